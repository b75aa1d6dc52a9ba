"""Which leading tokens of a prompt are public, and what a file of declared prefixes must be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_worker import FakeWorker
from hypothesis import given
from hypothesis import strategies as st
from router_fleet import Fleet, make_tokenizer

from engine.block_hash import pack_tokens
from engine.errors import ConfigError
from router.public_prefixes import PublicPrefixes, load_public_prefixes

VOCAB = 257
SEQUENCES = st.lists(st.integers(0, 2), max_size=12)


def load(tmp_path: Path, document: Any) -> PublicPrefixes:
    path = tmp_path / "prefixes.yaml"
    path.write_text(yaml.safe_dump(document))
    return load_public_prefixes(str(path), make_tokenizer(tmp_path), VOCAB)


@given(prefixes=st.lists(SEQUENCES, max_size=4), prompt=SEQUENCES)
def test_the_longest_beginning_that_a_declared_prefix_has_too_is_public(
    prefixes: list[list[int]], prompt: list[int]
) -> None:
    longest = max((n for p in prefixes for n in range(len(p) + 1) if p[:n] == prompt[:n]), default=0)
    expected = min(longest, len(prompt))
    assert PublicPrefixes([pack_tokens(p) for p in prefixes]).num_leading(pack_tokens(prompt)) == expected


def test_without_a_file_nothing_is_public(tmp_path: Path) -> None:
    assert load_public_prefixes("", make_tokenizer(tmp_path), VOCAB).num_leading(pack_tokens([1, 2])) == 0


def test_a_prefix_may_be_a_text_token_ids_or_a_system_prompt_as_the_template_renders_it(tmp_path: Path) -> None:
    public = load(tmp_path, [{"text": "Once upon"}, {"token_ids": [7, 8, 9]}, {"system": "Be brief."}])
    prompts = {
        b"Once upon a time": 9,
        bytes([7, 8, 9, 9]): 3,
        b"system: Be brief.\nuser: Hi\nassistant: ": 24,
        b"Hi": 0,
    }
    assert {text: public.num_leading(pack_tokens(list(text))) for text in prompts} == prompts


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"text": "a"}, "a list of 1 to 64"),
        ([], "a list of 1 to 64"),
        ([{"text": "a"}] * 65, "a list of 1 to 64"),
        (["a"], r"\[0\]: must have one of system, text and token_ids"),
        ([{"text": "a"}, {"text": "a", "system": "b"}], r"\[1\]: must have one of"),
        ([{"words": "a"}], r"\[0\]: must have one of"),
        ([{"text": ""}], "not empty"),
        ([{"token_ids": []}], "a list of integers"),
        ([{"token_ids": [VOCAB]}], r"integers in \[0, 257\)"),
        ([{"token_ids": [True]}], r"integers in \[0, 257\)"),
    ],
)
def test_a_damaged_file_is_named_with_the_entry(tmp_path: Path, document: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load(tmp_path, document)
    assert "prefixes.yaml" in str(caught.value)


def test_a_file_that_is_not_there_or_no_yaml_is_named(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "prefixes.yaml", make_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"prefixes\.yaml cannot be read"):
        load_public_prefixes(str(path), tokenizer, VOCAB)
    path.write_text("[")
    with pytest.raises(ConfigError, match=r"prefixes\.yaml is no YAML"):
        load_public_prefixes(str(path), tokenizer, VOCAB)


async def test_both_workers_are_told_how_much_of_a_prompt_is_public(fleet: Fleet) -> None:
    fleet.model = replace(fleet.model, public_prefixes=PublicPrefixes([pack_tokens(list(b"hello you"))]))
    prefill, decode = FakeWorker("prefill", "p0"), FakeWorker("decode", "d0")
    await fleet.start([prefill, decode], local_prefill_max_tokens=0)
    for prompt in (b"hello world", b"Hi"):
        await fleet.call(prompt).done()
    assert [message.reserve.num_public_tokens for message in decode.all("reserve")] == [6, 0]
    assert [message.prefill.num_public_tokens for message in prefill.all("prefill")] == [6, 0]
