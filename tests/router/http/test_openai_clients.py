"""The real `openai` client drives a router: the newest, and one of the 1.x that many programs still use."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_worker import expected_output
from http_front import HttpFront
from tenants_file import write_tenants

from engine.errors import InternalError
from router.served_model import ServedModel

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "support" / "openai_script.py"
ONE = "1.109.1"
"""The last of the 1.x."""
RENDERED = b"user: Hi\nassistant: "


@pytest.fixture(scope="session")
def one_x(request: pytest.FixtureRequest) -> Path:
    """A folder with a 1.x and what it needs; kept from run to run."""
    folder = Path(request.config.cache.mkdir("openai-1"))
    if not (folder / f"openai-{ONE}.dist-info").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), f"openai=={ONE}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        if done.returncode != 0:
            pytest.skip(f"openai {ONE} cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    return folder


@pytest.fixture
async def front(model: ServedModel, tmp_path: Path) -> AsyncIterator[HttpFront]:
    front = HttpFront(model)
    await front.start(api_keys=str(write_tenants(tmp_path / "keys.yaml", acme={"max_concurrent_requests": 8})))
    yield front
    await front.close()


@pytest.fixture(params=["newest", "1.x"])
def packages(request: pytest.FixtureRequest) -> list[str]:
    """What to put before the packages of this environment."""
    return [] if request.param == "newest" else [str(request.getfixturevalue("one_x"))]


async def run(packages: list[str], *arguments: str) -> str:
    """Output of Python with these packages in front."""
    code = f"import sys; sys.path[:0] = {packages}; import runpy; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


def text_of(prompt: bytes, n: int = 4) -> str:
    return bytes(expected_output(prompt, n)).decode()


async def test_the_openai_client_drives_the_router(front: HttpFront, packages: list[str]) -> None:
    front.decode.fail_at[("output", 5)] = InternalError("broken")
    seen: dict[str, Any] = json.loads(await run(packages, str(SCRIPT), f"{front.url}/v1", "key-of-acme"))
    version = seen.pop("version")
    assert version.startswith("1.") == bool(packages)
    assert re.fullmatch(r"[0-9a-f]{32}", seen["completion"].pop("request_id"))
    hi, ho, chat = text_of(b"Hi"), text_of(b"Ho"), text_of(RENDERED)
    assert seen == {
        "models": ["fake"],
        "completion": {
            "texts": [hi, hi, ho, ho],
            "reasons": ["length"] * 4,
            "tokens": list(hi),
            "usage": [4, 16],
        },
        "completion_stream": hi,
        "chat": {"texts": [chat, chat], "tokens": list(chat)},
        "chat_stream": {"text": chat, "roles": ["assistant"], "reasons": ["length"], "usage": [len(RENDERED), 4]},
        "errors": {
            "bad temperature": ["BadRequestError", 400, None, "temperature"],
            "unknown model": ["NotFoundError", 404, "model_not_found", "model"],
            "tools": ["BadRequestError", 400, None, "tools"],
            "too many outputs": ["BadRequestError", 400, None, "n"],
            "fault in a stream": ["APIError", "broken"],
        },
        "wrong_key": "invalid_api_key",
    }


async def test_the_example_of_the_front_page_runs(front: HttpFront, tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(from openai .*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    example = tmp_path / "example.py"
    code = code.replace("http://127.0.0.1:8601", front.url).replace('api_key="none"', 'api_key="key-of-acme"')
    example.write_text(code.replace("smollm2-135m", "fake"))
    output = await run([], str(example))
    prompt = b"user: Why is the sky blue?\nassistant: "
    assert output.strip() == text_of(prompt, 64)
