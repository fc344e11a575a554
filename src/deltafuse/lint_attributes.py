"""Attributes of a fused node against its signature."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from onnx import AttributeProto

from deltafuse.lint_view import Finding, View, kind_name
from deltafuse.lowering_attention import LINEAR_ATTENTION
from deltafuse.targets.custom_nodes import MINDSPORE_TYPES, outputs_shape
from deltafuse.wording import number

_NUMBERS = re.compile(r"(-?[0-9]{1,18},)+")
_AGAIN = "fuse the model again, or correct the script that wrote the node"
#: An attribute in Python.
Value: TypeAlias = "int | float | str | list[int] | list[float] | list[str]"


def attribute_findings(view: View) -> Iterator[Finding]:
    """Missing, extra, of the wrong kind, with the wrong value or in the wrong order."""
    rules = {rule.name: rule for rule in view.operator.attributes}
    for name, count in Counter(attribute.name for attribute in view.message.attribute).items():
        if count > 1:
            yield view.finding("attribute-twice", name, f"{count} of it", "one", f"keep one {name}: a reader takes any")
    for name in view.attributes.keys() - rules.keys():
        known = ", ".join(rules)
        yield view.finding("attribute-extra", name, "present", f"one of {known}", f"remove the attribute {name}")
    for name, rule in rules.items():
        attribute = view.attributes.get(name)
        if attribute is None and rule.required:
            yield view.finding("attribute-missing", name, "absent", kind_name(rule.kind), f"add it; {_AGAIN}")
        elif attribute is not None and attribute.type != rule.kind:
            kinds = kind_name(attribute.type), kind_name(rule.kind)
            yield view.finding("attribute-kind", name, *kinds, f"write {name} as {kind_name(rule.kind)}")
        elif attribute is not None and rule.value is not None:
            found = value_of(attribute)
            if found != rule.value and name != "update_rule":
                yield _differs(view, name, found, rule.value)


def _differs(view: View, name: str, found: Value, wanted: Value) -> Finding:
    in_order = (
        isinstance(found, list) and isinstance(wanted, list) and sorted(map(str, found)) == sorted(map(str, wanted))
    )
    if in_order:
        return view.finding("attribute-order", name, found, wanted, f"keep the operator's order in {name}")
    return view.finding("attribute-value", name, found, wanted, f"set {name} to {wanted}")


def value_of(attribute: AttributeProto) -> Value:
    """An attribute as a Python value, text decoded."""
    if attribute.type == AttributeProto.STRING:
        return attribute.s.decode(errors="replace")
    if attribute.type == AttributeProto.STRINGS:
        return [text.decode(errors="replace") for text in attribute.strings]
    if attribute.type == AttributeProto.INTS:
        return list(attribute.ints)
    if attribute.type == AttributeProto.FLOATS:
        return list(attribute.floats)
    return attribute.f if attribute.type == AttributeProto.FLOAT else attribute.i


def custom_findings(view: View, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """What follows from a Custom node's own inputs, outputs and sizes.

    Args:
        view: the node.
        sizes: letter -> size, as far as known: N and H heads, K and V head sizes.
    """
    yield from _index(view)
    attributes = view.attributes
    outputs = len(view.message.output)
    if "output_num" in attributes and attributes["output_num"].i != outputs:
        found = attributes["output_num"].i
        yield view.finding("output-count", "output_num", found, outputs, "give the node as many outputs as it says")
    if "dtype" in attributes and attributes["dtype"].i not in view.profile.boundaries:
        wanted = " or ".join(map(str, view.profile.boundaries))
        fix = f"set dtype to {wanted}: three places must agree on the type of the results"
        yield view.finding("dtype", "dtype", attributes["dtype"].i, wanted, fix)
    if "output_types" in attributes:
        typed = [MINDSPORE_TYPES[view.boundary]] * 2
        if list(attributes["output_types"].ints) != typed:
            found = list(attributes["output_types"].ints)
            yield view.finding("output-types", "output_types", found, typed, f"set output_types to {typed}")
    if "outputs_shape" in attributes and {"H", "K", "V"} <= sizes.keys():
        yield from _outputs_shape(view, sizes)
    yield from scale_findings(view, "scale_value")


def _index(view: View) -> Iterator[Finding]:
    names = len(view.operator.inputs)
    found = list(view.attributes["input_index"].ints) if "input_index" in view.attributes else None
    count = len(view.message.input)
    if found is None:
        return
    wanted = "as many as inputs, ascending, counted in the space of input_names"
    fix = "number the inputs by their place in input_names: what is not fed leaves a gap"
    if len(found) != count or found != sorted(set(found)) or not all(0 <= index < names for index in found):
        yield view.finding("input-index", "input_index", f"{found} for {number(count, 'input')}", wanted, fix)
        return
    for index, port in enumerate(view.operator.inputs):
        if not port.optional and port.name not in view.ports:
            yield view.finding("input-missing", port.name, "not fed", "fed", f"feed {port.name} as input {index}")
        elif index in found and port.name not in view.ports:
            fix = f"feed {port.name}, or take it out of the inputs and {index} out of input_index"
            yield view.finding("input-missing", port.name, "an empty name", "fed, or left out", fix)


def _outputs_shape(view: View, sizes: Mapping[str, int]) -> Iterator[Finding]:
    found = view.attributes["outputs_shape"].s.decode(errors="replace")
    wanted = outputs_shape(sizes["H"], sizes["V"], sizes["K"])
    # Tokens and slots may be written out.
    shapes = [sizes.get("T"), sizes["H"], sizes["V"]], [sizes.get("B"), sizes["H"], sizes["V"], sizes["K"]]
    expected = [number for shape in shapes for number in (len(shape), *shape)]
    numbers = _numbers(found)
    free = {index for index, number in enumerate(_numbers(wanted)) if number == -1}
    if len(numbers) != len(expected) or not all(
        (a > 0 if b is None else a == b) or (index in free and a == -1)
        for index, (a, b) in enumerate(zip(numbers, expected, strict=True))
    ):
        fix = f"set outputs_shape to {wanted!r}: each shape after its rank, a comma behind every number"
        yield view.finding("outputs-shape", "outputs_shape", repr(found), repr(wanted), fix)


def _numbers(text: str) -> list[int]:
    """Numbers with a comma behind every one; none where the text is anything else."""
    return [int(part) for part in text[:-1].split(",")] if _NUMBERS.fullmatch(text) else []


def scale_findings(view: View, name: str) -> Iterator[Finding]:
    """A scale is a positive number; LinearAttention reads 0.0 as 1/sqrt(Dk)."""
    attribute = view.attributes.get(name)
    if attribute is None or attribute.type != AttributeProto.FLOAT:
        return
    least = 0.0 if view.operator.op == LINEAR_ATTENTION else math.ulp(0.0)
    if not (math.isfinite(attribute.f) and attribute.f >= least):
        fix = f"set {name} to the factor on the query, e.g. 1/sqrt of the key head size"
        yield view.finding("scale", name, attribute.f, "a positive number", fix)
