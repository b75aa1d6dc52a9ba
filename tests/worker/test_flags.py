from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.cluster_key import ClusterKey
from engine.errors import InternalError
from engine.knobs import KNOBS
from worker.config import WorkerConfig
from worker.flags import worker_command
from worker.session import Role


def no_build(config: WorkerConfig) -> Role:
    raise InternalError("not reached")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WorkerConfig]:
    """The configs that workers would have been started with."""
    configs: list[WorkerConfig] = []
    monkeypatch.setattr("worker.flags.run_worker", lambda build, config: configs.append(config))
    return configs


def run(*flags: str) -> tuple[int, str]:
    result = CliRunner().invoke(worker_command("decode", no_build), ["--model", "some/folder", *flags])
    return result.exit_code, result.output


def test_flags_reach_the_settings_that_they_name(started: list[WorkerConfig]) -> None:
    flags = "--worker-id w7 --host 127.0.0.2 --port 81 --dtype float32 --block-size 8 --num-blocks-override 9"
    cache = "--kv-memory-bytes 1KiB --no-enable-prefix-caching --max-model-len 99"
    batch = "--max-num-batched-tokens 77 --max-num-seqs 5 --threads 2"
    swap = "--swap-space 1MB --preemption swap --priority-step-s 3"
    code, _ = run(*flags.split(), *cache.split(), *batch.split(), *swap.split())

    assert code == 0
    (config,) = started
    engine = config.engine
    assert (config.worker_id, config.host, config.port, config.model_name) == ("w7", "127.0.0.2", 81, "folder")
    assert (engine.model_path, engine.dtype, engine.block_size) == ("some/folder", "float32", 8)
    assert (engine.num_blocks_override, engine.kv_memory_bytes, engine.max_model_len) == (9, 1024, 99)
    assert not engine.enable_prefix_caching
    assert (engine.swap_space, engine.scheduler.preemption, engine.scheduler.priority_step_s) == (10**6, "swap", 3.0)
    assert (engine.scheduler.max_num_batched_tokens, engine.scheduler.max_num_seqs, engine.num_threads) == (77, 5, 2)


def test_the_flags_of_links_reach_their_settings(started: list[WorkerConfig], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(bytes(range(32)).hex() + "\n")

    assert run("--kv-transports", "tcp, gloo", "--cluster-key-file", str(key))[0] == 0

    (config,) = started
    assert config.kv_transports == ("tcp", "gloo")
    assert config.cluster_key == ClusterKey(bytes(range(32)))
    assert bytes(range(32)).hex() not in repr(config)
    assert repr(config.cluster_key.secret) not in repr(config)


@pytest.mark.parametrize("text", ["", "shm,shm", "shm,carrier-pigeon"])
def test_transports_that_are_none_are_refused_with_those_that_are(started: list[WorkerConfig], text: str) -> None:
    code, output = run("--kv-transports", text)

    assert code == 1
    assert "kv_transports must name some of adopt, shm, nccl, tcp, gloo" in output


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), ("12ab", "has 32 bytes, got 2"), ("no key at all", "digits")]
)
def test_a_cluster_key_that_cannot_be_used_is_told_and_not_repeated(
    started: list[WorkerConfig], tmp_path: Path, content: str | None, reason: str
) -> None:
    path = tmp_path / "cluster"
    if content is not None:
        path.write_text(content)

    code, output = run("--cluster-key-file", str(path))

    assert (code, reason in output, str(path) in output) == (1, True, True), output
    assert content is None or content not in output.replace(str(path), "")


def test_every_knob_has_a_flag_whose_default_is_that_of_the_table(started: list[WorkerConfig]) -> None:
    assert run()[0] == 0

    assert started[0].engine.knobs() == {name: knob.default for name, knob in KNOBS.items()}


def test_a_size_that_is_none_is_refused_with_the_units(started: list[WorkerConfig]) -> None:
    code, output = run("--kv-memory-bytes", "12 parsecs")

    assert code == 2
    assert "Invalid value for '--kv-memory-bytes': expected bytes, as in 512MiB" in output
    assert started == []


def test_workers_without_a_name_get_different_ones(started: list[WorkerConfig]) -> None:
    run()
    run()

    first, second = (config.worker_id for config in started)
    assert first != second
    assert first.startswith("decode-")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "70000"], "port must be in [0, 65535]"),
        (["--kv-memory-bytes", "0"], "kv_memory_bytes must be at least 1, got 0"),
        (["--block-size", "24"], "block_size must be a power of two in [1, 1024], got 24"),
        (["--eviction-policy", "fifo"], "eviction_policy must be one of lru, got 'fifo'"),
        (["--tensor-parallel-size", "65"], "tensor_parallel_size must be in [1, 64], got 65"),
        (["--tensor-parallel-size", "2", "--weights-dtype", "int8"], "tensor_parallel_size 2 cuts them"),
        (
            ["--sliding-window", "64"],
            "sliding_window 64 is not supported yet: a model runs with the window that its config",
        ),
        (["--device", "cpu", "--gpu-memory-utilization", "0.9"], "gpu_memory_utilization 0.9 is of a GPU, and device"),
        (["--device", "gpu"], "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["--threads", "0"], "num_threads must be at least 1"),
        (["--drain-s", "-1"], "drain_s must be at least 0"),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_limit(
    started: list[WorkerConfig], flags: list[str], named: str
) -> None:
    code, output = run(*flags)

    assert code == 1
    assert named in output
    assert started == []
