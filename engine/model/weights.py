"""Reads safetensors files into tensors that already exist. Knows files, names and shapes, no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.config_fields import read_json_object
from engine.errors import ModelError

_INDEX = "model.safetensors.index.json"
_SHOWN = 3


Cut = Callable[[str, torch.Tensor], torch.Tensor]
"""From a tensor of the checkpoint, by its name, to the part of it that is wanted."""


def load_weights(
    folder: Path, parts: Mapping[str, torch.Tensor], ignored: frozenset[str] = frozenset(), cut: Cut | None = None
) -> None:
    """Fill every tensor of `parts` with the checkpoint's tensor of that name, converted to its type.

    `ignored` are endings of names that the checkpoint may hold and nobody wants; `cut` gives the part that is wanted of
    a tensor. Files are mapped, so no second copy is made. Raises `ModelError` naming file and tensor: damaged or
    missing file, missing, unexpected or twice given tensor, wrong shape. `parts` are then partly filled.
    """
    filled: dict[str, Path] = {}
    for path in _files(folder):
        for name, tensor in _tensors(path):
            if name.endswith(tuple(ignored)):
                continue
            if name not in parts:
                raise ModelError(
                    f"{path} holds the tensor {name} {list(tensor.shape)}, which this model has no use for"
                )
            if name in filled:
                raise ModelError(f"the tensor {name} is in {filled[name]} and again in {path}")
            _fill(parts[name], tensor if cut is None else cut(name, tensor), name, path)
            filled[name] = path
    missing = [name for name in parts if name not in filled]
    if missing:
        shown = ", ".join(f"{name} {list(parts[name].shape)}" for name in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ModelError(f"{folder}: the safetensors files lack {shown}{more}")


def _files(folder: Path) -> list[Path]:
    """One `model.safetensors`, or the shards that the index names, or whatever safetensors there are."""
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    index = folder / _INDEX
    if index.exists():
        shards = read_json_object(index).get("weight_map")
        if not isinstance(shards, dict) or not all(_is_plain_name(name) for name in shards.values()):
            raise ModelError(f"{index}: weight_map must give the name of a file in this folder for each tensor")
        return [folder / name for name in sorted(set(shards.values()))]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} holds neither model.safetensors nor {_INDEX}; pull the model again")
    return paths


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of one file, as a view of the mapped file that is good until the next one is asked for."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; pull the model again") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or cut short ({error}); pull the model again") from error


def _fill(part: torch.Tensor, tensor: torch.Tensor, name: str, path: Path) -> None:
    if tensor.shape != part.shape:
        raise ModelError(f"{name} in {path} has shape {list(tensor.shape)}, expected {list(part.shape)}")
    if not tensor.is_floating_point():
        raise ModelError(f"{name} in {path} has type {tensor.dtype}, expected floating point: quantized?")
    part.copy_(tensor)
