"""A file of API keys for tests."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

SECRET = "0123456789abcdef0123456789abcdef"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write_tenants(path: Path, **tenants: dict[str, Any]) -> Path:
    """Tenants by name, each with the key `key-of-NAME` and the fields given."""
    entries = [{"name": name, "sha256": digest(f"key-of-{name}")} | fields for name, fields in tenants.items()]
    path.write_text(yaml.safe_dump({"scope_secret": SECRET, "tenants": entries}))
    return path


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-of-{name}"}
