"""What is wrong with a checkpoint is said with file, tensor and shapes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelError
from engine.model.weights import load_weights


@pytest.fixture
def parts() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(4)}


def good_tensors() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.arange(4.0)}


def write_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    weight_map: dict[str, str] = {}
    for file_name, tensors in shards.items():
        save_file(tensors, folder / file_name)
        weight_map |= dict.fromkeys(tensors, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_are_written_into_slices_of_a_fused_one(tmp_path: Path) -> None:
    save_file({"q": torch.full((2, 3), 1.0), "k": torch.full((1, 3), 2.0)}, tmp_path / "model.safetensors")
    fused = torch.zeros(3, 3)

    load_weights(tmp_path, {"q": fused[:2], "k": fused[2:]})

    assert fused.tolist() == [[1.0] * 3, [1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_type_is_converted(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    values = torch.tensor([0.5, -3.0, 1.25])
    save_file({"a": values.to(stored)}, tmp_path / "model.safetensors")
    part = torch.zeros(3, dtype=wanted)

    load_weights(tmp_path, {"a": part})

    assert torch.equal(part, values.to(wanted))


def test_shards_are_those_that_the_index_names(tmp_path: Path, parts: dict[str, torch.Tensor]) -> None:
    good = good_tensors()
    write_shards(
        tmp_path,
        {
            "model-1-of-2.safetensors": {"a.weight": good["a.weight"]},
            "model-2-of-2.safetensors": {"b.weight": good["b.weight"]},
        },
    )
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")

    load_weights(tmp_path, parts)

    assert torch.equal(parts["a.weight"], good["a.weight"])
    assert torch.equal(parts["b.weight"], good["b.weight"])


def test_ignored_endings_may_be_there_and_are_not_read(tmp_path: Path, parts: dict[str, torch.Tensor]) -> None:
    extra = {"layers.0.rotary_emb.inv_freq": torch.zeros(7)}
    save_file(good_tensors() | extra, tmp_path / "model.safetensors")

    load_weights(tmp_path, parts, frozenset({"rotary_emb.inv_freq"}))

    assert torch.equal(parts["b.weight"], torch.arange(4.0))


def test_missing_tensors_are_named_with_their_shapes(tmp_path: Path, parts: dict[str, torch.Tensor]) -> None:
    save_file({"b.weight": torch.arange(4.0)}, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match=r"lack a\.weight \[2, 3\]"):
        load_weights(tmp_path, parts)


def test_an_unexpected_tensor_is_named_with_its_file(tmp_path: Path, parts: dict[str, torch.Tensor]) -> None:
    save_file(good_tensors() | {"a.bias": torch.zeros(2)}, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match=r"model\.safetensors holds the tensor a\.bias \[2\]"):
        load_weights(tmp_path, parts)


def test_a_wrong_shape_is_told_with_the_right_one(tmp_path: Path, parts: dict[str, torch.Tensor]) -> None:
    save_file(good_tensors() | {"a.weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match=r"a\.weight in .*model\.safetensors has shape \[3, 2\], expected \[2, 3\]"):
        load_weights(tmp_path, parts)


def test_a_tensor_given_twice_is_refused(tmp_path: Path, parts: dict[str, torch.Tensor]) -> None:
    write_shards(tmp_path, {"1.safetensors": good_tensors(), "2.safetensors": {"b.weight": torch.zeros(4)}})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "1.safetensors", "b.weight": "2.safetensors"}}))

    with pytest.raises(ModelError, match=r"b\.weight is in .*1\.safetensors and again in .*2\.safetensors"):
        load_weights(tmp_path, parts)


def test_integers_are_not_taken_for_weights(tmp_path: Path, parts: dict[str, torch.Tensor]) -> None:
    save_file(good_tensors() | {"b.weight": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match=r"b\.weight in .* has type torch\.int8"):
        load_weights(tmp_path, parts)


@pytest.mark.parametrize("kept_bytes", [0, 5, 40, -1])
def test_a_file_cut_short_is_called_damaged(tmp_path: Path, parts: dict[str, torch.Tensor], kept_bytes: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(good_tensors(), path)
    path.write_bytes(path.read_bytes()[:kept_bytes])

    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short"):
        load_weights(tmp_path, parts)


@pytest.mark.parametrize("seed", range(5))
def test_random_bytes_are_called_damaged(tmp_path: Path, parts: dict[str, torch.Tensor], seed: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(np.random.default_rng(seed).bytes(500))

    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short"):
        load_weights(tmp_path, parts)


def test_a_missing_shard_is_named(tmp_path: Path, parts: dict[str, torch.Tensor]) -> None:
    write_shards(tmp_path, {"1.safetensors": good_tensors()})
    (tmp_path / "1.safetensors").unlink()

    with pytest.raises(ModelError, match=r"1\.safetensors is missing"):
        load_weights(tmp_path, parts)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}, {"a": "../1.safetensors"}, {"a": "/etc/1.safetensors"}])
def test_an_index_cannot_name_files_elsewhere(
    tmp_path: Path, parts: dict[str, torch.Tensor], weight_map: object
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    with pytest.raises(ModelError, match="weight_map must give the name of a file in this folder"):
        load_weights(tmp_path, parts)


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path, parts: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_weights(tmp_path, parts)
