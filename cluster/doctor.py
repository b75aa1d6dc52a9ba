"""What will fail and what will be slow, from what a machine has and a spec wants. Pure functions; `cluster.facts` asks.

Each check looks at one thing and says one of three: good, slow (it works, worse than it could), fails (`up` stops, or
breaks under load), with what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from cluster.facts import Facts
from cluster.pools import threads_of
from cluster.spec import ROLES, ClusterSpec
from engine.sizes import format_binary_size

MIN_PYTHON = (3, 11)
RAY_TRIED = "2.60."
"""Versions of Ray that start without its helpers (`cluster.ray_node`)."""
SPARE_FILES = 512
"""Descriptors of a router or worker beside clients: libraries, links, sessions."""
MIN_DISK_BYTES = 1024**3
MAX_CLOCK_SKEW_S = 1.0
"""Deadlines are spans, so clocks decide nothing; beyond this the logs of two nodes cannot be read side by side."""


class Verdict(Enum):
    GOOD = "good"
    SLOW = "slow"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    verdict: Verdict
    text: str
    """What there is, and what follows."""
    fix: str = ""
    """Empty if there is nothing to be done."""


Check = Callable[[Facts, ClusterSpec], Finding]


def examine(facts: Facts, spec: ClusterSpec) -> list[Finding]:
    """One finding for each check."""
    return [check(facts, spec) for check in CHECKS]


def good(check: str, text: str) -> Finding:
    return Finding(check, Verdict.GOOD, text)


def slow(check: str, text: str, fix: str) -> Finding:
    return Finding(check, Verdict.SLOW, text, fix)


def fails(check: str, text: str, fix: str) -> Finding:
    return Finding(check, Verdict.FAILS, text, fix)


def cpu(facts: Facts, spec: ClusterSpec) -> Finding:
    name = "instructions"
    if facts.machine not in ("x86_64", "AMD64"):
        return slow(name, f"{facts.machine}: kernels are tuned for x86-64; the compiler makes what it can", "")
    if not facts.cpu_flags:
        return good(name, "not known")
    best = [each for each in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if each in facts.cpu_flags]
    if not best:
        return slow(name, "no AVX2: kernels run with SSE", "run on a newer CPU, or show its instructions to the guest")
    if best[0] == "avx2":
        return slow(name, "AVX2 and no AVX-512: bfloat16 is widened in software", "run on a CPU with AVX-512")
    return good(name, ", ".join(best))


def cores(facts: Facts, spec: ClusterSpec) -> Finding:
    threads = sum(spec.pool(role).replicas * threads_of(spec.pool(role)) for role in ROLES)
    has = f"{facts.cores:g} cores"
    if threads > facts.cores:
        fix = "fewer replicas or num_threads, or more cores"
        return slow("cores", f"{has} for {threads} threads of workers: they slow each other down", fix)
    if facts.load > facts.cores:
        return slow("cores", f"{has}, load {facts.load:.1f}: something else runs here", "stop it, or wait for its end")
    return good("cores", f"{has} for {threads} threads of workers, load {facts.load:.1f}")


def memory(facts: Facts, spec: ClusterSpec) -> Finding:
    """Weights come on top, which only the model's files tell: `kvrelay plan` does that sum."""
    wanted = sum(spec.pool(role).host_pool_bytes * spec.pool(role).replicas for role in ROLES)
    text = f"{format_binary_size(facts.memory_bytes)} for KV pools of {format_binary_size(wanted)}"
    fix = "less kv_memory_bytes or swap_space, or fewer workers"
    if not spec.ray.local:
        return good("memory", f"{text}, which are on the nodes of a Ray that is joined")
    if wanted > facts.memory_bytes:
        return fails("memory", f"{text}: `up` refuses", fix)
    if wanted > facts.available_bytes:
        available = format_binary_size(facts.available_bytes)
        return fails("memory", f"{text}, {available} of it free: a worker is killed once its pool fills", fix)
    return good("memory", text)


def shm(facts: Facts, spec: ClusterSpec) -> Finding:
    wanted = spec.ray.object_store_bytes
    fix = f"a /dev/shm of {format_binary_size(wanted)} or more: --shm-size of docker, an emptyDir of medium Memory"
    if not spec.ray.local:
        return good("/dev/shm", "Ray's object store is on the nodes of a Ray that is joined")
    if facts.shm_bytes is None:
        return slow("/dev/shm", "none: Ray's object store goes to disk", fix)
    text = f"{format_binary_size(facts.shm_bytes)} free for Ray's object store of {format_binary_size(wanted)}"
    return good("/dev/shm", text) if facts.shm_bytes >= wanted else slow("/dev/shm", f"{text}: it goes to disk", fix)


def huge_pages(facts: Facts, spec: ClusterSpec) -> Finding:
    kinds = {"enabled": facts.anonymous_huge_pages, "shmem_enabled": facts.shared_huge_pages}
    off = [name for name, value in kinds.items() if value in ("never", "deny")]
    text = f"weights: {facts.anonymous_huge_pages or 'not known'}, KV pools: {facts.shared_huge_pages or 'not known'}"
    if not off:
        return good("huge pages", text)
    words = {"enabled": "madvise", "shmem_enabled": "advise"}
    commands = [f"echo {words[name]} > /sys/kernel/mm/transparent_hugepage/{name}" for name in off]
    return slow("huge pages", f"{text}: some percent of a step go to the page table", "; ".join(commands))


def open_files(facts: Facts, spec: ClusterSpec) -> Finding:
    wanted = spec.router.max_live_requests + SPARE_FILES
    text = f"{facts.open_files} open files, the router may need {wanted}"
    if facts.open_files >= wanted:
        return good("open files", text)
    if facts.open_files_hard >= wanted:
        return fails("open files", f"{text}: connections are refused under load", f"ulimit -n {wanted}")
    fix = f"raise the hard limit, which is {facts.open_files_hard}, or lower router.max_live_requests"
    return fails("open files", f"{text}: connections are refused under load", fix)


def ports(facts: Facts, spec: ClusterSpec) -> Finding:
    if facts.runs:
        return good("ports", f"cluster {spec.name!r} runs and has them")
    if facts.ports:
        text = "; ".join(f"{name}: {why}" for name, why in facts.ports.items())
        return fails("ports", text, "another port or host, or end whoever listens there: `ss -ltnp`")
    return good("ports", f"{spec.router.host}: " + ", ".join(str(port or "any") for port in spec.router.ports.values()))


def hosts(facts: Facts, spec: ClusterSpec) -> Finding:
    if facts.hosts:
        text = "; ".join(f"{name}: {why}" for name, why in facts.hosts.items())
        return fails("hosts", text, "an address of this machine; `ip -brief address` lists them")
    return good("hosts", "addresses of this machine" if spec.ray.local else "left to the nodes")


def python(facts: Facts, spec: ClusterSpec) -> Finding:
    have = tuple(int(part) for part in facts.python.split(".")[:2])
    if have < MIN_PYTHON:
        return fails("python", facts.python, f"Python {'.'.join(map(str, MIN_PYTHON))} or newer")
    return good("python", facts.python)


def packages(facts: Facts, spec: ClusterSpec) -> Finding:
    missing = [name for name in ("ray", "torch", "grpcio", "protobuf") if name not in facts.versions]
    text = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    if missing:
        return fails("packages", f"{', '.join(missing)} missing", "pip install --constraint constraints.txt .")
    if spec.ray.local and not facts.versions["ray"].startswith(RAY_TRIED):
        return slow("packages", f"{text}: this Ray starts with all its helpers", f"pip install 'ray=={RAY_TRIED}*'")
    if "uvloop" not in facts.versions:
        return slow("packages", f"{text}: a router takes a third more CPU without uvloop", "pip install uvloop")
    return good("packages", text)


def compiler(facts: Facts, spec: ClusterSpec) -> Finding:
    """Compiled kernels may be in the cache already; a worker's ready line says what computes."""
    if len(facts.compilers) == 2:
        return good("compiler", ", ".join(facts.compilers))
    wanted = {spec.pool(role).kernels for role in ROLES}
    text = f"{', '.join(facts.compilers) or 'none'}; native kernels are made by a C and a C++ compiler"
    if "native" in wanted:
        return fails("compiler", f"{text}, and the spec asks for them", "apt install g++, or kernels: auto")
    return slow("compiler", f"{text}: PyTorch computes instead, several times slower", "apt install g++")


def cards(facts: Facts, spec: ClusterSpec) -> Finding:
    demand = {role: spec.pool(role) for role in ROLES if spec.pool(role).device.startswith("cuda")}
    own = sum(pool.replicas for pool in demand.values() if pool.takes_card)
    asked = ", ".join(f"pools.{role}.device {pool.device}" for role, pool in demand.items() if pool.replicas)
    if not spec.ray.local:
        return good("cards", f"{asked or 'none asked for'}; they are on the nodes of a Ray that is joined")
    if not facts.cards:
        if asked:
            return fails("cards", f"{asked}, and torch sees none", "a CUDA build of torch and a driver, or device: cpu")
        return good("cards", "none that torch sees; workers compute on CPUs")
    text = ", ".join(f"{card.name} {format_binary_size(card.memory_bytes)}" for card in facts.cards)
    text += f"; NCCL {facts.nccl}" if facts.nccl else "; no NCCL"
    if own > len(facts.cards):
        fix = "fewer replicas, or device: cuda:0 for workers that share a card, with shares that add up to less than 1"
        return fails("cards", f"{text}; device: cuda wants one for each of {own} workers", fix)
    if asked:
        return good("cards", f"{text}; {asked}")
    if any(spec.pool(role).may_take_card for role in ROLES):
        return good("cards", f"{text}; workers with gpu_memory_utilization take them")
    return good("cards", f"{text}; workers compute on CPUs and leave them alone: pools.*.device says otherwise")


def model(facts: Facts, spec: ClusterSpec) -> Finding:
    pull = f"kvrelay pull {spec.model}"
    match facts.model:
        case "ready":
            return good("model", f"{spec.model} is ready")
        case "make":
            return slow("model", f"{spec.model} is converted at the first start", pull)
        case "fetch":
            return slow("model", f"{spec.model} may have to be fetched at the first start", pull)
    return fails("model", facts.model, "give model: an alias, a folder, a GGUF file or a Hugging Face id")


def router_files(facts: Facts, spec: ClusterSpec) -> Finding:
    if facts.router_files:
        return fails("router files", facts.router_files, "router.api_keys, router.tls_*: paths on this machine")
    return good("router files", "keys and certificates that the spec names can be read")


def disk(facts: Facts, spec: ClusterSpec) -> Finding:
    text = f"{format_binary_size(facts.disk_bytes)} free where models are kept"
    if facts.disk_bytes < MIN_DISK_BYTES and facts.model != "ready":
        return fails("disk", text, "free some, or set KVRELAY_HOME to a larger disk")
    return good("disk", text)


def nodes(facts: Facts, spec: ClusterSpec) -> Finding:
    if spec.ray.local:
        return good("nodes", "this machine")
    if facts.nodes_error:
        return fails(
            "nodes", f"{spec.ray.address}: {facts.nodes_error}", "ray.address, and RAY_AUTH_TOKEN if it has one"
        )
    wanted = {"python": facts.python, **facts.versions}
    for node in facts.nodes:
        unlike = [name for name in wanted if node.versions.get(name) != wanted[name]]
        if unlike:
            has = ", ".join(f"{name} {node.versions.get(name, 'missing')}" for name in unlike)
            return fails("nodes", f"{node.address} has {has}; here other versions", "one image for all nodes")
    for node in facts.nodes:
        if abs(node.clock_ahead_s) - node.clock_error_s > MAX_CLOCK_SKEW_S:
            text = f"the clock of {node.address} is {node.clock_ahead_s:+.1f} s off; logs of nodes do not fit together"
            return slow("nodes", text, "NTP on every node")
    return good("nodes", f"{len(facts.nodes)}: " + ", ".join(node.address for node in facts.nodes))


CHECKS: Sequence[Check] = (
    *(cpu, cores, memory, shm, huge_pages, open_files, disk),
    *(ports, hosts, router_files, python, packages, compiler, cards, model, nodes),
)
