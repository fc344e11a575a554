"""What tests of several rooms share: the command as a function."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

import graphs
import warm
from deltafuse import children, factors, network_run
from deltafuse.cli import main

#: Modules whose tests take longest, which are begun first: nothing is left that one of two processes does alone.
LONG = ("test_export_unfused", "test_rollout", "test_mutants", "test_torch_export")
#: Modules that are about children of the package: theirs are started as they are everywhere.
COLD = {"test_doctor", "test_worker"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts what takes longest to the front."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n`` the tests of a module stay together, since they share what takes long to make."""
    from xdist.scheduler import LoadFileScheduling

    if config.getoption("dist") != "load":
        return None
    # Its own order would be by the number of tests.
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


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


@pytest.fixture(scope="session")
def _forks() -> Iterator[warm.Forks]:
    with closing(warm.Forks()) as forks:
        yield forks


@pytest.fixture(scope="module", autouse=True)
def _warm_children(request: pytest.FixtureRequest) -> Iterator[None]:
    """Children are forked, which takes a tenth of a start."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ not in COLD:
            for module in (children, network_run):
                patch.setattr(module, "subprocess", request.getfixturevalue("_forks"))
        yield


@pytest.fixture(scope="module")
def one_worker() -> Iterator[None]:
    """All tests of a module share one worker; for modules that are not about workers."""
    with graphs.one_worker():
        yield


@pytest.fixture
def any_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """No constant is too small or too large and no power too high, for tests of what must show all the same."""
    monkeypatch.setattr(factors, "_NEAR", (0.0, float("inf")))
    monkeypatch.setattr(factors, "_OPERANDS", 1 << 30)
