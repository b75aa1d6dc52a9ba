"""The checks of `proto/` find what they are there for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUF = shutil.which("buf", path=str(Path(sys.executable).parent))
pytestmark = pytest.mark.skipif(BUF is None, reason="buf is not installed: pip install -e '.[tools]'")
RELEASED = ROOT / "tests" / "data" / "protos" / "released.binpb"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout's protos and their settings."""
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    return tmp_path


def buf(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert BUF is not None
    return subprocess.run([BUF, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / "proto" / "kvrelay" / "v1" / "router.proto"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_our_protos_are_clean_and_talk_to_the_released_ones() -> None:
    assert buf(ROOT, "lint").returncode == 0
    assert buf(ROOT, "breaking", "--against", str(RELEASED)).returncode == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  uint32 prompt_tokens = 2;\n}", "}", 'field "2" with name "prompt_tokens"'),
        ("uint32 n = 7;", "string n = 7;", 'Field "7" with name "n"'),
        ("uint32 n = 7;", "uint32 n = 17;", 'field "7" with name "n"'),
        ("message Tokens {\n  uint32 index = 1;", "message Tokens {\n  uint32 start = 1;", 'Field "1"'),
    ],
)
def test_a_change_that_breaks_others_is_refused(copy: Path, old: str, new: str, said: str) -> None:
    edit(copy, old, new)
    done = buf(copy, "breaking", "--against", str(RELEASED))
    assert done.returncode != 0
    assert said in done.stdout


def test_a_new_field_is_no_break(copy: Path) -> None:
    edit(copy, "uint32 n = 7;", "uint32 n = 7;\n  uint32 another = 99;")
    assert buf(copy, "breaking", "--against", str(RELEASED)).returncode == 0


def test_a_name_of_another_style_is_refused(copy: Path) -> None:
    edit(copy, "uint32 n = 7;", "uint32 howMany = 7;")
    assert "lower_snake_case" in buf(copy, "lint").stdout
