"""Whatever of the project's own exports is fused is verified to be equal, site by site."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import graphs
from deltafuse import verify

pytestmark = pytest.mark.usefixtures("one_worker")

FOLDERS = [Path(__file__).parent / folder for folder in ("fixtures", "zoo")]
SMALL_BYTES = 60_000


def fused_exports() -> list[Path]:
    paths = sorted(path for folder in FOLDERS for path in folder.glob("*.onnx"))
    small = [path for path in paths if path.stat().st_size < SMALL_BYTES]
    return [path for path in small if json.loads(path.with_suffix(".json").read_text())["exit"] == 0]


@pytest.mark.parametrize("path", fused_exports(), ids=lambda path: path.stem)
def test_what_is_fused_is_verified(path: Path, tmp_path: Path) -> None:
    fused = tmp_path / "fused.onnx"
    report = graphs.fuse(path, fused)
    assert report.exit == 0
    checked = verify(path, fused, level="site")
    assert [site.verdict for site in checked.sites] == ["equal"] * sum(one.status == "fused" for one in report.sites)
    assert checked.exit == 0
