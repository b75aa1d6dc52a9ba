"""Each family, loaded from a folder as transformers writes it, against transformers' own logits and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILIES, load_family
from tiny_llama import PagedRunner

from engine.model.decoder import Model
from engine.model.registry import load_model

_TOLERANCE = 1e-4
ODD_CHUNKS = [1, 30, 2, 37, 16, 14]


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(load_family(name).write(tmp_path_factory.mktemp(name)), "float32")


@pytest.mark.parametrize("chunks", [[100], ODD_CHUNKS, [23] + [1] * 77], ids=["whole", "odd chunks", "decode"])
def test_logits_are_those_of_transformers_however_they_are_chunked(name: str, model: Model, chunks: list[int]) -> None:
    family = load_family(name)

    logits = PagedRunner(model, block_size=8).run("a", family.token_ids, chunks)

    assert float((logits - family.logits).abs().max()) < _TOLERANCE


@pytest.mark.parametrize("block_size", [4, 16])
def test_greedy_tokens_are_those_of_transformers(name: str, model: Model, block_size: int) -> None:
    family = load_family(name)
    runner = PagedRunner(model, block_size=block_size)

    output = [int(runner.run("a", family.token_ids[: family.num_prompt], [family.num_prompt])[-1].argmax())]
    while len(output) < len(family.greedy):
        output.append(int(runner.run("a", output[-1:], [1])[-1].argmax()))

    assert output == family.greedy


def test_float32_logits_do_not_depend_on_chunks_or_neighbours_to_the_last_bit(name: str, model: Model) -> None:
    token_ids = load_family(name).token_ids
    whole = PagedRunner(model, block_size=16).run("a", token_ids, [100])

    runner, parts, start = PagedRunner(model, block_size=16), [], 0
    for number, size in enumerate(ODD_CHUNKS):
        step = {"a": token_ids[start : start + size]}
        if number % 2:
            step = {f"other {number}": token_ids[: number + 2], **step}
        parts.append(runner.forward(step)["a"])
        start += size

    assert torch.equal(torch.cat(parts), whole)


def test_weights_in_several_files_are_the_same_model(name: str, model: Model, tmp_path: Path) -> None:
    family = load_family(name)
    in_shards = load_model(family.write(tmp_path, num_files=3), "float32")

    logits = [PagedRunner(m, block_size=16).run("a", family.token_ids[:20], [20]) for m in (model, in_shards)]

    assert torch.equal(*logits)
