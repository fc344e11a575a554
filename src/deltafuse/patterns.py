"""Load patterns: one file per rule, shipped ones and a user's own, all by path and never by name.

There are two kinds: a recurrence over query, key, value, g, beta and state (`Pattern`), and an ordinary expression
(`deltafuse.expressions.Expression`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

from deltafuse.draws import Array
from deltafuse.errors import UserError
from deltafuse.expression_own import OwnExpression
from deltafuse.expressions import Expression
from deltafuse.patterns_own import check_recurrence
from deltafuse.reasons import TEXTS
from deltafuse.user_code import own_file, run_file, shipped_folder

#: What the log decay is one number of: a head and token, a head, token and key channel; or there is no decay.
Decay = Literal["head", "channel", "none"]


class Pattern(Protocol):
    """What a pattern file defines.

    Attributes:
        name: the rule's name.
        decay: what the log decay is one number of.
        anchors: op_types the search starts from: exponentials of the log decay; contractions of data with data where
            there is no decay.
        fence: op_types that are never inside the rule or its preparation: activations.
        contractions: op_types of which the core has at least one.
        least_roots: operands the rule has at least (without a state).
        neighbours: reason code -> recurrence of a rule that is often meant or made by mistake.
        texts: reason code -> text, for the neighbours: what is the matter, a semicolon, what to do.

    A file may define ``formula`` too: the recurrence as text, in which ``{query}``, ``{out}`` and the other roles and
    ``{scale}`` stand for what a site calls them; and ``in_chunks``: that it is a delta rule with one update a token, so
    that what goes wrong in chunks of it is that of `deltafuse.chunk_faults`.
    """

    name: str
    decay: Decay
    anchors: frozenset[str]
    fence: frozenset[str]
    contractions: frozenset[str]
    least_roots: int
    neighbours: dict[str, Recurrence]
    texts: dict[str, str]

    def recurrence(
        self, query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array
    ) -> tuple[Array, Array]:
        """The rule itself, in float64, with scale 1.

        Args:
            query: [B, T, H, key_dim], heads already repeated.
            key: as query.
            value: [B, T, H, value_dim].
            g: log decay [B, T, H], [B, T, H, key_dim] with a decay per channel, zeros [B, T, H] without decay.
            beta: [B, T, H].
            state: [B, H, key_dim, value_dim].

        Returns:
            out [B, T, H, value_dim] and the final state [B, H, key_dim, value_dim].
        """
        ...


class Recurrence(Protocol):
    """A recurrence in the form of `Pattern.recurrence`."""

    def __call__(
        self, query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array
    ) -> tuple[Array, Array]:
        """Out and final state."""
        ...


@dataclass(frozen=True)
class Loaded:
    """A pattern file.

    Attributes:
        name: of the rule.
        kind: ``recurrence`` or ``expression``.
        default: whether it is looked for without being named.
        summary: first line of the file's docstring.
        operator: on by default where the target has this operator; "" where that does not matter.
    """

    name: str
    kind: str
    default: bool
    summary: str
    pattern: Pattern | Expression
    operator: str = ""


def loaded(folders: Sequence[Path] = ()) -> tuple[Loaded, ...]:
    """Loads the patterns of the shipped folder and of others, all of them.

    Args:
        folders: further folders; a pattern there replaces a shipped one of the same name.

    Raises:
        UserError: a folder is missing, or a file is no pattern.
    """
    found: dict[str, Loaded] = {}
    for folder in (shipped_folder(), *folders):
        if not folder.is_dir():
            raise UserError(
                "no-such-folder", f"the pattern folder {folder} does not exist; give an existing folder to --patterns"
            )
        for path in sorted(folder.glob("[!_]*.py")):
            entry = load_file(path)
            found[entry.name] = entry
            TEXTS.update(entry.pattern.texts)
    return tuple(found.values())


def formulas(folders: Sequence[Path] = ()) -> dict[str, str]:
    """Of each rule the template of its recurrence as text, "" where its file has none.

    Args:
        folders: see `loaded`.
    """
    return {entry.name: getattr(entry.pattern, "formula", "") for entry in loaded(folders)}


def load(
    folders: Sequence[Path] = (), names: Sequence[str] | None = None, operators: Collection[str] = ()
) -> tuple[Pattern | Expression, ...]:
    """The patterns to look for.

    Args:
        folders: see `loaded`.
        names: only these rules; all that are on by default where None.
        operators: that the target has for ordinary expressions: what becomes one of them is on by default.

    Raises:
        UserError: as `loaded`, or a rule is unknown.
    """
    found = loaded(folders)
    known = [entry.name for entry in found]
    for name in names or ():
        if name not in known:
            raise UserError("unknown-rule", f"there is no rule {name}; known rules: {', '.join(known)}")
    if names is None:
        return tuple(entry.pattern for entry in found if entry.default or entry.operator in operators)
    return tuple(entry.pattern for entry in found if entry.name in names)


def families(rules: Sequence[Pattern]) -> tuple[tuple[Pattern, ...], ...]:
    """Rules that are looked for in the same places, together: a candidate is proven to be the first that it is.

    Rules with a decay come first: what they were looked for in is no place to look for one without.
    """
    groups: dict[tuple[object, ...], list[Pattern]] = {}
    for rule in sorted(rules, key=lambda rule: _ORDER.index(rule.decay)):
        places = (rule.decay == "none", rule.anchors, rule.fence, rule.contractions, rule.least_roots)
        groups.setdefault(places, []).append(rule)
    return tuple(tuple(group) for group in groups.values())


def file_of(recurrence: Recurrence) -> Path | None:
    """The pattern file that a recurrence is a function of, None where it comes from elsewhere."""
    name = str(getattr(recurrence, "__module__", ""))
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file) if name.startswith("deltafuse_pattern_") and file else None


def load_file(path: Path) -> Loaded:
    """One pattern file.

    Raises:
        UserError: it is no pattern.
    """
    module = run_file(path, "pattern")
    pattern: object = getattr(module, "PATTERN", None)
    if pattern is None:
        raise UserError("bad-pattern", f"{path} does not define a PATTERN: see patterns/gated_delta_rule.py")
    if isinstance(pattern, type):
        raise UserError("bad-pattern", f"the PATTERN of {path} is a class; write {pattern.__name__}()")
    ordinary = isinstance(pattern, Expression)
    missing = [name for name in (_PARTS if ordinary else _MEMBERS) if not hasattr(pattern, name)]
    if missing:
        like = "patterns/min_max_clip.py" if ordinary else "patterns/gated_delta_rule.py"
        raise UserError("bad-pattern", f"the PATTERN of {path} lacks {', '.join(missing)}: see {like}")
    rule = cast("Pattern | Expression", pattern)
    if own_file(module.__name__) is not None:
        if isinstance(rule, Expression):
            rule = OwnExpression(rule, path)
        else:
            check_recurrence(rule, path)
    summary = next(iter((module.__doc__ or "").strip().splitlines()), "")
    kind = "expression" if ordinary else "recurrence"
    operator = rule.operator if isinstance(rule, Expression) else ""
    return Loaded(rule.name, kind, bool(getattr(rule, "default", True)), summary, rule, operator)


_ORDER: tuple[Decay, ...] = ("head", "channel", "none")
_MEMBERS = ("name", "decay", "anchors", "fence", "contractions", "least_roots", "neighbours", "texts", "recurrence")
_PARTS = ("name", "anchors", "operators", "roles", "outputs", "examples")
