"""What to run next, as whole commands: with the paths and options that led here, quoted for a shell. Light."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from glob import escape
from pathlib import Path

from deltafuse.options import DEFAULT_TARGET, DEFAULT_TIMEOUT, FuseOptions

__all__ = ["NEXT", "inspection", "page_each", "rollback", "site_steps"]

#: How a line begins of which the rest is a command.
NEXT = "next: "


def inspection(options: FuseOptions) -> tuple[str, ...]:
    """The words of a command that finds the same sites again, under the same names.

    Args:
        options: of a run.
    """
    words = ["fuse", "inspect", str(options.model)]
    words += ["--target", options.target] if options.target != DEFAULT_TARGET else []
    words += ["--rules", *options.rules] if options.rules else []
    words += [word for folder in options.patterns for word in ("--patterns", str(folder))]
    words += ["--timeout", f"{options.timeout:g}"] if options.timeout != DEFAULT_TIMEOUT else []
    return (*words, "--allow-outside") if options.allow_outside else tuple(words)


def site_steps(again: Sequence[str], model: str, site: str, *, drawn: bool, shown: bool) -> Iterator[str]:
    """A command that tells more of a site, and what it does.

    Args:
        again: see `inspection`; nothing is told where it is empty.
        model: path of the model.
        site: its name.
        drawn: there is a page already.
        shown: the site is shown in detail already.
    """
    if not again or (drawn and shown):
        return
    page = [] if drawn else ["--html", f"{Path(model).stem}.html"]
    yield NEXT + shlex.join([*again, "--site", escape(site), *page])
    tells = [] if shown else ["tells how far off it is"]
    yield f"  {' and '.join([*tells, *([] if drawn else ['draws what was looked at'])])}"


def rollback(model: Path) -> str:
    """A command that gives back the file that a fused one was made from.

    Args:
        model: the fused one.
    """
    return shlex.join(["fuse", "rollback", str(model), "-o", str(model.with_name(f"{model.stem}-unfused.onnx"))])


def page_each(folder: Path) -> str:
    """A command that writes a page for each model below a folder.

    Args:
        folder: of models.
    """
    return f"find {shlex.quote(str(folder))} -name '*.onnx' -exec fuse inspect {{}} --html {{}}.html \\;"
