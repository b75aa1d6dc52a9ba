"""Do the committed stubs in `kvrelay/v1` equal what the generator makes of `proto/` now? Run by `make check`.

`python -m tests.support.check_stubs` prints a summary of the differences and exits with 1 if there are any.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("kvrelay/v1")
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")
MAX_DIFF_LINES = 20
"""Shown of each file; the rest is no news."""


class GeneratorFailed(Exception):
    pass


def generate(protos: Path, out: Path) -> None:
    """Write the stubs of every .proto below `protos` to `out`. Raises `GeneratorFailed` with the generator's words."""
    bin_folder = Path(sys.executable).parent  # where pip put the plugins of this interpreter, on PATH or not
    sources = sorted(str(path) for path in (protos / PACKAGE).glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(protos)]
    command += [f"--plugin={plugin}={bin_folder / plugin}" for plugin in PLUGINS]
    command += [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    done = subprocess.run([*command, *sources], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise GeneratorFailed(done.stderr.strip() or f"protoc ended with code {done.returncode}")


def differences(committed: Path, generated: Path) -> list[str]:
    """Lines that say what differs between two folders of stubs; none if they are equal."""
    ours, theirs = _stubs(committed), _stubs(generated)
    lines = [f"{name}: committed, but no .proto makes it" for name in sorted(ours.keys() - theirs.keys())]
    lines += [f"{name}: missing" for name in sorted(theirs.keys() - ours.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            lines += _diff(name, ours[name], theirs[name])
    return lines


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kvrelay-stubs-") as folder:
        try:
            generate(ROOT / "proto", Path(folder))
        except GeneratorFailed as error:
            print(f"the stubs cannot be generated: {error}", file=sys.stderr)
            return 1
        lines = differences(ROOT / PACKAGE, Path(folder) / PACKAGE)
    if lines:
        print("kvrelay/v1 is not what proto/ gives; run `make proto` and commit the result:", *lines, sep="\n")
        return 1
    print("kvrelay/v1 is what proto/ gives")
    return 0


def _stubs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for pattern in GENERATED for path in folder.glob(pattern)}


def _diff(name: str, ours: str, theirs: str) -> list[str]:
    diff = list(
        difflib.unified_diff(
            ours.splitlines(), theirs.splitlines(), f"committed/{name}", f"generated/{name}", n=0, lineterm=""
        )
    )
    changed = sum(line[0] in "+-" for line in diff) - 2  # without the two file names
    left_out = [f"... {len(diff) - MAX_DIFF_LINES} more lines"] if len(diff) > MAX_DIFF_LINES else []
    return [f"{name}: {changed} changed lines", *diff[:MAX_DIFF_LINES], *left_out]


if __name__ == "__main__":
    sys.exit(main())
