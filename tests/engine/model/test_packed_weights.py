"""The file of packed weights: read in place of the checkpoint, for it alone, and never when it is damaged."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_llama import TINY, PagedRunner, random_tensors, weights_of

from engine.config import ModelConfig
from engine.model import packed_weights
from engine.model.decoder import DecoderWeights
from engine.model.native_decoder import NativeModel
from engine.model.packed_weights import PackedWeights, load_packed, pack
from engine.native.decoder import NativeDecoder, load_decoder

CHECKPOINT = b"c" * 32
TOKENS = [5, 4, 3, 90, 17]
UNTIED = replace(TINY, tie_word_embeddings=False, qkv_bias=True, qk_norm=True)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> NativeDecoder:
    return load_decoder(tmp_path_factory.getbasetemp() / "native")


def weights(config: ModelConfig = TINY, seed: int = 0) -> DecoderWeights:
    return weights_of(config, random_tensors(config, seed), "bfloat16")


def nothing() -> DecoderWeights:
    raise AssertionError("the weights were read")


def logits(packed: PackedWeights, decoder: NativeDecoder, config: ModelConfig = TINY) -> torch.Tensor:
    runner = PagedRunner(NativeModel(config, packed, decoder, 1), block_size=16, num_blocks=4, dtype="bfloat16")
    return runner.run("a", TOKENS, [5])


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize("config", [TINY, UNTIED], ids=["tied", "untied"])
def test_the_second_load_maps_what_the_first_made(tmp_path: Path, decoder: NativeDecoder, config: ModelConfig) -> None:
    expected = logits(pack(config, weights(config), decoder), decoder, config)
    first = load_packed(tmp_path, CHECKPOINT, config, lambda: weights(config), decoder)
    second = load_packed(tmp_path, CHECKPOINT, config, nothing, decoder)

    assert len(files(tmp_path)) == 1
    assert torch.equal(logits(first, decoder, config), expected)
    assert torch.equal(logits(second, decoder, config), expected)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: content[:5000] + b"\xff" + content[5001:],
        lambda content: b"k" * 20 + content[20:],
    ],
    ids=["cut", "empty", "last byte", "a byte", "version"],
)
def test_a_damaged_file_is_made_again(tmp_path: Path, decoder: NativeDecoder, damage: Callable[[bytes], bytes]) -> None:
    load_packed(tmp_path, CHECKPOINT, TINY, weights, decoder)
    (path,) = files(tmp_path)
    content = path.read_bytes()
    path.write_bytes(damage(content))

    load_packed(tmp_path, CHECKPOINT, TINY, weights, decoder)

    assert path.read_bytes() == content
    assert files(tmp_path) == [path]


def test_a_whole_file_of_another_model_under_this_name_is_made_again(tmp_path: Path, decoder: NativeDecoder) -> None:
    load_packed(tmp_path, CHECKPOINT, TINY, weights, decoder)
    (path,) = files(tmp_path)
    content = path.read_bytes()
    load_packed(tmp_path, b"d" * 32, TINY, lambda: weights(seed=1), decoder)
    files(tmp_path)[0].rename(path)

    load_packed(tmp_path, CHECKPOINT, TINY, weights, decoder)

    assert path.read_bytes() == content


def test_a_pipe_in_place_of_the_file_is_replaced_by_one(tmp_path: Path, decoder: NativeDecoder) -> None:
    load_packed(tmp_path, CHECKPOINT, TINY, weights, decoder)
    (path,) = files(tmp_path)
    path.unlink()
    os.mkfifo(path)

    load_packed(tmp_path, CHECKPOINT, TINY, weights, decoder)

    assert path.is_file()


def test_a_damaged_file_in_a_folder_that_is_read_only_costs_no_start(
    tmp_path: Path, decoder: NativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_packed(tmp_path, CHECKPOINT, TINY, weights, decoder)
    (path,) = files(tmp_path)
    path.write_bytes(b"damaged")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(packed_weights, "_make", refuse)
    packed = load_packed(tmp_path, CHECKPOINT, TINY, weights, decoder)

    assert torch.equal(logits(packed, decoder), logits(pack(TINY, weights(), decoder), decoder))


@pytest.mark.parametrize(
    ("checkpoint", "config"),
    [(b"d" * 32, TINY), (CHECKPOINT, replace(TINY, rope_theta=5.0))],
    ids=["weights", "config"],
)
def test_another_model_has_another_file_and_the_old_one_goes(
    tmp_path: Path, decoder: NativeDecoder, checkpoint: bytes, config: ModelConfig
) -> None:
    load_packed(tmp_path, CHECKPOINT, TINY, weights, decoder)
    before = files(tmp_path)

    other = load_packed(tmp_path, checkpoint, config, lambda: weights(config, 1), decoder)

    assert torch.equal(
        logits(other, decoder, config), logits(pack(config, weights(config, 1), decoder), decoder, config)
    )
    assert len(files(tmp_path)) == 1
    assert files(tmp_path) != before


def test_int8_weights_have_a_file_beside_that_of_bfloat16(tmp_path: Path, decoder: NativeDecoder) -> None:
    made = load_packed(tmp_path, CHECKPOINT, TINY, weights, decoder, int8=True)
    in_bfloat16 = load_packed(tmp_path, CHECKPOINT, TINY, weights, decoder)
    found = load_packed(tmp_path, CHECKPOINT, TINY, nothing, decoder, int8=True)

    sizes = sorted(path.stat().st_size for path in files(tmp_path))
    assert len(sizes) == 2
    assert sizes[0] < 0.75 * sizes[1]
    expected = logits(pack(TINY, weights(), decoder, int8=True), decoder)
    assert torch.equal(logits(made, decoder), expected)
    assert torch.equal(logits(found, decoder), expected)
    assert not torch.equal(logits(in_bfloat16, decoder), expected)


def test_of_two_that_make_it_at_once_the_first_ones_stays(tmp_path: Path, decoder: NativeDecoder) -> None:
    made: list[int] = []

    def load_while_another_makes_it() -> DecoderWeights:
        load_packed(tmp_path, CHECKPOINT, TINY, weights, decoder)
        made.extend(path.stat().st_ino for path in files(tmp_path))
        return weights()

    load_packed(tmp_path, CHECKPOINT, TINY, load_while_another_makes_it, decoder)

    assert [path.stat().st_ino for path in files(tmp_path)] == made


def test_where_no_file_can_be_made_the_weights_are_packed_in_memory(tmp_path: Path, decoder: NativeDecoder) -> None:
    packed = load_packed(tmp_path / "not there", CHECKPOINT, TINY, weights, decoder)

    assert torch.equal(logits(packed, decoder), logits(pack(TINY, weights(), decoder), decoder))
    assert files(tmp_path) == []
