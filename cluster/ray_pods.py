"""The pods of a cluster on Kubernetes, as KubeRay's RayCluster wants them. Pure: a spec in, plain objects out.

The head pod holds Ray's head, in whose container the router's actor runs, and beside it the supervisor: `kvrelay up`,
which joins that Ray. Each pool is a worker group whose pods hold one worker each. KubeRay writes the `ray start` of
every pod itself.
"""

from __future__ import annotations

import math
from typing import Any

from cluster.deploy_spec import PodSpec
from cluster.pools import threads_of
from cluster.spec import ClusterSpec
from engine.errors import ConfigError

Object = dict[str, Any]

RAY_VERSION = "2.60.0"
"""Of the image; KubeRay chooses its probes by it. The same as in constraints.txt."""
GCS_PORT, DASHBOARD_PORT, AGENT_PORT, RAY_METRICS_PORT, RAY_CLIENT_PORT = 6379, 8265, 52365, 8080, 10001
HOME = "/var/lib/kvrelay"
"""KVRELAY_HOME of every pod: the supervisor tells workers the model's folder, which must be there under its path."""
MODELS = "/models"
SPEC_FOLDER, SPEC_FILE = "/etc/kvrelay/spec", "cluster.yaml"
KEY_FOLDER, KEY_FILE = "/etc/kvrelay/cluster-key", "cluster-key"
API_KEYS_FOLDER, API_KEYS_FILE = "/etc/kvrelay/api-keys", "api-keys.yaml"
PREFIXES_FILE = "public-prefixes.yaml"
TLS_FOLDER, TLS_CERT, TLS_KEY, TLS_CA = "/etc/kvrelay/tls", "tls.crt", "tls.key", "ca.crt"
"""As in a secret of type kubernetes.io/tls, and as cert-manager names them."""
GPU = "nvidia.com/gpu"
UID = 1000
_MIB = 1024**2
_KILL_MARGIN_S = 20.0
"""Of a stop, beyond the bounds of the spec: to kill what did not stop, and to say so."""


def cluster_name(spec: ClusterSpec) -> str:
    """Of every object. The prefix makes it a DNS label also if the cluster's name begins with a digit."""
    return f"kvrelay-{spec.name}"


def tls_secret(spec: ClusterSpec) -> str:
    return f"{cluster_name(spec)}-tls"


def role_resource(role: str) -> str:
    """Custom resource of Ray by which an actor finds the pods of its pool: one for each worker."""
    return f"kvrelay_{role}"


def stop_bound_s(spec: ClusterSpec) -> int:
    """Within this many seconds of a signal `kvrelay up` has stopped the router, then the workers, and has ended."""
    limits = spec.supervision
    return math.ceil(2 * (limits.drain_s + limits.stop_timeout_s) + _KILL_MARGIN_S)


def drain_bound_s(spec: ClusterSpec) -> int:
    """For so long at most a worker lives on after its pod was told to end."""
    return math.ceil(spec.supervision.worker_drain_s + spec.supervision.stop_timeout_s)


def head_pod(spec: ClusterSpec) -> Object:
    ray = {
        **_container(spec, "ray-head", spec.deploy.head_bytes, cpus=1),
        "ports": _ports(gcs=GCS_PORT, dashboard=DASHBOARD_PORT, client=RAY_CLIENT_PORT, metrics=RAY_METRICS_PORT),
        "env": [*_ray_env(drain_s=0), *_job_key(spec)],
        "volumeMounts": [
            _mount("ray", "/tmp/ray"),
            _mount("home", HOME),
            _mount("spec", SPEC_FOLDER, read_only=True),
            _mount("api-keys", API_KEYS_FOLDER, read_only=True),
            *([_mount("tls", TLS_FOLDER, read_only=True)] if spec.router.tls_cert else []),
            *_model_mounts(spec),
        ],
        # The router's actor is in this container: it must outlive the supervisor, which drains it. The kernel gives the
        # lock back when `kvrelay up` ends, however it ends.
        "lifecycle": {"preStop": {"exec": {"command": _wait_for_supervisor(spec)}}},
    }
    return {
        "metadata": {"labels": _labels(spec, "router")},
        "spec": {
            # The supervisor knows actors of its pod by process ids. Without one name space for both containers it would
            # take a stranger for the router.
            "shareProcessNamespace": True,
            **_pod(spec, stop_bound_s(spec) + 10),
            "containers": [ray, _supervisor(spec)],
            "volumes": [
                _empty("ray"),
                _empty("home"),
                {"name": "spec", "configMap": {"name": f"{cluster_name(spec)}-spec"}},
                _secret_volume("api-keys", f"{cluster_name(spec)}-api-keys"),
                _secret_volume("cluster-key", f"{cluster_name(spec)}-cluster-key"),
                *([_secret_volume("tls", tls_secret(spec))] if spec.router.tls_cert else []),
                *_model_volumes(spec),
            ],
        },
    }


def worker_pod(spec: ClusterSpec, role: str) -> Object:
    pool, pods = spec.pool(role), pods_of(spec, role)
    drain_s = drain_bound_s(spec)
    ray = {
        **_container(spec, "ray-worker", worker_bytes(spec, role), cpus=threads_of(pool), gpus=pods.gpus),
        "ports": _ports(metrics=RAY_METRICS_PORT),
        "env": _ray_env(drain_s),
        "volumeMounts": [_mount("home", HOME), *_model_mounts(spec)],
    }
    return {
        "metadata": {"labels": _labels(spec, role)},
        "spec": {
            **_pod(spec, drain_s + 10),
            **_placement(pods),
            "containers": [ray],
            "volumes": [_empty("home"), *_model_volumes(spec)],
        },
    }


def pods_of(spec: ClusterSpec, role: str) -> PodSpec:
    pods: PodSpec = getattr(spec.deploy, role)
    return pods


def worker_bytes(spec: ClusterSpec, role: str) -> int:
    """Memory of one worker's pod. Raises `ConfigError` where the pool's size is not known without the model."""
    pool = spec.pool(role)
    if pool.num_blocks_override is not None and not pool.device.startswith("cuda"):
        raise ConfigError(
            f"pools.{role}.num_blocks_override: the memory of a pod follows from kv_memory_bytes; give that instead"
        )
    return pool.host_pool_bytes + spec.ray.object_store_bytes + pods_of(spec, role).process_bytes


def _supervisor(spec: ClusterSpec) -> Object:
    name = cluster_name(spec)
    token = {"name": name, "key": "auth_token"}  # a secret that KubeRay makes, for Ray's containers
    return {
        **_container(spec, "supervisor", 1024 * _MIB, cpus=0.25),
        "command": ["kvrelay", "up", f"{SPEC_FOLDER}/{SPEC_FILE}"],
        "ports": _ports(grpc=spec.router.ports["port"], http=spec.router.ports["http_port"]),
        "env": [
            *_base_env(),
            _env("KVRELAY_CLUSTER_KEY_FILE", f"{KEY_FOLDER}/{KEY_FILE}"),
            _env("RAY_AUTH_MODE", "token"),
            {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": token}},
        ],
        "volumeMounts": [
            _mount("ray", "/tmp/ray"),
            _mount("home", HOME),
            _mount("spec", SPEC_FOLDER, read_only=True),
            _mount("cluster-key", KEY_FOLDER, read_only=True),
            *_model_mounts(spec),
        ],
        "readinessProbe": {**_ready(spec), "periodSeconds": 5, "timeoutSeconds": 3, "failureThreshold": 2},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _ready(spec: ClusterSpec) -> Object:
    """The kubelet verifies no certificate, and has none to show: where clients must, all that it can see is that the
    router listens."""
    if spec.router.tls_client_ca:
        return {"tcpSocket": {"port": "http"}}
    scheme = {"scheme": "HTTPS"} if spec.router.tls_cert else {}
    return {"httpGet": {"path": "/ready", "port": "http", **scheme}}


def _pod(spec: ClusterSpec, grace_s: int) -> Object:
    pod: Object = {
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if not spec.deploy.model_claim:
        pull = {
            **_container(spec, "model", 2048 * _MIB, cpus=0.25),
            "command": ["kvrelay", "pull", spec.model],
            "env": _base_env(),
            "volumeMounts": [_mount("home", HOME)],
        }
        pod["initContainers"] = [pull]
    return pod


def _container(spec: ClusterSpec, name: str, memory: int, *, cpus: float, gpus: int = 0) -> Object:
    """Memory is a limit too; CPU is not: a worker that may run on idle cores harms nobody."""
    cards = {GPU: str(gpus)} if gpus else {}
    return {
        "name": name,
        "image": spec.deploy.image,
        "imagePullPolicy": spec.deploy.image_pull_policy,
        "resources": {
            "requests": {"cpu": _cpu(cpus), "memory": _memory(memory), **cards},
            "limits": {"memory": _memory(memory), **cards},
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _placement(pods: PodSpec) -> Object:
    if not pods.gpus:
        return {}
    placement: Object = {"tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]}
    if pods.card:
        placement["nodeSelector"] = {"nvidia.com/gpu.product": pods.card}
    return placement


def _model_volumes(spec: ClusterSpec) -> list[Object]:
    claim = {"claimName": spec.deploy.model_claim, "readOnly": True}
    return [{"name": "models", "persistentVolumeClaim": claim}] if spec.deploy.model_claim else []


def _model_mounts(spec: ClusterSpec) -> list[Object]:
    return [_mount("models", MODELS, read_only=True)] if spec.deploy.model_claim else []


def _wait_for_supervisor(spec: ClusterSpec) -> list[str]:
    return ["flock", "--timeout", str(stop_bound_s(spec)), f"{HOME}/state/{spec.name}.lock", "true"]


def _base_env() -> list[Object]:
    return [_env("KVRELAY_HOME", HOME), _env("RAY_USAGE_STATS_ENABLED", "0")]


def _ray_env(drain_s: int) -> list[Object]:
    """What `kvrelay up` sets for a Ray of its own (`cluster.config.prepare_ray_environment`), and for how long a node
    lives on, at most, when its pod is to end: until then Ray says that it drains, places nothing there, and waits for
    its actors to end."""
    return [
        *_base_env(),
        _env("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", str(drain_s)),
        _env("RAY_worker_niceness", "0"),
        _env("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        _env("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
    ]


def _job_key(spec: ClusterSpec) -> list[Object]:
    """Jobs that are submitted to this Ray run in the head's container, and call the router as this tenant."""
    secret = {"name": f"{cluster_name(spec)}-job-api-key", "key": "api-key", "optional": True}
    return [{"name": "KVRELAY_API_KEY", "valueFrom": {"secretKeyRef": secret}}]


def _labels(spec: ClusterSpec, component: str) -> Object:
    return {**common_labels(spec), "app.kubernetes.io/component": component}


def common_labels(spec: ClusterSpec) -> Object:
    return {"app.kubernetes.io/part-of": "kvrelay", "app.kubernetes.io/instance": cluster_name(spec)}


def _ports(**ports: int) -> list[Object]:
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _env(name: str, value: str) -> Object:
    return {"name": name, "value": value}


def _mount(name: str, path: str, *, read_only: bool = False) -> Object:
    return {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}


def _empty(name: str) -> Object:
    return {"name": name, "emptyDir": {}}


def _secret_volume(name: str, secret: str) -> Object:
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}


def _cpu(cpus: float) -> str:
    return str(cpus) if cpus == int(cpus) else f"{round(1000 * cpus)}m"


def _memory(num_bytes: int) -> str:
    return f"{math.ceil(num_bytes / _MIB)}Mi"
