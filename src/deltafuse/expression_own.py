"""An ordinary pattern from a file of the user's: looked over when it is read, and what it gives whenever it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, get_origin, get_type_hints

import numpy as np
import onnx

from deltafuse.errors import UserError
from deltafuse.expressions import Emission, Expression, Neighbour, Operands, Parameters, Place, Proposal, Trial
from deltafuse.kinds import misfits
from deltafuse.reasons import TEXTS, Reason
from deltafuse.user_code import at_fault, blamed, guide

if TYPE_CHECKING:
    from deltafuse.expression_view import View
    from deltafuse.targets.emit import Emitter

__all__ = ["OwnExpression", "own_expression_file"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def own_expression_file(pattern: Expression) -> Path | None:
    """The file of the user's that a pattern is in, None for a shipped one."""
    return pattern.file if isinstance(pattern, OwnExpression) else None


class OwnExpression(Expression):
    """A pattern that looks over what another one says and gives.

    Args:
        given: as the file defines it.
        file: of the user's.

    Raises:
        UserError: ``bad-pattern``, from every function too.
    """

    def __init__(self, given: Expression, file: Path) -> None:
        self._given, self.file = given, file
        for name, hint in get_type_hints(Expression).items():
            value: Any = getattr(given, name)
            kind: Any = get_origin(hint)
            if (kind is tuple and type(value) is list) or (kind is frozenset and type(value) is set):
                value = cast("Any", kind(value))
            for place, what in misfits(f"PATTERN.{name}", value, hint):
                raise self._error(place, what)
            setattr(self, name, value)
        for name in ("name", "anchors", "operators", "outputs"):
            if not getattr(self, name):
                raise self._error(f"PATTERN.{name}", "it is empty")
        self.neighbours = {code: self._neighbour(code, one) for code, one in self.neighbours.items()}

    def _error(self, place: str, what: str) -> UserError:
        return UserError("bad-pattern", f"{self.file}, {place}: {what}; mend {place}, {guide('pattern')}")

    def _call(self, part: str, function: Callable[_P, _T], *given: _P.args, **named: _P.kwargs) -> _T:
        with at_fault(self.file, "pattern", part), blamed():
            return function(*given, **named)

    def _checked(self, part: str, value: Any, hint: Any) -> Any:
        """A result that is of a type; a Reason has a text."""
        for place, what in misfits("what it gives", value, hint):
            raise self._error(part, f"{place}: {what}")
        if isinstance(value, Reason) and value.code not in TEXTS | dict(self.texts):
            raise self._error(part, f"there is no text for {value.code!r} in texts")
        return value

    def _each(self, part: str, given: Callable[[], Iterable[_T]], hint: Any) -> Iterator[_T]:
        found = self._call(part, lambda: iter(given()))
        while True:
            entry: Any = self._call(part, next, found, self)
            if entry is self:
                return
            yield self._checked(part, entry, hint)

    def _referred(self, part: str, value: Any) -> Operands:
        found = self._checked(part, value, Mapping)
        for name, array in found.items():
            if np.asarray(array).dtype.kind not in "fiub":
                raise self._error(part, f"{name} is {array!r} and must be an array of numbers")
        return found

    def _neighbour(self, code: str, given: Neighbour) -> Neighbour:
        part = f"neighbour {code}"
        return Neighbour(
            lambda trial: self._checked(part, self._call(part, given.solve, trial), Parameters | Reason),
            lambda operands, parameters: self._referred(part, self._call(part, given.reference, operands, parameters)),
        )

    def propose(self, view: View, anchor: int) -> Iterator[Proposal | Reason]:
        """See `Expression`."""
        count = len(view.graph.producer)
        for one in self._each("propose", lambda: self._given.propose(view, anchor), Proposal | Reason):
            if isinstance(one, Proposal):
                unknown = [*(one.roles.keys() - set(self.roles)), *(one.outputs.keys() - set(self.outputs))]
                if unknown:
                    raise self._error("propose", f"{unknown[0]!r} is none of roles or outputs")
                if not all(0 <= value < count for value in (*one.roles.values(), *one.outputs.values())):
                    raise self._error("propose", f"{one} names a value that the graph does not have")
            yield one

    def reference(self, operands: Operands, parameters: Parameters) -> Operands:
        """See `Expression`."""
        return self._referred("reference", self._call("reference", self._given.reference, operands, parameters))

    def solve(self, trial: Trial) -> Parameters | Reason:
        """See `Expression`."""
        return self._checked("solve", self._call("solve", self._given.solve, trial), Parameters | Reason)

    def draws(
        self, shapes: Mapping[str, tuple[int, ...]], parameters: Parameters, rng: np.random.Generator
    ) -> Iterator[Operands]:
        """See `Expression`."""
        return self._each("draws", lambda: self._given.draws(shapes, parameters, rng), Mapping)

    def emit(self, place: Place, emitter: Emitter) -> Emission | Reason:
        """See `Expression`."""
        found = self._checked("emit", self._call("emit", self._given.emit, place, emitter), Emission | Reason)
        for output, role in found.aliases.items() if isinstance(found, Emission) else ():
            if output not in place.outputs or role not in place.roles:
                raise self._error("emit", f"the site has no output {output!r} or no role {role!r} for an alias")
        return found

    def lower(self, node: onnx.NodeProto) -> Sequence[onnx.NodeProto]:
        """See `Expression`."""
        return tuple(self._each("lower", lambda: self._given.lower(node), onnx.NodeProto))
