"""Who calls: API keys to tenants, and what each tenant may. Knows no protocol; keeps no key, only their digests.

The file, YAML:

    scope_secret: 32 or more characters, the same for all routers of a cluster; `openssl rand -hex 32` makes one
    tenants:
      - name: acme
        sha256: [digest of a key in hexadecimal, ...]   # printf %s "$KEY" | sha256sum
        max_concurrent_requests: 8                      # this and all that follow are optional
        tokens_per_minute: 100000
        priority: 0                                     # of requests that name none; a smaller number goes first
        best_priority: 0                                # no request may ask for a smaller one
        admin: true
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, PermissionDenied, RequestError, Unauthenticated
from engine.priority import MAX_PRIORITY, check_priority
from engine.yaml_text import read_yaml

MIN_SECRET_CHARS = 32
MAX_TENANTS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIELDS = {"name", "sha256", "max_concurrent_requests", "tokens_per_minute", "priority", "best_priority", "admin"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    name: str
    scope: bytes = field(repr=False)
    """Part of block identity and of routing keys: no two tenants share a block, and workers serve them in turn."""
    admin: bool = False
    """May call the Admin service."""
    max_concurrent_requests: int | None = None
    """Outputs at once: a call with n = 4 counts four times."""
    tokens_per_minute: int | None = None
    """Of prompts and outputs, on average; as many may come at once after a pause."""
    priority: int = 0
    """Of its requests that name none."""
    best_priority: int = 0
    """The smallest number that its requests may name."""

    def qualified(self, request_id: str) -> str:
        """`request_id` among those of all tenants: they neither meet nor see each other's."""
        return f"{self.name}/{request_id}" if self.scope else request_id

    def check_admin(self) -> None:
        if not self.admin:
            raise PermissionDenied(f"tenant {self.name!r} may not call the Admin service")

    def check_priority(self, priority: int) -> None:
        """Raises `RequestError` (field `priority`) for one that no request, or none of this tenant, may have."""
        check_priority(priority)
        if priority < self.best_priority:
            raise RequestError(
                "priority", f"must be at least {self.best_priority} for tenant {self.name!r}, got {priority}"
            )


ANYBODY = Tenant(name="anybody", scope=b"", admin=True, best_priority=-MAX_PRIORITY)
"""Everyone, where no keys are configured."""


class Tenants:
    def __init__(self, by_digest: Mapping[bytes, Tenant] | None = None) -> None:
        """None: nobody needs a key."""
        self._by_digest = by_digest

    def identify(self, authorization: str | None) -> Tenant:
        """The tenant of `Bearer KEY`. Raises `Unauthenticated`, which never repeats the key."""
        if self._by_digest is None:
            return ANYBODY
        kind, _, key = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not key:
            raise Unauthenticated(
                "an API key is needed: send it as `authorization: Bearer KEY` (commands take it from KVRELAY_API_KEY)"
            )
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: Tenant | None = None
        for known, tenant in self._by_digest.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthenticated("the API key is unknown")
        return found


def load_tenants(path: Path | str | None) -> Tenants:
    """Read the file, if there is one to be. Raises `ConfigError` that names file and field, never a value of it."""
    if not path:
        return Tenants()
    try:
        document = read_yaml(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"API keys: {path} cannot be read: {error.strerror}") from error
    except ValueError:
        raise ConfigError(f"API keys: {path} is no YAML") from None  # the cause would show lines of the file
    try:
        return Tenants(_read_document(document))
    except ConfigError as error:
        raise ConfigError(f"API keys: {path}: {error}") from None


def scope_of(secret: str, name: str) -> bytes:
    """Who does not know the secret can neither compute a tenant's block hashes nor tell a scope's owner."""
    return hmac.digest(secret.encode(), b"kvrelay.scope.v1:" + name.encode(), "sha256")


def _read_document(document: Any) -> dict[bytes, Tenant]:
    if not isinstance(document, dict) or set(document) != {"scope_secret", "tenants"}:
        raise ConfigError("must have scope_secret and tenants, and nothing else")
    secret, entries = document["scope_secret"], document["tenants"]
    if not isinstance(secret, str) or len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(f"scope_secret must be a text of at least {MIN_SECRET_CHARS} characters")
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_TENANTS:
        raise ConfigError(f"tenants must be a list of 1 to {MAX_TENANTS}")
    by_digest: dict[bytes, Tenant] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries):
        where = f"tenants[{number}]"
        tenant, digests = _read_tenant(entry, where, secret)
        if tenant.name in names:
            raise ConfigError(f"{where}.name: {tenant.name!r} is there twice; one tenant may have several keys")
        names.add(tenant.name)
        for digest in digests:
            if digest in by_digest:
                raise ConfigError(f"{where}.sha256: a key is there twice")
            by_digest[digest] = tenant
    return by_digest


def _read_tenant(entry: Any, where: str, secret: str) -> tuple[Tenant, list[bytes]]:
    if not isinstance(entry, dict) or not {"name", "sha256"} <= set(entry) <= _FIELDS:
        raise ConfigError(f"{where}: must have name and sha256, and may have {', '.join(sorted(_FIELDS))}")
    name, digests, admin = entry["name"], entry["sha256"], entry.get("admin", False)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}.name must be 1 to 64 of letters, digits, dots and dashes")
    if not isinstance(admin, bool):
        raise ConfigError(f"{where}.admin must be true or false")
    limits: dict[str, Any] = {field: entry.get(field) for field in ("max_concurrent_requests", "tokens_per_minute")}
    for limit, value in limits.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{where}.{limit} must be an integer of at least 1")
    digests = [digests] if isinstance(digests, str) else digests
    good = isinstance(digests, list) and digests
    if not good or not all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests):
        raise ConfigError(f"{where}.sha256 must be 64 hexadecimal digits, or a list of such, quoted")
    priorities = _read_priorities(entry, where)
    tenant = Tenant(name=name, scope=scope_of(secret, name), admin=admin, **limits, **priorities)
    return tenant, [bytes.fromhex(digest) for digest in digests]


def _read_priorities(entry: dict[str, Any], where: str) -> dict[str, int]:
    """Without `best_priority`, the tenant's requests may name nothing better than its own."""
    priority = entry.get("priority", 0)
    priorities = {"priority": priority, "best_priority": entry.get("best_priority", priority)}
    for name, value in priorities.items():
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_PRIORITY:
            raise ConfigError(f"{where}.{name} must be an integer in [{-MAX_PRIORITY}, {MAX_PRIORITY}]")
    if priority < priorities["best_priority"]:
        raise ConfigError(f"{where}.priority must be at least best_priority, {priorities['best_priority']}")
    return priorities
