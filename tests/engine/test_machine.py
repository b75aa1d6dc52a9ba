from __future__ import annotations

from pathlib import Path

from engine.machine import memory_bytes


def test_a_container_has_what_its_limit_says(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    assert memory_bytes((tmp_path / "absent", limit)) == 1048576


def test_without_a_limit_it_is_the_memory_of_the_machine(tmp_path: Path) -> None:
    unlimited, huge = tmp_path / "memory.max", tmp_path / "limit_in_bytes"
    unlimited.write_text("max\n")
    huge.write_text("9223372036854771712\n")
    machine = memory_bytes(())
    assert machine > 0
    assert memory_bytes((unlimited, huge)) == machine
