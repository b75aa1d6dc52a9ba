"""TLS and mutual TLS over both protocols. The authority is made here, for one test session."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from http_front import HttpFront

from engine.errors import ConfigError, UnavailableError
from kvrelay import AsyncClient, Client, Tls
from router.config import RouterConfig
from router.served_model import ServedModel
from router.tls import load_server_tls


class Files:
    """A server, a client and a stranger, of two authorities."""

    def __init__(self, folder: Path) -> None:
        ours, strange = trustme.CA(), trustme.CA()
        self.ca = self._write(folder / "ca.pem", ours.cert_pem)
        self.strange_ca = self._write(folder / "strange.pem", strange.cert_pem)
        self.server = self._pair(folder, "server", ours.issue_cert("127.0.0.1"))
        self.client = self._pair(folder, "client", ours.issue_cert("client@example.org"))
        self.stranger = self._pair(folder, "stranger", strange.issue_cert("client@example.org"))

    def _pair(self, folder: Path, name: str, leaf: trustme.LeafCert) -> tuple[str, str]:
        chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
        (folder / f"{name}.pem").write_bytes(chain)
        return str(folder / f"{name}.pem"), self._write(folder / f"{name}.key", leaf.private_key_pem)

    @staticmethod
    def _write(path: Path, blob: trustme.Blob) -> str:
        path.write_bytes(blob.bytes())
        return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture
async def front(model: ServedModel) -> AsyncIterator[HttpFront]:
    front = HttpFront(model)
    yield front
    await front.close()


async def start(front: HttpFront, files: Files, **settings: Any) -> None:
    await front.start(tls_cert=files.server[0], tls_key=files.server[1], **settings)


async def over_http(front: HttpFront, ca: str, pair: tuple[str, str] | None = None) -> int:
    context = ssl.create_default_context(cafile=ca)
    if pair is not None:
        context.load_cert_chain(*pair)
    url = f"https://{front.server.http_address}/v1/models"
    async with aiohttp.ClientSession() as http, http.get(url, ssl=context) as response:
        return response.status


async def over_grpc(front: HttpFront, ca: str, pair: tuple[str, str] | None = None) -> int:
    cert, key = pair or (None, None)
    tls = Tls(ca_file=ca, cert_file=cert, key_file=key)
    async with AsyncClient(front.grpc_address, timeout_s=5.0, tls=tls) as client:
        return len((await client.generate("Hi", max_tokens=3)).token_ids)


async def test_with_a_certificate_both_protocols_are_served_over_tls(front: HttpFront, files: Files) -> None:
    await start(front, files)
    assert await over_http(front, files.ca) == 200
    assert await over_grpc(front, files.ca) == 3


async def test_a_client_does_not_talk_to_a_router_that_it_cannot_verify(front: HttpFront, files: Files) -> None:
    await start(front, files)
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await over_http(front, files.strange_ca)
    with pytest.raises(UnavailableError):
        await over_grpc(front, files.strange_ca)


async def test_without_tls_nothing_is_answered(front: HttpFront, files: Files) -> None:
    await start(front, files)
    with pytest.raises(aiohttp.ClientError):
        await front.get("/health")
    async with AsyncClient(front.grpc_address, timeout_s=5.0) as client:
        with pytest.raises(UnavailableError):
            await client.models()


@pytest.mark.parametrize("who", ["nobody", "stranger"])
async def test_with_a_client_authority_only_its_clients_are_served(front: HttpFront, files: Files, who: str) -> None:
    await start(front, files, tls_client_ca=files.ca)
    pair = None if who == "nobody" else files.stranger
    with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
        await over_http(front, files.ca, pair)
    with pytest.raises(UnavailableError):
        await over_grpc(front, files.ca, pair)
    assert await over_http(front, files.ca, files.client) == 200
    assert await over_grpc(front, files.ca, files.client) == 3


async def test_the_synchronous_client_speaks_tls_too(front: HttpFront, files: Files) -> None:
    await start(front, files)

    def ask() -> int:
        with Client(front.grpc_address, timeout_s=5.0, tls=Tls(ca_file=files.ca)) as client:
            return len(client.models())

    assert await asyncio.to_thread(ask) == 1


def config(**settings: Any) -> RouterConfig:
    return RouterConfig(model_path="unused", model_name="fake", **settings)


def test_settings_that_belong_together_are_asked_for_together(files: Files) -> None:
    with pytest.raises(ConfigError, match="tls_cert and tls_key are needed both"):
        config(tls_cert=files.server[0])
    with pytest.raises(ConfigError, match="tls_client_ca needs"):
        config(tls_client_ca=files.ca)
    with pytest.raises(ConfigError, match="cert_file and key_file are needed both"):
        Tls(cert_file=files.client[0])


def test_files_that_do_not_serve_are_named(files: Files, tmp_path: Path) -> None:
    cert, key = files.server
    nothing = str(tmp_path / "nothing.pem")
    with pytest.raises(ConfigError, match=f"tls_key: {nothing} cannot be read"):
        load_server_tls(config(tls_cert=cert, tls_key=nothing))
    with pytest.raises(ConfigError, match="are no PEM pair: KEY_VALUES_MISMATCH"):
        load_server_tls(config(tls_cert=cert, tls_key=files.client[1]))
    (tmp_path / "text.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"tls_client_ca .* is no PEM"):
        load_server_tls(config(tls_cert=cert, tls_key=key, tls_client_ca=str(tmp_path / "text.pem")))
    with pytest.raises(ConfigError, match=f"tls: {nothing} cannot be read"):
        AsyncClient("127.0.0.1:1", tls=Tls(ca_file=nothing))
