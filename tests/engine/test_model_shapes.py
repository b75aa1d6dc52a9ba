from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, ModelError
from engine.model_shapes import SHAPES, ModelShape, find_shape, read_shape

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
}


def folder_with(path: Path, **fields: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    return path


def test_a_shape_is_found_by_name_in_any_case() -> None:
    assert find_shape("Llama-3-70B") is SHAPES["llama-3-70b"]


def test_a_folder_gives_the_shape_of_its_config(tmp_path: Path) -> None:
    shape = find_shape(str(folder_with(tmp_path)))
    assert shape == ModelShape(
        name=tmp_path.name, num_layers=32, num_kv_heads=8, head_dim=128, max_model_len=8192, sliding_window=None
    )


def test_a_model_without_shared_heads_has_as_many_kv_heads_as_heads(tmp_path: Path) -> None:
    shape = read_shape(folder_with(tmp_path, num_key_value_heads=None, head_dim=64))
    assert (shape.num_kv_heads, shape.head_dim) == (32, 64)


def test_the_text_part_of_a_model_of_several_kinds_counts(tmp_path: Path) -> None:
    assert read_shape(folder_with(tmp_path, text_config={**LLAMA, "num_hidden_layers": 5})).num_layers == 5


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]}, None),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention"]}, 4096),
        ({"sliding_window": 4096, "architectures": ["MistralForCausalLM"]}, 4096),
        ({"sliding_window": 512, "architectures": ["Gemma3ForCausalLM"]}, None),
        ({"sliding_window": 4096, "architectures": ["Qwen2ForCausalLM"]}, None),
    ],
)
def test_a_window_counts_if_every_layer_has_it(tmp_path: Path, fields: dict[str, Any], window: int | None) -> None:
    assert read_shape(folder_with(tmp_path, **fields)).sliding_window == window


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (
            {"num_hidden_layers": "many"},
            r"config\.json: num_hidden_layers: must be an integer of at least 1, got 'many'",
        ),
        ({"num_attention_heads": 0}, r"config\.json: num_attention_heads: must be an integer of at least 1, got 0"),
        ({"kv_lora_rank": 512}, r"config\.json: kv_lora_rank: "),
    ],
)
def test_a_config_that_is_no_plain_kv_names_the_field(tmp_path: Path, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        read_shape(folder_with(tmp_path, **fields))


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'gpt-9' is neither a folder nor a shape known by name \(smollm2-135m, "):
        find_shape("gpt-9")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        find_shape(str(tmp_path))


def test_dimensions_have_limits() -> None:
    with pytest.raises(ConfigError, match=r"num_layers must be in \[1, 65536\], got 0"):
        ModelShape(name="x", num_layers=0, num_kv_heads=1, head_dim=1)
