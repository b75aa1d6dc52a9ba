"""`kvrelay up`, `down` and `demo`: start a cluster here or in the background, stop it, show one at work."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.logging import RichHandler

from cluster import state
from cluster.cli_common import echo_json, json_option
from cluster.config import inherited_cluster_id, load_spec
from cluster.display import Display
from cluster.facts import check_router_files
from cluster.spec import ClusterSpec
from cluster.updates import Failed, Listener, MemberTrouble, Ready, Update, to_line
from engine.errors import UnavailableError


def _spec_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--port", type=int, default=None, help="Of the router; 0 takes a free one."),
        click.option("--decode", type=int, default=None, metavar="N", help="Decode workers."),
        click.option("--prefill", type=int, default=None, metavar="N", help="Prefill workers."),
        click.option("--model", default=None, help="Alias, Hugging Face id, folder, or GGUF file."),
        click.option("--name", default=None, help="Of the cluster; several may run side by side."),
        click.argument("spec_path", metavar="[SPEC]", type=click.Path(path_type=Path), required=False),
    ):
        command = option(command)
    return command


@click.command()
@_spec_options
@click.option("--detach", "-d", is_flag=True, help="Return when it is ready; it runs on in the background.")
@json_option
@click.option("--updates-fd", type=int, default=None, hidden=True)
@click.option("--new-log", type=click.Path(path_type=Path), default=None, hidden=True)
def up(
    spec_path: Path | None,
    detach: bool,
    as_json: bool,
    updates_fd: int | None,
    new_log: Path | None,
    **overrides: Any,
) -> None:
    """Start a cluster: the one that the file SPEC describes, or one prefill and one decode worker on this machine.

    Without --detach it runs until Ctrl-C. Options override the file.
    """
    started = time.monotonic()
    spec = (load_spec(spec_path) if spec_path is not None else ClusterSpec()).with_overrides(**overrides)
    if spec.ray.local:
        check_router_files(spec)
    if updates_fd is not None:
        _run_in_background(spec, updates_fd, new_log, started)
    elif detach:
        _detach(spec, [str(spec_path)] if spec_path is not None else [], overrides, as_json)
    else:
        with _shown(as_json) as tell:
            _run(spec, tell, started)


@click.command()
@click.argument("name", required=False)
@json_option
def down(name: str | None, as_json: bool) -> None:
    """Stop the cluster NAME, or the only one there is. Stopping what does not run is no error."""
    from cluster.takedown import take_down

    stopped = take_down(name)
    if as_json:
        echo_json({"stopped": ", ".join(stopped)})
    elif stopped:
        for each in stopped:
            click.echo(f"cluster {each} is down")
    else:
        others = ", ".join(record.name for record in state.running())
        click.echo(f"{state.nothing_runs(name)}{f', but these do: {others}' if others else ''}")


@click.command()
@click.option("--prompt", default="Why is the sky blue?", show_default=True)
@click.option("--max-tokens", type=int, default=96, show_default=True)
def demo(prompt: str, max_tokens: int) -> None:
    """Start a cluster, answer one prompt through it, show what moved and how long it took, stop."""
    from cluster.demo import DEMO_SPEC, Demo

    started = time.monotonic()
    console = Console(highlight=False)
    with _display(console, hints=False) as tell:
        _run(DEMO_SPEC, tell, started, Demo(console, prompt, max_tokens, started))
    console.print("stopped, nothing left running", style="dim")


def _run(spec: ClusterSpec, tell: Listener, started: float, job: Any = None) -> None:
    from cluster.launch import ClusterRun  # what only `up` and `demo` need

    ClusterRun(spec, tell, started=started).run(job)


def _run_in_background(spec: ClusterSpec, updates_fd: int, new_log: Path | None, started: float) -> None:
    from cluster.launch import ClusterRun

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    with open(updates_fd, "w", buffering=1) as pipe:

        def tell(update: Update) -> None:
            logging.getLogger("kvrelay").info("%s", update)
            if not pipe.closed:
                try:
                    pipe.write(to_line(update) + "\n")
                    if isinstance(update, Ready):
                        pipe.close()
                except BrokenPipeError:  # whoever started us went away; the cluster is wanted all the same
                    os.dup2(os.open(os.devnull, os.O_WRONLY), updates_fd)

        ClusterRun(
            spec,
            tell,
            started=started,
            new_log=new_log,
            cluster_id=inherited_cluster_id(),
        ).run()


def _detach(spec: ClusterSpec, arguments: list[str], overrides: dict[str, Any], as_json: bool) -> None:
    from cluster.detach import start_detached

    for option, value in overrides.items():
        if value is not None:
            arguments += [f"--{option}", str(value)]
    if (running := state.running_record(spec.name)) is not None:
        raise state.runs_already(spec.name, running.process.pid)
    with _shown(as_json) as tell:
        outcome = start_detached(arguments, state.log_path(spec.name), tell)
    if isinstance(outcome, Failed):
        raise UnavailableError(outcome.reason)


@contextmanager
def _shown(as_json: bool) -> Iterator[Listener]:
    """Where updates go: a display, or nothing but one JSON object when the cluster is ready."""
    if as_json:
        logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
        yield _tell_script
    else:
        with _display(Console(highlight=False), hints=True) as tell:
            yield tell


def _tell_script(update: Update) -> None:
    match update:
        case Ready():
            echo_json(asdict(update))
        case MemberTrouble(member_id, reason):
            click.echo(f"! {member_id} {reason}", err=True)


@contextmanager
def _display(console: Console, *, hints: bool) -> Iterator[Listener]:
    handler: logging.Handler = logging.StreamHandler()
    if console.is_terminal:  # through it, so that a message does not tear the display
        handler = RichHandler(console=console, show_time=False, show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    with Display(console, hints=hints) as display:
        yield display
