"""`python -m bench.peers [NAME ...]`: make or renew the environments of the peers, all of them by default."""

from __future__ import annotations

import subprocess
import sys
import venv

import click

from bench.peers import ENVIRONMENTS, PEERS


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
    return True


if __name__ == "__main__":
    main()
