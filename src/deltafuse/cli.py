"""The command ``fuse``: options, exit codes, one JSON document for every exit. Whatever is heavy is imported late."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, get_args

from deltafuse.errors import DeltafuseError, UserError
from deltafuse.options import DEFAULT_TARGET, DEFAULT_TIMEOUT, AttentionMode, Form, Level, Operator, RecordMode

EXIT_USER, EXIT_BUG = 1, 2
EXITS = """\
exit codes:
  0  done
  1  something you can mend: a bad file, a bad option
  2  a bug of ours
  3  no site matched, or the model is fused already, or there is nothing to lower; nothing was written
  4  some sites matched, others are refused; nothing was written unless --keep-going
  5  verify found a difference"""
COMMANDS = """\
commands (fuse COMMAND --help tells more):
  inspect    show the sites of a model, write nothing
  verify     compare a fused model with the unfused one
  rollback   give back the model a fused one was made from
  lower      turn fused nodes into plain operators that onnxruntime runs
  demo       write two small models to try things on
  targets    list the targets and their limits
  patterns   list the rules"""
REPORT_TO = (
    "This is a bug in deltafuse. Please report it to the project with the traceback above, the output of "
    "`fuse --version` and, if you may, the model without its weights."
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ours: exit 1, and JSON where JSON was asked for."""

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would exit with 2 for."""
        raise UserError("usage", f"{message}; see `{self.prog} --help`")


def pin(text: str) -> tuple[str, int]:
    """``SYMBOL=N`` with N of 1 or more."""
    symbol, _, size = text.rpartition("=")
    if not symbol or not size.isascii() or not size.isdigit() or int(size) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not SYMBOL=N with N of 1 or more, e.g. seq_len=128")
    return symbol, int(size)


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _parser(prog: str, usage: str, description: str, epilog: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else")
    return parser


def _add_list(
    parser: argparse.ArgumentParser, metavar: str, text: str, *names: str, kind: Callable[[str], object] = str
) -> None:
    """An option that is given once for each value."""
    parser.add_argument(*names, action="append", default=[], type=kind, metavar=metavar, help=f"{text}; repeatable")


def _add_search(parser: argparse.ArgumentParser) -> None:
    """Options that say what to look for and for whom: shared by the plain form and inspect."""
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="the ONNX file to read; it is never written")
    add("--target", default=DEFAULT_TARGET, metavar="NAME", help="whom to fuse for (default: %(default)s)")
    add("--form", choices=get_args(Form), help="only sites written in this form")
    _add_list(parser, "GLOB", "only sites whose name fits, e.g. 'layers.1?'", "--sites", "--site")
    _add_list(parser, "GLOB", "but not these sites", "--skip-sites")
    _add_list(parser, "NAME", "only these rules, see `fuse patterns`", "--rules")
    _add_list(parser, "DIR", "a folder of further rules", "--patterns", kind=Path)
    add("--no-pin", dest="pin", action="store_false", help="leave the axes dynamic that the target wants fixed")
    add("--pin", dest="pins", action="append", type=pin, default=[], metavar="SYMBOL=N", help="fix a further axis")
    add("--allow-bf16-to-fp16", action="store_true", help="accept float16 where the model has bfloat16")
    add("--timeout", type=seconds, default=DEFAULT_TIMEOUT, metavar="SECONDS", help="limit of one proof (%(default)g)")


def plain_parser() -> Parser:
    """``fuse MODEL -o OUT``."""
    usage = "fuse MODEL -o OUT [options]\n       fuse COMMAND ..."
    text = "Find gated delta rules in an ONNX model, prove them, and replace each with one fused operator."
    parser = _parser("fuse", usage, text, f"{COMMANDS}\n\n{EXITS}\n\nA model named like a command is given as ./NAME.")
    _add_search(parser)
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="OUT", help="the file to write")
    add("--op", choices=get_args(Operator), help="force this operator where it is legal")
    add("--record", choices=get_args(RecordMode), default="embed", help="where the patch for rollback goes (embed)")
    add("--keep-going", action="store_true", help="write what can be fused although other sites are refused")
    add("--strict", action="store_true", help="treat a note as a refusal")
    add("--dry-run", action="store_true", help="do everything but write")
    add("--version", action="store_true", help="print the version")
    return parser


def inspect_parser() -> Parser:
    """``fuse inspect MODEL``."""
    parser = _parser("fuse inspect", "fuse inspect MODEL [options]", "Show the sites of a model; write nothing.", EXITS)
    _add_search(parser)
    add = parser.add_argument
    add("--extract", type=Path, metavar="DIR", help="write each site as stand-alone models into DIR")
    tables = parser.add_argument_group(
        "tables of any model", "Given after MODEL. No site is looked for then, unless --sites or --extract asks for it."
    )
    text = "list the {} whose name matches (all if left out)"
    add = tables.add_argument
    add("--tensors", nargs="?", const="", metavar="REGEX", help=text.format("tensors"))
    add("--nodes", nargs="?", const="", metavar="REGEX", help=text.format("nodes"))
    forced = " or ".join(get_args(Operator))
    op_text = (
        f"list the nodes of this operator, e.g. Conv or 'Reduce*'; {forced}: force it where it is legal, as in fuse"
    )
    _add_list(parser, "TYPE", op_text, "--op")
    return parser


def verify_parser() -> Parser:
    """``fuse verify UNFUSED FUSED``."""
    text = "Compare each fused site with the nodes it replaced, and both whole models where their weights are there."
    parser = _parser("fuse verify", "fuse verify UNFUSED FUSED [options]", text, EXITS)
    add = parser.add_argument
    add("unfused", metavar="UNFUSED", type=Path, help="the model as exported")
    add("fused", metavar="FUSED", type=Path, help="what fuse made of it")
    levels = "site: sites alone; network: the whole models too; all: these too where they can be run (default)"
    add("--level", choices=get_args(Level), default="all", help=levels)
    add("--inputs", type=Path, metavar="NPZ", help="arrays for some or all inputs, by name; the others are drawn")
    add("--save-inputs", type=Path, metavar="NPZ", help="write the inputs that are used")
    add("--seed", type=int, default=0, metavar="N", help="of the inputs that are drawn (0)")
    dims = "size of an input's axis, e.g. past_seq_len=40; the others follow from it"
    _add_list(parser, "SYMBOL=N", dims, "--dim", kind=pin)
    add("--timeout", type=seconds, default=DEFAULT_TIMEOUT, metavar="SECONDS", help="limit of one run (%(default)g)")
    return parser


def rollback_parser() -> Parser:
    """``fuse rollback FUSED -o MODEL``."""
    text = "Give back the model a fused one was made from, byte for byte; later edits are kept."
    parser = _parser("fuse rollback", "fuse rollback FUSED -o MODEL [options]", text, EXITS)
    add = parser.add_argument
    add("fused", metavar="FUSED", type=Path, help="the fused model; it is never written")
    add("-o", "--output", type=Path, required=True, metavar="MODEL", help="the file to write")
    _add_list(parser, "GLOB", "only sites whose name fits", "--sites")
    add("--all", action="store_true", help="undo every fuse, not just the last")
    add("--sidecar", type=Path, metavar="FILE", help="the record, where it was written beside the model")
    return parser


def lower_parser() -> Parser:
    """``fuse lower FUSED -o RUNNABLE``."""
    text = "Turn fused nodes into plain operators, so that onnxruntime runs the file; all else stays as it is."
    parser = _parser("fuse lower", "fuse lower FUSED -o RUNNABLE [options]", text, EXITS)
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
        help="lower LinearAttention where the installed onnxruntime lacks it (auto), always, or never",
    )
    return parser


def demo_parser() -> Parser:
    """``fuse demo DIR``."""
    parser = _parser("fuse demo", "fuse demo DIR [--json]", "Write two small unfused models, with inputs and outputs.")
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write into; made if need be")
    return parser


def targets_parser() -> Parser:
    """``fuse targets``."""
    text = "List the targets and what each cannot do (V seen in a file, S read in source, A assumed)."
    return _parser("fuse targets", "fuse targets [--json]", text)


def patterns_parser() -> Parser:
    """``fuse patterns``."""
    parser = _parser("fuse patterns", "fuse patterns [--patterns DIR] [--json]", "List the rules that are looked for.")
    _add_list(parser, "DIR", "a folder of further rules", "--patterns", kind=Path)
    return parser


PARSERS: dict[str, Callable[[], Parser]] = {
    "inspect": inspect_parser,
    "verify": verify_parser,
    "rollback": rollback_parser,
    "lower": lower_parser,
    "demo": demo_parser,
    "targets": targets_parser,
    "patterns": patterns_parser,
}


def parse(arguments: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """The command's name ("fuse" for the plain form) and its options.

    Raises:
        UserError: ``usage``.
    """
    if arguments and arguments[0] in PARSERS:
        return arguments[0], PARSERS[arguments[0]]().parse_args(arguments[1:])
    if "--version" in arguments:
        return "version", argparse.Namespace(json="--json" in arguments)
    given = plain_parser().parse_args(arguments)
    if given.output is None and not given.dry_run:
        raise UserError("usage", "say where to write with -o OUT, or use --dry-run; see `fuse --help`")
    return "fuse", given


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Args:
        arguments: without the program's name; ``sys.argv`` where None.

    Returns:
        The exit code, see `EXITS`.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in arguments
    try:
        name, given = parse(arguments)
        from deltafuse import commands

        return commands.run(name, given)
    except UserError as error:
        return _fail(as_json, EXIT_USER, error.code, str(error), arguments)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            return _bug(as_json, error, arguments)
        return _fail(as_json, EXIT_USER, "file", f"cannot use {error.filename}: {error.strerror}", arguments)
    except KeyboardInterrupt:
        return _fail(as_json, EXIT_USER, "interrupted", "interrupted; nothing was written", arguments)
    except Exception as error:
        return _bug(as_json, error, arguments)


def _bug(as_json: bool, error: Exception, arguments: Sequence[str]) -> int:
    traceback.print_exception(error)
    sys.stderr.write(f"{REPORT_TO}\n")
    text = str(error) if isinstance(error, DeltafuseError) else f"{type(error).__name__}: {error}"
    return _fail(as_json, EXIT_BUG, "internal", text, arguments)


def _fail(as_json: bool, code: int, name: str, text: str, arguments: Sequence[str]) -> int:
    if as_json:
        from deltafuse.report import failure, write

        write(failure(arguments, code, name, text))
    if code == EXIT_USER:
        sys.stderr.write(f"fuse: {text}\n")
    return code


def run() -> NoReturn:
    """Entry point of the command; a reader that goes away (``fuse ... | head``) is no error."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
