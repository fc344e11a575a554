"""Fenced blocks of Markdown files, and a way to run them as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
#: What makes an environment; the one that runs these tests is there already.
SETTING_UP = ("python3 -m venv", ". .venv/bin/activate", "pip install")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: ``bash`` and ``python`` are run, or written to a file where there is a title.
        title: of a file to write; ``output`` of a text that the block before prints.
    """

    language: str
    title: str
    text: str


def blocks(path: str, language: str | None = None) -> list[Block]:
    """The blocks of a file below the project's folder, those of one language where it is given."""
    text = (ROOT / path).read_text()
    fences = len(re.findall(r"^```", text, re.MULTILINE))
    found = [Block(match["language"], match["title"] or "", match["text"]) for match in _FENCE.finditer(text)]
    assert len(found) * 2 == fences, f"{path} has a fence that is not understood"
    return [block for block in found if language in (None, block.language)]


def steps(block: str) -> list[str]:
    """The commands of a block, but for those that make an environment."""
    commands = [command for line in block.splitlines() for command in line.split(" && ")]
    return [command for command in commands if not command.startswith(SETTING_UP)]


def run(commands: Iterable[str], folder: Path, tools: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """Runs commands in a folder; the first that fails ends it.

    Args:
        commands: lines of bash.
        folder: where.
        tools: folders that are looked into for programs before all others.
    """
    path = os.pathsep.join([*map(str, tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "-c", "\n".join(["set -euo pipefail", *commands])]
    environment = os.environ | {"PATH": path}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def follow(page: Sequence[Block], folder: Path) -> int:
    """Does what a page says, block by block; returns how many blocks were run.

    Raises:
        AssertionError: a block fails, complains, or prints something else than the page shows.
    """
    (folder / "scripts").symlink_to(ROOT / "scripts")
    printed, done = "", 0
    for block in page:
        if block.title == "output":
            assert printed == block.text
        elif block.title and block.language == "python":
            (folder / block.title).parent.mkdir(exist_ok=True)
            (folder / block.title).write_text(block.text)
        elif block.language in ("bash", "python"):
            text = block.text if block.language == "bash" else f"python -W error - <<'END'\n{block.text}END"
            ran = run([text], folder)
            assert (ran.returncode, _complaints(ran.stderr)) == (0, ""), f"{block.text}\n{ran.stdout}\n{ran.stderr}"
            printed, done = ran.stdout, done + 1
    return done


def _complaints(stderr: str) -> str:
    """What a page does not say that it comes: a refusal that it shows begins with ``fuse:``."""
    return "\n".join(line for line in stderr.splitlines() if not line.startswith("fuse:"))
