"""Keys to tenants, and what a file of keys must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tenants_file import SECRET, digest, write_tenants

from engine.errors import ConfigError, PermissionDenied, RequestError, Unauthenticated
from router.tenants import ANYBODY, Tenant, Tenants, load_tenants, scope_of

GOOD = {"name": "acme", "sha256": digest("key")}


def test_without_a_file_everybody_is_the_same_caller_and_may_do_everything() -> None:
    tenants = load_tenants("")
    assert tenants.identify(None) is tenants.identify("Bearer anything") is ANYBODY
    ANYBODY.check_admin()
    assert (ANYBODY.scope, ANYBODY.qualified("r1")) == (b"", "r1")


def test_a_key_gives_its_tenant_with_limits_and_a_scope_of_its_own(tmp_path: Path) -> None:
    path = write_tenants(
        tmp_path / "keys.yaml", acme={"max_concurrent_requests": 3, "tokens_per_minute": 600}, other={"admin": True}
    )
    tenants = load_tenants(path)
    acme, other = tenants.identify("Bearer key-of-acme"), tenants.identify("bearer  key-of-other")
    assert (acme.name, acme.max_concurrent_requests, acme.tokens_per_minute, acme.admin) == ("acme", 3, 600, False)
    assert (other.name, other.max_concurrent_requests, other.admin) == ("other", None, True)
    assert (acme.scope, other.scope) == (scope_of(SECRET, "acme"), scope_of(SECRET, "other"))
    assert len({acme.scope, other.scope, scope_of("another secret", "acme"), b""}) == 4
    assert acme.qualified("r1") != other.qualified("r1")


def test_a_tenants_best_priority_is_its_own_unless_its_entry_says_otherwise(tmp_path: Path) -> None:
    fields = {"plain": {}, "batch": {"priority": 3}, "both": {"priority": 1, "best_priority": -2}}
    tenants = load_tenants(write_tenants(tmp_path / "keys.yaml", **fields))
    found = [tenants.identify(f"Bearer key-of-{name}") for name in fields]
    assert [(tenant.priority, tenant.best_priority) for tenant in found] == [(0, 0), (3, 3), (1, -2)]


@pytest.mark.parametrize(
    ("priority", "said"),
    [
        (-9, r"must be in \[-8, 8\], got -9"),
        (9, r"must be in \[-8, 8\], got 9"),
        (-3, "must be at least -2 for tenant 'a'"),
    ],
)
def test_a_priority_that_a_tenant_may_not_have_is_refused_with_the_limit(priority: int, said: str) -> None:
    tenant = Tenant(name="a", scope=b"a", best_priority=-2)
    tenant.check_priority(-2)
    tenant.check_priority(8)
    with pytest.raises(RequestError, match=said) as caught:
        tenant.check_priority(priority)
    assert caught.value.field == "priority"


def test_a_tenant_may_have_several_keys_and_keeps_its_scope(tmp_path: Path) -> None:
    path = write_tenants(tmp_path / "keys.yaml", acme={"sha256": [digest("old"), digest("new")]})
    tenants = load_tenants(path)
    assert tenants.identify("Bearer old") is tenants.identify("Bearer new")


@pytest.mark.parametrize("header", [None, "", "key-of-acme", "Basic key-of-acme", "Bearer", "Bearer ", "Bearer wrong"])
def test_whoever_brings_no_key_that_is_known_is_refused_without_repeating_it(
    tmp_path: Path, header: str | None
) -> None:
    tenants = load_tenants(write_tenants(tmp_path / "keys.yaml", acme={}))
    with pytest.raises(Unauthenticated) as caught:
        tenants.identify(header)
    assert "acme" not in str(caught.value)
    assert "wrong" not in str(caught.value)


def test_a_tenant_that_is_no_admin_may_not_call_the_admin_service(tmp_path: Path) -> None:
    tenants = load_tenants(write_tenants(tmp_path / "keys.yaml", acme={}))
    with pytest.raises(PermissionDenied, match="acme"):
        tenants.identify("Bearer key-of-acme").check_admin()


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "must have scope_secret and tenants"),
        ({"scope_secret": SECRET}, "must have scope_secret and tenants"),
        ({"scope_secret": SECRET, "tenants": [GOOD], "more": 1}, "and nothing else"),
        ({"scope_secret": "short", "tenants": [GOOD]}, "scope_secret must be a text of at least 32"),
        ({"scope_secret": SECRET, "tenants": []}, "a list of 1 to 1000"),
        ({"scope_secret": SECRET, "tenants": ["acme"]}, r"tenants\[0\]: must have name and sha256"),
        ({"scope_secret": SECRET, "tenants": [GOOD | {"key": "x"}]}, r"tenants\[0\]: must have name and sha256"),
        ({"scope_secret": SECRET, "tenants": [GOOD | {"name": "a/b"}]}, r"tenants\[0\]\.name"),
        ({"scope_secret": SECRET, "tenants": [GOOD, GOOD]}, r"tenants\[1\]\.name: 'acme' is there twice"),
        ({"scope_secret": SECRET, "tenants": [GOOD, GOOD | {"name": "b"}]}, r"tenants\[1\]\.sha256: a key is there"),
        ({"scope_secret": SECRET, "tenants": [GOOD | {"sha256": "abc"}]}, r"tenants\[0\]\.sha256 must be 64"),
        ({"scope_secret": SECRET, "tenants": [GOOD | {"sha256": []}]}, r"tenants\[0\]\.sha256 must be 64"),
        ({"scope_secret": SECRET, "tenants": [GOOD | {"admin": 1}]}, r"tenants\[0\]\.admin"),
        ({"scope_secret": SECRET, "tenants": [GOOD | {"tokens_per_minute": 0}]}, r"tokens_per_minute must be an int"),
        ({"scope_secret": SECRET, "tenants": [GOOD | {"max_concurrent_requests": True}]}, "max_concurrent_requests"),
        ({"scope_secret": SECRET, "tenants": [GOOD | {"priority": 9}]}, r"priority must be an integer in \[-8, 8\]"),
        ({"scope_secret": SECRET, "tenants": [GOOD | {"best_priority": True}]}, "best_priority must be an integer"),
        ({"scope_secret": SECRET, "tenants": [GOOD | {"best_priority": 1}]}, "priority must be at least best_priority"),
    ],
)
def test_a_damaged_file_is_named_with_the_field_and_without_its_values(
    tmp_path: Path, document: Any, said: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=said) as caught:
        load_tenants(path)
    assert str(path) in str(caught.value)
    assert SECRET not in str(caught.value)
    assert digest("key") not in str(caught.value)


def test_a_file_that_is_no_yaml_or_not_there_is_named_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tenants(path)
    path.write_text(f"scope_secret: [{SECRET}")
    with pytest.raises(ConfigError, match="is no YAML") as caught:
        load_tenants(path)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_tenant_shows_neither_keys_nor_scope(tmp_path: Path) -> None:
    tenant = load_tenants(write_tenants(tmp_path / "keys.yaml", acme={})).identify("Bearer key-of-acme")
    assert "scope" not in repr(tenant)
    assert repr(tenant.scope) not in repr(tenant)
    assert digest("key-of-acme") not in repr(Tenants({b"x": tenant}))
