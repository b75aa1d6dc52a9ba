from __future__ import annotations

import io

from rich.console import Console

from cluster.display import Display
from cluster.updates import Failed, MemberTrouble, Ready, StageBegan, StageDone, StageMoved, Update

READY = Ready("default", "m", "127.0.0.1:8600", "127.0.0.1:1", "", 12, 5.5, "http://127.0.0.1:8601")


def shown(*updates: Update, terminal: bool = False, hints: bool = True) -> str:
    file = io.StringIO()
    with Display(Console(file=file, force_terminal=terminal, width=100, color_system=None), hints=hints) as display:
        for update in updates:
            display(update)
    return file.getvalue()


def test_without_a_terminal_each_finished_stage_is_one_line() -> None:
    text = shown(
        StageBegan("model", "m"),
        StageMoved("model", "download", 0.5),
        StageDone("model", 1.25, "m"),
        StageBegan("decode-0"),
        MemberTrouble("decode-0", "killed"),
        StageBegan("decode-0", "start 2"),
        StageDone("decode-0", 3.0),
    )
    assert [line.rstrip() for line in text.splitlines()] == [
        "✓ model          1.2 s  m",
        "! decode-0     killed",
        "✓ decode-0       3.0 s  start 2",
    ]


def test_a_ready_cluster_shows_its_endpoints_and_what_to_type() -> None:
    text = shown(READY)
    assert "ready after 5.5 s" in text
    assert "127.0.0.1:8600 (gRPC)" in text
    assert "http://127.0.0.1:8601/v1" in text
    assert "kvrelay generate" in text
    assert "Ctrl-C" in text
    assert "kvrelay generate" not in shown(READY, hints=False)


def test_without_a_terminal_a_long_reason_stays_on_one_line() -> None:
    reason = "a reason of many words " * 20
    assert shown(MemberTrouble("decode-0", reason)).count("\n") == 1


def test_on_a_terminal_the_list_is_gone_at_the_end() -> None:
    text = shown(StageBegan("ray", "local"), StageMoved("ray", "part", 0.5), Failed("no luck"), terminal=True)
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is shown again
