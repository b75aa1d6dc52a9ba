from __future__ import annotations

import pytest

from cluster.updates import (
    Failed,
    MemberTrouble,
    Ready,
    StageBegan,
    StageDone,
    StageMoved,
    Update,
    from_line,
    to_line,
)

READY = Ready("default", "m", "127.0.0.1:8600", "127.0.0.1:1", "/log", 12, 5.5)


@pytest.mark.parametrize(
    "update",
    [
        StageBegan("ray", "local"),
        StageMoved("model", "download ü\n", 0.5),
        StageDone("ray", 1.25, "127.0.0.1:1"),
        MemberTrouble("decode-0", "killed"),
        READY,
        Failed("why"),
    ],
)
def test_an_update_survives_the_pipe_as_one_line(update: Update) -> None:
    line = to_line(update)
    assert "\n" not in line
    assert from_line(line) == update


@pytest.mark.parametrize(
    "line", ["", "{}", '{"update": "Other"}', '{"update": "Failed"}', '{"update": "Failed", "x": 1}']
)
def test_another_line_is_no_update(line: str) -> None:
    with pytest.raises(ValueError):
        from_line(line)
