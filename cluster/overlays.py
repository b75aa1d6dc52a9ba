"""Kustomize overlays: what the objects of one spec have that those of another, the base, have not. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cluster.manifests import HEADER, JOB, KUSTOMIZATION, to_yaml
from cluster.ray_pods import Object


def overlay(base: Iterable[Object], files: Mapping[str, list[Object]], base_path: str) -> dict[str, str]:
    """Texts of an overlay's files, which make the objects in `files` of those in `base`, at `base_path`."""
    before = {_key(each): each for each in base}
    after = {_key(each): each for name, objects in files.items() if name != JOB for each in objects}
    added = {_file(key, ""): each for key, each in after.items() if key not in before}
    patches = {}
    for key, old in before.items():
        change: Object | None = merge_patch(old, after[key]) if key in after else {"$patch": "delete"}
        if change is not None:
            name = {"metadata": {"name": old["metadata"]["name"], **change.get("metadata", {})}}
            patches[_file(key, ".patch")] = {"apiVersion": old["apiVersion"], "kind": old["kind"], **change, **name}
    kustomization: Object = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [base_path, *sorted(added)],
        "patches": [{"path": name} for name in sorted(patches)],
    }
    files_of = {**added, **patches, KUSTOMIZATION: kustomization}
    return {name: HEADER + to_yaml([each]) for name, each in files_of.items()}


def merge_patch(before: Any, after: Any) -> Any:
    """What makes `after` of `before` by RFC 7386, in which a list replaces a list; None if they are equal."""
    if before == after:
        return None
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    removed = {name: None for name in before if name not in after}
    added = {name: value for name, value in after.items() if name not in before}
    changed = {
        name: merge_patch(before[name], value)
        for name, value in after.items()
        if name in before and before[name] != value
    }
    return {**removed, **added, **changed}


def _file(key: tuple[str, str], suffix: str) -> str:
    return f"{'-'.join(key).lower()}{suffix}.yaml"


def _key(each: Object) -> tuple[str, str]:
    return each["kind"], each["metadata"]["name"]
