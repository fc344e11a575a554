"""The command ``fuse``: exit codes, one JSON document for every exit. Whatever is heavy is imported late."""

from __future__ import annotations

import argparse
import difflib
import errno
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from deltafuse.completion_scripts import COMPLETE
from deltafuse.errors import DeltafuseError, UserError
from deltafuse.parsers import EXITS, PARSERS, plain_parser

__all__ = ["EXITS", "PARSERS", "REPORT_TO", "main", "parse", "plain_parser", "run"]

EXIT_USER, EXIT_BUG = 1, 2
REPORT_TO = (
    "This is a bug in deltafuse. Please report it to the project with the traceback above, the output of "
    "`fuse --version` and, if you may, the model without its weights."
)


def parse(arguments: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """The command's name ("fuse" for the plain form) and its options.

    Raises:
        UserError: ``usage``.
    """
    if arguments and arguments[0] in PARSERS:
        return arguments[0], _parse_command(arguments[0], arguments[1:])
    if "--version" in arguments:
        return "version", argparse.Namespace(json="--json" in arguments)
    for option in ("--install-completion", "--show-completion"):
        if option in arguments:
            shell = next(iter(arguments[arguments.index(option) + 1 :]), None)
            return "completion", argparse.Namespace(
                install=option.startswith("--install"),
                shell=None if shell is None or shell.startswith("-") else shell,
                json="--json" in arguments,
            )
    _check_command(arguments)
    given = plain_parser().parse_args(arguments)
    if given.output is None and not given.dry_run:
        raise UserError("usage", "say where to write with -o OUT, or use --dry-run; see `fuse --help`")
    return "fuse", given


def _parse_command(name: str, rest: Sequence[str]) -> argparse.Namespace:
    """A command's options; where they do not fit, a model or folder that is named like the command may be meant."""
    try:
        return PARSERS[name]().parse_args(rest)
    except UserError as error:
        if not os.path.exists(name):
            raise
        raise UserError(error.code, f"{error}; to fuse what is called {name} here, write ./{name}") from None


def _check_command(arguments: Sequence[str]) -> None:
    """Names a command that is misspelt: a plain word that is no file."""
    word = arguments[0] if arguments else ""
    if not word.replace("_", "").isalpha() or os.path.exists(word):
        return
    near = difflib.get_close_matches(word, PARSERS, 1)
    hint = f"did you mean `fuse {near[0]}`?" if near else f"the commands are {', '.join(PARSERS)}"
    raise UserError("usage", f"{word} is no command and no file; {hint}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Args:
        arguments: without the program's name; ``sys.argv`` where None.

    Returns:
        The exit code, see `EXITS`.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if COMPLETE in os.environ:
        from deltafuse.completion import answer

        return answer()
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
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = "no room left on a disk, that of temporary files maybe: free some space, or set TMPDIR"
            return _fail(as_json, EXIT_USER, "disk-full", text, arguments)
        if error.filename is None:
            return _bug(as_json, error, arguments)
        text = f"cannot use {error.filename}: {error.strerror}; give another path, or change its permissions"
        return _fail(as_json, EXIT_USER, "file", text, arguments)
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
    """Entry point of the command; a reader that goes away (``fuse ... | head``) is no error.

    The process ends at once: taking what it knows of hundreds of thousands of nodes apart would take a tenth of a
    second, and nothing is left to be done.
    """
    # numpy's products are small here: threads would wait for each other longer than they work.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # What is imported stays: by default Python looks through it for garbage dozens of times.
    gc.set_threshold(100_000)
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.stderr.flush()
    os._exit(code)
