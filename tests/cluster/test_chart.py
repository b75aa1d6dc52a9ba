"""The Helm chart makes of a spec, under `spec` of its values, the objects that `kvrelay manifests` makes of it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_schemas
import pytest
import yaml

from cluster.deploy_spec import DeploySpec, PodSpec
from cluster.manifests import JOB, manifests
from cluster.monitoring import alert_groups, dashboard_text
from cluster.ray_pods import RAY_VERSION
from cluster.spec import ClusterSpec, PoolSpec, PoolsSpec, RouterSpec, SupervisionSpec
from cluster.spec_file import parse_spec
from cluster.spec_text import spec_values

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "kvrelay"
MIB = 1024**2
PREFIXES = '- system: "You are a helpful assistant."\n'
SPECS = {
    "default": ClusterSpec(),
    "pools on cards": ClusterSpec(
        name="7b-chat",
        model="/models/llama",
        pools=PoolsSpec(
            prefill=PoolSpec(replicas=2, num_threads=8, device="cuda"),
            decode=PoolSpec(
                replicas=5,
                num_threads=4,
                swap_space=1024 * MIB,
                kv_memory_bytes=4096 * MIB + 1,
                gpu_memory_utilization=0.5,
            ),
        ),
        router=RouterSpec(
            port=8700, http_port=8080, public_prefixes="prefixes.yaml", tls_cert="a.pem", tls_key="a.key"
        ),
        supervision=SupervisionSpec(drain_s=0.25, worker_drain_s=90),
        deploy=DeploySpec(
            image="registry.example/kvrelay:cuda",
            namespace="models",
            model_claim="models",
            prefill=PodSpec(gpus=1, card="NVIDIA-H100-80GB-HBM3"),
            decode=PodSpec(gpus=2),
        ),
    ),
    "decode only": ClusterSpec(
        pools=PoolsSpec(
            prefill=PoolSpec(replicas=0),
            decode=PoolSpec(replicas=3, min_replicas=1, max_replicas=4, num_threads=3, tensor_parallel_size=2),
        ),
        router=RouterSpec(tls_cert="a.pem", tls_key="a.key", tls_client_ca="ca.pem"),
    ),
}


@pytest.fixture
def helm() -> ModuleType:
    module: ModuleType = pytest.importorskip(
        "helm_python", reason="helm-python-sdk is not installed: `make deploy-check` does"
    )
    return module


def rendered(helm: ModuleType, values: dict[str, Any]) -> dict[tuple[str, str], Any]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values=values, name="any")
    objects = [each for text in files.values() for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def take_spec(objects: dict[tuple[str, str], Any], name: str) -> ClusterSpec:
    """What the supervisor reads: the same spec may be written in several ways."""
    return parse_spec(objects["ConfigMap", f"kvrelay-{name}-spec"]["data"].pop("cluster.yaml"), "cluster.yaml")


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_chart_makes_the_objects_of_the_spec(spec: ClusterSpec, helm: ModuleType) -> None:
    prefixes = PREFIXES if spec.router.public_prefixes else ""
    files = manifests(spec, prefixes)
    wanted = {(o["kind"], o["metadata"]["name"]): o for name, file in files.items() if name != JOB for o in file}
    found = rendered(helm, {"spec": spec_values(spec), "publicPrefixes": prefixes})
    for each in found.values():
        kubernetes_schemas.check(each)
    assert take_spec(found, spec.name) == take_spec(wanted, spec.name)
    assert found == wanted


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"router": {"port": 0}}, "spec.router.port"),
        ({"pools": {"decode": {"num_blocks_override": 9}}}, "pools.decode.num_blocks_override"),
        ({"pools": {"decode": {"device": "cuda"}}}, "deploy.decode.gpus must be at least 1"),
        ({"deploy": {"decode": {"gpus": 1}}}, "deploy.decode.gpus for workers that compute on CPUs"),
        ({"pools": {"decode": {"kv_memory_bytes": "1GB"}}}, "binary unit"),
    ],
)
def test_what_cannot_run_there_is_refused(values: dict[str, Any], message: str, helm: ModuleType) -> None:
    with pytest.raises(helm.HelmError, match=message):
        rendered(helm, {"spec": values})


def test_without_monitoring_there_is_nothing_of_it(helm: ModuleType) -> None:
    kinds = {kind for kind, _ in rendered(helm, {"monitoring": False})}
    assert kinds == {"ConfigMap", "Service", "RayCluster", "NetworkPolicy", "PodDisruptionBudget"}


def test_helm_finds_nothing_wrong_with_the_chart(helm: ModuleType) -> None:
    report = helm.lint(CHART)
    assert not [each for each in report["messages"] if each["severity"] >= 2], report  # warnings, errors


def test_the_values_are_the_defaults_of_the_spec() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert parse_spec(yaml.safe_dump(values["spec"]), "values.yaml") == ClusterSpec()


def test_files_of_the_chart_are_those_of_the_manifests() -> None:
    assert yaml.safe_load((CHART / "files" / "alerts.yaml").read_text()) == {"groups": alert_groups()}
    assert (CHART / "files" / "dashboard.json").read_text() == dashboard_text()
    assert (CHART / "files" / "ray-version").read_text() == f"{RAY_VERSION}\n"
