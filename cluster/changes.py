"""What it takes to make one spec of another while the cluster serves: which pools grow, shrink or restart, and why; and
what cannot be changed so. A pure function of two specs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.events import DesiredChanged, PoolWanted
from cluster.spec import ROLES, ClusterSpec, PoolSpec
from engine.errors import ConfigError

_ONE_MODEL = "router and workers serve one model"
_KNOWN_PLACE = "clients know the router by it"
_WHY_NOT = {
    "name": "another name is another cluster",
    "model": _ONE_MODEL,
    "dtype": _ONE_MODEL,
    "weights_dtype": _ONE_MODEL,
    "router.host": _KNOWN_PLACE,
    "router.port": _KNOWN_PLACE,
    "router.http_port": _KNOWN_PLACE,
    "router.ray_resource": "another router listens where the one before does",
    "ray": "every process runs on it",
    "block_size": "a router takes workers of one block size only",
    "kv_cache_dtype": "blocks move between the workers that serve together",
}
"""By a field's path, or the first or the last part of it."""
_RANGE = ("min_replicas", "max_replicas")
REMEDY = "`kvrelay down`, then `kvrelay up`"


@dataclass(frozen=True, slots=True)
class FieldChange:
    field: str
    """Its path in the spec."""
    before: object
    after: object

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.field.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.field} {_told(self.before)} -> {_told(self.after)}"


@dataclass(frozen=True, slots=True)
class Refused:
    change: FieldChange
    why: str


@dataclass(frozen=True, slots=True)
class PoolChange:
    role: str
    before: int
    after: int
    """Replicas."""
    because: tuple[FieldChange, ...]
    """Settings for which every worker that stays is restarted, one at a time."""


@dataclass(frozen=True, slots=True)
class Changes:
    pools: tuple[PoolChange, ...]
    """Those that change."""
    at_once: tuple[FieldChange, ...]
    """What concerns the supervisor alone."""
    router: tuple[FieldChange, ...]
    """With these settings another router takes over."""
    refused: tuple[Refused, ...]
    """What can only be changed by stopping the cluster."""

    @property
    def any(self) -> bool:
        return bool(self.pools or self.at_once or self.router or self.refused)

    def check(self) -> None:
        """Raises `ConfigError` naming every field that cannot be changed now."""
        if self.refused:
            told = "; ".join(f"{refused.change}: {refused.why}" for refused in self.refused)
            raise ConfigError(f"{told}; nothing was changed; to change it: {REMEDY}")

    def lines(self) -> Iterator[str]:
        """For people."""
        for pool in self.pools:
            yield from _pool_lines(pool)
        if self.router:
            names = ", ".join(str(change).removeprefix("router.") for change in self.router)
            yield f"router: another one takes over: {names}"
        for change in self.at_once:
            yield f"{change}: at once"
        for refused in self.refused:
            yield f"refused: {refused.change}: {refused.why}; {REMEDY}"


def compare(running: ClusterSpec, wanted: ClusterSpec) -> Changes:
    """Equal specs differ in nothing."""
    differences = list(_differences("", asdict(running), asdict(wanted)))
    refused = tuple(Refused(change, why) for change in differences if (why := _why_not(change)))
    beyond = [change for change in differences if not _why_not(change)]
    pools = []
    for role in ROLES:
        before, after = running.pool(role).replicas, wanted.pool(role).replicas
        sizes = ("replicas", *_RANGE)
        settings = [c for c in beyond if c.field.startswith(f"pools.{role}.") and c.name not in sizes]
        if before != after or settings:
            pools.append(PoolChange(role, before, after, tuple(settings)))
    at_once = tuple(change for change in beyond if change.field.startswith("supervision.") or change.name in _RANGE)
    router = tuple(change for change in beyond if change.field.startswith("router."))
    return Changes(tuple(pools), at_once, router, refused)


def desired(spec: ClusterSpec, take_away: str = "", router_restarts: int = 0) -> DesiredChanged:
    """What the reconciler is to make true of `spec`; with one restart more another router takes over as it is."""
    return DesiredChanged(pools_wanted(spec), spec.supervision, take_away, router_wanted(spec, router_restarts))


def router_wanted(spec: ClusterSpec, restarts: int = 0) -> Hashable:
    """A revision."""
    return spec.router, restarts


def pools_wanted(spec: ClusterSpec) -> dict[str, PoolWanted]:
    return {role: PoolWanted(spec.pool(role).replicas, _revision(spec.pool(role))) for role in ROLES}


def _revision(pool: PoolSpec) -> Hashable:
    """Equal for pools whose workers are alike."""
    return replace(pool, replicas=1, min_replicas=None, max_replicas=None)


def _differences(path: str, before: Any, after: Any) -> Iterator[FieldChange]:
    if isinstance(before, dict):
        for name in before:
            yield from _differences(f"{path}.{name}" if path else name, before[name], after[name])
    elif before != after:
        yield FieldChange(path, before, after)


def _why_not(change: FieldChange) -> str:
    if change.field == "router.tls_cert" and bool(change.before) != bool(change.after):
        return "clients speak TLS, or they do not"
    first = change.field.partition(".")[0]
    why = _WHY_NOT.get(change.field) or _WHY_NOT.get(first, "")
    return why or (_WHY_NOT.get(change.name, "") if first == "pools" else "")


def _pool_lines(pool: PoolChange) -> Iterator[str]:
    more = pool.after - pool.before
    if more:
        how = "started" if more > 0 else "drained and stopped"
        yield f"{pool.role}: {pool.before} -> {pool.after} workers: {_workers(abs(more))} {how}"
    staying = min(pool.before, pool.after)
    if pool.because and staying:
        names = ", ".join(str(change).rpartition(f"pools.{pool.role}.")[2] for change in pool.because)
        how = "one at a time" if staying > 1 else "its successor starts first"
        yield f"{pool.role}: {_workers(staying)} restarted, {how}: {names}"
    elif pool.because:
        yield from (f"{change}: for workers that are started" for change in pool.because)


def _workers(count: int) -> str:
    return "1 worker is" if count == 1 else f"{count} workers are"


def _told(value: object) -> str:
    return "none" if value in (None, "") else str(value)
