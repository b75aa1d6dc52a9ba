from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_llama import TINY, PagedRunner, model_of, random_tensors, write_checkpoint

from engine.config import ModelConfig, RopeScaling
from engine.errors import ConfigError, ModelError
from engine.model.registry import load_model

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    "config",
    [TINY, replace(TINY, tie_word_embeddings=False), replace(TINY, rope_scaling=SCALING)],
    ids=["tied", "untied", "scaled"],
)
def test_a_checkpoint_loads_into_the_model_it_came_from(tmp_path: Path, config: ModelConfig) -> None:
    tensors = random_tensors(config)
    write_checkpoint(tmp_path, config, tensors)

    model = load_model(tmp_path, "float32")

    assert model.config == config
    expected = PagedRunner(model_of(config, tensors), block_size=16).run("a", range(40), [40])
    assert torch.equal(PagedRunner(model, block_size=16).run("a", range(40), [40]), expected)


def test_a_second_copy_of_a_tied_head_is_ignored(tmp_path: Path) -> None:
    tensors = random_tensors(TINY)
    write_checkpoint(tmp_path, TINY, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})

    assert load_model(tmp_path, "bfloat16").config.tie_word_embeddings


def test_an_unsupported_architecture_is_refused_with_those_supported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY, random_tensors(TINY))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))

    with pytest.raises(ModelError, match=r"supported: LlamaForCausalLM, .*; found: MambaForCausalLM"):
        load_model(tmp_path, "float32")


def test_an_unknown_dtype_is_refused_with_those_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype must be one of .*'bfloat16'.* got 'int4'"):
        load_model(tmp_path, "int4")


@pytest.mark.model
def test_the_real_model_names_the_capital_of_france(smollm2_folder: Path) -> None:
    model = load_model(smollm2_folder, "bfloat16")
    runner = PagedRunner(model, block_size=16, num_blocks=8, dtype="bfloat16")
    # "The capital of France is" -> " Paris"
    logits = runner.run("a", [504, 3575, 282, 4649, 314], [5])

    assert int(logits[-1].argmax()) == 7042
