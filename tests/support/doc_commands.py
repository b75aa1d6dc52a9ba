"""The commands and code that a page of documentation shows."""

from __future__ import annotations

import re
import shlex

import click

from cluster.cli import main

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    return [body for name, body in _FENCE.findall(page) if name == language]


def shell_commands(page: str) -> list[str]:
    """One a line, without comments."""
    lines = [line for body in blocks(page, "sh") for line in body.splitlines()]
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


def parse_kvrelay(command: str) -> click.Context:
    """`command` as the command line reads it. Raises `click.UsageError` if it does not."""
    _, name, *arguments = shlex.split(command)
    subcommand = main.get_command(click.Context(main), name)
    assert subcommand is not None, f"no command {name}"
    context = subcommand.make_context(name, list(arguments))
    assert context.command is subcommand
    return context
