"""Children of the package as forks of a process that has made their imports: these take longer than a small proof.

Each is a process of its own, in the state of one that has just begun, and runs what it would run by itself.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import IO, Any

#: What is run in a fork; all else is started as it is.
MODULES = ("deltafuse.worker_main", "deltafuse.network_child", "deltafuse.rollout_child")
_REQUEST = 1 << 17


class Forks:
    """Stands for the module `subprocess` where the package starts a child."""

    DEVNULL, PIPE, TimeoutExpired = subprocess.DEVNULL, subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self) -> None:
        self._lock = Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._origin = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def close(self) -> None:
        self._channel.close()
        self._origin.wait()

    def Popen(self, command: Sequence[str], **streams: Any) -> subprocess.Popen[bytes] | Fork:  # noqa: N802
        if tuple(command[:2]) != (sys.executable, "-m") or command[2] not in MODULES:
            return subprocess.Popen(command, **streams)
        return Fork(command, self._ask, streams.get("stdin"), streams.get("stdout"), streams.get("stderr"))

    def _ask(self, command: Sequence[str], ends: Sequence[int]) -> None:
        request = {"argv": list(command[2:]), "environ": dict(os.environ), "cwd": os.getcwd()}
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(request).encode()], ends)


class Fork:
    """A forked child, with what the package uses of a `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], ask: Any, stdin: Any, stdout: Any, stderr: Any) -> None:
        self.args, self.returncode = command, None
        own: list[int] = []
        self.stdin, read = self._end(stdin, 0, "wb", own)
        self.stdout, write = self._end(stdout, 1, "rb", own)
        said = self._end(stderr, 2, "rb", own)[1]
        self._status, told = os.pipe()
        ask(command, [read, write, said, told])
        for end in (*own, told):
            os.close(end)
        self.pid = self._told()

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        found = self._wait(timeout)
        if found is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return found

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._status)

    @staticmethod
    def _end(asked: Any, default: int, mode: str, own: list[int]) -> tuple[IO[bytes] | None, int]:
        """Our end of a stream, where there is one, and the child's, which goes to `own` where it is to be closed."""
        if asked == subprocess.PIPE:
            read, write = os.pipe()
            ours, theirs = (write, read) if mode == "wb" else (read, write)
            own.append(theirs)
            return open(ours, mode, buffering=0), theirs
        if asked == subprocess.DEVNULL:
            own.append(os.open(os.devnull, os.O_RDWR))
            return None, own[-1]
        return None, default if asked is None else asked.fileno()

    def _told(self) -> int:
        return int.from_bytes(os.read(self._status, 8), "little", signed=True)

    def _wait(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            self.returncode = self._told()
            os.close(self._status)
        return self.returncode


def _serve(channel: socket.socket) -> None:
    """Forks once for each request, until the other side is gone."""
    while True:
        request, ends, *_ = socket.recv_fds(channel, _REQUEST, 4)
        if not request:
            return
        if os.fork() == 0:
            channel.close()
            _watch(json.loads(request), ends)
        for end in ends:
            os.close(end)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _watch(request: dict[str, Any], ends: list[int]) -> None:
    """Tells the child's number, and how it ended: that it is no child of who asked is not seen."""
    *streams, told = ends
    pid = os.fork()
    if pid == 0:
        os.close(told)
        _become(request, streams)
    for end in streams:
        os.close(end)
    os.write(told, pid.to_bytes(8, "little"))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):
        os.write(told, status.to_bytes(8, "little", signed=True))
    os._exit(0)


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Runs a module as `python -m` does, and ends."""
    for number, end in enumerate(streams):
        os.dup2(end, number)
        os.close(end)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = request["argv"]
    sys.path[0] = request["cwd"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    # What the children import, but for the modules that they run.
    import onnxruntime  # noqa: F401

    import deltafuse.comparing  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(socket.socket(fileno=int(sys.argv[1])))
