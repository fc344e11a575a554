"""What tests of several rooms share: the command as a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from deltafuse.cli import main


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code, stdout, stderr."""

    exit: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Stdout as the one JSON document it is to be."""
        return json.loads(self.out)


@pytest.fixture
def fuse(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs ``fuse ARGUMENT ...`` in this process; paths are welcome."""

    def call(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capfd.readouterr())

    return call
