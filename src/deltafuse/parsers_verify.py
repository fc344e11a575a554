"""Options of ``fuse verify``, in the groups that its help shows."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltafuse.parsers_types import bound, cosine, count, pin, state_map
from deltafuse.verify_tolerances import EXACT, rows


def add_verify(parser: argparse.ArgumentParser) -> None:
    """All options but the files, the level and the timeout."""
    _add_inputs(parser)
    _add_task(parser)
    _add_causes(parser)
    _add_bars(parser)


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("inputs of whole models").add_argument
    add("--inputs", type=Path, metavar="NPZ", help="arrays for some or all inputs, by name; the others are drawn")
    add("--save-inputs", type=Path, metavar="NPZ", help="write the inputs that are used")
    add("--seed", type=int, default=0, metavar="N", help="of the inputs that are drawn (0)")
    dims = "size of an input's axis, e.g. past_seq_len=40; the others follow from it; repeatable"
    lowering = "a Python file that lowers other tools' Custom nodes for the run, or one that ships: fixed-capacity"
    add("--lowering", metavar="FILE", help=lowering)
    add("--dim", action="append", type=pin, default=[], metavar="SYMBOL=N", help=dims)


def _add_task(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("task level: the graphs as they are used, in place of UNFUSED FUSED").add_argument
    files = ("UNFUSED", "FUSED")
    add("--prefill", nargs=2, type=Path, metavar=files, help="the graph that takes a prompt")
    decode = "the graph that takes one token more; alone, its first states are drawn"
    add("--decode", nargs=2, type=Path, metavar=files, help=decode)
    add("--rollout", type=count, default=0, metavar="N", help="chain N decode steps, each with the likeliest token")
    add("--prompt", type=Path, metavar="NPY", help="token ids of the prompt; drawn if left out")
    add("--nll", type=Path, metavar="NPY", help="token ids whose loss both pairs are to tell, token by token")
    maps = "a state that decode takes from this output, where names and sizes do not tell; several with commas are a "
    add("--map", dest="maps", action="append", type=state_map, default=[], metavar="OUTPUT=INPUT",
        help=f"{maps}stack; repeatable")  # fmt: skip


def _add_causes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("finding a cause").add_argument
    add("--bisect", action="store_true", help="fuse half of the sites at a time, to find those that move an output")
    ablate = "undo the decisions of this site one by one: types, scale, head map; repeatable"
    add("--ablate", action="append", default=[], metavar="SITE", help=ablate)
    minimize = "write the first site to blame as a stand-alone reproduction"
    add("--minimize", type=Path, metavar="DIR", help=minimize)


def _add_bars(parser: argparse.ArgumentParser) -> None:
    held = "\n".join(f"{row.title}: {row.values}" for row in rows())
    group = parser.add_argument_group(
        "bars, in place of those for the kind of difference and the target",
        f"{held}\nA site alone, in double, may be {EXACT:g} off, whatever is set. The largest difference counts for "
        "the outputs of whole models only.",
    )
    group.add_argument("--cosine", type=cosine, metavar="X", help="least cosine")
    group.add_argument("--nrmse", type=bound, metavar="X", help="largest root mean square error, over the unfused")
    group.add_argument("--max-abs", type=bound, metavar="X", help="largest difference of one element")
