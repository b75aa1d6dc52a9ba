"""n > 1 over the split system draws what one engine's fork draws."""

from __future__ import annotations

from pathlib import Path

from factories import HarnessFactory, make_request
from one_process_cluster import BOUND_S, OneProcessCluster

from engine.block_hash import pack_tokens, unpack_tokens
from engine.parallel_sampling import further_samples
from engine.sampling_params import SamplingParams
from kvrelay.v1 import common_pb2, router_pb2, router_pb2_grpc

PROMPT = [(7 * i + 3) % 500 for i in range(60)]
N = 4
UNDECIDED = 50.0
"""Temperature at which the fake model's draws differ by seed."""


async def test_n_over_the_split_system_equals_one_engines_fork(tmp_path: Path, make_engine: HarnessFactory) -> None:
    params = SamplingParams(temperature=UNDECIDED, seed=11, max_tokens=12, ignore_eos=True)
    harness = make_engine()
    request = make_request(PROMPT, params=params)
    samples = [request, *further_samples(request, N)]
    harness.submit(request)
    harness.fork(request, samples[1:])
    harness.run()

    async with OneProcessCluster(tmp_path) as cluster:
        outputs: list[list[int]] = [[] for _ in range(N)]
        cached = [0] * N
        message = router_pb2.GenerateRequest(
            prompt_token_ids=pack_tokens(PROMPT),
            sampling=common_pb2.SamplingParams(temperature=UNDECIDED, seed=11, max_tokens=12, ignore_eos=True),
            n=N,
        )
        async for event in router_pb2_grpc.RouterStub(cluster.channel).Generate(message, timeout=BOUND_S):
            if event.HasField("tokens"):
                outputs[event.tokens.choice] += unpack_tokens(event.tokens.token_ids)
            elif event.HasField("finished"):
                cached[event.finished.choice] = event.finished.usage.cached_tokens

    assert outputs == [harness.outputs[sample.request_id] for sample in samples]
    assert len({tuple(output) for output in outputs}) > 1
    assert cached == [0, 56, 56, 56]
