"""Kubernetes objects of a cluster: each is of its kind, and all say what the one spec says."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_schemas
import pytest
import yaml
from click.testing import CliRunner
from doc_commands import parse_kvrelay
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import ValidationError

from cluster import cli
from cluster.deploy_spec import DeploySpec, PodSpec
from cluster.manifests import JOB, KUSTOMIZATION, in_cluster, manifests, render
from cluster.pools import threads_of
from cluster.ray_pods import RAY_VERSION, stop_bound_s, worker_bytes
from cluster.spec import ROLES, ClusterSpec, PoolSpec, PoolsSpec, RouterSpec, SupervisionSpec
from cluster.spec_file import load_spec, parse_spec
from cluster.spec_text import spec_text
from engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024**2

SPECS = {
    "default": ClusterSpec(),
    "large": ClusterSpec(
        name="7b-chat",
        model="/models/llama",
        pools=PoolsSpec(
            prefill=PoolSpec(replicas=2, num_threads=8, device="cuda"),
            decode=PoolSpec(
                replicas=5,
                num_threads=4,
                kv_memory_bytes=8192 * MIB,
                swap_space=1024 * MIB,
                gpu_memory_utilization=0.5,
            ),
        ),
        router=RouterSpec(port=8700, http_port=8080, public_prefixes="prefixes.yaml"),
        deploy=DeploySpec(
            image="registry.example/kvrelay:cuda",
            namespace="models",
            model_claim="models",
            prefill=PodSpec(gpus=1, card="NVIDIA-H100-80GB-HBM3"),
            decode=PodSpec(gpus=2),
        ),
    ),
    "decode only": ClusterSpec(
        pools=PoolsSpec(prefill=PoolSpec(replicas=0), decode=PoolSpec(replicas=3, min_replicas=1, max_replicas=4))
    ),
    "tls": ClusterSpec(router=RouterSpec(tls_cert="here/a.pem", tls_key="here/a.key")),
    "mutual tls": ClusterSpec(
        router=RouterSpec(tls_cert="here/a.pem", tls_key="here/a.key", tls_client_ca="here/ca.pem")
    ),
}


def objects(spec: ClusterSpec) -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and name."""
    every = [each for file in manifests(spec).values() for each in file]
    found = {(each["kind"], each["metadata"]["name"]): each for each in every}
    assert len(found) == len(every)
    return found


def ray_cluster(spec: ClusterSpec) -> dict[str, Any]:
    body: dict[str, Any] = objects(spec)["RayCluster", f"kvrelay-{spec.name}"]["spec"]
    return body


def pods(spec: ClusterSpec) -> dict[str, dict[str, Any]]:
    """Pod specs: the head's, and those of the worker groups."""
    body = ray_cluster(spec)
    groups = {group["groupName"]: group["template"]["spec"] for group in body["workerGroupSpecs"]}
    return {"head": body["headGroupSpec"]["template"]["spec"], **groups}


def containers(spec: ClusterSpec) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for pod in pods(spec).values() for each in pod["containers"]}


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_object_is_one_of_its_kind(spec: ClusterSpec) -> None:
    for each in objects(spec).values():
        kubernetes_schemas.check(each)


@pytest.mark.parametrize(
    "path", [["spec", "workerGroupSpecs", 0, "replica"], ["spec", "headGroupSpec", "template", "spec", "affinty"]]
)
def test_the_schemas_refuse_a_field_that_is_not_known(path: list[Any]) -> None:
    wrong = deepcopy(objects(ClusterSpec())["RayCluster", "kvrelay-default"])
    node: Any = wrong
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = 1
    with pytest.raises(ValidationError, match=path[-1]):
        kubernetes_schemas.check(wrong)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_each_pool_is_a_group_with_a_pod_for_each_worker(spec: ClusterSpec) -> None:
    groups = {group["groupName"]: group for group in ray_cluster(spec)["workerGroupSpecs"]}
    assert set(groups) == {role for role in ROLES if spec.pool(role).replicas}
    for role, group in groups.items():
        assert (group["minReplicas"], group["maxReplicas"]) == spec.pool(role).replica_range
        assert group["replicas"] == spec.pool(role).replicas
        assert group["resources"][f"kvrelay_{role}"] == "1"
        assert group["resources"]["CPU"] == str(threads_of(spec.pool(role)))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_pod_asks_for_the_threads_and_the_memory_of_its_worker(spec: ClusterSpec) -> None:
    for role, pod in pods(spec).items():
        if role == "head":
            continue
        pool, wanted = spec.pool(role), pod["containers"][0]["resources"]
        assert wanted["requests"]["cpu"] == str(threads_of(pool))
        held = int(wanted["limits"]["memory"].removesuffix("Mi")) * MIB
        assert held - worker_bytes(spec, role) < MIB
        assert held > pool.host_pool_bytes
        assert wanted["requests"]["memory"] == wanted["limits"]["memory"]


def test_cards_are_asked_for_and_chosen_by_pool() -> None:
    found = pods(SPECS["large"])
    assert found["prefill"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert found["prefill"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert found["decode"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "nodeSelector" not in found["decode"]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_supervisor_reads_the_same_spec_with_the_addresses_of_its_pod(spec: ClusterSpec) -> None:
    text = objects(spec)["ConfigMap", f"kvrelay-{spec.name}-spec"]["data"]["cluster.yaml"]
    inner = parse_spec(text, "cluster.yaml")
    assert inner == in_cluster(spec)
    assert inner.ray.address == "127.0.0.1:6379"
    assert {inner.pool(role).host for role in ROLES} == {"node"}
    back = replace(inner, ray=spec.ray, router=spec.router, pools=spec.pools)
    assert back == spec


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_each_actor_takes_the_resource_that_its_pods_offer(spec: ClusterSpec) -> None:
    inner = in_cluster(spec)
    body = ray_cluster(spec)
    assert inner.router.ray_resource in body["headGroupSpec"]["resources"]
    for group in body["workerGroupSpecs"]:
        assert inner.pool(group["groupName"]).ray_resource in group["resources"]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_volume_that_is_mounted_is_there_and_every_one_is_used(spec: ClusterSpec) -> None:
    for pod in pods(spec).values():
        mounted = {
            mount["name"]
            for container in [*pod["containers"], *pod.get("initContainers", [])]
            for mount in container["volumeMounts"]
        }
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_commands_in_containers_are_ours() -> None:
    found = pods(ClusterSpec())
    commands = [each["command"] for pod in found.values() for each in pod["initContainers"]]
    commands.append(containers(ClusterSpec())["supervisor"]["command"])
    for program, *arguments in commands:
        assert program == "kvrelay"
        assert CliRunner().invoke(cli.main, [arguments[0], "--help"]).exit_code == 0


def test_a_model_on_a_claim_is_not_pulled() -> None:
    for pod in pods(SPECS["large"]).values():
        assert "initContainers" not in pod
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in pod["containers"][0]["volumeMounts"]


def test_the_service_leads_to_the_ports_of_the_router() -> None:
    spec = SPECS["large"]
    service = objects(spec)["Service", "kvrelay-7b-chat"]["spec"]
    assert {port["name"]: port["port"] for port in service["ports"]} == {"grpc": 8700, "http": 8080}
    named = {port["name"]: port["containerPort"] for port in containers(spec)["supervisor"]["ports"]}
    assert named == {"grpc": 8700, "http": 8080}
    assert service["selector"] == {"ray.io/cluster": "kvrelay-7b-chat", "ray.io/node-type": "head"}


def test_a_default_http_port_follows_grpc() -> None:
    spec = ClusterSpec(router=RouterSpec(port=9000))
    ports = objects(spec)["Service", "kvrelay-default"]["spec"]["ports"]
    assert {port["name"]: port["port"] for port in ports} == {"grpc": 9000, "http": 9001}


def test_ready_and_metrics_are_asked_for_over_http() -> None:
    assert containers(ClusterSpec())["supervisor"]["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    endpoint = objects(ClusterSpec())["PodMonitor", "kvrelay-default"]["spec"]["podMetricsEndpoints"][0]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_strangers_reach_the_router_alone(spec: ClusterSpec) -> None:
    name = f"kvrelay-{spec.name}"
    found = objects(spec)
    inside = found["NetworkPolicy", f"{name}-inside"]["spec"]
    assert inside["podSelector"]["matchLabels"] == {"ray.io/cluster": name}
    assert inside["ingress"] == [{"from": [{"podSelector": {"matchLabels": {"ray.io/cluster": name}}}]}]
    clients, operator = found["NetworkPolicy", f"{name}-clients"]["spec"]["ingress"]
    assert [port["port"] for port in clients["ports"]] == list(spec.router.ports.values())
    assert [port["port"] for port in operator["ports"]] == [8265]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_each_pool_loses_one_pod_at_a_time_to_a_drained_node(spec: ClusterSpec) -> None:
    budgets = {name: each for (kind, name), each in objects(spec).items() if kind == "PodDisruptionBudget"}
    assert set(budgets) == {f"kvrelay-{spec.name}-{role}" for role in ROLES if spec.pool(role).replicas}
    for budget in budgets.values():
        assert budget["spec"]["maxUnavailable"] == 1


def test_the_routers_container_outlives_the_supervisor_within_the_grace() -> None:
    limits = SupervisionSpec(drain_s=90, stop_timeout_s=15)
    spec = ClusterSpec(supervision=limits)
    head = pods(spec)["head"]
    hook = containers(spec)["ray-head"]["lifecycle"]["preStop"]["exec"]["command"]
    assert stop_bound_s(spec) > 2 * (limits.drain_s + limits.stop_timeout_s)
    assert hook[:3] == ["flock", "--timeout", str(stop_bound_s(spec))]
    assert head["terminationGracePeriodSeconds"] > stop_bound_s(spec)
    # Only so can the supervisor name processes of the other container, and the hook see its lock.
    assert head["shareProcessNamespace"] is True


def test_a_workers_pod_waits_for_its_drain_within_the_grace() -> None:
    spec = ClusterSpec(supervision=SupervisionSpec(worker_drain_s=90))
    name = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    drain_s = variables(pods(spec)["decode"]["containers"][0])[name]
    assert 90 < int(drain_s) < pods(spec)["decode"]["terminationGracePeriodSeconds"]
    assert variables(containers(spec)["ray-head"])[name] == "0"  # whose end nobody waits for any more


def test_no_secret_is_written_and_those_that_are_named_are_mounted_or_read() -> None:
    spec = ClusterSpec()
    assert not [kind for kind, _ in objects(spec) if kind == "Secret"]
    secrets = {v["secret"]["secretName"] for v in pods(spec)["head"]["volumes"] if "secret" in v}
    assert secrets == {"kvrelay-default-api-keys", "kvrelay-default-cluster-key"}


@pytest.mark.parametrize("name", ["tls", "mutual tls"])
def test_with_tls_the_secret_is_where_the_router_reads_it_and_whoever_asks_it_speaks_tls(name: str) -> None:
    spec = SPECS[name]
    inner, head = in_cluster(spec).router, pods(spec)["head"]
    (folder,) = [each["mountPath"] for each in containers(spec)["ray-head"]["volumeMounts"] if each["name"] == "tls"]
    (volume,) = [each["secret"]["secretName"] for each in head["volumes"] if each["name"] == "tls"]
    assert (inner.tls_cert, inner.tls_key) == (f"{folder}/tls.crt", f"{folder}/tls.key")
    assert inner.tls_client_ca == (f"{folder}/ca.crt" if spec.router.tls_client_ca else "")
    found = objects(spec)
    (scrape,) = found["PodMonitor", "kvrelay-default"]["spec"]["podMetricsEndpoints"]
    assert (scrape["scheme"], scrape["tlsConfig"]["ca"]["secret"]["name"]) == ("https", volume)
    assert ("keySecret" in scrape["tlsConfig"]) == bool(spec.router.tls_client_ca)
    probe = containers(spec)["supervisor"]["readinessProbe"]
    assert probe.get("httpGet", {}).get("scheme") == (None if spec.router.tls_client_ca else "HTTPS")
    job = found["RayJob", "kvrelay-default-hello"]["spec"]["entrypoint"]
    assert f"--tls-ca {folder}/ca.crt" in job
    assert parse_kvrelay(job).info_name == "generate"


def test_every_container_runs_without_rights() -> None:
    for pod in pods(ClusterSpec()).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in [*pod["containers"], *pod["initContainers"]]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_router_of_a_cluster_always_asks_for_keys() -> None:
    assert in_cluster(ClusterSpec()).router.api_keys == "/etc/kvrelay/api-keys/api-keys.yaml"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (ClusterSpec(router=RouterSpec(port=0)), "router.port"),
        (ClusterSpec(router=RouterSpec(http_port=0)), "router.http_port"),
        (ClusterSpec(pools=PoolsSpec(decode=PoolSpec(num_blocks_override=64))), "pools.decode.num_blocks_override"),
        (ClusterSpec(pools=PoolsSpec(decode=PoolSpec(device="cuda"))), "deploy.decode.gpus must be at least 1"),
        (ClusterSpec(deploy=DeploySpec(prefill=PodSpec(gpus=1))), "deploy.prefill.gpus: 1 for workers that compute"),
    ],
)
def test_what_cannot_run_there_is_refused_by_name(spec: ClusterSpec, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}"):
        manifests(spec)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("deploy: {image: ''}", "deploy: image must be"),
        ("deploy: {prefill: {card: H100}}", "deploy.prefill: card needs gpus"),
        ("deploy: {image_pull_policy: Sometimes}", "image_pull_policy must be one of"),
        ("deploy: {namespace: A_b}", "namespace must be a name"),
        ("deploy: {head_bytes: 1MiB}", "head_bytes must be at least"),
        ("deploy: {decode: {process_bytes: 1MiB}}", "process_bytes must be at least"),
        ("router: {ray_resource: 'a b'}", "ray_resource must be"),
    ],
)
def test_wrong_settings_are_named(values: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_spec(values, "cluster.yaml")


def test_the_image_has_the_ray_that_kuberay_is_told_of() -> None:
    assert f"ray=={RAY_VERSION}\n" in (ROOT / "constraints.txt").read_text()


def test_the_kustomization_holds_all_but_the_job() -> None:
    texts = render(manifests(ClusterSpec()))
    assert yaml.safe_load(texts[KUSTOMIZATION])["resources"] == sorted(set(texts) - {JOB, KUSTOMIZATION})


def test_the_command_prints_what_kubectl_applies() -> None:
    result = CliRunner().invoke(cli.main, ["manifests", str(ROOT / "deploy" / "cluster.yaml")])
    assert result.exit_code == 0, result.stderr
    spec = load_spec(ROOT / "deploy" / "cluster.yaml")
    wanted = [each for name, file in manifests(spec).items() if name != JOB for each in file]
    assert list(yaml.safe_load_all(result.stdout)) == wanted


def test_files_that_are_not_as_the_spec_says_fail_the_check(tmp_path: Path) -> None:
    command = ["manifests", str(ROOT / "deploy" / "cluster.yaml"), "-o", str(tmp_path)]
    assert CliRunner().invoke(cli.main, command).exit_code == 0
    assert CliRunner().invoke(cli.main, [*command, "--check"]).exit_code == 0
    path = tmp_path / "cluster.yaml"
    path.write_text(path.read_text().replace("replicas: 1", "replicas: 2"))
    failed = CliRunner().invoke(cli.main, [*command, "--check"])
    assert failed.exit_code == 1
    assert "cluster.yaml are not as the spec says" in failed.stderr


@example(replicas=1, num_threads=1, drain_s=1.0, port=1, text="a\x85b")  # an end of line, to YAML
@given(
    replicas=st.integers(1, 256),
    num_threads=st.integers(1, 64),
    drain_s=st.floats(0, 1e6),
    port=st.integers(1, 65534),
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
)
def test_a_spec_that_is_written_reads_as_itself(
    replicas: int, num_threads: int, drain_s: float, port: int, text: str
) -> None:
    pool = PoolSpec(replicas=replicas, num_threads=num_threads)
    spec = ClusterSpec(
        model=text,
        pools=PoolsSpec(decode=pool),
        router=RouterSpec(port=port),
        supervision=SupervisionSpec(drain_s=drain_s),
    )
    assert parse_spec(spec_text(spec), "spec") == spec
