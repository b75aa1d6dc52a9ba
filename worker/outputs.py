"""Turns what the engine drew into its wire form."""

from __future__ import annotations

from dataclasses import asdict

from engine.kv_layout import KvLayout
from engine.request import FinishReason
from engine.sampler import SampledToken
from kvrelay._wire import finish_reason_to_proto, logprobs_to_proto
from kvrelay.v1 import worker_pb2


def layout_to_proto(layout: KvLayout) -> worker_pb2.KvLayout:
    return worker_pb2.KvLayout(**asdict(layout))


def output_to_proto(index: int, token: SampledToken, finish_reason: FinishReason | None) -> worker_pb2.Output:
    """`index` is the output index of `token`, from 0."""
    output = worker_pb2.Output(
        index=index,
        token_id=token.token_id,
        finish_reason=finish_reason_to_proto(None if finish_reason is None else finish_reason.value),
    )
    if token.logprobs is not None:
        output.logprobs.CopyFrom(logprobs_to_proto(token.logprobs.logprob, token.logprobs.top))
    return output
