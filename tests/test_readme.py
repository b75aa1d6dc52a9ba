"""The front page's commands, code and links are checked against what is there, so that it cannot lie."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_commands import blocks, parse_kvrelay, shell_commands
from fake_router import running_fake_router

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_page_shows_commands_and_code() -> None:
    assert any(command.startswith("make demo") for command in shell_commands(README))
    assert blocks(README, "python")


@pytest.mark.parametrize("command", [c for c in shell_commands(README) if c.startswith("make ")])
def test_every_make_command_is_a_target(command: str) -> None:
    target = command.split()[1]

    assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", [c for c in shell_commands(README) if c.startswith("kvrelay ")])
def test_every_kvrelay_command_parses(command: str) -> None:
    assert parse_kvrelay(command).info_name == command.split()[1]


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_every_link_leads_to_a_file(link: str) -> None:
    assert link.startswith("https://") or (ROOT / link).exists()


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with running_fake_router() as router:
        for code in blocks(README, "python"):
            if "openai" in code:  # tests/router/http/test_openai_clients.py runs it
                continue
            exec(compile(code.replace("127.0.0.1:8600", router.address), "README.md", "exec"), {})

    assert "Grüße" in capsys.readouterr().out
