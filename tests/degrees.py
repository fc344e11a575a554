"""One step of the rule with a term that is nothing at common sizes: of another degree, or of another head."""

from __future__ import annotations

from collections.abc import Callable


def power(value: str, result: str, times: int, little: str, axes: str = "") -> str:
    """1 + little * |value|^times, or of each number where no axes are given."""
    lines = [f"{result}.2 = Mul({value}, {value})"]
    last = f"{result}.2"
    if axes:
        lines.append(f"{result}.s = ReduceSum<keepdims = 1>({last}, {axes})")
        last = f"{result}.s"
    for step in range(times.bit_length() - 2):
        lines.append(f"{result}.{4 << step} = Mul({last}, {last})")
        last = f"{result}.{4 << step}"
    lines += [f"{result}.l = Constant<value = float {{{little}}}>()", f"{result}.o = Constant<value = float {{1}}>()"]
    lines += [f"{result}.m = Mul({last}, {result}.l)", f"{result} = Add({result}.m, {result}.o)"]
    return "\n  ".join(line.replace(f"{result}.", f"{result}_") for line in lines)


#: Edits of `graphs.STEP` for a power and the factor that makes it little.
Term = Callable[[int, str], list[tuple[str, str]]]
READ = "read = Mul(final_state, q2)"
UPDATE = "update = Mul(k1, delta_row)"
KEYS = "w1 = Unsqueeze(w, last)\n  up0 = Mul(k1, delta_row)\n  update = Mul(up0, w1)"


def of_query(times: int, little: str) -> list[tuple[str, str]]:
    factor = power("q0", "w", times, little, "last")
    return [(READ, f"{factor}\n  w1 = Unsqueeze(w, last)\n  r0 = Mul(final_state, q2)\n  read = Mul(r0, w1)")]


def of_key(times: int, little: str) -> list[tuple[str, str]]:
    return [(UPDATE, f"{power('k0', 'w', times, little, 'last')}\n  {KEYS}")]


def of_beta(times: int, little: str) -> list[tuple[str, str]]:
    return [(UPDATE, f"c0 = Unsqueeze(b0, last)\n  {power('c0', 'w', times, little)}\n  {KEYS}")]


def of_both(times: int, little: str) -> list[tuple[str, str]]:
    """What scales a key is made up for: beta alone tells."""
    together = "kk = Mul(k0, k0)\n  ks = ReduceSum<keepdims = 1>(kk, last)\n  bk = Mul(ks, b1)"
    return [(UPDATE, f"{together}\n  {power('bk', 'w', times, little)}\n  {KEYS}")]


def of_nothing(times: int, little: str) -> list[tuple[str, str]]:
    number = f"little = Constant<value = float {{{little}}}>()"
    return [(READ, f"{number}\n  q3 = Add(q2, little)\n  read = Mul(final_state, q3)")]


def of_another_head(times: int, little: str) -> list[tuple[str, str]]:
    numbers = f"turn = Constant<value = int64[4] {{1, 2, 3, 0}}>()\n  little = Constant<value = float {{{little}}}>()"
    leaked = "tk = Gather<axis = 1>(known, turn)\n  lk = Mul(tk, little)\n  k9 = Add(known, lk)"
    return [("missing = Sub(v0, known)", f"{numbers}\n  {leaked}\n  missing = Sub(v0, k9)")]


TERMS = [of_query, of_key, of_beta, of_both, of_nothing, of_another_head]
