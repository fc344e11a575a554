"""Habits of the project that can be checked."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest

import deltafuse
from deltafuse.patterns import loaded
from deltafuse.reasons import TEXTS

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("src", "patterns", "scripts") for path in (ROOT / folder).rglob("*.py"))
#: What needs the extra ``torch``.
EXPORT_TIME = ROOT / "src/deltafuse/torch"
MODULE_LINES, FUNCTION_LINES = 300, 60
#: One loop over hundreds of thousands of nodes: a call for each of them costs as much as the loop itself.
TIGHT_LOOPS = {"scanner.py:_nodes"}
#: How many functions of a hundred may have more than forty lines.
LONG_FUNCTIONS = 3
HEAVY = ("jinja2", "numpy", "onnx", "onnx_graphsurgeon", "onnxruntime", "rich", "torch", "transformers", "zstandard")


def functions(path: Path) -> list[tuple[str, int]]:
    """Name and length of every function of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    found = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [(f"{path.name}:{node.name}", node.end_lineno - node.lineno + 1) for node in found]


def test_modules_are_short() -> None:
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in SOURCES}
    assert {name: count for name, count in lines.items() if count > MODULE_LINES} == {}


def test_functions_are_short() -> None:
    lengths = [entry for path in SOURCES for entry in functions(path)]
    assert [entry for entry in lengths if entry[1] > FUNCTION_LINES and entry[0] not in TIGHT_LOOPS] == []
    assert sum(length > 40 for _, length in lengths) * 100 <= len(lengths) * LONG_FUNCTIONS


def test_importing_the_command_imports_nothing_heavy() -> None:
    code = f"import sys, deltafuse.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["verify", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom deltafuse.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as stop:\n    assert not stop.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "[]"


def test_no_file_speaks_of_the_machine_it_was_made_on() -> None:
    private = re.compile("|".join(("/wor" + "k/", "/roo" + "t/", "/hom" + "e/", "site-pack" + "ages")).encode())
    folders = ("src", "patterns", "scripts", "tests", "docs", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    named_files = ("README.md", "pyproject.toml", "mkdocs.yml", "constraints-oldest.txt", ".gitignore")
    files += [ROOT / name for name in named_files]
    assert len(files) > 100
    named = [str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts]
    assert [name for name in named if private.search((ROOT / name).read_bytes())] == []


def test_every_reason_is_asserted_by_a_test() -> None:
    for module in pkgutil.walk_packages(deltafuse.__path__, "deltafuse."):
        if not module.name.endswith(("__main__", "worker_main")):
            importlib.import_module(module.name)
    loaded()
    tests = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py")))
    assert len(TEXTS) > 20
    assert [code for code in sorted(TEXTS) if f'"{code}"' not in tests] == []


def test_the_fixtures_stay_small() -> None:
    assert sum(path.stat().st_size for path in (ROOT / "tests/fixtures").iterdir()) < 12_500_000
    assert sum(path.stat().st_size for path in (ROOT / "tests/zoo").iterdir()) < 7_500_000
    assert sum(path.stat().st_size for path in (ROOT / "src/deltafuse/demo_models").iterdir()) < 3_000_000


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a wheel would install it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("src", "patterns"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, folder / "tree")
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", code, str(folder)]
    subprocess.run(command, cwd=folder / "tree", check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_a_wheel_holds_patterns_demo_and_licence(installed: Path) -> None:
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    shipped = {f"deltafuse/_patterns/{path.name}" for path in (ROOT / "patterns").glob("*.py")}
    for kind in ("templates", "lowerings", "web"):
        shipped |= {f"deltafuse/{kind}/{path.name}" for path in (ROOT / "src/deltafuse" / kind).glob("*.*")}
    models = {f"deltafuse/demo_models/{name}" for name in ("prefill.onnx", "prefill.npz", "decode.onnx", "decode.npz")}
    assert shipped | models | {"deltafuse/py.typed", "deltafuse/targets/__init__.py"} <= files
    for text in ("LICENSE", "NOTICE"):
        assert any(name.endswith(text) for name in files)


def test_an_installed_package_finds_its_patterns(installed: Path, tmp_path: Path) -> None:
    code = (
        "import deltafuse; from deltafuse.cli import main; from deltafuse.patterns import shipped_folder\n"
        "print(deltafuse.__file__); print(shipped_folder()); raise SystemExit(main(['patterns']))"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    run = [sys.executable, "-c", code]
    lines = subprocess.check_output(run, text=True, cwd=tmp_path, env=environment).splitlines()
    assert lines[0] == str(installed / "deltafuse" / "__init__.py")
    assert lines[1] == str(installed / "deltafuse" / "_patterns")
    assert [line.split()[0] for line in lines[3:]] == [entry.name for entry in loaded()]


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def imports(path: Path) -> set[str]:
    """Top-level names of what a file imports, `importlib.import_module` included."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    plain |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    calls = [node for node in nodes if isinstance(node, ast.Call) and called(node) == "import_module"]
    plain |= {argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)}
    return {name.split(".")[0] for name in plain}


def test_what_is_imported_is_what_is_declared() -> None:
    ours = sys.stdlib_module_names | {"deltafuse"}
    shipped = [path for path in SOURCES if "scripts" not in path.parts]
    found = {name for path in shipped if path.parent != EXPORT_TIME for name in imports(path)}
    names = [re.split(r"[ <>=;]", line)[0] for line in requires("deltafuse") if "extra" not in line]
    declared = {{"protobuf": "google"}.get(name, name.replace("-", "_")) for name in names}
    # What an option asks for alone comes with an extra of its name.
    assert re.search(r'^netron = \["netron>=', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert found - ours == declared | {"netron"}
    more = {name for path in shipped if path.parent == EXPORT_TIME for name in imports(path)}
    (line,) = re.findall(r"^torch = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert more - ours - declared == set(re.findall(r'"([a-z]+)[<>=]', line))
