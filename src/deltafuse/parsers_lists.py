"""Options of the commands that list and explain, and of the demo."""

from __future__ import annotations

from pathlib import Path

from deltafuse.parsers_base import EXITS, Parser, parser_of


def demo_parser() -> Parser:
    """``fuse demo DIR``."""
    text = "Write two small unfused models, with inputs and outputs."
    parser = parser_of("fuse demo", "fuse demo DIR [--json]", text)
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write into; made if need be")
    return parser


def targets_parser() -> Parser:
    """``fuse targets``."""
    text = "List the targets and what each cannot do (V seen in a file, S read in source, A assumed)."
    parser = parser_of("fuse targets", "fuse targets [NAME] [--json]", text)
    what = "show this target, or the file of your own, in detail: operators with their ports, limits, what it needs"
    parser.add_argument("target", nargs="?", metavar="NAME", help=what)
    return parser


def doctor_parser() -> Parser:
    """``fuse doctor``."""
    text = "See whether what is installed does what fuse and its targets need, and how to mend what does not."
    parser = parser_of("fuse doctor", "fuse doctor [--target NAME] [--json]", text, EXITS)
    what = "this target alone; what it lacks is to be mended, save what only its device can have"
    parser.add_argument("--target", metavar="NAME", help=what)
    return parser


def patterns_parser() -> Parser:
    """``fuse patterns``."""
    parser = parser_of(
        "fuse patterns",
        "fuse patterns [--patterns DIR] [--json]",
        "List the patterns: kind, whether on by default, what each is.",
    )
    what = "a folder of further patterns; repeatable"
    parser.add_argument("--patterns", action="append", default=[], type=Path, metavar="DIR", help=what)
    return parser


def explain_parser() -> Parser:
    """``fuse explain``."""
    text = "Say what the code of a reason, a note or an error means, and what to do, or what a word of a report means; "
    text += "list all without one."
    parser = parser_of("fuse explain", "fuse explain [CODE ...] [--json]", text, EXITS)
    what = "a code as reports and messages have it, a pattern of codes, e.g. 'pin-*', or a heading or label, e.g. nrmse"
    parser.add_argument("codes", nargs="*", metavar="CODE", help=what)
    return parser
