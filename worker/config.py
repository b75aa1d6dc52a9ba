"""Settings of one worker process, of either role."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.cluster_key import ClusterKey
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.log_format import check_log_format
from kv_transfer.identity import ADOPT, DEFAULT_TRANSPORTS, check_transports

MAX_LEASE_S = 5.0
"""A lease that nobody renews blocks memory for this long at most."""
NODE_HOST = "node"
"""As `host`, for actors: the address of the Ray node that one is placed on."""
_WILDCARDS = ("", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    worker_id: str
    """Name of this worker in its cluster; it survives a restart, the incarnation does not."""
    engine: EngineConfig
    model_name: str
    """What routers call the model; two workers exchange blocks by fingerprint, never by name."""
    host: str = "127.0.0.1"
    """Address for sessions and links. Tickets carry it to prefill workers, so no wildcard will do."""
    port: int = 0
    """Of the sessions; 0 takes a free one."""
    heartbeat_s: float = 0.5
    """A load report goes to every router at least this often."""
    max_outbox: int = 1024
    """Messages that may wait for one router. A router that lets more pile up loses its session."""
    max_sessions: int = 64
    """Routers at once."""
    kv_transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    """Of links: some of adopt, shm, nccl, tcp, gloo. Two workers use the first of these, in this order, that both
    have."""
    max_lent_share: float = 0.5
    """Of a prefill worker's pool, what decode workers may read where it is (`adopt`); beyond it blocks are copied. Too
    high: prompts wait for blocks that are lent. Too low: more is copied."""
    cluster_key: ClusterKey | None = None
    """Routers and peers must know it. None: whoever reaches the address is served."""
    lease_s: float = MAX_LEASE_S
    """Of tickets. Too short: a busy prefill worker loses it. Too long: a lost one delays the request."""
    max_timeout_s: float = 3600.0
    """No request holds blocks for longer, whatever its deadline says."""
    log_format: str = "text"
    """Of the process's log: "text", or a JSON object for each line."""
    drain_s: float = 1.0
    """On a stop, requests that run may finish within this time; the router resumes the others elsewhere."""

    def engine_of(self, role: str) -> EngineConfig:
        """With what the role's links ask of the pool."""
        if ADOPT not in self.kv_transports:
            return self.engine
        if role == "decode":
            return replace(self.engine, borrows=self.engine.tensor_parallel_size == 1)  # ranks see their own pool alone
        return replace(self.engine, lent_share=self.max_lent_share)

    def __post_init__(self) -> None:
        if not self.worker_id:
            raise ConfigError("worker_id must not be empty")
        if self.host in _WILDCARDS:
            raise ConfigError(f"host must be an address that routers and peers can reach, got {self.host!r}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        for name in ("heartbeat_s", "max_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        check_transports(self.kv_transports)
        check_log_format(self.log_format)
        if not 0 < self.max_lent_share <= 1:
            raise ConfigError(f"max_lent_share must be in (0, 1], got {self.max_lent_share}")
        if not 0 < self.lease_s <= MAX_LEASE_S:
            raise ConfigError(f"lease_s must be in (0, {MAX_LEASE_S}], got {self.lease_s}")
        if not self.drain_s >= 0:
            raise ConfigError(f"drain_s must be at least 0, got {self.drain_s}")
        for name in ("max_outbox", "max_sessions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
