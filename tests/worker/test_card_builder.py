"""Which device a worker takes, and an engine on a card that is a stand-in: the tokens of one on the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import EOS_TOKEN_ID, VOCAB_SIZE, make_model_folder
from gpu_stand_in import StandIn
from tiny_llama import TINY, random_tensors, write_checkpoint

from engine.config import EngineConfig, SchedulerConfig
from engine.cuda.device import Device
from engine.cuda.memory import CudaKvCache
from engine.cuda.plan import obstacle
from engine.errors import ConfigError
from engine.request import Request
from engine.sampling_params import SamplingParams
from worker.engine_builder import build_engine
from worker.engine_parts import EngineParts

MODEL = replace(TINY, num_layers=1, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model_folder(folder)
    write_checkpoint(folder, MODEL, random_tensors(MODEL))
    return folder


def config(folder: Path, **settings: Any) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_batched_tokens=12, max_num_seqs=2)
    defaults: dict[str, Any] = {"model_path": str(folder), "dtype": "float32", "block_size": 8, "scheduler": scheduler}
    return EngineConfig(**defaults | {"num_blocks_override": 16, "kv_memory_bytes": 1 << 20} | settings)


def open_stand_in(name: str) -> Device:
    return StandIn()


def tokens_of(parts: EngineParts, request_id: str, prompt: list[int], **sampling: Any) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were in the prefix cache."""
    params = SamplingParams(max_tokens=3, ignore_eos=True, **sampling)
    request = Request(
        request_id=request_id,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        params=params,
        scope=b"",
        arrival=0.0,
    )
    parts.engine.submit(request)
    while parts.engine.has_work():
        parts.engine.step()
    return request.token_ids[len(prompt) :], request.num_cached_tokens


def test_an_engine_on_a_card_draws_the_tokens_of_one_on_the_cpu(folder: Path) -> None:
    """Chunks, decoding, a cached beginning, greedy and with everything that sampling can be asked for."""
    all_of_it: dict[str, Any] = {"temperature": 0.9, "seed": 7, "min_p": 0.01, "repetition_penalty": 1.2}
    all_of_it |= {"presence_penalty": 0.4, "logit_bias": ((5, 2.0),)}
    prompt = [(7 * n + 3) % VOCAB_SIZE for n in range(19)]
    drawn = []
    for device in ("cuda", "cpu"):
        parts = build_engine(config(folder, device=device), open_stand_in)
        drawn.append(
            [
                tokens_of(parts, "greedy", prompt, temperature=0.0),
                tokens_of(parts, "again", [*prompt[:17], 4], temperature=0.0),
                tokens_of(parts, "sampled", prompt[:5], **all_of_it),
            ]
        )
        parts.engine.check_integrity()
        parts.kv.close()
    on_card, on_cpu = drawn
    assert on_card == on_cpu
    assert on_card[1][1] == 16


def test_an_engine_on_a_card_says_which_and_what_computes(folder: Path) -> None:
    parts = build_engine(config(folder, device="cuda:0", swap_space=1 << 16), open_stand_in)

    assert parts.device == "cuda:0: rehearsal on the CPU"
    assert parts.kernels.startswith("triton ")
    assert isinstance(parts.kv, CudaKvCache)
    assert (parts.pool.num_blocks, parts.kv.num_host_blocks) == (16, (1 << 16) // parts.kv.layout.block_bytes)
    assert parts.timings.keys() == {"model_s", "fingerprint_and_engine_s", "warm_up_s"}
    parts.kv.close()


def test_the_pool_is_as_large_as_the_share_of_the_card_allows(folder: Path) -> None:
    sizes = []
    for share in (0.7, 0.9):
        small = SchedulerConfig(max_num_batched_tokens=1, max_num_seqs=1)
        settings = {"num_blocks_override": None, "gpu_memory_utilization": share, "scheduler": small}
        parts = build_engine(config(folder, device="cuda", **settings), open_stand_in)
        sizes.append(parts.kv.nbytes)
        parts.kv.close()
    block_bytes = parts.kv.layout.block_bytes
    assert abs(sizes[1] - sizes[0] - 0.2 * StandIn().total) <= block_bytes


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"device": "gpu"}, "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        ({"device": "cuda:-1"}, "device must be auto"),
        ({"device": "cpu", "gpu_memory_utilization": 0.9}, "gpu_memory_utilization 0.9 is of a GPU, and device is cpu"),
        ({"device": "cuda", "kernels": "native"}, "kernels native are for CPUs, and device is cuda"),
    ],
)
def test_settings_that_contradict_each_other_are_named(folder: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config(folder, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_without_a_card_a_worker_that_demands_one_names_the_setting(folder: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device {device}: "):
        build_engine(config(folder, device=device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_a_worker_that_would_take_one_runs_on_the_cpu_and_says_why(folder: Path) -> None:
    parts = build_engine(config(folder, device="auto", gpu_memory_utilization=0.9))
    parts.kv.close()
    assert parts.device.startswith("cpu: device cuda: ")
    assert parts.kernels.startswith("reference")


def test_int8_weights_are_refused_on_a_card(folder: Path) -> None:
    with pytest.raises(ConfigError, match="device cuda: weights_dtype int8 is for CPUs only"):
        build_engine(config(folder, device="cuda", weights_dtype="int8"), open_stand_in)


def test_auto_leaves_cards_alone_of_which_no_share_is_given(folder: Path) -> None:
    def touched(name: str) -> Device:
        raise AssertionError("a card was opened")

    parts = build_engine(config(folder), touched)
    parts.kv.close()
    assert parts.device == "cpu"


def test_without_triton_the_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"device cuda: triton is not installed: pip install 'kvrelay\[gpu\]'"):
        build_engine(config(folder, device="cuda"), open_stand_in)


@pytest.mark.parametrize(
    ("changes", "dtype", "arch", "reason"),
    [
        ({}, "bfloat16", 90, None),
        ({}, "float16", 75, "sm_75"),
        ({"head_dim": 512}, "bfloat16", 90, "head_dim 512"),
        ({"head_dim": 128}, "float32", 90, "float32"),
    ],
)
def test_models_that_the_kernels_cannot_run_are_refused_with_the_reason(
    changes: dict[str, int], dtype: str, arch: int, reason: str | None
) -> None:
    told = obstacle(replace(MODEL, **changes), dtype, arch)  # type: ignore[arg-type]
    assert (told is None) if reason is None else reason in str(told)


def test_swap_space_beyond_the_machine_is_refused_before_anything_is_loaded(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"swap_space \d+ is more than this machine's"):
        build_engine(config(folder, device="cuda", swap_space=1 << 50), open_stand_in)
