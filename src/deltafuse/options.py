"""What a run is asked to do, and how it tells how far it is. Light: the command imports it before anything else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

from deltafuse.errors import UserError

Form = Literal["chunk", "recurrent"]
Operator = Literal["cgdr", "rgdr"]
RecordMode = Literal["embed", "sidecar", "none"]
Level = Literal["site", "network", "task", "all"]
AttentionMode = Literal["auto", "always", "never"]
ExternalData = Literal["keep", "copy", "reflink"]
Boundary = Literal["fp16", "bf16", "fp32"]

DEFAULT_TARGET = "ascend-310p"
DEFAULT_TIMEOUT = 600.0


class Progress(Protocol):
    """Told how far a run is; never asked anything."""

    def start(self, stage: str) -> None:
        """A new stage begins, e.g. ``proving``."""
        ...

    def advance(self, n: int, total: int) -> None:
        """``n`` of ``total`` steps (sites, bytes) of the stage are done."""
        ...

    def note(self, text: str) -> None:
        """What of the stage is being done now; gone when something else is."""
        ...


class SilentProgress:
    """Says nothing: for calls from Python."""

    def start(self, stage: str) -> None:
        """Ignores the stage."""

    def advance(self, n: int, total: int) -> None:
        """Ignores the count."""

    def note(self, text: str) -> None:
        """Ignores the text."""


@dataclass(frozen=True)
class FuseOptions:
    """Everything ``fuse MODEL -o OUT`` and ``fuse inspect MODEL`` can be told.

    Attributes:
        model: the file to read; never written.
        output: the file to write; None for inspect and dry runs without one.
        target: name of a profile, see ``fuse targets``.
        form: take only sites written as this form; None for all.
        op: force this operator where its limits allow it; None for what is legal.
        sites, skip_sites: shell-style patterns of site names to take (empty for all) and to leave.
        rules: names of the patterns to look for; empty for those that are on by default.
        patterns: folders of further rules, of the same form as the shipped one.
        pin: put the batch axis (and a token axis proven for one size only) to that size in the output.
        pins: further axes to pin: symbol and size.
        batch: how many sequences the output takes, for targets that fix it.
        record: where the patch that undoes the fuse goes.
        external_data: how data outside the model file comes to stand beside the output; None: it is left in the same
            folder, else copied, blocks shared where the file system can. ``keep``: never copied; ``copy``: byte by
            byte; ``reflink``: blocks shared or not at all.
        allow_outside: take data that lies outside the model's folder.
        boundary: element type of the kernels' operands, where the target leaves a choice; None for its own.
        signature: version of the operators' signature, where the target has several; None for the newest.
        allow_bf16_to_fp16: accept the loss of range where a bfloat16 boundary must become float16.
        keep_going: write the sites that can be fused although others are refused.
        strict: a note is as bad as a refusal.
        dry_run: do everything but write.
        timeout: seconds that a run may take up to the writing; one proof takes half of what is left at most.
        extract: folder for each site as stand-alone models (inspect).
        html: the page to write about what was found and done.
        plan: file that says what becomes of each site; a dry run writes it, any other does what it says.
    """

    model: Path
    output: Path | None = None
    target: str = DEFAULT_TARGET
    form: Form | None = None
    op: Operator | None = None
    sites: tuple[str, ...] = ()
    skip_sites: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    patterns: tuple[Path, ...] = ()
    pin: bool = True
    pins: tuple[tuple[str, int], ...] = ()
    batch: int = 1
    record: RecordMode = "embed"
    external_data: ExternalData | None = None
    allow_outside: bool = False
    boundary: Boundary | None = None
    signature: str | None = None
    allow_bf16_to_fp16: bool = False
    keep_going: bool = False
    strict: bool = False
    dry_run: bool = False
    timeout: float = DEFAULT_TIMEOUT
    extract: Path | None = None
    html: Path | None = None
    plan: Path | None = None

    def __post_init__(self) -> None:
        """Refuses what the command line would: a choice that is none, a pin without a size.

        Raises:
            UserError: ``usage``.
        """
        choices = {"form": Form, "op": Operator, "record": RecordMode, "boundary": Boundary}
        choices |= {"external_data": ExternalData}
        for name, choice in choices.items():
            value, known = getattr(self, name), get_args(choice)
            if value not in known and not (value is None and name != "record"):
                raise UserError("usage", f"{name}={value!r} is none of {', '.join(map(repr, known))}")
        for symbol, size in (*self.pins, ("batch", self.batch)):
            if type(size) is not int or size < 1:
                raise UserError("usage", f"pins: {symbol!r} to {size!r}: a size is a whole number of 1 or more")
