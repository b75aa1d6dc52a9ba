"""The `kvrelay` command: names its subcommands, loads the one that is asked for, turns typed errors into one line.

Knows nothing else, so that `kvrelay --help` loads neither gRPC nor Ray nor torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import click

from engine.errors import EngineError, RequestError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130


class Target(NamedTuple):
    path: str
    """`module:attribute` of a `click.Command`, imported when it runs."""
    help: str
    """One line; kept here because asking the command for it would import it."""


COMMANDS = {
    "up": Target("cluster.cli_cluster:up", "Start a local cluster, or one from a spec file."),
    "down": Target("cluster.cli_cluster:down", "Stop the local cluster."),
    "apply": Target("cluster.cli_operations:apply", "Make the running cluster what a spec file says."),
    "scale": Target("cluster.cli_operations:scale", "Have more or fewer workers."),
    "drain": Target("cluster.cli_operations:drain", "Take a worker out of service, without a failed request."),
    "flip": Target("cluster.cli_operations:flip", "Give a worker the other role."),
    "restart": Target("cluster.cli_operations:restart", "Have another router take over, without a failed request."),
    "status": Target("cluster.cli_status:status", "Show the router's view of its workers."),
    "generate": Target("cluster.cli_generate:generate", "Answer one prompt."),
    "chat": Target("cluster.cli_chat:chat", "Talk to the model."),
    "batch": Target("cluster.jobs.batch:batch", "Answer a file of requests, in OpenAI's batch format."),
    "explain": Target("cluster.cli_status:explain", "Show how a recent request was placed, and what happened."),
    "pull": Target("cluster.cli_pull:pull", "Get a model and make it ready to load."),
    "plan": Target("cluster.cli_plan:plan", "Show what fits into memory, for a model and its settings."),
    "doctor": Target("cluster.cli_doctor:doctor", "Say what will fail here, what will be slow, and the fix."),
    "manifests": Target("cluster.cli_manifests:manifests_command", "Turn a cluster's spec into Kubernetes objects."),
    "demo": Target("cluster.cli_cluster:demo", "Start a cluster, answer one prompt, show what moved, stop."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are needed.

    Every command fails in one way: a typed error becomes one line on stderr and exit code 1. Anything else is a fault
    of ours and keeps its traceback.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].path.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, target.help) for name, target in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EngineError as error:
            click.echo(f"kvrelay: {one_line(error, self._flags(ctx))}", err=True)
            ctx.exit(EXIT_ERROR)
        except KeyboardInterrupt:
            click.echo(err=True)  # the shell's prompt begins on a line of its own
            ctx.exit(EXIT_INTERRUPTED)

    def _flags(self, ctx: click.Context) -> dict[str, str]:
        """What the options of the command that ran are called, by the name of what they set."""
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        options = [param for param in command.params if isinstance(param, click.Option)] if command else []
        return {option.name: option.opts[0] for option in options if option.name}


def one_line(error: EngineError, flags: Mapping[str, str] = MappingProxyType({})) -> str:
    """The error's text on one line; its class if it has none. Names of fields that have a flag become the flag."""
    text = str(error)
    if isinstance(error, RequestError) and error.field in flags:
        text = f"{flags[error.field]}: {error.description}"
    elif "timeout_s" in flags:  # the API's word, in an advice
        text = text.replace("timeout_s", flags["timeout_s"])
    return " ".join(text.split()) or type(error).__name__


def as_command(command: click.Command) -> None:
    """Run one command by itself as it would run under `kvrelay`; ends the process."""
    name = command.name or ""
    assert name in COMMANDS, f"{name} is no command of ours"
    main(args=[name, *sys.argv[1:]], prog_name="kvrelay")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvrelay", prog_name="kvrelay")
def main() -> None:
    """Serve a large language model with prefill and decode on separate workers."""
