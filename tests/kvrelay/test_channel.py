"""How the clients reach a router; TLS is in `tests/router/test_tls.py`."""

from __future__ import annotations

import asyncio

import pytest
from fake_router import running_fake_router

from kvrelay import AsyncClient, Client, ConfigError

WAIT_S = 30.0


async def test_a_key_goes_with_every_call() -> None:
    with running_fake_router() as router:
        async with AsyncClient(router.address, timeout_s=WAIT_S, api_key="secret") as client:
            await client.generate("x")
            await client.status()
        with Client(router.address, timeout_s=WAIT_S, api_key="secret") as client:
            await asyncio.to_thread(client.generate, "x")
            await asyncio.to_thread(client.status)
    assert router.authorizations == ["Bearer secret"] * 4


@pytest.mark.parametrize("key", ["", "two words", "umlaut-ü", "line\n"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_repeated(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Client("127.0.0.1:1", api_key=key)
    assert str(caught.value) == "api_key must be printable ASCII without spaces"
