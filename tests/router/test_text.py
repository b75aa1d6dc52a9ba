from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.tokenizer import IncrementalDetokenizer, Tokenizer
from router.served_model import ServedModel
from router.text import TextStream


class Pieces:
    """A detokenizer whose token n is the nth piece."""

    def __init__(self, pieces: Sequence[str], rest: str = "") -> None:
        self._pieces, self._rest = pieces, rest

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._pieces[token_id] for token_id in token_ids)

    def flush(self) -> str:
        return self._rest


def run(pieces: Sequence[str], stop: Sequence[str] = (), min_tokens: int = 0) -> tuple[list[str], str, int | None]:
    """Text of each token, text at the end, index at which a stop string was found."""
    stream = TextStream(Pieces(pieces), stop, min_tokens)
    texts: list[str] = []
    for index in range(len(pieces)):
        texts.append(stream.push(index, (index,)))
        if stream.stopped:
            return texts, stream.finish(), index
    return texts, stream.finish(), None


def test_without_stop_strings_text_passes_at_once() -> None:
    assert run(["ab", "c", ""]) == (["ab", "c", ""], "", None)


def test_the_text_ends_before_the_stop_string() -> None:
    assert run(["one ", "two END", " three"], ["END"]) == (["one ", "two "], "", 1)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    assert run(["a<", "|", "end", "|>b"], ["<|end|>"]) == (["a", "", "", ""], "", 3)


def test_held_text_is_released_when_it_turns_out_not_to_begin_a_stop_string() -> None:
    assert run(["a<", "|", "x"], ["<|end|>"]) == (["a", "", "<|x"], "", None)


def test_held_text_comes_at_the_end() -> None:
    assert run(["a<", "|"], ["<|end|>"]) == (["a", ""], "<|", None)


def test_a_failed_beginning_can_contain_the_next_one() -> None:
    assert run(["aa", "a", "b!"], ["aab"]) == (["", "a", ""], "", 2)


def test_the_stop_string_that_begins_first_wins() -> None:
    assert run(["xxBBAA"], ["AA", "BB"]) == (["xx"], "", 0)


def test_stop_strings_count_only_from_min_tokens_on() -> None:
    assert run(["END", "END", "a END"], ["END"], min_tokens=2) == (["END", "END", "a "], "", 2)


def test_text_before_min_tokens_is_no_part_of_a_stop_string() -> None:
    assert run(["EN", "D", "END"], ["END"], min_tokens=1) == (["EN", "D", ""], "", 2)


@pytest.mark.parametrize("seed", range(30))
def test_any_cut_into_tokens_gives_the_text_before_the_first_stop_string(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(40))
    stop = "".join(rng.choice("ab") for _ in range(rng.randint(2, 6)))
    pieces: list[str] = []
    rest = text
    while rest:
        length = rng.randint(1, 3)
        pieces.append(rest[:length])
        rest = rest[length:]
    texts, held, _ = run(pieces, [stop])
    assert "".join(texts) + held == text.split(stop)[0]


@pytest.fixture(scope="module")
def tokenizer(model: ServedModel) -> Tokenizer:
    return model.tokenizer


def test_a_character_of_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    stream = TextStream(IncrementalDetokenizer(tokenizer), (), 0)
    pieces = [stream.push(index, (byte,)) for index, byte in enumerate("aé€".encode())]
    assert pieces == ["a", "", "é", "", "", "€"]
    assert stream.finish() == ""


def test_half_a_character_at_the_end_becomes_a_replacement(tokenizer: Tokenizer) -> None:
    stream = TextStream(IncrementalDetokenizer(tokenizer), ("zz",), 0)
    assert stream.push(0, "€".encode()[:1]) == ""
    assert stream.finish() == "\ufffd"


def test_the_text_is_the_same_however_tokens_were_grouped(tokenizer: Tokenizer) -> None:
    token_ids, rng = "aé€b\U0001f600".encode() + b"\xff\xfe", random.Random(1)
    singly = TextStream(IncrementalDetokenizer(tokenizer), (), 0)
    text = "".join([singly.push(index, (byte,)) for index, byte in enumerate(token_ids)]) + singly.finish()
    for _ in range(20):
        cut = rng.randrange(len(token_ids))
        grouped = TextStream(IncrementalDetokenizer(tokenizer), (), 0)
        assert grouped.push(0, token_ids[:cut]) + grouped.push(cut, token_ids[cut:]) + grouped.finish() == text
