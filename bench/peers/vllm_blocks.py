"""vLLM's block manager at the work of `bench.blocks`; runs in vLLM's environment. Prints operations a second.

Arguments: seed, sequences, prompt tokens, output tokens, lookup tokens, block size, vocabulary.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request


def main() -> None:
    seed, num_sequences, num_prompt, num_output, num_lookup, block_size, vocabulary = map(int, sys.argv[1:])
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(block_size, sha256_cbor)
    dice = random.Random(seed)

    def request(name: str, token_ids: list[int]) -> Request:
        params = SamplingParams(max_tokens=num_output + 1)
        return Request(name, token_ids, params, None, block_hasher=hasher)

    def tokens(count: int) -> list[int]:
        return dice.choices(range(vocabulary), k=count)

    def manager() -> KVCacheManager:
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
        num_blocks = num_sequences * (num_lookup // block_size + 2)
        config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        return KVCacheManager(config, 16_384, scheduler_block_size=block_size, hash_block_size=block_size)

    blocks = manager()
    prompts = [request(f"a{i}", tokens(num_prompt)) for i in range(num_sequences)]
    outputs = [tokens(num_output) for _ in range(num_sequences)]

    def operations() -> None:
        for one in prompts:
            blocks.get_computed_blocks(one)
            blocks.allocate_slots(one, num_prompt)
            one.num_computed_tokens = num_prompt
        for i in range(num_output):
            for one, output in zip(prompts, outputs, strict=True):
                one.append_output_token_ids(output[i])
                blocks.allocate_slots(one, 1)
                one.num_computed_tokens += 1
        for one in prompts:
            blocks.free(one)

    operations_s = num_sequences * (num_output + 2) / seconds(operations)

    blocks = manager()
    long_prompts = [tokens(num_lookup) for _ in range(num_sequences)]
    for i, prompt in enumerate(long_prompts):
        one = request(f"b{i}", prompt)
        blocks.allocate_slots(one, num_lookup)
        blocks.free(one)

    def lookups() -> None:  # with the hashing, which vLLM does as a request is made
        for i, prompt in enumerate(long_prompts):
            _, num_cached, *_ = blocks.get_computed_blocks(request(f"c{i}", [*prompt, 1]))
            if num_cached != num_lookup:
                raise SystemExit(f"found {num_cached} tokens of {num_lookup}")

    lookups_s = num_sequences / seconds(lookups)
    print(json.dumps({"alloc_ops_s": operations_s, "lookup_ops_s": lookups_s}))


def seconds(work: Callable[[], None]) -> float:
    gc.collect()
    gc.disable()
    try:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    finally:
        gc.enable()


if __name__ == "__main__":
    main()
