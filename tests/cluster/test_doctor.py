"""What `kvrelay doctor` says of a machine, one verdict a test, and that it looks at the real one."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cluster import cli, cli_doctor
from cluster.doctor import CHECKS, Verdict, examine
from cluster.facts import Card, Facts, NodeFact, gather
from cluster.spec import ClusterSpec, PoolSpec, PoolsSpec, RaySpec, RouterSpec

GIB = 1024**3
VERSIONS = {"ray": "2.60.0", "torch": "2.13.0", "grpcio": "1.85.3", "protobuf": "6.33.6", "uvloop": "0.23.0"}
WELL = Facts(
    cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16"}),
    machine="x86_64",
    cores=8.0,
    load=0.5,
    memory_bytes=32 * GIB,
    available_bytes=24 * GIB,
    shm_bytes=8 * GIB,
    anonymous_huge_pages="madvise",
    shared_huge_pages="advise",
    open_files=65536,
    open_files_hard=65536,
    python="3.11.7",
    versions=VERSIONS,
    compilers=("/usr/bin/cc", "/usr/bin/c++"),
    disk_bytes=50 * GIB,
)
"""A machine on which nothing is to be said."""
SPEC = ClusterSpec()
JOINED = ClusterSpec(ray=RaySpec(address="10.0.0.1:6379"))
LARGE = ClusterSpec(
    pools=PoolsSpec(prefill=PoolSpec(replicas=4, num_threads=4), decode=PoolSpec(kv_memory_bytes=30 * GIB))
)
NODE = NodeFact("10.0.0.2", 0.0, 0.001, {"python": "3.11.7", **VERSIONS})


def verdicts(facts: Facts, spec: ClusterSpec = SPEC) -> dict[str, str]:
    """Of checks that are not good."""
    return {each.check: each.verdict.value for each in examine(facts, spec) if each.verdict is not Verdict.GOOD}


def kvrelay(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments), prog_name="kvrelay")


def test_a_machine_that_has_all_is_good() -> None:
    assert verdicts(WELL) == {}
    assert verdicts(replace(WELL, nodes=(NODE,)), JOINED) == {}


@pytest.mark.parametrize(
    ("changes", "check", "verdict"),
    [
        ({"cpu_flags": frozenset({"avx2"})}, "instructions", "slow"),
        ({"cpu_flags": frozenset({"sse4_2"})}, "instructions", "slow"),
        ({"machine": "aarch64"}, "instructions", "slow"),
        ({"cores": 1.0}, "cores", "slow"),
        ({"load": 9.0}, "cores", "slow"),
        ({"router_files": "api_keys: /no/file cannot be read"}, "router files", "fails"),
        ({"memory_bytes": GIB // 2}, "memory", "fails"),
        ({"available_bytes": GIB // 2}, "memory", "fails"),
        ({"shm_bytes": 64 * 1024**2}, "/dev/shm", "slow"),
        ({"shm_bytes": None}, "/dev/shm", "slow"),
        ({"anonymous_huge_pages": "never"}, "huge pages", "slow"),
        ({"shared_huge_pages": "never"}, "huge pages", "slow"),
        ({"open_files": 1024}, "open files", "fails"),
        ({"open_files": 1024, "open_files_hard": 1024}, "open files", "fails"),
        ({"ports": {"router.port": "127.0.0.1:8600: Address already in use"}}, "ports", "fails"),
        ({"hosts": {"pools.decode.host": "10.1.1.1: Cannot assign requested address"}}, "hosts", "fails"),
        ({"python": "3.10.2"}, "python", "fails"),
        ({"versions": {"ray": "2.60.0"}}, "packages", "fails"),
        ({"versions": VERSIONS | {"ray": "2.61.0"}}, "packages", "slow"),
        ({"versions": {name: VERSIONS[name] for name in VERSIONS if name != "uvloop"}}, "packages", "slow"),
        ({"compilers": ("/usr/bin/cc",)}, "compiler", "slow"),
        ({"model": "make"}, "model", "slow"),
        ({"model": "fetch"}, "model", "slow"),
        ({"model": "there is no file or folder /x"}, "model", "fails"),
        ({"model": "fetch", "disk_bytes": GIB // 2}, "disk", "fails"),
    ],
)
def test_each_lack_has_one_verdict_and_a_fix(changes: dict[str, Any], check: str, verdict: str) -> None:
    facts = replace(WELL, **changes)
    found = verdicts(facts)
    assert found[check] == verdict
    assert set(found) - {check} <= {"model"}  # where the disk matters, the model is not here yet
    finding = next(each for each in examine(facts, SPEC) if each.check == check)
    assert finding.fix or check == "instructions"


def test_native_kernels_that_the_spec_asks_for_need_a_compiler() -> None:
    spec = ClusterSpec(pools=PoolsSpec(decode=PoolSpec(kernels="native")))
    assert verdicts(replace(WELL, compilers=()), spec)["compiler"] == "fails"


def test_all_workers_of_a_machine_count() -> None:
    assert verdicts(WELL, LARGE) == {"cores": "slow", "memory": "fails"}
    assert verdicts(replace(WELL, nodes=(NODE,)), replace(LARGE, ray=JOINED.ray)) == {"cores": "slow"}


def test_ports_of_the_cluster_that_runs_are_its_own() -> None:
    assert verdicts(replace(WELL, ports={"router.port": "taken"}, runs=True)) == {}


def test_a_disk_that_is_full_does_not_matter_once_the_model_is_there() -> None:
    assert verdicts(replace(WELL, disk_bytes=0)) == {}


@pytest.mark.parametrize(
    ("count", "prefill", "decode", "verdict", "text"),
    [
        (1, {}, {}, "good", "H200 141 GiB; NCCL 2.27.5; workers compute on CPUs and leave them alone"),
        (1, {}, {"gpu_memory_utilization": 0.5}, "good", "workers with gpu_memory_utilization take them"),
        (2, {"device": "cuda"}, {"device": "cuda"}, "good", "pools.prefill.device cuda, pools.decode.device cuda"),
        (1, {"device": "cuda"}, {"device": "cuda"}, "fails", "device: cuda wants one for each of 2 workers"),
        (1, {"device": "cuda:0"}, {"device": "cuda:0"}, "good", "pools.decode.device cuda:0"),
        (0, {}, {"device": "cuda"}, "fails", "pools.decode.device cuda, and torch sees none"),
    ],
)
def test_cards_are_named_with_who_takes_them(
    count: int, prefill: dict[str, Any], decode: dict[str, Any], verdict: str, text: str
) -> None:
    facts = replace(WELL, cards=(Card("H200", 141 * GIB),) * count, nccl="2.27.5")
    spec = ClusterSpec(pools=PoolsSpec(prefill=PoolSpec(**prefill), decode=PoolSpec(**decode)))
    (finding,) = [each for each in examine(facts, spec) if each.check == "cards"]
    assert (finding.verdict.value, text in finding.text) == (verdict, True), finding


def test_a_pool_on_a_card_takes_no_memory_of_the_machine() -> None:
    pools = PoolsSpec(decode=PoolSpec(device="cuda", kv_memory_bytes=900 * GIB))
    facts = replace(WELL, cards=(Card("H200", 141 * GIB),))
    assert verdicts(facts, ClusterSpec(pools=pools)) == {}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"nodes_error": "no Ray there"}, "fails"),
        ({"nodes": (NODE, replace(NODE, versions={**NODE.versions, "torch": "2.9.0"}))}, "fails"),
        ({"nodes": (replace(NODE, versions={"python": "3.11.7"}),)}, "fails"),
        ({"nodes": (replace(NODE, clock_ahead_s=-3.0),)}, "slow"),
        ({"nodes": (replace(NODE, clock_ahead_s=3.0, clock_error_s=2.5),)}, None),
    ],
)
def test_nodes_of_a_ray_that_is_joined(changes: dict[str, Any], verdict: str | None) -> None:
    assert verdicts(replace(WELL, **changes), JOINED).get("nodes") == verdict


def test_every_check_has_a_name_of_its_own() -> None:
    assert len({each.check for each in examine(WELL, SPEC)}) == len(CHECKS)


def test_the_real_machine_is_looked_at(tmp_path: Path) -> None:
    facts = gather(SPEC, tmp_path)
    assert facts.cores > 0
    assert facts.memory_bytes >= facts.available_bytes > 0
    assert facts.versions["ray"]
    assert facts.model == "make"


def test_a_port_that_is_taken_and_an_address_that_is_not_ours_are_found(tmp_path: Path) -> None:
    pools = PoolsSpec(decode=PoolSpec(host="192.0.2.1"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        facts = gather(ClusterSpec(pools=pools, router=RouterSpec(port=port, http_port=0)), tmp_path)
    assert list(facts.ports) == ["router.port"]
    assert list(facts.hosts) == ["pools.decode.host"]


@pytest.mark.parametrize(
    ("model", "state"),
    [("org/name", "fetch"), ("/no/such/model", "there is no file or folder /no/such/model"), ("file.gguf", "make")],
)
def test_where_the_model_is(model: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert gather(ClusterSpec(model=model), tmp_path).model == state


@pytest.mark.parametrize(("changes", "code"), [({}, 0), ({"load": 9.0}, 0), ({"python": "3.9.1"}, 1)])
def test_only_what_will_fail_fails_the_command(
    changes: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_doctor, "gather", lambda spec, models: replace(WELL, **changes))
    result = kvrelay("doctor")
    assert result.exit_code == code, result.output
    assert result.stdout.count("good") == len(CHECKS) - len(changes)


def test_json_has_findings_and_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "gather", lambda spec, models: replace(WELL, open_files=10))
    answer = json.loads(kvrelay("doctor", "--json").stdout)
    failing = [each for each in answer["findings"] if each["verdict"] == "fails"]
    assert [(each["check"], each["fix"]) for each in failing] == [("open files", "ulimit -n 1536")]
    assert answer["facts"]["open_files"] == 10


def test_a_ray_that_cannot_be_joined_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tmp_path / "cluster.yaml"
    spec.write_text("ray: {address: '127.0.0.1:1'}\n")
    monkeypatch.setattr(cli_doctor, "gather", lambda spec, models: WELL)
    monkeypatch.setattr(cli_doctor, "_with_nodes", lambda facts, spec: replace(facts, nodes_error="no Ray there"))
    result = kvrelay("doctor", str(spec))
    assert result.exit_code == 1
    assert "127.0.0.1:1: no Ray there" in result.stdout
