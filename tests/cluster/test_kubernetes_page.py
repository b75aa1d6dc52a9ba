"""docs/quickstart-kubernetes.md is checked as far as a machine without Kubernetes allows."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from doc_commands import parse_kvrelay, shell_commands

from cluster.deploy_spec import DeploySpec
from cluster.manifests import manifests
from cluster.spec import ClusterSpec, RouterSpec
from cluster.spec_file import load_spec

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quickstart-kubernetes.md").read_text()
COMMANDS = shell_commands(PAGE)
KUBECTL = [command for command in COMMANDS if "kubectl " in command]
OBJECTS = [each for file in manifests(ClusterSpec()).values() for each in file]


def test_every_command_is_of_a_program_that_is_looked_at_here() -> None:
    assert len(COMMANDS) > 12
    assert {command.split()[0] for command in COMMANDS} <= {
        "kvrelay",
        "kubectl",
        "docker",
        "kind",
        "helm",
        "HEAD=$(kubectl",
    }


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("kvrelay ") or " -- kvrelay " in c])
def test_every_kvrelay_command_parses(command: str) -> None:
    command = command[command.index("kvrelay ") :]
    assert parse_kvrelay(command).info_name == command.split()[1]


@pytest.mark.parametrize("command", KUBECTL)
def test_kubectl_knows_every_flag(command: str) -> None:
    kubectl = shutil.which("kubectl", path=str(Path(sys.executable).parent))
    if kubectl is None:
        pytest.skip("kubectl is not installed: `make tools` does")
    words = shlex.split(command.removeprefix("HEAD=$(").removesuffix(")"))
    words = words[: words.index("--")] if "--" in words else words
    verbs = [word for word in words[1:4] if word.isalpha() and word in ("create", "secret", "generic")] or words[1:2]
    shown = subprocess.run([kubectl, *verbs, "--help"], capture_output=True, text=True, check=True).stdout
    options = subprocess.run([kubectl, "options"], capture_output=True, text=True, check=True).stdout
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    assert [flag for flag in flags if not re.search(rf"(^|[\s,]){re.escape(flag)}[=,]", shown + options)] == []


def test_the_secrets_that_it_makes_are_those_that_the_objects_name() -> None:
    made = {words[4]: words[5] for words in map(str.split, COMMANDS) if words[1:4] == ["create", "secret", "generic"]}
    with_tls = manifests(ClusterSpec(router=RouterSpec(tls_cert="a", tls_key="b")))
    named = set(re.findall(r"kvrelay-default-(?:[\w-]*key[\w-]*|tls\b)", str(with_tls)))
    assert set(made) == named
    assert [made[name].partition("=")[2].partition("=")[0] for name in sorted(made)] == [
        "api-keys.yaml",
        "cluster-key",
        "api-key",
        "tls.crt",
    ]


def test_folders_and_files_that_it_applies_are_there() -> None:
    paths = re.findall(r"deploy/[\w./-]+", "\n".join(COMMANDS))
    assert paths
    assert all((ROOT / path).exists() for path in paths)
    shown = re.findall(r"\| `(overlays/[\w-]+|base)` \|", PAGE)
    assert {ROOT / "deploy" / "kubernetes" / name for name in shown} == {
        path.parent for path in (ROOT / "deploy" / "kubernetes").rglob("kustomization.yaml")
    }


def test_the_targets_of_the_image_are_there() -> None:
    targets = re.findall(r"--target (\w+)", "\n".join(COMMANDS))
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert targets == ["cpu", "cuda"]
    assert all(f" AS {target}\n" in dockerfile for target in targets)
    tags = re.findall(r"--tag (\S+)", "\n".join(COMMANDS))
    specs = [load_spec(path) for path in (ROOT / "deploy" / "kubernetes" / "specs").glob("*.yaml")]
    assert {DeploySpec().image, *(spec.deploy.image for spec in specs)} == set(tags)


def test_names_ports_and_labels_are_those_of_the_objects() -> None:
    text = yaml.safe_dump(OBJECTS)
    service: Any = next(each for each in OBJECTS if each["kind"] == "Service")
    assert f"service/{service['metadata']['name']} " in PAGE
    (forwarded,) = [command for command in COMMANDS if "port-forward" in command]
    ports = [f"{each['port']}:{each['port']}" for each in service["spec"]["ports"]]
    assert forwarded.split()[3:] == ports
    assert "kvrelay.io/clients: 'true'" in text
    for container in ("supervisor", "ray-head", "ray-worker"):
        assert f"name: {container}\n" in text
        assert f"`{container}`" in PAGE
    assert f"-f {'/etc/kvrelay/spec/cluster.yaml'}" in PAGE
    assert "mountPath: /etc/kvrelay/spec\n" in text


def test_every_field_of_the_deploy_section_that_it_names_exists() -> None:
    known = {f"deploy.{name}" for name in get_type_hints(DeploySpec)}
    assert set(re.findall(r"`(deploy\.\w+)`", PAGE)) <= known


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE))
def test_every_link_leads_to_a_file(link: str) -> None:
    assert link.startswith("https://") or (ROOT / "docs" / link).exists()
