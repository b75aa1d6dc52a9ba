from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from router.config import RouterConfig


@pytest.mark.parametrize(
    ("setting", "pattern"),
    [
        ({"model_name": ""}, "model_name"),
        ({"router_id": ""}, "router_id"),
        ({"port": 65536}, "port must be in"),
        ({"max_live_requests": 0}, "max_live_requests must be at least 1, got 0"),
        ({"silence_s": 0.0}, "silence_s must be positive"),
        ({"default_timeout_s": float("nan")}, "default_timeout_s must be positive"),
        ({"prefill_share": 1.5}, "prefill_share must be in"),
        ({"local_prefill_max_tokens": -1}, "local_prefill_max_tokens"),
        ({"routing_seed": 2**64}, "routing_seed"),
        ({"index_bytes": 0}, "index_bytes"),
        ({"speculation_s": 0.0}, "speculation_s"),
        ({"reconnect_max_s": 0.01}, "reconnect_max_s 0.01 is below"),
        ({"otlp_endpoint": "127.0.0.1:4317"}, "otlp_endpoint must begin with"),
        ({"trace_ratio": 1.5}, "trace_ratio must be in"),
        ({"log_format": "xml"}, "log_format must be one of text, json"),
        ({"workers": ("a:1", "a:1")}, "an address twice"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_out_of_range_is_named(setting: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        RouterConfig(**{"model_path": "m", "model_name": "m"} | setting)
