"""What is made of the draws that tell nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from deltafuse import agreement
from deltafuse.bench import Binding
from deltafuse.draws import DRAWS
from deltafuse.reasons import Reason

AT = Binding({}, None, None, (), ())


@dataclass
class Silent:
    """A trial none of whose comparisons are made."""

    def few_tokens(self, batch: int | None) -> Binding | None:
        return AT

    def ahead(self, steps: Sequence[object]) -> None:
        return None


def told(monkeypatch: pytest.MonkeyPatch, errors: Sequence[float | None]) -> list[float] | Reason:
    left = iter(errors)
    monkeypatch.setattr(agreement, "_error", lambda *_, **__: next(left))
    return agreement.errors_on(Silent(), AT)


def test_a_draw_that_tells_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, [1e-15, 1e-16, None, 3e-16, None, 2e-16]) == [1e-16, 3e-16, 2e-16]


@pytest.mark.parametrize("errors", [[None, *[1e-16] * len(DRAWS)], [1e-16, *[None] * len(DRAWS)]])
def test_columns_and_draws_must_tell_something(
    errors: Sequence[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = told(monkeypatch, errors)
    assert isinstance(reason, Reason)
    assert (reason.code, reason.args) == ("overflows", {"draw": DRAWS[0].name})


def test_the_worst_draw_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = told(monkeypatch, [1e-15, 1e-15, 1e-15, 1e-3, 1e-15, 1e-15])
    assert isinstance(reason, Reason)
    assert (reason.code, reason.args["error"]) == ("not-equal", 1e-3)
