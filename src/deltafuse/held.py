"""What is known of a site that an earlier run fused. Light."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Held", "Port"]


@dataclass(frozen=True)
class Port:
    """One operand or result of a fused node: the operator's name for it, the tensor, its type and sizes."""

    name: str
    tensor: str
    type: str


@dataclass(frozen=True)
class Held:
    """What is known of a site that an earlier run fused.

    Attributes:
        node: label of the fused node.
        domain: of its operator.
        attributes: names and texts.
        rounded: operand or result, its type in the model, the type that it is handed over or comes in.
        replaced: operator -> how many nodes of it the site was; empty where no record tells.
    """

    node: str
    domain: str
    attributes: tuple[tuple[str, str], ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    rounded: tuple[tuple[str, str, str], ...]
    replaced: Mapping[str, int]
