"""`kvrelay manifests`: a cluster's Kubernetes objects, as files or on stdout."""

from __future__ import annotations

import os
from pathlib import Path

import click
import yaml

from cluster.config import load_spec
from cluster.manifests import JOB, KUSTOMIZATION, manifests, render, to_yaml
from cluster.overlays import overlay
from cluster.ray_pods import Object
from engine.errors import ConfigError
from engine.yaml_text import MALFORMED


@click.command("manifests")
@click.argument("spec_path", metavar="SPEC", type=click.Path(path_type=Path))
@click.option(
    "--output", "-o", "folder", type=click.Path(file_okay=False, path_type=Path), help="Write files into this folder."
)
@click.option(
    "--overlay-of",
    "base",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Write only what is unlike the files in this folder, as an overlay of it.",
)
@click.option("--check", is_flag=True, help="With --output: write nothing, fail if a file there is not as it would be.")
def manifests_command(spec_path: Path, folder: Path | None, base: Path | None, check: bool) -> None:
    """Turn the cluster's spec in the file SPEC into objects for Kubernetes with KubeRay.

    Without --output all that is to be applied goes to stdout, for `kubectl apply -f -`. With it, the files are a base
    for Kustomize, and job.yaml, which is none of it. Secrets are named, never made: docs/quickstart-kubernetes.md.
    """
    spec = load_spec(spec_path)
    files = manifests(spec, _text(spec.router.public_prefixes))
    if folder is None:
        if check or base:
            raise ConfigError("--check and --overlay-of need --output")
        click.echo(to_yaml([each for name, objects in files.items() if name != JOB for each in objects]), nl=False)
        return
    texts = render(files) if base is None else overlay(_objects(base), files, os.path.relpath(base, folder))
    if check:
        _check(folder, texts)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
            click.echo(str(folder / name))
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from error


def _objects(folder: Path) -> list[Object]:
    """Those in the files of a base. Raises `ConfigError` if it is none."""
    try:
        listed = yaml.safe_load((folder / KUSTOMIZATION).read_text())["resources"]
        objects = [each for name in listed for each in yaml.safe_load_all((folder / name).read_text())]
        named = [(each["kind"], each["metadata"]["name"]) for each in objects]
    except OSError as error:
        raise ConfigError(f"--overlay-of: {error.filename}: {error.strerror}") from error
    except MALFORMED as error:
        raise ConfigError(f"--overlay-of: {folder} holds no objects that `kvrelay manifests` made: {error}") from error
    if len(set(named)) < len(named):
        raise ConfigError(f"--overlay-of: {folder} has an object twice")
    return objects


def _check(folder: Path, texts: dict[str, str]) -> None:
    there = {path.name: path.read_text() for path in folder.glob("*.yaml")}
    stale = [name for name, text in texts.items() if there.get(name) != text]
    if stale:
        raise ConfigError(f"{folder}: {', '.join(stale)} are not as the spec says; make them again without --check")


def _text(path: str) -> str:
    """Of a file that the spec names; as for `up`, relative to where the command runs."""
    if not path:
        return ""
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"router.public_prefixes: {path}: {error.strerror}") from error
