"""Sends the requests of a batch to a router's OpenAI endpoint, and sorts what comes back."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from cluster.jobs.ledger import Answer, Ask
from cluster.jobs.runner import Away, Outcome, Refused, Send
from engine.errors import ConfigError, PermissionDenied, Unauthenticated

CONNECT_TIMEOUT_S = 5.0
DEFAULT_RETRY_S = 1.0
NO_ROOM, GONE, UNKNOWN_KEY, FORBIDDEN = 429, 503, 401, 403


@asynccontextmanager
async def http_sender(
    base_url: str, *, api_key: str | None, ca_file: str | None, timeout_s: float
) -> AsyncIterator[Send]:
    """`base_url` of the router, without `/v1`. `timeout_s`: for one answer."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, ssl=_tls(ca_file))  # how many at once is for the batch to say
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:

        async def send(ask: Ask) -> Outcome:
            try:
                async with session.post(base_url.rstrip("/") + ask.url, json=ask.body) as response:
                    return _sort(response, await response.read())
            except (aiohttp.ClientError, TimeoutError) as error:
                return Away(f"{type(error).__name__}: {error}")

        yield send


def _tls(ca_file: str | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"tls-ca: cannot use {ca_file}: {error}") from error


def _sort(response: aiohttp.ClientResponse, data: bytes) -> Outcome:
    status = response.status
    try:
        body = json.loads(data)
    except ValueError:
        body = {"error": {"message": data[:200].decode(errors="replace")}}
    fields = body if isinstance(body, dict) else {"error": {"message": "an answer that is no object"}}
    if status in (UNKNOWN_KEY, FORBIDDEN):
        told = fields.get("error")
        message = str(told.get("message") if isinstance(told, dict) else told)
        raise (Unauthenticated if status == UNKNOWN_KEY else PermissionDenied)(message)
    if status == NO_ROOM:
        return Refused(_retry_after_s(response))
    if status == GONE:  # it stops, or has no worker: both pass
        return Away(f"HTTP status {status}: {str(fields)[:200]}")
    return Answer(status, response.headers.get("X-Request-Id", ""), fields)


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    try:
        return max(0.0, float(response.headers.get("Retry-After", DEFAULT_RETRY_S)))
    except ValueError:
        return DEFAULT_RETRY_S
