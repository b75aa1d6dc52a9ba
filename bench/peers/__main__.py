"""`python -m bench.peers [NAME ...]`: make or renew the environments of the peers, all of them by default."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import click

from bench.peers import ENVIRONMENTS, PEERS, unpacked


@click.command(help="Install the peers that benchmarks compare with, each into an environment of its own.")
@click.argument("names", nargs=-1, type=click.Choice(sorted(PEERS)))
def main(names: tuple[str, ...]) -> None:
    failed = [name for name in names or sorted(PEERS) if not install(name)]
    if failed:
        sys.exit(f"not installed: {', '.join(failed)}; the benchmarks will say so")


def install(name: str) -> bool:
    """Whether it worked. Half an environment stays where it did not; the next call goes on from there."""
    folder = ENVIRONMENTS / name
    click.echo(f"{name}: installing into {folder}")
    venv.create(folder, with_pip=True)
    for step in PEERS[name].steps:
        done = subprocess.run([folder / "bin" / "pip", "--quiet", "--disable-pip-version-check", *step], check=False)
        if done.returncode:
            return False
    return all(_unpack(package, unpacked(name)) for package in PEERS[name].debian)


def _unpack(package: str, folder: Path) -> bool:
    """Whether a Debian package's files lie in `folder` now."""
    folder.mkdir(exist_ok=True)
    try:
        subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True)
        for archive in folder.glob(f"{package}_*.deb"):
            subprocess.run(["dpkg", "-x", archive, folder], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        click.echo(f"{package}, from Debian: {error}")
        return False
    return True


if __name__ == "__main__":
    main()
