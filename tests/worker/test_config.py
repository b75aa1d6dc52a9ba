from __future__ import annotations

from typing import Any

import pytest
from roles import make_config

from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"worker_id": ""}, "worker_id must not be empty"),
        ({"host": "0.0.0.0"}, "host must be an address that routers and peers can reach"),
        ({"port": -1}, r"port must be in \[0, 65535\], got -1"),
        ({"heartbeat_s": 0.0}, "heartbeat_s must be positive"),
        ({"lease_s": 5.1}, r"lease_s must be in \(0, 5.0\], got 5.1"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"max_outbox": 0}, "max_outbox must be at least 1"),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_limit(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_config(**settings)
