from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from bench.report import Goal, Report
from bench.results import PAGE, RESULTS, keep, render


def test_the_page_has_what_was_measured_and_nothing_else() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(RESULTS), "run: python -m bench.results --render"


def test_a_goal_that_was_missed_is_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    goals = (Goal("fast", ">=", 2.0), Goal("small", "<=", 8.0))
    Report("transfer", goals, {"fast": 1.5, "small": 7.0, "other": 123456.0}, {"fast": 1.0}).print(as_json=True)

    keep("a line before\n" + capsys.readouterr().out, tmp_path)

    page = render(tmp_path)
    assert "| `fast` | 1.5 | 1 | >= 2 | **no** |" in page
    assert "| `small` | 7 |  | <= 8 | yes |" in page
    assert "| `other` | 123,456 |  |  |  |" in page


@pytest.mark.parametrize("output", ["", "no json", "[1]", json.dumps({"bench": "x"})])
def test_what_is_no_report_is_not_kept(output: str, tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="--json"):
        keep(output, tmp_path)
    assert not list(tmp_path.iterdir())
