"""A cluster whose processes run what the containers of its manifests run, on a real Ray, and who comes to it from
outside: a Ray client, Ray jobs, the job of the manifests. TLS and API keys are as the manifests want them.

One Ray for all, because its head with jobs takes seconds to start.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from tenants_file import write_tenants
from worker_process import make_tiny_model

from bench.ray_nodes import RayAddress, node_environment, ray_nodes
from cluster.manifests import manifests
from cluster.ray_pods import GCS_PORT, HOME, role_resource
from cluster.spec import ROLES, ClusterSpec, PoolSpec, PoolsSpec, RouterSpec, SupervisionSpec

pytestmark = pytest.mark.processes

BOUND_S = 100.0
LINES = 120
"""Of a batch: so many that, one after the other, they take longer than it takes to stop a job."""
CLIENT = """
import json, sys
import cluster
from kvrelay import Tls

address, ca_file, source, output = sys.argv[1:]
with cluster.connect(address, tls=Tls(ca_file=ca_file)) as connected:
    answer = connected.generate("hello", max_tokens=6, temperature=0.0, ignore_eos=True)
    with connected.stream("hello", max_tokens=6, temperature=0.0, ignore_eos=True) as stream:
        pieces = [chunk.token_ids for chunk in stream]
    batch = connected.submit_batch(source, output)
    end = batch.result(60)
    scaled = connected.scale(prefill=2)
    flipped = connected.flip("prefill-1")
    workers = sorted(worker.worker_id for worker in connected.status().workers)
    try:
        connected.scale(decode=0)
    except Exception as error:
        refusal = f"{type(error).__name__}: {error}"
    connected.client.scale(decode=1)
print(json.dumps({
    "generated": answer.token_ids, "streamed": sum(map(list, pieces), []), "done": end.done, "failed": end.failed,
    "lines": scaled["lines"] + flipped["lines"], "workers": workers, "refusal": refusal,
    "torch": "torch" in sys.modules,
}))
"""
FACTS = """
import json, sys
import ray
from cluster.ray_facts import node_facts
from cluster.ray_host import actor_needs

facts = [(fact.address, dict(fact.versions), abs(fact.clock_ahead_s) < 5) for fact in node_facts(sys.argv[1])]
ray.init(sys.argv[1], log_to_driver=False)

class Somewhere:
    def node(self):
        return ray.get_runtime_context().get_node_id()

actors = [ray.remote(Somewhere).options(**actor_needs(1, "", "place=worker")).remote() for _ in range(2)]
nodes = {node["NodeID"]: node["Labels"].get("place", "") for node in ray.nodes()}
print(json.dumps({"facts": facts, "nodes": sorted(nodes.values()),
                  "placed": [nodes[node] for node in ray.get([actor.node.remote() for actor in actors], timeout=60)]}))
"""


@dataclass(frozen=True)
class Running:
    nodes: RayAddress
    spec: ClusterSpec
    environment: Mapping[str, str]
    """Of whoever comes from outside; it finds nothing by a record."""
    ca_file: str
    objects: Mapping[str, Any]
    """By kind, with the paths and addresses of this machine."""

    def python(self, *arguments: str) -> str:
        """The last line of what it prints."""
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BOUND_S, check=False, env=dict(self.environment)
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()[-1]

    def job(self, verb: str, *arguments: str) -> str:
        return self.python("-m", "ray.scripts.scripts", "job", verb, "--address", self.nodes.jobs_url, *arguments)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("pods")
    for name in ("model", "elsewhere"):
        (folder / name).mkdir()
    ports = free_ports(4)
    pool = PoolSpec(kv_memory_bytes=4 << 20, block_size=8)
    spec = ClusterSpec(
        model=str(make_tiny_model(folder / "model")),
        dtype="float32",
        pools=PoolsSpec(prefill=pool, decode=pool),
        router=RouterSpec(port=ports[0], http_port=ports[1], tls_cert="any", tls_key="any"),
        supervision=SupervisionSpec(worker_drain_s=5.0),
    )
    token, job_key = secrets.token_hex(32), {"KVRELAY_API_KEY": "key-of-ops"}
    make_secrets(folder / "etc")
    outside = {**os.environ, **node_environment(token), **job_key, "KVRELAY_HOME": str(folder / "elsewhere")}
    objects = here(manifests(spec), folder)
    ray_head, supervisor = objects["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    offers = {role_resource(role): 3.0 for role in (*ROLES, "router")}
    in_head = {**node_environment(token), **values(ray_head), **job_key}
    with ExitStack() as stack:
        nodes = stack.enter_context(ray_nodes(1, offers, in_head, client_port=ports[2], jobs_port=ports[3]))
        at_spec = folder / "etc" / "spec" / "cluster.yaml"
        at_spec.parent.mkdir()
        at_spec.write_text(objects["ConfigMap"]["data"]["cluster.yaml"].replace(f"127.0.0.1:{GCS_PORT}", nodes.address))
        program, *arguments = supervisor["command"]
        assert program == "kvrelay"
        environment = {**os.environ, **node_environment(token), **values(supervisor)}
        up = subprocess.Popen([sys.executable, "-m", "cluster", *arguments], env=environment)
        stack.callback(end, up, ray_head["lifecycle"]["preStop"]["exec"]["command"])
        wait_until_ready(supervisor["readinessProbe"]["httpGet"], ports[1], up)
        yield Running(nodes, spec, outside, str(folder / "etc" / "tls" / "ca.crt"), objects)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def make_secrets(etc: Path) -> None:
    """What quickstart-kubernetes.md has made, as the pods see it."""
    for name in ("tls", "cluster-key", "api-keys"):
        (etc / name).mkdir(parents=True)
    authority = trustme.CA()
    router = authority.issue_cert("127.0.0.1")
    (etc / "tls" / "tls.crt").write_bytes(b"".join(part.bytes() for part in router.cert_chain_pems))
    (etc / "tls" / "tls.key").write_bytes(router.private_key_pem.bytes())
    (etc / "tls" / "ca.crt").write_bytes(authority.cert_pem.bytes())
    (etc / "cluster-key" / "cluster-key").write_text(secrets.token_hex(32))
    write_tenants(etc / "api-keys" / "api-keys.yaml", ops={"admin": True})


def here(files: Mapping[str, list[Any]], folder: Path) -> dict[str, Any]:
    """The first object of each kind, with what mounts and addresses are on this machine."""
    text = json.dumps([each for objects in files.values() for each in objects])
    for there, mine in (("/etc/kvrelay", str(folder / "etc")), (HOME, str(folder / "home")), ("0.0.0.0", "127.0.0.1")):
        text = text.replace(there, mine)
    return {each["kind"]: each for each in reversed(json.loads(text))}


def values(container: Any) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def wait_until_ready(probe: Any, port: int, up: subprocess.Popen[bytes]) -> None:
    """As the kubelet does: without verifying anybody."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    tick, deadline = threading.Event(), time.monotonic() + BOUND_S
    url = f"{probe['scheme'].lower()}://127.0.0.1:{port}{probe['path']}"
    while True:
        assert up.poll() is None, "the supervisor ended"
        assert time.monotonic() < deadline, "it is not ready"
        try:
            with urllib.request.urlopen(url, timeout=3, context=context):
                return
        except OSError:
            tick.wait(0.1)


def end(up: subprocess.Popen[bytes], pre_stop: list[str]) -> None:
    """As a pod ends: the router's container waits in its hook until the supervisor has stopped the router."""
    with subprocess.Popen(pre_stop) as waiting:
        up.terminate()
        assert up.wait(BOUND_S) == 0
        assert waiting.wait(BOUND_S) == 0


def records(output: Path) -> dict[str, Any]:
    """By custom_id, each once, the text."""
    found = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [record["error"] for record in found] == [None] * len(found)
    texts = {record["custom_id"]: record["response"]["body"]["choices"][0]["text"] for record in found}
    assert len(texts) == len(found)
    return texts


def batch_of(count: int, max_tokens: int, folder: Path) -> Path:
    body = {"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True}
    lines = [json.dumps({"custom_id": f"id-{n}", "url": "/v1/completions", "body": body}) for n in range(count)]
    path = folder / "in.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_client_process_generates_streams_runs_a_batch_and_scales(running: Running, tmp_path: Path) -> None:
    source, output = batch_of(5, 4, tmp_path), tmp_path / "out.jsonl"
    nodes = running.nodes
    told = json.loads(running.python("-c", CLIENT, nodes.client_address, running.ca_file, str(source), str(output)))
    assert told["generated"] == told["streamed"]
    assert len(told["generated"]) == 6
    assert (told["done"], told["failed"]) == (5, 0)
    assert told["lines"] == [
        "prefill: 1 -> 2 workers: 1 worker is started",
        "prefill: 2 -> 1 workers: 1 worker is drained and stopped",
        "decode: 1 -> 2 workers: 1 worker is started",
    ]
    assert told["workers"] == ["decode-0", "decode-1", "prefill-0"]
    assert told["refusal"].startswith("ConfigError: decode: replicas must be at least 1")
    assert not told["torch"]
    assert len(records(output)) == 5


def test_a_job_of_ray_that_was_stopped_and_is_submitted_again_answers_each_line_once_as_a_batch_does(
    running: Running, tmp_path: Path
) -> None:
    source, output, here = batch_of(LINES, 64, tmp_path), tmp_path / "job.jsonl", tmp_path / "batch.jsonl"

    def batch(output: Path, *options: str) -> list[str]:
        tls = ["--tls-ca", running.ca_file]
        return ["-m", "cluster.jobs.batch", str(source), "-o", str(output), *tls, "--json", *options]

    def submit(*options: str, concurrency: int) -> None:
        entry = [sys.executable, *batch(output, "--ray", "auto", "--concurrency", str(concurrency))]
        # In a pod KubeRay says which Ray `auto` is. Here there may be others, of other tests.
        running.job("submit", *options, "--", "env", f"RAY_ADDRESS={running.nodes.address}", *entry)

    submit("--no-wait", "--submission-id", "first", concurrency=1)
    tick, deadline = threading.Event(), time.monotonic() + BOUND_S
    while not output.exists() or output.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < deadline, "the job writes nothing"
        tick.wait(0.02)
    running.job("stop", "first")
    before = output.read_bytes()
    assert before.count(b"\n") < LINES

    submit(concurrency=16)
    assert output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    http_url = f"https://127.0.0.1:{running.spec.router.ports['http_port']}"
    assert json.loads(running.python(*batch(here, "--url", http_url)))["done"] == LINES
    assert records(output) == records(here)


def test_the_job_of_the_manifests_gets_an_answer(running: Running) -> None:
    name, port = running.objects["Service"]["metadata"]["name"], running.spec.router.port
    entry = running.objects["RayJob"]["spec"]["entrypoint"].replace(f"{name}:{port}", f"127.0.0.1:{port}")
    program, *arguments = shlex.split(entry)
    assert program == "kvrelay"
    assert "tokens" in running.python("-m", "cluster", *arguments, "--json")


def test_nodes_of_a_real_ray_tell_what_they_have_and_actors_run_where_labels_fit(running: Running) -> None:
    told = json.loads(running.python("-c", FACTS, running.nodes.address))
    assert [address for address, _, _ in told["facts"]] == ["127.0.0.1", "127.0.0.1"]
    assert all(found["ray"] and found["python"] and clock for _, found, clock in told["facts"])
    assert told["nodes"] == ["", "worker"]
    assert told["placed"] == ["worker", "worker"]
