"""``fuse rollback FUSED_DIR -o DIR`` and ``fuse verify DIR FUSED_DIR``: the single forms, model by model."""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from deltafuse.boundary import SITE
from deltafuse.errors import UserError
from deltafuse.folder_tree import copy_rest, named, place, read_tree, staged
from deltafuse.fused import fused_nodes
from deltafuse.options import ExternalData, Progress
from deltafuse.record import KEY, sidecar_path
from deltafuse.rollback import RollbackReport, rollback
from deltafuse.verify import VerifyReport
from deltafuse.wire import Model, scan


@dataclass(frozen=True)
class Restored:
    """One model.

    Attributes:
        name: path below the folder.
        report: None where it was copied, since no fuse had written it.
        error: why a file that a fuse had written cannot be read, and so was copied as it is; None for all others.
        unread: why a file that no fuse had written cannot be read; None where it can.
    """

    name: str
    report: RollbackReport | None
    error: UserError | None = None
    unread: UserError | None = None

    @property
    def outcome(self) -> str:
        """``restored``, ``unchanged`` (no fuse had written it) or ``failed``."""
        return "failed" if self.error else "unchanged" if self.report is None else "restored"

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of it."""
        if self.unread is None:
            return () if self.report is None else self.report.notes
        return (f"it is no model that can be read ({self.unread.code}) and has no trace of a fuse: copied as it is",)


@dataclass(frozen=True)
class FolderRollback:
    """What was undone. Exit 1 where a fused file cannot be read, else 4 where a site could not be put back."""

    source: str
    output: str
    models: tuple[Restored, ...]
    exit: int

    @property
    def errors(self) -> tuple[UserError, ...]:
        """Those of the fused files that cannot be read."""
        return tuple(one.error for one in self.models if one.error is not None)


@dataclass(frozen=True)
class Compared:
    """One model of both folders.

    Attributes:
        name: path below the folders.
        outcome: ``equal``, ``differs``, ``unchanged`` (the same bytes); of what was not compared ``unreadable`` (no
            model in the one folder or the other) or ``failed``.
        report: None where nothing was compared.
        same_bytes: whether the file is the same in both folders.
        error: why it was not compared; None where it was, or is unchanged.
    """

    name: str
    outcome: str
    report: VerifyReport | None
    same_bytes: bool = False
    error: UserError | None = None


@dataclass(frozen=True)
class FolderVerify:
    """How two folders compare.

    Attributes:
        differing: other files, external data among them, that are in both folders and not the same.
        exit: 5 where anything differs, else 1 where a model could not be compared, else 0.
    """

    unfused: str
    fused: str
    models: tuple[Compared, ...]
    differing: tuple[str, ...]
    exit: int

    @property
    def errors(self) -> tuple[UserError, ...]:
        """Those of the models that could not be compared."""
        return tuple(one.error for one in self.models if one.error is not None)


def rollback_folder(
    fused: Path,
    output: Path,
    *,
    sites: Sequence[str] | None,
    all_records: bool,
    progress: Progress,
    how: ExternalData | None = None,
    allow_outside: bool = False,
) -> FolderRollback:
    """Gives back the folder that a fused one was made from, byte for byte.

    Args:
        fused: a folder that fuse wrote.
        output: a new folder.
        sites: globs of site names: only these are restored.
        all_records: undo every fuse, not only the last.
        progress: told about stages.
        how: what becomes of external data, see `deltafuse.options.FuseOptions`.
        allow_outside: see there.

    Raises:
        UserError: what a single model raises, with its name; ``no-record`` where no model was fused; what is wrong
            with the folders.
    """
    tree = read_tree(fused)
    undo = partial(rollback, sites=sites, all_records=all_records, how=how, allow_outside=allow_outside)
    with staged(fused, output) as stage:
        found: list[Restored] = []
        for name in tree.models:
            progress.start(f"restoring {name}")
            target = place(stage.path, name)
            path = tree.root / name
            try:
                model = named(name, lambda path=path: scan(path))
            except UserError as error:
                # A fuse with --keep-going copies such a file as it is.
                found.append(Restored(name, None, error) if _traces(path) else Restored(name, None, unread=error))
                continue
            report = named(name, lambda model=model, target=target: _restored(model, target, undo))
            found.append(Restored(name, report and replace(report, output=output / name)))
        if not any(one.report for one in found):
            for error in (one.error or one.unread for one in found):
                if error is not None:
                    raise error
            wanted = "" if sites is None else f" with a site that {', '.join(sites)} names"
            text = f"no model in {fused} was fused{wanted}: there is nothing to roll back; give what fuse wrote"
            raise UserError("no-record", text)
        done = {one.name for one in found if one.report is not None}
        sidecars = {sidecar_path(Path(name)).as_posix() for name in done}
        copy_rest(tree, (name for name in (*tree.models, *tree.others) if name not in done | sidecars), stage.path)
        stage.publish()
    refused = any(one.report and one.report.refused for one in found)
    code = 1 if any(one.error for one in found) else 4 if refused else 0
    return FolderRollback(str(fused), str(output), tuple(found), code)


def _restored(model: Model, target: Path, undo: Callable[[Path, Path], RollbackReport]) -> RollbackReport | None:
    # A fused model without a record is an error of the single form, not a model to copy.
    if KEY not in model.metadata and not fused_nodes(model.graph, range(len(model.graph.op))):
        return None
    try:
        return undo(model.path, target)
    except UserError as error:
        if error.code == "no-such-site":
            return None
        raise


def _traces(path: Path) -> bool:
    """Whether a file that cannot be read as a model holds what a fuse writes, or has its record beside it."""
    data = path.read_bytes()
    return any(key.encode() in data for key in (KEY, SITE)) or sidecar_path(path).exists()


def verify_folders(unfused: Path, fused: Path, verify: Callable[[Path, Path], VerifyReport]) -> FolderVerify:
    """Compares each model of a fused folder with the one it was made from.

    Args:
        unfused: the folder as exported.
        fused: what fuse made of it.
        verify: compares two models.

    Raises:
        UserError: ``folder-mismatch``: they do not hold the same models; ``nothing-fused``; what a single model raises
            where each that could be compared raises something.
    """
    before, after = read_tree(unfused), read_tree(fused)
    lone = sorted(set(before.models) ^ set(after.models))
    if lone:
        where = unfused if lone[0] in before.models else fused
        raise UserError("folder-mismatch", f"{lone[0]} is in {where} only: give a folder and what fuse made of it")
    found = tuple(_compared(name, unfused / name, fused / name, verify) for name in before.models)
    if all(one.report is None for one in found):
        # An error of the options, say, is that of all.
        for one in found:
            if one.outcome == "failed" and one.error is not None:
                raise one.error
        if all(one.same_bytes for one in found):
            text = f"no model in {fused} is fused; give the unfused folder first, then the fused"
            raise UserError("nothing-fused", text)
    shared = sorted(set(before.others) & set(after.others))
    differing = tuple(name for name in shared if not filecmp.cmp(unfused / name, fused / name, shallow=False))
    differs = differing or any(one.outcome == "differs" for one in found)
    code = 5 if differs else 1 if any(one.error for one in found) else 0
    return FolderVerify(str(unfused), str(fused), found, differing, code)


def _compared(name: str, unfused: Path, fused: Path, verify: Callable[[Path, Path], VerifyReport]) -> Compared:
    same = filecmp.cmp(unfused, fused, shallow=False)
    try:
        for path in (unfused, fused):
            named(name, lambda path=path: scan(path))
    except UserError as error:
        return Compared(name, "unreadable", None, same, error)
    if same:
        return Compared(name, "unchanged", None, same)
    try:
        report = named(name, lambda: verify(unfused, fused))
    except UserError as error:
        return Compared(name, "failed", None, same, error)
    return Compared(name, "differs" if report.exit else "equal", report)
