"""The first nodes of a large graph, read by the worker's child while the command still imports what it needs.

The child has nothing else to do then, and a scan is what takes longest of all that one process does by itself. What the
file holds is found by the same `Scanner` there and here; where the child cannot tell, all is read here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import cast

from deltafuse import children
from deltafuse.limits import no_garbage_collection
from deltafuse.lockstep import walk
from deltafuse.mapping import Identity, mapped
from deltafuse.reasons import Reason
from deltafuse.scanner import NODE_TAG, Columns, Scanner
from deltafuse.wire import first_graph
from deltafuse.worker import Worker

#: How much of the nodes: who reads the rest begins later, and puts all together.
_SHARE = 0.5


class Reading:
    """The child's side: what it reads ahead, once, of a file.

    Args:
        path: of the model that is likely to be asked for.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._walked, self._done = Event(), Event()
        self._rest: tuple[Identity, int] | None = None
        self._columns: Columns | None = None

    def read(self) -> None:
        """Reads; to be called in a thread of its own."""
        try:
            # Whatever is wrong with the file is told by who reads all of it.
            with suppress(Exception), no_garbage_collection():
                self._read()
        finally:
            self._walked.set()
            self._done.set()

    def _read(self) -> None:
        view, identity = mapped(self._path)
        start, end = first_graph(view)
        starts, begins, _ = walk(view, start, end, NODE_TAG)
        count = int(len(starts) * _SHARE)
        if count:
            self._rest = identity, starts[count]
            self._walked.set()
            scanner = Scanner(view)
            scanner.nodes(starts[:count], begins[:count], starts[count])
            self._columns = scanner.columns()

    def rest(self) -> tuple[Identity, int] | None:
        """Which file is read, and where in it the nodes begin that are not; None where nothing is read ahead."""
        self._walked.wait()
        return self._rest

    def columns(self) -> Columns | None:
        """What was read, once."""
        self._done.wait()
        columns, self._columns = self._columns, None
        return columns


class Elsewhere:
    """The other side: what `deltafuse.wire.scan` asks the child for.

    Args:
        worker: whose child was told the path when it was started.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def rest(self, identity: Identity) -> int | None:
        """See `deltafuse.wire.Ahead`."""
        if identity[2] < children.LARGE:
            return None
        answer = cast("tuple[Identity, int] | Reason | None", self._worker.ask("rest"))
        return None if answer is None or isinstance(answer, Reason) or answer[0] != identity else answer[1]

    def columns(self, meanwhile: Callable[[], object]) -> Columns | None:
        """See `deltafuse.wire.Ahead`."""
        answer = self._worker.ask("first_nodes", meanwhile=meanwhile)
        return answer if isinstance(answer, Columns) else None
