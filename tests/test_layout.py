"""Rules of the repository as a whole: names resolve here, light packages stay light, files and functions stay short."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
    "wheel"
]["packages"]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
HEAVY = {"torch", "ray"}


def sources() -> Iterator[Path]:
    """Every Python file of ours that no generator wrote."""
    for package in (*PACKAGES, "tests"):
        yield from (path for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name)


def functions_in(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def loaded_by(*modules: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after importing these."""
    program = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_resolves_to_this_checkout(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin == str(ROOT / package / "__init__.py")


def test_the_import_name_proto_is_left_to_proto_plus() -> None:
    """Our `proto/` holds no Python. As a folder it may still be found, as a namespace without a file."""
    assert list((ROOT / "proto").rglob("*.py")) == []
    spec = importlib.util.find_spec("proto")
    assert spec is None or spec.origin is None or ROOT / "proto" not in Path(spec.origin).parents


@pytest.mark.parametrize("package", ["kvrelay", "router"])
def test_every_module_of_a_light_package_loads_without_torch_and_ray(package: str) -> None:
    with_extras = {"otel"} if importlib.util.find_spec("opentelemetry") is None else set()
    found = (path for path in (ROOT / package).rglob("*.py") if path.stem not in with_extras)
    paths = (path.relative_to(ROOT).with_suffix("") for path in found)
    modules = [".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__"]
    assert loaded_by(*modules) & HEAVY == set()


def test_no_file_is_longer_than_the_limit() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_the_limit() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: {length} lines"
        for path in sources()
        for function in functions_in(path)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert too_long == []
