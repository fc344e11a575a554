"""``fuse rollback FUSED_DIR -o DIR`` and ``fuse verify DIR FUSED_DIR``: the single forms, model by model."""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

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
        error: why a file that was copied cannot be read; None where it can.
    """

    name: str
    report: RollbackReport | None
    error: UserError | None = None


@dataclass(frozen=True)
class FolderRollback:
    """What was undone. Exit 1 where a file cannot be read as a model, else 4 where a site could not be put back."""

    source: str
    output: str
    models: tuple[Restored, ...]
    exit: int

    @property
    def errors(self) -> tuple[UserError, ...]:
        """Those of the files that cannot be read."""
        return tuple(one.error for one in self.models if one.error is not None)


@dataclass(frozen=True)
class Compared:
    """One model of both folders.

    Attributes:
        name: path below the folders.
        outcome: ``equal``, ``differs`` or ``unchanged`` (the same bytes).
        report: None where it is unchanged.
    """

    name: str
    outcome: str
    report: VerifyReport | None


@dataclass(frozen=True)
class FolderVerify:
    """How two folders compare.

    Attributes:
        differing: other files, external data among them, that are in both folders and not the same.
        exit: 0 or 5.
    """

    unfused: str
    fused: str
    models: tuple[Compared, ...]
    differing: tuple[str, ...]
    exit: int


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
                found.append(Restored(name, None, error))
                continue
            report = named(name, lambda model=model, target=target: _restored(model, target, undo))
            found.append(Restored(name, report and replace(report, output=output / name)))
        if not any(one.report for one in found):
            for one in found:
                if one.error is not None:
                    raise one.error
            wanted = "" if sites is None else f" with a site that {', '.join(sites)} names"
            raise UserError("no-record", f"no model in {fused} was fused{wanted}: there is nothing to roll back")
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


def verify_folders(unfused: Path, fused: Path, verify: Callable[[Path, Path], VerifyReport]) -> FolderVerify:
    """Compares each model of a fused folder with the one it was made from.

    Args:
        unfused: the folder as exported.
        fused: what fuse made of it.
        verify: compares two models.

    Raises:
        UserError: ``folder-mismatch``: they do not hold the same models; ``nothing-fused``; what a single model raises.
    """
    before, after = read_tree(unfused), read_tree(fused)
    lone = sorted(set(before.models) ^ set(after.models))
    if lone:
        where = unfused if lone[0] in before.models else fused
        raise UserError("folder-mismatch", f"{lone[0]} is in {where} only: give a folder and what fuse made of it")
    found: list[Compared] = []
    for name in before.models:
        one, other = unfused / name, fused / name
        if filecmp.cmp(one, other, shallow=False):
            found.append(Compared(name, "unchanged", None))
            continue
        report = named(name, lambda one=one, other=other: verify(one, other))
        found.append(Compared(name, "differs" if report.exit else "equal", report))
    if all(one.report is None for one in found):
        raise UserError("nothing-fused", f"no model in {fused} is fused; give the unfused folder first, then the fused")
    shared = sorted(set(before.others) & set(after.others))
    differing = tuple(name for name in shared if not filecmp.cmp(unfused / name, fused / name, shallow=False))
    failed = differing or any(one.outcome == "differs" for one in found)
    return FolderVerify(str(unfused), str(fused), tuple(found), differing, 5 if failed else 0)
