"""Values of options: what a text must be like. Light, as all that the parsers import."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence


def pin(text: str) -> tuple[str, int]:
    """``SYMBOL=N`` with N of 1 or more."""
    symbol, _, size = text.rpartition("=")
    if not symbol or not size.isascii() or not size.isdigit() or int(size) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not SYMBOL=N with N of 1 or more, e.g. seq_len=128")
    return symbol, int(size)


def count(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def state_map(text: str) -> tuple[str, str]:
    """``OUTPUT=INPUT``, names of states; several on one side are parted by commas."""
    left, _, right = text.partition("=")
    if not all(name for side in (left, right) for name in side.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not OUTPUT=INPUT, e.g. present_kv=past_kv")
    return left, right


def bound(text: str) -> float:
    """A number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def cosine(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


#: Names of the shipped targets, as `deltafuse.targets.names` has them.
TARGETS = ("ascend-310p", "ascend-a2", "onnx", "ort")


def swallowed(prog: str, actions: Mapping[str, argparse.Action], words: Sequence[str]) -> str:
    """That an option which may have a value took the model for one, and how to write it; "" where none did.

    Args:
        prog: the command.
        actions: by option.
        words: the command line.
    """
    option = ""
    for word in words:
        if word.startswith("-"):
            option = word
        elif option in actions and actions[option].nargs in ("?", "*", "+") and word.lower().endswith(".onnx"):
            return f"{option} took {word} as its value: put the model first, `{prog} {word} {option} ...`"
    return ""
