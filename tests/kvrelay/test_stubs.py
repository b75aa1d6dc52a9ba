"""The check that guards the committed stubs sees what it must see."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import check_stubs
import pytest


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the committed stubs."""
    return Path(shutil.copytree(check_stubs.ROOT / check_stubs.PACKAGE, tmp_path / "v1"))


def test_the_committed_stubs_are_what_the_generator_makes() -> None:
    command = [sys.executable, "-m", "tests.support.check_stubs"]
    done = subprocess.run(command, cwd=check_stubs.ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "kvrelay/v1 is what proto/ gives\n"), done.stdout + done.stderr


def test_equal_folders_have_no_differences(copy: Path) -> None:
    assert check_stubs.differences(check_stubs.ROOT / check_stubs.PACKAGE, copy) == []


def test_a_changed_a_missing_and_a_left_over_file_are_named(copy: Path) -> None:
    (copy / "common_pb2.pyi").write_text("# edited by hand\n" + (copy / "common_pb2.pyi").read_text())
    (copy / "worker_pb2.py").unlink()
    (copy / "forgotten_pb2.py").touch()
    lines = check_stubs.differences(copy, check_stubs.ROOT / check_stubs.PACKAGE)
    assert lines[:3] == [
        "forgotten_pb2.py: committed, but no .proto makes it",
        "worker_pb2.py: missing",
        "common_pb2.pyi: 1 changed lines",
    ]
    assert "-# edited by hand" in lines


def test_a_long_difference_is_summarized(copy: Path) -> None:
    (copy / "router_pb2.pyi").write_text("")
    lines = check_stubs.differences(copy, check_stubs.ROOT / check_stubs.PACKAGE)
    assert len(lines) == check_stubs.MAX_DIFF_LINES + 2
    assert lines[-1].endswith("more lines")


def test_a_broken_proto_gives_the_words_of_the_generator(tmp_path: Path) -> None:
    folder = tmp_path / "proto" / check_stubs.PACKAGE
    folder.mkdir(parents=True)
    (folder / "bad.proto").write_text('syntax = "proto3"; message {')
    with pytest.raises(check_stubs.GeneratorFailed, match=r"bad\.proto"):
        check_stubs.generate(tmp_path / "proto", tmp_path)
