"""A cluster as Kubernetes objects, from its one spec. Pure: files of plain objects out, nothing read and nothing asked.

    spec.yaml        ConfigMap: the spec as `kvrelay up` reads it there
    cluster.yaml     RayCluster: the head with router and supervisor, one worker group for each pool
    service.yaml     Service: gRPC and HTTP of the router
    policies.yaml    NetworkPolicies, and a PodDisruptionBudget for each pool
    monitoring.yaml  PodMonitor, alert rules, Grafana dashboard
    job.yaml         RayJob: a prompt from inside, to be applied by hand

A RayService would not do: it deploys applications of Ray Serve and routes to their proxies, and calls itself ready by
them. Here Ray places processes, and clients talk to the router itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from cluster.monitoring import CLUSTER, alert_groups, dashboard_text
from cluster.pools import threads_of
from cluster.ray_pods import (
    API_KEYS_FILE,
    API_KEYS_FOLDER,
    DASHBOARD_PORT,
    GCS_PORT,
    PREFIXES_FILE,
    RAY_VERSION,
    SPEC_FILE,
    SPEC_FOLDER,
    TLS_CA,
    TLS_CERT,
    TLS_FOLDER,
    TLS_KEY,
    Object,
    cluster_name,
    common_labels,
    head_pod,
    pods_of,
    role_resource,
    tls_secret,
    worker_pod,
)
from cluster.spec import ROLES, ClusterSpec, RaySpec
from cluster.spec_text import spec_text
from engine.errors import ConfigError
from worker.config import NODE_HOST

KUSTOMIZATION = "kustomization.yaml"
JOB = "job.yaml"
HEADER = "# Made by `kvrelay manifests`: edit the spec and make it again.\n"
CLIENTS_LABEL = "kvrelay.io/clients"
"""Namespaces with this label, and the value "true", may reach the router; so may the cluster's own."""
ROUTER = "router"


def manifests(spec: ClusterSpec, public_prefixes: str = "") -> dict[str, list[Object]]:
    """File names and the objects in them. `public_prefixes`: the text of the file that the spec names.

    Raises `ConfigError` naming the field for which the spec cannot run on Kubernetes.
    """
    inner = in_cluster(spec)
    return {
        "spec.yaml": [_spec_map(inner, public_prefixes)],
        "cluster.yaml": [_ray_cluster(inner)],
        "service.yaml": [_service(inner)],
        "policies.yaml": [*_network_policies(inner), *_disruption_budgets(inner)],
        "monitoring.yaml": [_pod_monitor(inner), _rules(inner), _dashboard(inner)],
        JOB: [_job(inner)],
    }


def in_cluster(spec: ClusterSpec) -> ClusterSpec:
    """The spec as the supervisor's pod gets it: what it says of addresses and files holds only where it was written."""
    for name, port in spec.router.ports.items():
        if not port:
            raise ConfigError(f"router.{name} must be given for Kubernetes: its Service has to know it")
    _check_cards(spec)
    router = replace(
        spec.router,
        host="0.0.0.0",
        api_keys=f"{API_KEYS_FOLDER}/{API_KEYS_FILE}",
        public_prefixes=f"{SPEC_FOLDER}/{PREFIXES_FILE}" if spec.router.public_prefixes else "",
        ray_resource=role_resource(ROUTER),
        tls_cert=f"{TLS_FOLDER}/{TLS_CERT}" if spec.router.tls_cert else "",
        tls_key=f"{TLS_FOLDER}/{TLS_KEY}" if spec.router.tls_cert else "",
        tls_client_ca=f"{TLS_FOLDER}/{TLS_CA}" if spec.router.tls_client_ca else "",
    )
    pools = {
        role: replace(spec.pool(role), host=NODE_HOST, ray_resource=role_resource(role), ray_labels="")
        for role in ROLES
    }
    ray = RaySpec(address=f"127.0.0.1:{GCS_PORT}", object_store_bytes=spec.ray.object_store_bytes)
    return replace(spec, router=router, pools=replace(spec.pools, **pools), ray=ray)


def _check_cards(spec: ClusterSpec) -> None:
    """Raises `ConfigError` for workers that want a card in pods without, and for pods with cards that nobody uses."""
    for role in ROLES:
        pool, gpus = spec.pool(role), pods_of(spec, role).gpus
        if pool.device.startswith("cuda") and not gpus:
            raise ConfigError(f"deploy.{role}.gpus must be at least 1: pools.{role}.device is {pool.device}")
        if gpus and not pool.may_take_card:
            raise ConfigError(f"deploy.{role}.gpus: {gpus} for workers that compute on CPUs; pools.{role}.device: cuda")


def render(files: Mapping[str, list[Object]]) -> dict[str, str]:
    """The texts of the files, and of a kustomization of all that is to be applied together."""
    applied = sorted(name for name in files if name != JOB)
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": applied}
    return {name: HEADER + to_yaml(objects) for name, objects in {**files, KUSTOMIZATION: [kustomization]}.items()}


def to_yaml(objects: list[Object]) -> str:
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks; no references between equal parts, which people do not read well."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _object(spec: ClusterSpec, api: str, kind: str, name: str, body: Object) -> Object:
    namespace = {"namespace": spec.deploy.namespace} if spec.deploy.namespace else {}
    metadata = {"name": name, **namespace, "labels": common_labels(spec)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}


def _spec_map(spec: ClusterSpec, public_prefixes: str) -> Object:
    data = {SPEC_FILE: spec_text(spec)}
    if spec.router.public_prefixes:
        data[PREFIXES_FILE] = public_prefixes
    return _object(spec, "v1", "ConfigMap", f"{cluster_name(spec)}-spec", {"data": data})


def _ray_cluster(spec: ClusterSpec) -> Object:
    store = {"object-store-memory": str(spec.ray.object_store_bytes)}
    body = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0", **store},
            "resources": {"CPU": "1", role_resource(ROUTER): "1"},
            "template": head_pod(spec),
        },
        "workerGroupSpecs": [_worker_group(spec, role, store) for role in ROLES if spec.pool(role).replicas],
    }
    return _object(spec, "ray.io/v1", "RayCluster", cluster_name(spec), {"spec": body})


def _worker_group(spec: ClusterSpec, role: str, store: Object) -> Object:
    pool = spec.pool(role)
    gpus = pods_of(spec, role).gpus
    least, most = pool.replica_range
    return {
        "groupName": role,
        "replicas": pool.replicas,
        "minReplicas": least,
        "maxReplicas": most,
        "rayStartParams": store,
        "resources": {
            "CPU": str(threads_of(pool)),
            **({"GPU": str(gpus)} if gpus else {}),
            role_resource(role): "1",
        },
        "template": worker_pod(spec, role),
    }


def _service(spec: ClusterSpec) -> Object:
    ports = spec.router.ports
    grpc, http = ("https", "https") if spec.router.tls_cert else ("kubernetes.io/h2c", "http")
    body = {
        "selector": _head_labels(spec),
        "ports": [
            {"name": "grpc", "port": ports["port"], "targetPort": "grpc", "appProtocol": grpc},
            {"name": "http", "port": ports["http_port"], "targetPort": "http", "appProtocol": http},
        ],
    }
    return _object(spec, "v1", "Service", cluster_name(spec), {"spec": body})


def _network_policies(spec: ClusterSpec) -> list[Object]:
    name, ports = cluster_name(spec), spec.router.ports
    own = {"podSelector": {"matchLabels": _pod_labels(spec)}}
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    submitter = {"podSelector": {"matchLabels": {"ray.io/originated-from-crd": "RayJob"}}}
    clients = [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {CLIENTS_LABEL: "true"}}}]
    inner = {
        "podSelector": {"matchLabels": _pod_labels(spec)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [own]}],
    }
    head = {
        "podSelector": {"matchLabels": _head_labels(spec)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": clients, "ports": [_tcp(ports["port"]), _tcp(ports["http_port"])]},
            {"from": [operator, submitter], "ports": [_tcp(DASHBOARD_PORT)]},
        ],
    }
    api, kind = "networking.k8s.io/v1", "NetworkPolicy"
    return [
        _object(spec, api, kind, f"{name}-inside", {"spec": inner}),
        _object(spec, api, kind, f"{name}-clients", {"spec": head}),
    ]


def _disruption_budgets(spec: ClusterSpec) -> list[Object]:
    """A drained node takes one worker of a pool at a time. Its requests go on elsewhere, where there is another."""
    return [
        _object(
            spec,
            "policy/v1",
            "PodDisruptionBudget",
            f"{cluster_name(spec)}-{role}",
            {
                "spec": {
                    "maxUnavailable": 1,
                    "selector": {"matchLabels": {**_pod_labels(spec), "ray.io/group": role}},
                }
            },
        )
        for role in ROLES
        if spec.pool(role).replicas
    ]


def _pod_monitor(spec: ClusterSpec) -> Object:
    body = {
        "selector": {"matchLabels": _head_labels(spec)},
        "podMetricsEndpoints": [
            {
                "port": "http",
                "path": "/metrics",
                "interval": "15s",
                **_scrape_tls(spec),
                "relabelings": [
                    {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"], "targetLabel": CLUSTER}
                ],
            }
        ],
    }
    return _object(spec, "monitoring.coreos.com/v1", "PodMonitor", cluster_name(spec), {"spec": body})


def _scrape_tls(spec: ClusterSpec) -> Object:
    """Prometheus knows a pod by its address, and verifies the name of the Service. Where clients must show a
    certificate it shows the router's own."""
    if not spec.router.tls_cert:
        return {}

    def key(name: str) -> Object:
        return {"name": tls_secret(spec), "key": name}

    shown = {"cert": {"secret": key(TLS_CERT)}, "keySecret": key(TLS_KEY)} if spec.router.tls_client_ca else {}
    return {
        "scheme": "https",
        "tlsConfig": {"ca": {"secret": key(TLS_CA)}, "serverName": cluster_name(spec), **shown},
    }


def _rules(spec: ClusterSpec) -> Object:
    body = {"spec": {"groups": alert_groups()}}
    return _object(spec, "monitoring.coreos.com/v1", "PrometheusRule", cluster_name(spec), body)


def _dashboard(spec: ClusterSpec) -> Object:
    """Found by Grafana's sidecar, as its chart sets it up, by the label."""
    found = _object(
        spec, "v1", "ConfigMap", f"{cluster_name(spec)}-dashboard", {"data": {"kvrelay.json": dashboard_text()}}
    )
    found["metadata"]["labels"] |= {"grafana_dashboard": "1"}
    return found


def _job(spec: ClusterSpec) -> Object:
    """Runs on a cluster that serves, with the image and the tools of its head; a cluster made for the job, as RayJob
    makes one by default, would load the model for one prompt."""
    address = f"{cluster_name(spec)}:{spec.router.ports['port']}"
    tls = f" --tls-ca {TLS_FOLDER}/{TLS_CA}" if spec.router.tls_cert else ""
    if spec.router.tls_client_ca:
        tls += f" --tls-cert {TLS_FOLDER}/{TLS_CERT} --tls-key {TLS_FOLDER}/{TLS_KEY}"
    body = {
        "entrypoint": f"kvrelay generate --router {address}{tls} --max-tokens 16 'Why is the sky blue?'",
        "clusterSelector": {"ray.io/cluster": cluster_name(spec)},
        "activeDeadlineSeconds": math.ceil(spec.supervision.start_timeout_s + spec.router.default_timeout_s),
    }
    return _object(spec, "ray.io/v1", "RayJob", f"{cluster_name(spec)}-hello", {"spec": body})


def _pod_labels(spec: ClusterSpec) -> Object:
    return {"ray.io/cluster": cluster_name(spec)}


def _head_labels(spec: ClusterSpec) -> Object:
    return {**_pod_labels(spec), "ray.io/node-type": "head"}


def _tcp(port: int) -> Object:
    return {"protocol": "TCP", "port": port}
