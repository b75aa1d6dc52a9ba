from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from cluster.changes import compare, desired
from cluster.spec import ClusterSpec, PoolSpec, PoolsSpec, RouterSpec
from cluster.spec_file import parse_spec
from engine.errors import ConfigError

SPEC = ClusterSpec(pools=PoolsSpec(prefill=PoolSpec(replicas=2), decode=PoolSpec(replicas=1)))


def spec_with(path: str, value: Any) -> ClusterSpec:
    """`SPEC` but for one field."""
    fields = asdict(SPEC)
    *parents, last = path.split(".")
    inner = fields
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    return parse_spec(json.dumps(fields), "test")


def test_equal_specs_differ_in_nothing() -> None:
    same = parse_spec(json.dumps(asdict(SPEC)), "test")
    assert not compare(SPEC, same).any
    assert desired(SPEC) == desired(same)


@pytest.mark.parametrize(
    ("path", "value", "lines"),
    [
        ("pools.decode.replicas", 3, ["decode: 1 -> 3 workers: 2 workers are started"]),
        ("pools.prefill.replicas", 1, ["prefill: 2 -> 1 workers: 1 worker is drained and stopped"]),
        (
            "pools.prefill.num_threads",
            2,
            ["prefill: 2 workers are restarted, one at a time: num_threads 1 -> 2"],
        ),
        (
            "pools.decode.max_num_seqs",
            8,
            ["decode: 1 worker is restarted, its successor starts first: max_num_seqs 64 -> 8"],
        ),
        ("supervision.hung_after_s", 6.0, ["supervision.hung_after_s 15.0 -> 6.0: at once"]),
        ("router.max_live_requests", 8, ["router: another one takes over: max_live_requests 1024 -> 8"]),
    ],
)
def test_each_field_is_told_with_what_it_takes(path: str, value: Any, lines: list[str]) -> None:
    assert list(compare(SPEC, spec_with(path, value)).lines()) == lines


@pytest.mark.parametrize(
    ("path", "value"),
    [("name", "other"), ("model", "m"), ("dtype", "float32"), ("router.port", 1), ("ray.helpers", True)],
)
def test_what_every_process_depends_on_is_refused_by_name(path: str, value: Any) -> None:
    changes = compare(SPEC, spec_with(path, value))
    assert [refused.change.field for refused in changes.refused] == [path]
    with pytest.raises(ConfigError, match=rf"{path} .* -> .*; nothing was changed"):
        changes.check()


def test_a_router_does_not_begin_or_cease_to_speak_tls_while_it_serves() -> None:
    with_tls = replace(SPEC, router=RouterSpec(tls_cert="a", tls_key="b"))
    for before, after in ((SPEC, with_tls), (with_tls, SPEC)):
        with pytest.raises(ConfigError, match=r"router\.tls_cert .*clients speak TLS, or they do not"):
            compare(before, after).check()
    renewed = replace(SPEC, router=RouterSpec(tls_cert="c", tls_key="d"))
    compare(with_tls, renewed).check()


@pytest.mark.parametrize(("field", "value"), [("block_size", 32), ("kv_cache_dtype", "int8")])
def test_what_workers_must_have_in_common_is_refused(field: str, value: Any) -> None:
    pools = {role: replace(SPEC.pool(role), **{field: value}) for role in ("prefill", "decode")}
    changes = compare(SPEC, replace(SPEC, pools=PoolsSpec(**pools)))
    assert {refused.change.field for refused in changes.refused} == {f"pools.{role}.{field}" for role in pools}


def test_only_settings_that_a_worker_starts_with_make_it_another_one() -> None:
    revisions = [
        desired(spec).pools["decode"].revision
        for spec in (SPEC, spec_with("pools.decode.replicas", 3), spec_with("pools.decode.num_threads", 3))
    ]
    decode = replace(SPEC.pools.decode, min_replicas=1, max_replicas=3)
    ranged = replace(SPEC, pools=replace(SPEC.pools, decode=decode))
    assert desired(ranged).pools == desired(SPEC).pools
    assert revisions[0] == revisions[1] != revisions[2]
