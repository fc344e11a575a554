"""``python -m deltafuse`` is the command ``fuse``."""

from deltafuse.cli import run

run()
