"""The command line of a worker process, the same for both roles."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from engine.cluster_key import ClusterKey
from engine.config import DTYPE_BYTES, KERNELS, PREEMPTIONS, WEIGHTS_DTYPES, EngineConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.knobs import KNOBS
from engine.log_format import LOG_FORMATS
from engine.native.build import default_cache
from kv_transfer.identity import DEFAULT_TRANSPORTS, parse_transports
from worker.config import WorkerConfig
from worker.knob_options import knob_option
from worker.process import exit_with_parent, run_worker
from worker.session import Role

_ENGINE = EngineConfig(model_path="")
_SCHEDULER = SchedulerConfig()


def worker_command(role: str, build: Callable[[WorkerConfig], Role]) -> click.Command:
    """`python -m <role>_worker`: runs one worker that `build` makes."""

    def run(**flags: Any) -> None:
        try:
            if flags.pop("exit_with_parent"):
                exit_with_parent()
            config = _worker_config(role, **flags)
        except ConfigError as error:
            raise click.ClickException(str(error)) from error
        run_worker(build, config)

    return click.Command(
        name=f"{role}_worker",
        callback=run,
        params=_options(),
        help=f"Run one {role} worker without Ray. Prints one JSON line when it serves; SIGTERM stops it.",
    )


def _options() -> list[click.Parameter]:
    def option(name: str, help_text: str, **settings: Any) -> click.Option:
        return click.Option([name], help=help_text, show_default=True, **settings)

    return [
        option("--model", "Model folder.", type=click.Path(path_type=Path), required=True),
        option("--model-name", "What routers call it; by default the folder's name.", default=None),
        option("--worker-id", "Name in the cluster; by default a new one.", default=None),
        option("--host", "Interface for sessions and links.", default="127.0.0.1"),
        option("--port", "Of the sessions; 0 takes a free one.", type=int, default=0),
        option("--dtype", "Of weights and activations.", type=click.Choice(sorted(DTYPE_BYTES)), default=_ENGINE.dtype),
        option("--weights-dtype", "int8: half the memory.", type=click.Choice(WEIGHTS_DTYPES), default="auto"),
        *(knob_option(name) for name in KNOBS),
        option("--max-num-batched-tokens", "Tokens of one step.", type=int, default=_SCHEDULER.max_num_batched_tokens),
        option("--max-num-seqs", "Requests that run at once.", type=int, default=_SCHEDULER.max_num_seqs),
        option("--max-waiting", "Requests that may wait.", type=int, default=_SCHEDULER.max_waiting),
        option(
            "--preemption",
            "The KV of a request that gives way is computed again, or copied to host memory (--swap-space).",
            type=click.Choice(PREEMPTIONS),
            default=_SCHEDULER.preemption,
        ),
        option(
            "--priority-step-s",
            "Seconds without a turn that lift waiting requests by one priority.",
            type=float,
            default=_SCHEDULER.priority_step_s,
        ),
        option("--device", "Where the model runs: auto, cpu, cuda or cuda:N.", default=_ENGINE.device),
        option("--kernels", "Who computes on a CPU.", type=click.Choice(KERNELS), default=_ENGINE.kernels),
        option("--threads", "Threads of the kernels.", type=int, default=_ENGINE.num_threads),
        option(
            "--native-cache",
            "Folder for native libraries, compiled at the first start.",
            default=lambda: str(default_cache()),
        ),
        option(
            "--kv-transports",
            "Of links, with commas: adopt, shm, nccl, tcp, gloo. In this order, the first that both ends have is used.",
            default=",".join(DEFAULT_TRANSPORTS),
        ),
        option(
            "--max-lent-share",
            "Of a prefill worker's pool, what decode workers may read where it is (adopt); the rest is copied.",
            type=float,
            default=0.5,
        ),
        option(
            "--cluster-key-file",
            "64 hexadecimal digits that routers and peers must know; by default nobody has to prove anything.",
            type=click.Path(path_type=Path),
            default=None,
        ),
        option("--log-format", "Of the log.", type=click.Choice(LOG_FORMATS), default="text"),
        option("--drain-s", "Seconds that live requests get on a stop.", type=float, default=1.0),
        click.Option(["--exit-with-parent"], is_flag=True, help="Stop when the parent process dies (Linux)."),
    ]


def _worker_config(role: str, **flags: Any) -> WorkerConfig:
    model: Path = flags["model"]
    key_file: Path | None = flags["cluster_key_file"]
    return WorkerConfig(
        worker_id=flags["worker_id"] or f"{role}-{secrets.token_hex(3)}",
        model_name=flags["model_name"] or model.resolve().name,
        host=flags["host"],
        port=flags["port"],
        log_format=flags["log_format"],
        drain_s=flags["drain_s"],
        kv_transports=parse_transports(flags["kv_transports"]),
        max_lent_share=flags["max_lent_share"],
        cluster_key=None if key_file is None else ClusterKey.read(key_file),
        engine=EngineConfig(
            model_path=str(model),
            dtype=flags["dtype"],
            weights_dtype=flags["weights_dtype"],
            **{name: flags[name] for name in KNOBS},
            device=flags["device"],
            num_threads=flags["threads"],
            native_cache=flags["native_cache"],
            kernels=flags["kernels"],
            scheduler=SchedulerConfig(
                max_num_batched_tokens=flags["max_num_batched_tokens"],
                max_num_seqs=flags["max_num_seqs"],
                max_waiting=flags["max_waiting"],
                preemption=flags["preemption"],
                priority_step_s=flags["priority_step_s"],
            ),
        ),
    )
