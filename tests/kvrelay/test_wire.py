"""Values survive the wire, and what the wire cannot carry is named."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from engine.errors import InternalError, RequestError
from engine.sampling_params import SamplingParams
from kvrelay import _wire
from kvrelay.v1 import common_pb2

EVERY_FIELD_SET = SamplingParams(
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    seed=2**64 - 1,
    stop=("\n\n", "Ende. ✓"),
    stop_token_ids=(0, 2, 49151),
    min_tokens=2,
    max_tokens=17,
    logprobs=0,
    ignore_eos=True,
    min_p=0.05,
    repetition_penalty=1.2,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias=((0, -100.0), (49151, 2.5)),
)


def sent(params: SamplingParams) -> SamplingParams:
    wire = _wire.sampling_to_proto(params).SerializeToString()
    return _wire.sampling_from_proto(common_pb2.SamplingParams.FromString(wire))


def test_sampling_survives_the_wire_field_by_field() -> None:
    assert sent(EVERY_FIELD_SET) == EVERY_FIELD_SET


def test_the_sample_above_leaves_no_field_at_its_default() -> None:
    default = SamplingParams()
    assert [f.name for f in fields(default) if getattr(default, f.name) == getattr(EVERY_FIELD_SET, f.name)] == []


def test_an_empty_message_means_the_documented_defaults() -> None:
    assert _wire.sampling_from_proto(common_pb2.SamplingParams()) == SamplingParams()


def test_every_default_is_written_out() -> None:
    message = _wire.sampling_to_proto(SamplingParams())
    assert {field.name for field, _ in message.ListFields()} == {
        "temperature",
        "top_k",
        "top_p",
        "min_tokens",
        "max_tokens",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    }


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (common_pb2.SamplingParams(temperature=math.nan), "temperature"),
        (common_pb2.SamplingParams(temperature=-1.0), "temperature"),
        (common_pb2.SamplingParams(top_p=math.nan), "top_p"),
        (common_pb2.SamplingParams(max_tokens=0), "max_tokens"),
        (common_pb2.SamplingParams(logprobs=2**32 - 1), "logprobs"),
        (common_pb2.SamplingParams(stop=[""]), "stop"),
        (common_pb2.SamplingParams(min_p=math.nan), "min_p"),
        (common_pb2.SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (common_pb2.SamplingParams(presence_penalty=2.5), "presence_penalty"),
        (common_pb2.SamplingParams(frequency_penalty=math.nan), "frequency_penalty"),
        (common_pb2.SamplingParams(logit_bias={5: 101.0}), "logit_bias"),
        (common_pb2.SamplingParams(logit_bias={5: math.nan}), "logit_bias"),
        (common_pb2.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias"),
    ],
)
def test_a_bad_value_from_the_wire_names_its_field(message: common_pb2.SamplingParams, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        _wire.sampling_from_proto(message)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(max_tokens=2**32), "max_tokens"),
        (SamplingParams(stop_token_ids=(2**32,)), "stop_token_ids"),
        (SamplingParams(logit_bias=((2**32, 1.0),)), "logit_bias"),
        (SamplingParams(stop=("\ud800",)), "stop"),
    ],
)
def test_what_the_wire_cannot_carry_names_its_field(params: SamplingParams, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        _wire.sampling_to_proto(params)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["stop", "length", None])
def test_finish_reasons_survive_the_wire(name: str | None) -> None:
    assert _wire.finish_reason_from_proto(_wire.finish_reason_to_proto(name)) == name


def test_every_finish_reason_of_the_protocol_has_a_name() -> None:
    numbers = [v for v in common_pb2.FinishReason.values() if v != common_pb2.FINISH_REASON_UNSPECIFIED]
    assert sorted(str(_wire.finish_reason_from_proto(number)) for number in numbers) == ["length", "stop"]


def test_an_unknown_finish_reason_is_our_fault_not_a_stop() -> None:
    with pytest.raises(InternalError, match="'abort'"):
        _wire.finish_reason_to_proto("abort")


def test_logprobs_survive_the_wire_as_float32() -> None:
    message = _wire.logprobs_to_proto(-0.5, [(7, -0.5), (3, -1.25)])
    wire = common_pb2.TokenLogprobs.FromString(message.SerializeToString())
    assert _wire.logprobs_from_proto(wire) == (-0.5, ((7, -0.5), (3, -1.25)))
