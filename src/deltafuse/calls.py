"""Which local functions call which: a model whose functions call themselves, or unfold without end, is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx

from deltafuse.errors import UserError
from deltafuse.functions import plain_domain

#: How many calls may lie in each other, and how many nodes a function may have with all that it calls written out.
#: Exporters write one function for each kind of module: a dozen deep, some hundred thousand nodes.
DEEPEST, LARGEST = 100, 1 << 22

Key = tuple[str, str]


def check_calls(functions: Mapping[Key, onnx.FunctionProto]) -> None:
    """Raises where functions cannot be unfolded.

    Args:
        functions: by domain and name.

    Raises:
        UserError: ``function-recursive``: a function calls itself, by way of others maybe; ``function-too-large``.
    """
    called = {key: [call for call in _calls(f.node) if call in functions] for key, f in functions.items()}
    sizes: dict[Key, int] = {}
    for first in functions:
        path: dict[Key, Iterator[Key]] = {first: iter(called[first])} if first not in sizes else {}
        while path:
            key, left = next(reversed(path.items()))
            callee = next((one for one in left if one not in sizes), None)
            if callee is None:
                sizes[key] = len(functions[key].node) + sum(sizes[one] for one in called[key])
                del path[key]
            elif callee in path:
                name = ":".join(filter(None, callee))
                raise UserError(
                    "function-recursive",
                    f"the function {name} calls itself, which ONNX does not allow: export the model again",
                )
            else:
                path[callee] = iter(called[callee])
            if len(path) > DEEPEST or sizes.get(key, 0) > LARGEST:
                raise _too_large(key)


def _too_large(key: Key) -> UserError:
    name = ":".join(filter(None, key))
    return UserError(
        "function-too-large",
        f"the function {name} calls others more than {DEEPEST} deep, or has more than {LARGEST} nodes with all that it "
        "calls: export the model with fewer functions, or inline them with onnx.inliner.inline_local_functions",
    )


def _calls(nodes: Iterable[onnx.NodeProto]) -> Iterator[Key]:
    for node in nodes:
        yield plain_domain(node.domain), node.op_type
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _calls(graph.node)
