"""What a target needs to run what is written for it, as far as that can be seen here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deltafuse.lowering_attention import LINEAR_ATTENTION, runtime_has
from deltafuse.lowering_conv import CAUSAL_CONV, runtime_has_conv
from deltafuse.targets import Profile
from deltafuse.versions import installed, numbers

#: Asks the installed onnxruntime whether it has a kernel for an operator of a domain.
_ASKED = {LINEAR_ATTENTION: runtime_has, CAUSAL_CONV: runtime_has_conv}


@dataclass(frozen=True)
class Need:
    """Something that a target needs.

    Attributes:
        name: of the package or operator.
        found: what there is.
        fix: what to do, "" where it is there.
        here: whether it can be installed here; the kernels of a device are not.
    """

    name: str
    found: str
    fix: str = ""
    here: bool = True


def needs(profile: Profile) -> Iterator[Need]:
    """Packages, then operators."""
    for one in profile.requires:
        version = installed(one.package)
        here = one.package in ("onnx", "onnxruntime")
        if version is not None and numbers(version) >= numbers(one.version):
            yield Need(one.package, version)
            continue
        found = "not installed" if version is None else f"{version}, and {one.version} is needed"
        package = f"pip install -U '{one.package}>={one.version}'"
        fix = package if here else f"install {one.package} {one.version} or newer on the device"
        yield Need(one.package, found, f"{fix}{', ' if one.fact.startswith('and ') else ': '}{one.fact}", here)
    asked = [one for one in (*profile.operators, *profile.others) if one.op_type in _ASKED]
    for operator in asked:
        name = f"{operator.domain or 'ai.onnx'} {operator.op}"
        if _ASKED[operator.op_type](operator.domain):
            yield Need(name, "the installed onnxruntime runs it")
            continue
        text = "update onnxruntime; until then `fuse lower` writes it as plain operators, and verify does so itself"
        yield Need(name, "the installed onnxruntime has no kernel", text)
