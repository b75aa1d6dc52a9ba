"""Settings of one router process."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cluster_key import ClusterKey
from engine.errors import ConfigError
from engine.log_format import check_log_format
from engine.routing_key import MAX_SEED

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    model_path: str
    """Folder in the standard layout. The router reads tokenizer, config and fingerprint; never the weights' values."""
    model_name: str
    """What clients call the model."""
    host: str = "127.0.0.1"
    port: int = 0
    """For gRPC; 0 takes a free one."""
    http_port: int | None = None
    """None: the one after `port`, or a free one if that is 0, which 0 takes as well."""
    shares_ports: bool = False
    """Listen beside a router that this one takes over from (`router.shared_port`); else a port that somebody listens on
    is taken."""
    router_id: str = "router"
    cluster_key: ClusterKey | None = None
    """Shown to workers, those that have it serve nobody else."""
    api_keys: str = ""
    """File of tenants and digests of their keys (`router.tenants`); empty: nobody needs a key."""
    audit_log: str = ""
    """File to which each call of the Admin service is a line of JSON (`router.audit`); empty: there is none."""
    public_prefixes: str = ""
    """File of prompts' beginnings whose KV all tenants share (`router.public_prefixes`); the same for all routers of a
    cluster; empty: none."""
    tls_cert: str = ""
    """Certificate chain, PEM; with it, gRPC and HTTP are served over TLS only."""
    tls_key: str = ""
    """Its private key, PEM."""
    tls_client_ca: str = ""
    """Authorities, PEM; with it, only clients with a certificate of one of them are served."""
    workers: tuple[str, ...] = ()
    """Addresses (HOST:PORT) of the workers known at start; `RouterServer.set_workers` replaces them."""

    max_live_requests: int = 1024
    """Requests at once; one more is refused with a retry hint. That is for priority 0: one sixteenth less for each step
    that is worse, as much more for each better. Too high: memory, and waits past every deadline."""
    retry_after_s: float = 1.0
    """The hint."""
    default_timeout_s: float = 600.0
    """Deadline of a call that brings none."""
    max_n: int = 16
    """Choices of one call. Each holds blocks of its own and takes a turn in each step of a decode worker."""
    max_attempts: int = 3
    """Placements of one request, the first included."""
    no_worker_wait_s: float = 30.0
    """How long a request waits for a decode worker, if one was ready within `worker_memory_s`: it is being replaced."""
    cold_wait_s: float = 5.0
    """The same if none was. At most `no_worker_wait_s`."""
    worker_memory_s: float = 60.0
    """How long a worker that was taken away is still told of, with the reason."""
    reserve_share: float = 0.5
    """Of the time that is left, how much one reservation may take before another worker is asked."""
    prefill_share: float = 0.6
    """Of the time that is left, how much the prefill worker may take before the decode worker computes instead."""
    handover_wait_s: float = 2.0
    """How long a finished request waits for the decode worker's account of the transfer."""
    local_prefill_max_tokens: int = 128
    """A decode worker may compute so many tokens of a prompt itself, those that it does not hold, where that is
    estimated to be faster; 0 splits all. Too high: running streams wait for prompts."""
    min_gap_s: float = 0.01
    """Between two messages to one client, of an output that is faster. Longer: fewer messages, more tokens in each."""
    max_unread_messages: int = 4096
    """Worker messages that may wait for one slow client; one more ends its request."""
    explain_capacity: int = 1000
    """Requests whose placement can still be explained."""

    log_format: str = "text"
    """Of the process's log: "text", or a JSON object for each line."""
    log_calls: bool = False
    """One line of the log for each call: where it ran, how long it took, how it ended."""
    otlp_endpoint: str = ""
    """`http://HOST:PORT` of a collector that takes traces as OTLP over gRPC (https:// over TLS); empty: none. Needs the
    extra `otel`."""
    trace_ratio: float = 1.0
    """Of the calls that bring no trace context, how many are traced. The others are if their caller traces them."""

    routing_seed: int = 0
    """Of routing keys; the same for all routers of a cluster, also after a restart. Who knows it can have requests sent
    to the wrong worker, and nothing else: `kvrelay up` draws one."""
    native_cache: str = ""
    """Folder for native libraries, compiled at the first start; empty: the prefix index is in Python."""
    index_bytes: int = 512 * MIB
    """The prefix index takes no more. Too low: prompts are sent to workers that do not hold their beginning."""
    speculation_s: float = 10.0
    """How long dispatched work counts as resident before the worker has said so; up to twice as long."""

    connect_timeout_s: float = 3.0
    """From dialling a worker to its welcome."""
    silence_s: float = 3.0
    """A worker that sends nothing, not even its load, for this long is lost. Several of its heartbeats."""
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 2.0
    """Pause before a worker is dialled again; doubles from the one to the other, with jitter."""
    max_outbox: int = 16384
    """Messages that may wait for one worker; one more gives the worker up."""

    max_http_connections: int = 4096
    """Open at once; one more is told 503 and closed. Too high: descriptors that nobody else has, workers included."""
    max_request_bytes: int = 8 * MIB
    """Of a client's message."""
    body_timeout_s: float = 30.0
    """For the first request of an HTTP connection to begin, and then for its body to arrive."""
    last_word_s: float = 10.0
    """For the client of an event stream to take its end, once nothing else of the request is left."""
    max_prompt_bytes: int = MIB
    """Of a prompt's text, or of all texts of a chat; more is refused before it is tokenized, and so is less that cannot
    have as few tokens as the model takes."""
    tokenizer_processes: int = 2
    """Long prompts that are tokenized at once. Each process is started when it is first needed, and then kept."""
    max_worker_message_bytes: int = 16 * MIB
    keepalive_s: float = 30.0
    """Pings on client connections, so that a client that vanished without a word is noticed."""

    def __post_init__(self) -> None:
        for name in ("model_name", "router_id"):
            if not getattr(self, name):
                raise ConfigError(f"{name} must not be empty")
        for name in ("port", "http_port"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < 65536:
                raise ConfigError(f"{name} must be in [0, 65535], got {getattr(self, name)}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key are needed both, or none")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("tls_client_ca needs tls_cert and tls_key")
        for name in ("local_prefill_max_tokens", "min_gap_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.reconnect_max_s < self.reconnect_min_s:
            raise ConfigError(f"reconnect_max_s {self.reconnect_max_s} is below reconnect_min_s {self.reconnect_min_s}")
        if len(set(self.workers)) != len(self.workers):
            raise ConfigError(f"workers names an address twice: {', '.join(self.workers)}")
        self._check_amounts()
        self._check_telling()

    def _check_telling(self) -> None:
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_endpoint must begin with http:// or https://, got {self.otlp_endpoint!r}")
        if not 0 <= self.trace_ratio <= 1:
            raise ConfigError(f"trace_ratio must be in [0, 1], got {self.trace_ratio}")
        check_log_format(self.log_format)

    def _check_amounts(self) -> None:
        if not 0 <= self.routing_seed <= MAX_SEED:
            raise ConfigError(f"routing_seed must be in [0, 2^64), got {self.routing_seed}")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in _SECONDS:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("reserve_share", "prefill_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be in (0, 1], got {getattr(self, name)}")


_COUNTS = (
    "max_live_requests",
    "max_n",
    "max_attempts",
    "max_unread_messages",
    "explain_capacity",
    "max_outbox",
    "max_http_connections",
    "max_request_bytes",
    "max_prompt_bytes",
    "tokenizer_processes",
    "max_worker_message_bytes",
    "index_bytes",
)
_SECONDS = (
    "retry_after_s",
    "default_timeout_s",
    "no_worker_wait_s",
    "cold_wait_s",
    "worker_memory_s",
    "handover_wait_s",
    "connect_timeout_s",
    "silence_s",
    "reconnect_min_s",
    "keepalive_s",
    "body_timeout_s",
    "last_word_s",
    "speculation_s",
)
