"""What a cluster shall be: the model, the pools, the router, how to get at Ray. Knows no file and no environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from cluster.deploy_spec import DeploySpec
from cluster.quoting import quoted
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.knobs import Knobs
from engine.log_format import check_log_format
from kv_transfer.identity import DEFAULT_TRANSPORTS, parse_transports
from router.config import RouterConfig
from worker.config import WorkerConfig

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_PORT = 8600
"""Below 10000: Ray takes 10002 to 19999 for its workers, the kernel takes 32768 to 60999 for outgoing connections."""
PREFILL, DECODE = "prefill", "decode"
ROLES = (PREFILL, DECODE)
MAX_REPLICAS = 256

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
_RESOURCE = re.compile(r"[a-z][a-z0-9_]{0,62}")
_LABEL_VALUE = r"[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"[A-Za-z0-9](?:[\w./-]{{0,251}}[A-Za-z0-9])?={_LABEL_VALUE}", re.ASCII)
_ENGINE = EngineConfig(model_path="")
_SCHEDULER = SchedulerConfig()
_MIB = 1024 * 1024


def is_name(text: str) -> bool:
    """Whether a cluster may be called so; names are parts of file names."""
    return _NAME.fullmatch(text) is not None


def check_name(name: str) -> None:
    """Raises `ConfigError` unless `name` may be a cluster's."""
    if not is_name(name):
        raise ConfigError(f"name must be 1 to 32 of a-z, 0-9 and inner dashes, got {quoted(name)}")


def check_resource(name: str) -> None:
    """Raises `ConfigError` unless `name` is empty or may be a custom resource of Ray."""
    if name and not _RESOURCE.fullmatch(name):
        raise ConfigError(f"ray_resource must be up to 63 of a-z, 0-9 and _, got {quoted(name)}")


def parse_labels(text: str) -> dict[str, str]:
    """Of nodes of a Ray, by name. Raises `ConfigError` for what is none of NAME=VALUE,NAME=VALUE."""
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    labels = {name: value for name, _, value in pairs}
    if len(labels) < len(pairs) or not all(_LABEL.fullmatch("".join(pair)) for pair in pairs):
        raise ConfigError(f"ray_labels must be NAME=VALUE, several with commas, each name once, got {quoted(text)}")
    return labels


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec(Knobs):
    """Workers of one role, all alike. Beside the fields below it has every knob of `engine.knobs`; those of bytes
    accept "512MiB" and "2GB"."""

    replicas: int = 1
    """Workers of this role. No prefill worker: decode workers compute the prompts themselves."""
    min_replicas: int | None = None
    """With `max_replicas`, the range in which `replicas` may be scaled. Default: no range; scaling sets the number."""
    max_replicas: int | None = None
    device: str = _ENGINE.device
    """Where each worker's model runs: cpu; cuda, a GPU for each worker; cuda:N, which workers may share; or auto, a GPU
    if there is one and `gpu_memory_utilization` says how much of it."""
    num_threads: int = _ENGINE.num_threads
    """Threads of the kernels in each worker, or rank of one. More threads than cores in all: all are slower."""
    kernels: str = _ENGINE.kernels
    """Who computes on a CPU: "native" code, the PyTorch "reference", or "auto": native where it can run the model."""
    max_num_batched_tokens: int = _SCHEDULER.max_num_batched_tokens
    max_num_seqs: int = _SCHEDULER.max_num_seqs
    max_waiting: int = _SCHEDULER.max_waiting
    preemption: str = _SCHEDULER.preemption
    """"recompute", or "swap" to host memory of `swap_space`."""
    priority_step_s: float = _SCHEDULER.priority_step_s
    """Seconds without a turn that lift waiting requests by one priority."""
    host: str = "127.0.0.1"
    """Interface for sessions and links; `node`: the address of the Ray node that a worker is placed on. Both demand the
    cluster's key; what they carry is not encrypted."""
    kv_transports: str = ",".join(DEFAULT_TRANSPORTS)
    """Of links, with commas: some of adopt, shm, nccl, tcp, gloo."""
    max_lent_share: float = 0.5
    """Of a prefill worker's pool, what decode workers may read where it is (adopt); the rest is copied."""
    ray_resource: str = ""
    """Of a Ray that was joined: a custom resource of which each worker takes one, so that it is placed on the nodes
    that offer it. Default: any node."""
    ray_labels: str = ""
    """Of a Ray that was joined: labels of nodes on which workers may be placed, "zone=a,card=h100". Default: any."""

    def __post_init__(self) -> None:
        parse_transports(self.kv_transports)
        check_resource(self.ray_resource)
        self._check_replicas()
        parse_labels(self.ray_labels)
        self.engine("", _ENGINE.dtype)  # its checks are ours

    def _check_replicas(self) -> None:
        least, most = self.min_replicas, self.max_replicas
        if not 0 <= self.replicas <= MAX_REPLICAS:
            raise ConfigError(f"replicas must be in [0, {MAX_REPLICAS}], got {self.replicas}")
        if least is None and most is None:
            return
        if least is None or most is None:
            missing = "min_replicas" if least is None else "max_replicas"
            raise ConfigError(f"{'max' if least is None else 'min'}_replicas needs {missing} beside it")
        if not 0 <= least <= MAX_REPLICAS:
            raise ConfigError(f"min_replicas must be in [0, {MAX_REPLICAS}], got {least}")
        if not least <= most <= MAX_REPLICAS:
            raise ConfigError(f"max_replicas must be in [min_replicas, {MAX_REPLICAS}], got {most} and {least}")
        if not least <= self.replicas <= most:
            raise ConfigError(
                f"replicas must be in [{least}, {most}], min_replicas to max_replicas, got {self.replicas}"
            )

    @property
    def replica_range(self) -> tuple[int, int]:
        """Smallest and largest number of workers; a number without a range is both."""
        if self.min_replicas is None or self.max_replicas is None:
            return self.replicas, self.replicas
        return self.min_replicas, self.max_replicas

    @property
    def host_pool_bytes(self) -> int:
        """Of host memory for each worker's KV pool and `swap_space`, at most."""
        return self.swap_space + (0 if self.device.startswith("cuda") else self.kv_memory_bytes)

    @property
    def takes_card(self) -> bool:
        """Whether each worker is to have a GPU of its own."""
        return self.device == "cuda"

    @property
    def may_take_card(self) -> bool:
        return self.device.startswith("cuda") or (self.device == "auto" and self.gpu_memory_utilization is not None)

    def engine(self, model_path: str, dtype: str, native_cache: str | None = None) -> EngineConfig:
        return EngineConfig(
            model_path=model_path,
            dtype=dtype,
            native_cache=native_cache,
            device=self.device,
            kernels=self.kernels,
            **self.knobs(),
            num_threads=self.num_threads,
            scheduler=SchedulerConfig(
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                max_waiting=self.max_waiting,
                preemption=self.preemption,
                priority_step_s=self.priority_step_s,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsSpec:
    prefill: PoolSpec = field(default_factory=PoolSpec)
    decode: PoolSpec = field(default_factory=PoolSpec)

    def __post_init__(self) -> None:
        if self.decode.replicas < 1:
            raise ConfigError("decode: replicas must be at least 1: every request ends on a decode worker")
        if self.decode.min_replicas == 0:
            raise ConfigError("decode: min_replicas must be at least 1: every request ends on a decode worker")
        if self.prefill.replicas and self.prefill.block_size != self.decode.block_size:
            raise ConfigError(
                f"decode: block_size {self.decode.block_size} differs from prefill's {self.prefill.block_size}: "
                "blocks move between the pools"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    host: str = "127.0.0.1"
    """Interface for clients. Without `api_keys`, any other interface is open to its network."""
    port: int = DEFAULT_PORT
    """For gRPC; 0 takes a free one."""
    http_port: int | None = None
    """For HTTP. Default: the one after `port`, or a free one if that is 0, which 0 takes as well."""
    max_live_requests: int = 1024
    """Requests of priority 0 at once; one more is refused with a retry hint. Worse ones are refused sooner, better ones
    later: a sixteenth for each step."""
    default_timeout_s: float = 600.0
    """Deadline of a call that brings none."""
    api_keys: str = ""
    """File of tenants and digests of their keys. Default: nobody needs a key."""
    audit_log: str = ""
    """File to which each call of the Admin service is a line of JSON. Default: only in the router's log."""
    public_prefixes: str = ""
    """File of prompts' beginnings whose KV all tenants share. Default: none."""
    tls_cert: str = ""
    """Certificate chain, PEM file; with it, gRPC and HTTP are served over TLS only."""
    tls_key: str = ""
    """Its private key, PEM file."""
    tls_client_ca: str = ""
    """Authorities, PEM file; with it, only clients with a certificate of one of them are served."""
    log_calls: bool = False
    """One line of the log for each call: where it ran, how long it took, how it ended."""
    otlp_endpoint: str = ""
    """`http://HOST:PORT` of a collector that takes traces as OTLP over gRPC (https:// over TLS). Default: no traces."""
    trace_ratio: float = 1.0
    """Of the calls that bring no trace context, how many are traced. The others are if their caller traces them."""
    ray_resource: str = ""
    """Like that of pools."""

    def __post_init__(self) -> None:
        check_resource(self.ray_resource)
        self.config(model_path="", model_name="any", router_id="any")  # its checks are ours

    def config(self, model_path: str, model_name: str, router_id: str) -> RouterConfig:
        return RouterConfig(
            model_path=model_path,
            model_name=model_name,
            router_id=router_id,
            host=self.host,
            port=self.port,
            http_port=self.http_port,
            max_live_requests=self.max_live_requests,
            default_timeout_s=self.default_timeout_s,
            api_keys=_absolute(self.api_keys),
            audit_log=_absolute(self.audit_log),
            public_prefixes=_absolute(self.public_prefixes),
            tls_cert=_absolute(self.tls_cert),
            tls_key=_absolute(self.tls_key),
            tls_client_ca=_absolute(self.tls_client_ca),
            log_calls=self.log_calls,
            otlp_endpoint=self.otlp_endpoint,
            trace_ratio=self.trace_ratio,
        )

    @property
    def ports(self) -> dict[str, int]:
        """Those to listen on, by the name of the field that says so; 0: a free one."""
        http_port = self.http_port if self.http_port is not None else self.port + 1 if self.port else 0
        return {"port": self.port, "http_port": http_port}


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySpec:
    address: str = "local"
    """`local` starts a Ray of our own and stops it with us; `auto` or HOST:PORT joins a running one."""
    object_store_bytes: int = 80 * _MIB
    """Of a Ray of our own; Ray's minimum is 75 MiB. No KV, prompt or token travels through it."""
    helpers: bool = False
    """Start the processes of a Ray of our own that only its dashboard, metrics, log forwarding, autoscaler and runtime
    environments need. They cost some seconds of start and 0.4 GB."""

    def __post_init__(self) -> None:
        if self.address not in ("local", "auto") and not re.fullmatch(r"[^\s:/]+:\d{1,5}", self.address):
            raise ConfigError(f"address must be local, auto or HOST:PORT, got {quoted(self.address)}")
        if self.object_store_bytes < 75 * _MIB:
            raise ConfigError(f"object_store_bytes must be at least 75 MiB, got {self.object_store_bytes}")

    @property
    def local(self) -> bool:
        return self.address == "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionSpec:
    """Bounds of everything that the supervisor waits for, and how it treats a worker that dies again and again."""

    start_timeout_s: float = 120.0
    """From asking Ray for a worker until it serves."""
    drain_s: float = 1.0
    """On a stop, requests that run may finish within this time."""
    worker_drain_s: float = 30.0
    """On a worker that is taken away or replaced, requests may finish within this time; those that are left go on
    elsewhere."""
    stop_timeout_s: float = 10.0
    """From asking a worker to stop until it is killed."""
    hung_after_s: float = 15.0
    """A member that serves and does not answer for this long is killed, and started again like a dead one."""
    backoff_min_s: float = 0.5
    backoff_max_s: float = 30.0
    """Pause before a dead worker is started again; doubles from the one to the other."""
    stable_s: float = 60.0
    """A worker that served for this long starts the pauses anew."""
    max_first_starts: int = 3
    """Starts of a worker that never served, before the whole `up` fails with its reason."""

    def __post_init__(self) -> None:
        for name in ("start_timeout_s", "stop_timeout_s", "hung_after_s", "backoff_min_s", "stable_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("drain_s", "worker_drain_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not self.backoff_max_s >= self.backoff_min_s:
            raise ConfigError(f"backoff_max_s {self.backoff_max_s} is below backoff_min_s {self.backoff_min_s}")
        if self.max_first_starts < 1:
            raise ConfigError(f"max_first_starts must be at least 1, got {self.max_first_starts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """One cluster: a router, prefill workers, decode workers, one model. Two clusters of one machine differ in name."""

    name: str = "default"
    model: str = DEFAULT_MODEL
    """An alias, a Hugging Face id, a folder of safetensors, or a GGUF file."""
    dtype: str = _ENGINE.dtype
    """Of weights and activations."""
    log_format: str = "text"
    """Of the logs of router and workers: "text", or "json", an object for each line."""
    weights_dtype: str = _ENGINE.weights_dtype
    """"int8": weights in half the memory, a little less exact; "auto": in `dtype`."""
    pools: PoolsSpec = field(default_factory=PoolsSpec)
    router: RouterSpec = field(default_factory=RouterSpec)
    ray: RaySpec = field(default_factory=RaySpec)
    supervision: SupervisionSpec = field(default_factory=SupervisionSpec)
    deploy: DeploySpec = field(default_factory=DeploySpec)

    def __post_init__(self) -> None:
        check_name(self.name)
        if not self.model:
            raise ConfigError("model must not be empty")
        check_log_format(self.log_format)
        # Its checks of both are ours.
        replace(self.pools.decode.engine("", self.dtype), weights_dtype=self.weights_dtype)
        prefill, decode = (pool.kv_dtype(self.dtype) for pool in (self.pools.prefill, self.pools.decode))
        if self.pools.prefill.replicas and prefill != decode:
            raise ConfigError(
                f"pools: kv_cache_dtype {decode} of decode differs from prefill's {prefill}: "
                "blocks move between the pools"
            )

    def with_overrides(
        self,
        *,
        name: str | None = None,
        model: str | None = None,
        prefill: int | None = None,
        decode: int | None = None,
        port: int | None = None,
    ) -> ClusterSpec:
        """This spec with what the command line says. Raises `ConfigError` as the constructor does, naming the flag."""
        spec = self
        if name is not None:
            with _of("--name"):
                spec = replace(spec, name=name)
        if model is not None:
            with _of("--model"):
                spec = replace(spec, model=model)
        if port is not None:
            with _of("--port"):
                spec = replace(spec, router=replace(spec.router, port=port))
        for role, replicas in ((PREFILL, prefill), (DECODE, decode)):
            if replicas is not None:
                with _of(f"--{role}"):
                    pool = replace(spec.pool(role), replicas=replicas)
                    pools = replace(spec.pools, **{role: pool})
                    spec = replace(spec, pools=pools)
        return spec

    def pool(self, role: str) -> PoolSpec:
        return {PREFILL: self.pools.prefill, DECODE: self.pools.decode}[role]

    def worker_config(self, role: str, worker_id: str, model_path: str, native_cache: str) -> WorkerConfig:
        pool = self.pool(role)
        return WorkerConfig(
            worker_id=worker_id,
            model_name=self.model,
            host=pool.host,
            log_format=self.log_format,
            drain_s=self.supervision.drain_s,
            kv_transports=parse_transports(pool.kv_transports),
            max_lent_share=pool.max_lent_share,
            engine=replace(pool.engine(model_path, self.dtype, native_cache), weights_dtype=self.weights_dtype),
        )

    def router_config(self, model_path: str) -> RouterConfig:
        config = self.router.config(model_path, self.model, f"{self.name}-router")
        return replace(config, log_format=self.log_format)


def _absolute(path: str) -> str:
    """The router's process may run in another folder. An empty path stays empty."""
    return os.path.abspath(path) if path else ""


@contextmanager
def _of(flag: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
