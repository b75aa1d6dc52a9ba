"""Libraries are compiled once, whole or not at all, and a machine that cannot compile says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import NativeUnavailable
from engine.native import blocks, build

ROOT = Path(build.__file__).parents[2]


def test_a_library_in_the_cache_needs_no_compiler(tmp_path: Path) -> None:
    build.load("blocks.c", tmp_path)

    assert build.load("blocks.c", tmp_path, compilers=()).kvrelay_level() >= 0


def test_another_content_or_flag_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    cache = tmp_path / "cache"
    (tmp_path / "f.c").write_text("int f(void) { return 1; }")
    assert build.load("f.c", cache).f() == 1
    (tmp_path / "f.c").write_text("#ifndef N\n#define N 2\n#endif\nint f(void) { return N; }")
    assert build.load("f.c", cache).f() == 2
    assert build.load("f.c", cache, flags=[*build.C_FLAGS, "-DN=3"]).f() == 3
    assert len(list(cache.glob("*.so"))) == 3


def test_without_a_compiler_it_says_which_ones_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="none of no-such-cc, nor-this is on the path"):
        build.load("blocks.c", tmp_path, compilers=["no-such-cc", "nor-this"])


def test_a_failed_compilation_says_what_the_compiler_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    (tmp_path / "f.c").write_text("this is no C")

    with pytest.raises(NativeUnavailable, match=r"(?s)failed with status 1.*error"):
        build.load("f.c", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\nsleep 1000 & echo $! > {tmp_path}/pid\nwait\n")
    compiler.chmod(0o700)

    with pytest.raises(NativeUnavailable, match=r"took longer than 0\.5 s"):
        build.load("blocks.c", tmp_path / "cache", compilers=[str(compiler)], timeout_s=0.5)
    assert list((tmp_path / "cache").iterdir()) == []
    assert ended(int((tmp_path / "pid").read_text()))


def test_a_library_of_another_user_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.load("blocks.c", tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    for library in tmp_path.glob("*.so"):
        if os.geteuid() == 0:
            os.chown(library, 54321, -1)

    with pytest.raises(NativeUnavailable, match="belongs to another user"):
        build.load("blocks.c", tmp_path)


def test_a_folder_that_cannot_be_made_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(NativeUnavailable, match="cannot hold native libraries"):
        build.load("blocks.c", tmp_path / "file" / "cache")


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[:5000] + b"\xcc" * 4096])
def test_a_damaged_library_is_made_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """In a cache of its own name: this process has the first one mapped, and must not have it damaged."""
    build.load("blocks.c", tmp_path)
    (library,) = tmp_path.glob("*.so")
    shutil.copytree(tmp_path, tmp_path / "copy")
    (tmp_path / "copy" / library.name).write_bytes(damage(library.read_bytes()))

    assert build.load("blocks.c", tmp_path / "copy").kvrelay_level() >= 0
    assert (tmp_path / "copy" / library.name).read_bytes() == library.read_bytes()


def test_a_file_that_is_no_library_is_a_reason(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nfor out in "$@"; do [ "$last" = -o ] && echo none > "$out"; last=$out; done\n')
    compiler.chmod(0o700)

    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        build.load("blocks.c", tmp_path / "cache", compilers=[str(compiler)])


def test_a_library_that_computes_wrongly_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    (tmp_path / "blocks.c").write_text("int kvrelay_level(void) { return 0; }\nvoid kvrelay_pass(void) {}\n")

    with pytest.raises(NativeUnavailable, match="is not the one of the xxhash package"):
        blocks.load_block_copier(tmp_path / "cache")


def test_nobody_loads_what_another_process_is_still_compiling(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    slow = tmp_path / "slow-cc"
    slow.write_text(
        '#!/bin/sh\nfor out in "$@"; do [ "$last" = -o ] && echo half > "$out"; last=$out; done\n'
        f'read line < {tmp_path}/go\nexec cc "$@"\n'
    )
    slow.chmod(0o700)
    program = "import sys; from pathlib import Path; from engine.native.build import load"
    command = f"{program}; print(load('blocks.c', Path(sys.argv[1]), compilers=[sys.argv[2]]).kvrelay_level())"
    other = subprocess.Popen(
        [sys.executable, "-c", command, str(tmp_path / "cache"), str(slow)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        with (tmp_path / "go").open("w") as go:  # opens when the compiler reads
            level = build.load("blocks.c", tmp_path / "cache").kvrelay_level()
            go.write("\n")
        said, _ = other.communicate(timeout=60)
    finally:
        other.kill()
        other.wait()

    assert int(said) == level
    assert len(list((tmp_path / "cache").iterdir())) == 2


def ended(pid: int) -> bool:
    """Of a process that was killed: at once, but for what the kernel still has to do."""
    stat = Path(f"/proc/{pid}/stat")
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
    return False
