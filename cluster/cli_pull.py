"""`kvrelay pull`: get a model and make it ready to load."""

from __future__ import annotations

import threading
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, TaskID

from cluster.cli_common import echo_json, json_option
from cluster.config import HOME_REMEDY, default_model_dir, make_folder
from engine.model_store import pull_model


@click.command()
@click.argument("name")
@click.option(
    "--model-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Where models are kept.  [default: the folder that `kvrelay up` looks in]",
)
@json_option
def pull(name: str, model_dir: Path | None, as_json: bool) -> None:
    """Get the model NAME: an alias such as smollm2-135m, a Hugging Face id, a folder or a GGUF file.

    Prints the folder that holds it afterwards. A model that is already there is checked, and made again only if it is
    damaged.
    """
    remedy = HOME_REMEDY if model_dir is None else "give another --model-dir"
    cache_dir = make_folder(model_dir or default_model_dir(), private=False, remedy=remedy)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        folder = pull_model(name, cache_dir, _Bars(progress).update)
    if as_json:
        echo_json({"name": name, "path": str(folder)})
    else:
        click.echo(str(folder))


class _Bars:
    """One progress bar a stage, in the order in which the stages begin."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def update(self, stage: str, share: float) -> None:
        """`share` is what is done of the stage, from 0 to 1. Downloads call from threads of their own."""
        with self._lock:
            if stage not in self._tasks:
                self._tasks[stage] = self._progress.add_task(stage, total=1.0)
            self._progress.update(self._tasks[stage], completed=share)
