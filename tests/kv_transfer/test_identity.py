"""Endpoints travel through routers unread; "same host" is a fact about namespaces, not about names."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_links import identity

from engine.errors import ConfigError, ProtocolError
from kv_transfer.identity import LinkEndpoint, host_id

ENDPOINT = LinkEndpoint(
    host_id=b"h" * 16, unix_name=b"\0kvrelay-x", host="127.0.0.1", port=1234, transports=("shm", "tcp")
)


@pytest.mark.parametrize("endpoint", [ENDPOINT, replace(ENDPOINT, unix_name=None, transports=("tcp", "from-2031"))])
def test_an_endpoint_comes_back_equal(endpoint: LinkEndpoint) -> None:
    assert LinkEndpoint.decode(endpoint.encode()) == endpoint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host_id": b"short"}, "host_id must be 16 bytes"),
        ({"unix_name": b"/tmp/file"}, "abstract name"),
        ({"unix_name": b"\0" * 108}, "abstract name"),
        ({"port": 0}, "port must be in"),
        ({"port": 65536}, "port must be in"),
        ({"port": True}, "port must be in"),
        ({"host": "x" * 2000}, "at most 1024"),
        ({"transports": (7,)}, "has not the fields"),
    ],
)
def test_an_endpoint_out_of_range_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        LinkEndpoint.decode(replace(ENDPOINT, **change).encode())  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_random_bytes_are_no_endpoint_or_a_valid_one(data: bytes) -> None:
    try:
        endpoint = LinkEndpoint.decode(data)
    except ProtocolError:
        return
    assert LinkEndpoint.decode(endpoint.encode()) == endpoint


def test_two_processes_of_one_host_have_one_host_id() -> None:
    code = "from kv_transfer.identity import host_id; print(host_id().hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert other.stdout.strip() == host_id().hex()


def test_an_identity_that_fits_no_frame_is_refused() -> None:
    with pytest.raises(ConfigError, match="worker_id must have 1 to 128 bytes"):
        identity("x" * 129)
    with pytest.raises(ConfigError, match="fingerprint must be 32 bytes"):
        replace(identity("w"), fingerprint=b"short")
