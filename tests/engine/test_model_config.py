"""What is read from a model folder, what is refused, and when two folders are the same model."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine import model_config
from engine.config import LinearRopeScaling, LocalLayers, ModelConfig, RopeScaling
from engine.errors import ModelError
from engine.model_config import DIGEST_FILE, load_model_config, model_fingerprint, read_eos_token_ids

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NULL = object()
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_config(folder: Path, **changes: Any) -> Path:
    """A config.json with `changes`; a field changed to None is left out, one changed to NULL is null."""
    fields = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
    fields = {name: None if value is NULL else value for name, value in fields.items()}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Enough of a model to be told apart from others."""
    write_config(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-1.safetensors").write_bytes(b"first weights")
    (tmp_path / "model-2.safetensors").write_bytes(b"second weights")
    return tmp_path


def test_the_fields_of_a_llama_are_read(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path))

    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (128, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 16)
    assert (config.max_model_len, config.rms_norm_eps, config.rope_theta) == (256, 1e-5, 500000.0)
    assert config.rope_scaling is None
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_absent_fields_take_the_defaults_of_llama_2(tmp_path: Path) -> None:
    absent = dict.fromkeys(("num_key_value_heads", "rope_theta", "tie_word_embeddings", "bos_token_id", "eos_token_id"))
    config = load_model_config(write_config(tmp_path, **absent))

    assert config.num_kv_heads == config.num_heads
    assert config.rope_theta == 10000.0
    assert not config.tie_word_embeddings
    assert config.bos_token_id is None
    assert config.eos_token_ids == ()


def test_a_head_may_be_wider_than_its_share_of_the_model(tmp_path: Path) -> None:
    assert load_model_config(write_config(tmp_path, head_dim=32)).head_dim == 32


def test_llama_3_scaling_is_read(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, rope_scaling=LLAMA3_SCALING))

    assert config.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )


def test_rotary_settings_are_read_from_where_transformers_5_writes_them(tmp_path: Path) -> None:
    rope = {**LLAMA3_SCALING, "rope_theta": 250000.0}
    config = load_model_config(write_config(tmp_path, rope_theta=None, rope_parameters=rope))

    assert config.rope_theta == 250000.0
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 8.0


def test_generation_settings_decide_which_tokens_end_an_output(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))

    assert read_eos_token_ids(tmp_path) == (7, 9)
    assert load_model_config(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"]
)
def test_a_missing_field_is_named_with_its_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {name}: missing"):
        load_model_config(write_config(tmp_path, **{name: None}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", "128"),
        ("hidden_size", 64.0),
        ("num_hidden_layers", True),
        ("num_attention_heads", 0),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", -1.0),
        ("rope_theta", [1]),
        ("rope_scaling", 8),
        ("tie_word_embeddings", "yes"),
        ("architectures", "LlamaForCausalLM"),
        ("bos_token_id", "<s>"),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [-1]),
    ],
)
def test_a_field_of_the_wrong_type_or_range_is_named_with_its_file(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {name}"):
        load_model_config(write_config(tmp_path, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("quantization_config", {"quant_method": "awq"}),
        ("rope_scaling", {"type": "yarn", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("partial_rotary_factor", 0.5),
        ("rope_parameters", {"partial_rotary_factor": 0.5}),
        ("sliding_window", 4096),
        ("layer_types", ["sliding_attention"] * 3),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    named = "rope_type" if name == "rope_scaling" else next(iter(value)) if name == "rope_parameters" else name
    with pytest.raises(ModelError, match=rf"config\.json: [a-z_.]*{named}: .*supported"):
        load_model_config(write_config(tmp_path, **{name: value}))


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}))

    assert config.rope_scaling == LinearRopeScaling(factor=2.0)


@pytest.mark.parametrize(
    ("architecture", "fields", "local"),
    [
        ("Mistral", {"sliding_window": 64}, LocalLayers(window=64, layers=(0, 1, 2))),
        ("Mistral", {}, LocalLayers(window=4096, layers=(0, 1, 2))),
        ("Mistral", {"sliding_window": NULL}, None),
        ("Qwen2", {"sliding_window": 64, "max_window_layers": 1}, None),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            LocalLayers(window=64, layers=(1, 2)),
        ),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 64}, None),
        ("Gemma3", {"sliding_window": 64}, LocalLayers(window=64, layers=(0, 1, 2), rope_theta=10000.0)),
        (
            "Gemma3",
            {"sliding_window": 64, "sliding_window_pattern": 2, "rope_local_base_freq": 500.0},
            LocalLayers(window=64, layers=(0, 2), rope_theta=500.0),
        ),
        (
            "Gemma3",
            {"sliding_window": 64, "layer_types": ["full_attention", "full_attention", "sliding_attention"]},
            LocalLayers(window=64, layers=(2,), rope_theta=10000.0),
        ),
    ],
)
def test_which_layers_have_a_window_is_as_in_transformers(
    tmp_path: Path, architecture: str, fields: dict[str, Any], local: LocalLayers | None
) -> None:
    folder = write_config(tmp_path, architectures=[f"{architecture}ForCausalLM"], **fields)

    assert load_model_config(folder).local == local


@pytest.mark.parametrize(
    ("architecture", "name", "value"),
    [
        ("Mistral", "sliding_window", 0),
        ("Mistral", "layer_types", ["full_attention"] * 3),
        ("Qwen2", "layer_types", ["sliding_attention"] * 3),
        ("Qwen3", "attention_bias", True),
        ("Gemma3", "layer_types", ["sliding_attention"] * 2),
        ("Gemma3", "layer_types", ["chunked_attention"] * 3),
        ("Gemma3", "hidden_activation", "gelu"),
        ("Gemma3", "use_bidirectional_attention", True),
        ("Gemma3", "rope_parameters", {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_what_a_family_does_not_do_is_refused_by_name(tmp_path: Path, architecture: str, name: str, value: Any) -> None:
    named = "rope_type" if name == "rope_parameters" else name
    with pytest.raises(ModelError, match=rf"config\.json: [a-z_.]*{named}: "):
        load_model_config(write_config(tmp_path, architectures=[f"{architecture}ForCausalLM"], **{name: value}))


def test_what_config_json_does_not_say_of_a_family_is_as_in_transformers(tmp_path: Path) -> None:
    def read(architecture: str) -> ModelConfig:
        absent = {"rope_theta": None, "tie_word_embeddings": None}
        return load_model_config(write_config(tmp_path, architectures=[f"{architecture}ForCausalLM"], **absent))

    assert (read("Qwen2").qkv_bias, read("Qwen2").head_dim) == (True, 16)
    assert (read("Qwen3").qk_norm, read("Qwen3").head_dim) == (True, 128)
    gemma = read("Gemma3")
    assert (gemma.head_dim, gemma.rope_theta, gemma.tie_word_embeddings) == (256, 1e6, True)
    assert gemma.score_scale == 256**-0.5


def test_another_architecture_is_refused_with_the_list_of_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"supported: LlamaForCausalLM, .*Gemma3ForCausalLM; found: MambaForCausalLM"):
        load_model_config(write_config(tmp_path, architectures=["MambaForCausalLM"]))


def test_settings_that_contradict_each_other_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: num_heads 4 is no multiple"):
        load_model_config(write_config(tmp_path, num_key_value_heads=3))


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"\xff\xfe"])
def test_a_missing_or_damaged_config_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_equal_content_has_one_fingerprint_wherever_it_lies(model_folder: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("other")
    for path in model_folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "config.json").write_text(json.dumps({**LLAMA, "transformers_version": "9.9"}, indent=4))

    assert len(model_fingerprint(model_folder)) == 32
    assert model_fingerprint(other) == model_fingerprint(model_folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "model-1.safetensors", "model-2.safetensors"])
def test_another_byte_in_a_file_is_another_fingerprint(model_folder: Path, name: str) -> None:
    before = model_fingerprint(model_folder)
    path = model_folder / name
    path.write_bytes(path.read_bytes() + b" ")

    assert model_fingerprint(model_folder) != before


def test_another_setting_is_another_fingerprint(model_folder: Path) -> None:
    before = model_fingerprint(model_folder)
    write_config(model_folder, rope_theta=10000)

    assert model_fingerprint(model_folder) != before


def test_weights_of_equal_size_are_read_again_once_they_changed(model_folder: Path) -> None:
    before = model_fingerprint(model_folder)
    path = model_folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    assert model_fingerprint(model_folder) != before


def test_unchanged_weights_are_read_once(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = model_fingerprint(model_folder)
    read: list[str] = []
    digest_file = model_config._digest_file

    def noting(path: Path) -> bytes:
        read.append(path.name)
        return digest_file(path)

    monkeypatch.setattr(model_config, "_digest_file", noting)

    assert model_fingerprint(model_folder) == before
    assert read == ["tokenizer.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"digest": 7}', '{"files": null, "digest": "zz"}'])
def test_a_torn_note_of_the_digest_is_replaced(model_folder: Path, content: str) -> None:
    before = model_fingerprint(model_folder)
    (model_folder / DIGEST_FILE).write_text(content)

    assert model_fingerprint(model_folder) == before
    assert json.loads((model_folder / DIGEST_FILE).read_text())["digest"]


def test_a_folder_that_cannot_keep_the_digest_still_has_a_fingerprint(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "replace", refuse)

    assert len(model_fingerprint(model_folder)) == 32
    assert [path.name for path in model_folder.glob(f"{DIGEST_FILE}*")] == []


def test_a_read_only_folder_still_has_a_fingerprint(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("write_text", "unlink"):
        monkeypatch.setattr(Path, name, refuse)

    assert len(model_fingerprint(model_folder)) == 32


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ModelError, match="holds no"):
        model_fingerprint(tmp_path)
