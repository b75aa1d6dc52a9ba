"""What docs/cluster.md shows is checked against what is there."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
from doc_commands import blocks, parse_kvrelay, shell_commands

from cluster.connection import ClusterConnection
from cluster.spec import ClusterSpec

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text()


@pytest.mark.parametrize("command", [c for c in shell_commands(PAGE) if "kvrelay " in c])
def test_every_kvrelay_command_parses(command: str) -> None:
    command = command[command.index("kvrelay ") :]
    assert parse_kvrelay(command).info_name == command.split()[1]


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", PAGE))
def test_every_link_leads_to_a_file(link: str) -> None:
    assert link.startswith("https://") or (ROOT / "docs" / link).exists()


@pytest.mark.parametrize("section", ["supervision", "ray", "router"])
def test_every_field_of_the_spec_is_explained(section: str) -> None:
    kind = get_type_hints(ClusterSpec)[section]
    assert is_dataclass(kind)
    missing = [field.name for field in fields(kind) if f"{field.name}`" not in PAGE]
    assert missing == []


def test_the_python_example_only_uses_what_is_there() -> None:
    (code,) = blocks(PAGE, "python")
    called = set(re.findall(r"connected\.(\w+)\(", code))
    assert called == {"generate", "stream", "submit_batch", "scale", "drain"}
    assert all(hasattr(ClusterConnection, name) for name in called)
    compile(code, "cluster.md", "exec")
