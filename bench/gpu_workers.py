"""Two workers on one card, as they serve: one computes prompts, the other goes on, and blocks pass between their pools.

Both are whole roles of `prefill_worker` and `decode_worker`, with pools on the card, in one process; what a router says
to them is said here. Links are those that two pools on one card can have, `shm` and `tcp`, through pinned host memory:
NCCL connects no two ends on one card. Tokens are compared with those of one engine on the CPU in float32.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.gpu_bench import Bench, config_of, random_weights
from bench.report import Report
from decode_worker.worker import DecodeWorker
from engine.block_hash import pack_tokens
from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.request import Request
from engine.sampling_params import SamplingParams
from kvrelay.v1 import common_pb2, worker_pb2
from prefill_worker.worker import PrefillWorker
from worker.config import WorkerConfig
from worker.engine_builder import build_engine
from worker.session import Role, Session

WAIT_S = 60.0
TRANSPORTS = ("shm", "tcp")
_ANSWERS = ("reserved", "prefilled", "handed_over", "step", "ended")


def check(report: Report, bench: Bench) -> None:
    """Figures: `worker_tokens`, those differing and those recomputed; by transport, `link_gb_per_s_*`."""
    lengths, new_tokens = ([19, 3], 3) if bench.tiny else ([333, 1, 130, 480], 24)
    shape = config_of(1, (4, 2), 16, 48, 64) if bench.tiny else config_of(6, (9, 3), 64, 1536, 8192)
    shape = replace(shape, qk_norm=False, max_model_len=64 if bench.tiny else 2048)
    prompts = [
        [random.Random(n).randrange(1, shape.vocab_size) for _ in range(length)] for n, length in enumerate(lengths)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name), shape)
        config = _engine_config(folder, bench)
        if not bench.tiny:
            _measure_pool(report, config, bench)
        expected = [tokens_of_one_engine(config, prompt, new_tokens) for prompt in prompts]
        got: list[list[int]] = []
        for transport in TRANSPORTS:
            drawn, accounts = asyncio.run(_serve(bench, config, transport, prompts, new_tokens))
            got += drawn
            report.figures[f"link_gb_per_s_{transport}"] = _gigabytes_per_s(accounts)
            report.figures["worker_tokens_recomputed"] = report.figures.get("worker_tokens_recomputed", 0) + sum(
                account.recomputed_tokens for account in accounts
            )
            report.notes.append(f"workers: {sum(a.blocks_adopted for a in accounts)} blocks adopted over {transport}")
    wanted = expected * len(TRANSPORTS)
    report.figures["worker_tokens"] = sum(map(len, wanted))
    report.figures["worker_tokens_differing"] = sum(
        a != b for ours, theirs in zip(got, wanted, strict=True) for a, b in zip(ours, theirs, strict=True)
    )


def write_model(folder: Path, shape: ModelConfig) -> Path:
    """A checkpoint with random weights."""
    save_file(
        {
            name: part.clone()
            for name, part in random_weights(shape, torch.float32, torch.device("cpu")).parts().items()
        },
        folder / "model.safetensors",
    )
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_model_len,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "eos_token_id": list(shape.eos_token_ids),
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "tokenizer.json").write_text("{}")  # no text is read here; the model's fingerprint holds it
    return folder


def tokens_of_one_engine(config: EngineConfig, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy, on the CPU."""
    parts = build_engine(replace(config, device="cpu"))
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    request = Request(
        request_id="r", token_ids=list(prompt), num_prompt_tokens=len(prompt), params=params, scope=b"", arrival=0.0
    )
    parts.engine.submit(request)
    while parts.engine.has_work():
        parts.engine.step()
    parts.kv.close()
    return request.token_ids[len(prompt) :]


def _engine_config(folder: Path, bench: Bench) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder),
        dtype="float32",
        device="cuda",
        num_blocks_override=32
        if bench.tiny
        else 512,  # what a process has allocated tells nothing of one of its workers
        scheduler=SchedulerConfig(
            max_num_batched_tokens=16 if bench.tiny else 256, max_num_seqs=2 if bench.tiny else 8
        ),
    )


def _measure_pool(report: Report, config: EngineConfig, bench: Bench) -> None:
    """The share of the card that a pool gets of a worker's share of 0.3; nothing else is built meanwhile."""
    parts = build_engine(replace(config, num_blocks_override=None, gpu_memory_utilization=0.3), bench.open)
    report.figures["worker_pool_card_share"] = parts.kv.nbytes / bench.device.memory()[1]
    parts.kv.close()


async def _serve(
    bench: Bench, config: EngineConfig, transport: str, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[list[list[int]], list[worker_pb2.HandedOver]]:
    """Tokens of each prompt, all at once, and what became of their blocks."""
    prefill, decode = (
        role(
            WorkerConfig(worker_id=name, engine=config, model_name="random", kv_transports=(transport,)),
            build_engine(config, bench.open),
        )
        for role, name in ((PrefillWorker, "prefill"), (DecodeWorker, "decode"))
    )
    await decode.start()
    await prefill.start()
    try:
        served = await asyncio.gather(
            *(_Call(prefill, decode, f"r{n}").run(prompt, num_tokens) for n, prompt in enumerate(prompts))
        )
        await decode.check_integrity()
    finally:
        await prefill.stop()
        await decode.stop()
    return [tokens for tokens, _ in served], [account for _, account in served]


class _Call:
    """What a router does with one request, on sessions of its own."""

    def __init__(self, prefill: Role, decode: Role, request_id: str) -> None:
        self._prefill, self._decode = prefill, decode
        self._request_id = request_id
        self._to_prefill, self._to_decode = Session("gpu-check", 1024), Session("gpu-check", 1024)

    async def run(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], worker_pb2.HandedOver]:
        async with asyncio.timeout(WAIT_S):
            common: dict[str, Any] = {
                "request_id": self._request_id,
                "token_ids": pack_tokens(prompt),
                "num_prompt_tokens": len(prompt),
                "sampling": common_pb2.SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
                "timeout_ms": round(1e3 * WAIT_S),
            }
            await self._say(self._decode, self._to_decode, reserve=worker_pb2.Reserve(**common))
            reserved = await self._hear(self._to_decode, "reserved")
            await self._say(
                self._prefill, self._to_prefill, prefill=worker_pb2.Prefill(ticket=reserved.ticket, **common)
            )
            first = (await self._hear(self._to_prefill, "prefilled")).output.token_id
            start = worker_pb2.Start(request_id=self._request_id, token_ids=pack_tokens([first]))
            await self._say(self._decode, self._to_decode, start=start)
            account = await self._hear(self._to_decode, "handed_over")
            tokens = [first]
            while len(tokens) < num_tokens:
                step = await self._hear(self._to_decode, "step")
                tokens += [each.output.token_id for each in step.outputs]
            return tokens, account

    async def _say(self, role: Role, session: Session, **message: Any) -> None:
        await role.handle(session, worker_pb2.SessionRequest(**message))

    async def _hear(self, session: Session, kind: str) -> Any:
        """The next message that is no report. Raises `RuntimeError` if it is another one."""
        while True:
            message = await session.next_message()
            heard = message.WhichOneof("message")
            if heard == kind:
                return getattr(message, kind)
            if heard in _ANSWERS:
                raise RuntimeError(f"{self._request_id}: expected {kind}, got {message}")


def _gigabytes_per_s(accounts: Sequence[worker_pb2.HandedOver]) -> float:
    seconds = sum(account.transfer_us for account in accounts) / 1e6
    return sum(account.bytes_received for account in accounts) / 1e9 / seconds if seconds else 0.0
