"""Options of the commands: one parser each, complaints that are ours. Light: nothing heavy is imported."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from deltafuse.completion_scripts import SHELLS
from deltafuse.options import (
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT,
    AttentionMode,
    Boundary,
    ExternalData,
    Form,
    Level,
    Operator,
    RecordMode,
)
from deltafuse.parsers_base import EXITS, Parser, parser_of
from deltafuse.parsers_lists import demo_parser, doctor_parser, explain_parser, patterns_parser, targets_parser
from deltafuse.parsers_types import count, pin, seconds
from deltafuse.parsers_verify import add_verify

COMMANDS = """\
commands (fuse COMMAND --help tells more):
  inspect    show the sites of a model, write nothing
  verify     compare a fused model with the unfused one
  rollback   give back the model a fused one was made from
  lower      turn fused nodes into plain operators that onnxruntime runs
  demo       write two small models to try things on
  lint       look over the fused nodes of any file, write nothing
  targets    list the targets and their limits, or one in detail
  patterns   list what is looked for
  explain    say what a code means, or a word that reports have
  doctor     see whether what is installed works, and how to mend it"""


def _add_list(
    parser: argparse.ArgumentParser, metavar: str, text: str, *names: str, kind: Callable[[str], object] = str
) -> None:
    """An option that is given once for each value."""
    parser.add_argument(*names, action="append", default=[], type=kind, metavar=metavar, help=f"{text}; repeatable")


def _add_outside(parser: argparse.ArgumentParser) -> None:
    text = "take external data that lies outside the model's folder; only for files you trust"
    parser.add_argument("--allow-outside", action="store_true", help=text)


def _add_data(parser: argparse.ArgumentParser) -> None:
    """What becomes of external data: of every command that writes a model."""
    text = "external data is left in the same folder, else copied, blocks shared where possible (default); keep: never "
    text += "copied; copy: byte by byte; reflink: blocks shared or an error"
    parser.add_argument("--external-data", choices=get_args(ExternalData), help=text)
    _add_outside(parser)


def _add_page(parser: argparse.ArgumentParser) -> None:
    text = "write what was found, why, and what becomes of it as one page: proofs, pictures; opens without a network; "
    text += "of one model, not of a folder"
    parser.add_argument("--html", type=Path, metavar="FILE", help=text)


def _add_search(parser: argparse.ArgumentParser, *, detail: bool = False) -> None:
    """Options that say what to look for and for whom: shared by the plain form and inspect, which shows details."""
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="the ONNX file to read, or a folder of them; never written")
    target = "whom to fuse for, or the path of a target file of your own (default: %(default)s)"
    add("--target", default=DEFAULT_TARGET, metavar="NAME", help=target)
    boundary = "element type of the fused operators' operands, where the target leaves a choice"
    add("--boundary", choices=get_args(Boundary), help=boundary)
    add("--signature", metavar="VERSION", help="an older signature of the operators, see `fuse targets`")
    add("--form", choices=get_args(Form), help="only sites written in this form")
    plain = () if detail else ("--site",)
    _add_list(parser, "GLOB", "only sites whose name fits, e.g. 'layers.1?'", "--sites", *plain)
    if detail:
        text = "show these sites in detail: operands, proof, the rule in the model's own names; repeatable"
        add("--site", dest="detail", action="append", default=[], metavar="GLOB", help=text)
    _add_list(parser, "GLOB", "but not these sites", "--skip-sites")
    rules = "only these patterns, those that are off by default too: see `fuse patterns`; give them after MODEL"
    add("--rules", nargs="+", action="extend", default=[], metavar="NAME", help=rules)
    _add_list(parser, "DIR", "a folder of further patterns", "--patterns", kind=Path)
    add("--no-pin", dest="pin", action="store_false", help="leave the axes dynamic that the target wants fixed")
    add("--pin", dest="pins", action="append", type=pin, default=[], metavar="SYMBOL=N", help="fix a further axis")
    batch = "how many sequences the output takes, where the target fixes it (default: %(default)s)"
    add("--batch", type=count, default=1, metavar="N", help=batch)
    loss = "accept float16 where the model has bfloat16, for targets that refuse it"
    add("--allow-bf16-to-fp16", action="store_true", help=loss)
    limit = "limit of the run up to the writing (%(default)g)"
    add("--timeout", type=seconds, default=DEFAULT_TIMEOUT, metavar="SECONDS", help=limit)


def plain_parser() -> Parser:
    """``fuse MODEL -o OUT``."""
    usage = "fuse MODEL -o OUT [options]\n       fuse COMMAND ..."
    text = "Find gated delta rules in an ONNX model, prove them, and replace each with one fused operator."
    epilog = f"{COMMANDS}\n\n{EXITS}\n\nA model named like a command is given as ./NAME."
    parser = parser_of("fuse", usage, text, epilog)
    _add_search(parser)
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="OUT", help="the file to write; a new folder where MODEL is one")
    add("--op", choices=get_args(Operator), help="force this operator where it is legal")
    add("--record", choices=get_args(RecordMode), default="embed", help="where the patch for rollback goes (embed)")
    _add_data(parser)
    going = "write what can be fused although other sites are refused, or other models of a folder cannot be read"
    add("--keep-going", action="store_true", help=going)
    add("--strict", action="store_true", help="treat a note as a refusal")
    add("--dry-run", action="store_true", help="do everything but write the model")
    _add_page(parser)
    plan = "with --dry-run: write what would be done, site by site, for you to edit; without: do what it says"
    add("--plan", type=Path, metavar="FILE", help=plan)
    add("--version", action="store_true", help="print the versions that a bug report needs")
    shells = ", ".join(SHELLS)
    text = f"completion of commands and options for {shells} (default: the shell that runs)"
    add("--install-completion", nargs="?", metavar="SHELL", help=f"set up {text}")
    add("--show-completion", nargs="?", metavar="SHELL", help=f"print {text}")
    return parser


def inspect_parser() -> Parser:
    """``fuse inspect MODEL``."""
    text = "Show the sites of a model; write nothing."
    parser = parser_of("fuse inspect", "fuse inspect MODEL [options]", text, EXITS)
    _add_search(parser, detail=True)
    add = parser.add_argument
    _add_outside(parser)
    add("--extract", type=Path, metavar="DIR", help="write each site as stand-alone models into DIR")
    _add_page(parser)
    add("--netron", action="store_true", help="open the first site, before and after, in netron (extra `netron`)")
    forced = " or ".join(get_args(Operator))
    tables = parser.add_argument_group(
        "tables of any model",
        "Given after MODEL. No site is looked for then, unless --sites, --extract or --html asks for it.\n"
        f"--op has two meanings: {forced} is forced where that is legal, as in the plain form, and "
        "makes no table; any other name is an operator whose nodes are listed.",
    )
    text = "list the {} whose name matches (all if left out)"
    add = tables.add_argument
    add("--tensors", nargs="?", const="", metavar="REGEX", help=text.format("tensors"))
    add("--nodes", nargs="?", const="", metavar="REGEX", help=text.format("nodes"))
    op_text = f"list and count the nodes of this operator, e.g. Conv or 'Reduce*'; {forced}: see above"
    add("--op", action="append", default=[], metavar="TYPE", help=f"{op_text}; repeatable")
    return parser


def verify_parser() -> Parser:
    """``fuse verify UNFUSED FUSED``, and the graphs of a pair."""
    usage = (
        "fuse verify UNFUSED FUSED [options]\n"
        "       fuse verify --prefill UNFUSED FUSED --decode UNFUSED FUSED --rollout N\n"
        "                   [--prompt NPY] [options]"
    )
    text = "Compare each fused site with the nodes it replaced, both whole models, and what they say token by token."
    parser = parser_of("fuse verify", usage, text, EXITS)
    add = parser.add_argument
    add("unfused", metavar="UNFUSED", type=Path, nargs="?", help="the model as exported, or a folder of them")
    add("fused", metavar="FUSED", type=Path, nargs="?", help="what fuse made of it; of a folder, the folder it wrote")
    levels = "site: sites alone; network: whole models too; task: sites, then --rollout and --nll; all: whatever can "
    add("--level", choices=get_args(Level), default="all", help=f"{levels}be run (default)")
    add("--timeout", type=seconds, default=DEFAULT_TIMEOUT, metavar="SECONDS", help="limit of the run (%(default)g)")
    add("--html", type=Path, metavar="FILE", help="write the report as one page, with plots of errors and drift")
    _add_outside(parser)
    add_verify(parser)
    return parser


def rollback_parser() -> Parser:
    """``fuse rollback FUSED -o MODEL``."""
    text = "Give back the model a fused one was made from, byte for byte; later edits are kept."
    parser = parser_of("fuse rollback", "fuse rollback FUSED -o MODEL [options]", text, EXITS)
    add = parser.add_argument
    add("fused", metavar="FUSED", type=Path, help="the fused model, or a folder of them; never written")
    add("-o", "--output", type=Path, required=True, metavar="MODEL", help="the file to write, or a new folder")
    _add_list(parser, "GLOB", "only sites whose name fits", "--sites")
    add("--all", action="store_true", help="undo every fuse, not just the last")
    add("--sidecar", type=Path, metavar="FILE", help="the record, where it was written beside the model")
    _add_data(parser)
    return parser


def lower_parser() -> Parser:
    """``fuse lower FUSED -o RUNNABLE``."""
    text = "Turn fused nodes into plain operators, so that onnxruntime runs the file; all else stays as it is."
    parser = parser_of("fuse lower", "fuse lower FUSED -o RUNNABLE [options]", text, EXITS)
    add = parser.add_argument
    add("fused", metavar="FUSED", type=Path, help="the fused model; it is never written")
    add("-o", "--output", type=Path, required=True, metavar="RUNNABLE", help="the file to write")
    add(
        "--rounding",
        choices=("on", "off"),
        default="on",
        help="round operands and results to float16 as the kernels do (on), or keep the unfused graph's precision",
    )
    add("--exact", dest="rounding", action="store_const", const="off", help="the same as --rounding off")
    add(
        "--linear-attention",
        choices=get_args(AttentionMode),
        default="auto",
        help="lower LinearAttention and CausalConvWithState where the installed onnxruntime lacks them (auto), always, "
        "or never",
    )
    _add_data(parser)
    return parser


def lint_parser() -> Parser:
    """``fuse lint FUSED``."""
    text = "Look over the fused nodes of a file, whoever wrote it, against a target's profile; needs no weights."
    parser = parser_of("fuse lint", "fuse lint FUSED [--target NAME] [--json]", text, EXITS)
    parser.add_argument("fused", metavar="FUSED", type=Path, help="the file to look over; it is never written")
    parser.add_argument("--target", metavar="NAME", help="whose profile (default: those that the nodes are of)")
    return parser


PARSERS: dict[str, Callable[[], Parser]] = {
    "inspect": inspect_parser,
    "verify": verify_parser,
    "rollback": rollback_parser,
    "lower": lower_parser,
    "demo": demo_parser,
    "lint": lint_parser,
    "targets": targets_parser,
    "patterns": patterns_parser,
    "doctor": doctor_parser,
    "explain": explain_parser,
}
