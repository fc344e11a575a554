"""What all parsers have: complaints that are ours, ``--json``, the exit codes."""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from deltafuse.errors import UserError
from deltafuse.parsers_types import swallowed
from deltafuse.wording import some

EXITS = """\
exit codes:
  0  done
  1  something you can mend: a bad file, a bad option
  2  a bug of ours
  3  no site matched (of a folder: in none of its models), or the model is
     fused already, or there is nothing to lower or to lint; nothing was
     written
  4  sites are refused, or near misses beside others; nothing was written
     (with --keep-going what matched is: 0, or 1 where a model of a folder
     cannot be read)
  5  verify found a difference, or lint a fault"""


#: Columns of a help text at most, which is no easier to read on a wider screen.
WIDTH = 80


class _Help(argparse.RawDescriptionHelpFormatter):
    """Lines of a description stay lines, and one that is too long is folded at a word."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(shutil.get_terminal_size().columns, WIDTH) - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_folded(line, width, indent) for line in text.splitlines())


def _folded(line: str, width: int, indent: str) -> str:
    start = indent + line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line.strip(), width, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ours: exit 1, and JSON where JSON was asked for."""

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """As argparse does, and tells a misspelt option which one may be meant."""
        try:
            given, unknown = self.parse_known_args(args)
        except UserError as error:
            if not (taken := swallowed(self.prog, self._option_string_actions, args)) or "required" not in str(error):
                raise
            self.error(taken)
        options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if options:
            self.error(f"there is no option {options[0]}{self._meant(options[0])}")
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)} (a path with a space in it stands in quotes)")
        return given

    def _meant(self, option: str) -> str:
        """Which commands have an option that this one lacks, else which of its own may be meant."""
        from deltafuse.parsers import PARSERS, plain_parser

        parsers = (plain_parser(), *(make() for make in PARSERS.values()))
        owners = [f"`{one.prog}`" for one in parsers if option in one._option_string_actions]
        if owners:
            return f" ({some(owners, len(owners))} {'has' if len(owners) == 1 else 'have'} it)"
        near = difflib.get_close_matches(option, self._option_string_actions, 1)
        return f" (did you mean {near[0]}?)" if near else ""

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would exit with 2 for."""
        raise UserError("usage", f"{message}; see `{self.prog} --help`")


def parser_of(prog: str, usage: str, description: str, epilog: str | None = None) -> Parser:
    """A parser that has ``--json``.

    Args:
        prog: the command.
        usage: its form.
        description: what it does.
        epilog: what stands after the options.
    """
    parser = Parser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else")
    return parser
