"""No field of the protocol gets lost on its way to a caller."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvrelay import types
from kvrelay.v1 import common_pb2, router_pb2

PAIRS: list[tuple[Any, Any]] = [
    (types.Usage, router_pb2.Usage),
    (types.Route, router_pb2.Route),
    (types.Waterfall, router_pb2.Waterfall),
    (types.Span, router_pb2.Span),
    (types.ModelCard, router_pb2.ModelCard),
    (types.PriceTerm, router_pb2.PriceTerm),
    (types.PricedPair, router_pb2.PricedPair),
    (types.Explanation, router_pb2.ExplainResponse),
    (types.WorkerStatus, router_pb2.WorkerStatus),
    (types.ClusterStatus, router_pb2.StatusResponse),
    (types.TokenLogprobs, common_pb2.TokenLogprobs),
    (types.Chunk, router_pb2.Tokens),
]


@pytest.mark.parametrize(("ours", "message"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_type_has_the_fields_of_its_message(ours: Any, message: Any) -> None:
    assert [field.name for field in fields(ours)] == [field.name for field in message.DESCRIPTOR.fields]


@pytest.mark.parametrize(
    ("ours", "message"),
    [p for p in PAIRS if p[0] in (types.Usage, types.Route, types.ModelCard)],
    ids=lambda value: value.__name__,
)
def test_every_value_lands_in_the_field_of_its_name(ours: Any, message: Any) -> None:
    wire = message()
    for number, field in enumerate(message.DESCRIPTOR.fields, start=1):
        value: Any = number
        if isinstance(field.default_value, str):
            value = str(number)
        elif isinstance(field.default_value, bytes):
            value = bytes([number])
        setattr(wire, field.name, value)
    made = ours.from_proto(wire)
    assert {f.name: getattr(made, f.name) for f in fields(made)} == {
        f.name: getattr(wire, f.name) for f in message.DESCRIPTOR.fields
    }
