"""Text to ids and back: against the recorded counts of another tokenizer, and against itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from golden import golden_records
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import TinyGguf
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel

from engine.errors import ModelError, RequestError
from engine.gguf_file import GgufFile
from engine.gguf_tokenizer import write_tokenizer
from engine.tokenizer import ChatMessage, IncrementalDetokenizer, Tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """256 byte tokens, 3 control tokens, a few words: like GPT-2, Llama 3, SmolLM2."""
    folder = tmp_path_factory.mktemp("byte_level")
    write_tokenizer(GgufFile(TinyGguf().write(folder / "tiny.gguf").path), folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Pieces with a visible space, and byte tokens for what they cannot spell: like Llama 2."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdeé", "▁a", "▁b", "ab", "▁ab"]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab")]
    backend = Backend(BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return save_and_load(backend, tmp_path_factory.mktemp("byte_fallback"))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Whole words, joined by spaces."""
    backend = Backend(
        WordLevel({word: n for n, word in enumerate(["[UNK]", "one", "two", "three"])}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return save_and_load(backend, tmp_path_factory.mktemp("words"))


def save_and_load(backend: Backend, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def streamed(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Text of each token, pushed alone, and what the flush gives."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


@given(text=st.text(max_size=80))
def test_byte_level_text_survives_the_round_trip(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text


@given(token_ids=st.lists(st.integers(0, 280), max_size=40))
def test_streamed_byte_level_text_equals_decode_for_any_ids(byte_level: Tokenizer, token_ids: list[int]) -> None:
    assert "".join(streamed(byte_level, token_ids)) == byte_level.decode(token_ids)


@given(token_ids=st.lists(st.integers(0, 280), max_size=40))
def test_streamed_byte_fallback_text_equals_decode_for_any_ids(byte_fallback: Tokenizer, token_ids: list[int]) -> None:
    assert "".join(streamed(byte_fallback, token_ids)) == byte_fallback.decode(token_ids)


@given(token_ids=st.lists(st.integers(0, 5), max_size=20))
def test_streamed_words_equal_decode_for_any_ids(words: Tokenizer, token_ids: list[int]) -> None:
    assert "".join(streamed(words, token_ids)) == words.decode(token_ids)


@given(text=st.text(max_size=30), data=st.data())
def test_no_piece_holds_half_a_character(byte_level: Tokenizer, text: str, data: st.DataObject) -> None:
    token_ids = byte_level.encode(text)
    cut = data.draw(st.integers(0, len(token_ids)))
    detokenizer = IncrementalDetokenizer(byte_level)

    shown = detokenizer.push(token_ids[:cut])

    assert text.startswith(shown)
    assert shown + detokenizer.push(token_ids[cut:]) == text


def test_a_character_of_several_byte_tokens_appears_with_the_last_of_them(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("€")

    assert len(token_ids) == 3
    assert streamed(byte_level, token_ids) == ["", "", "€", ""]


def test_fallback_bytes_appear_once_their_run_is_over(byte_fallback: Tokenizer) -> None:
    token_ids = byte_fallback.encode("a€b")

    assert "".join(streamed(byte_fallback, token_ids)[:-2]) == "a"
    assert "".join(streamed(byte_fallback, token_ids)) == "a€b"


def test_the_space_before_a_word_survives_a_special_token(byte_fallback: Tokenizer) -> None:
    token_ids = [*byte_fallback.encode("a"), 2, *byte_fallback.encode("b")]

    assert "".join(streamed(byte_fallback, token_ids)) == byte_fallback.decode(token_ids) == "a b"


def test_an_unfinished_character_is_replaced_at_the_end(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("€")[:2]

    assert streamed(byte_level, token_ids) == ["", "", "\ufffd"]


def test_detokenizing_decodes_a_bounded_number_of_tokens_for_each_new_one(
    byte_fallback: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, token_ids: Sequence[int]) -> str:
        sizes.append(len(token_ids))
        return decode(self, token_ids)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    token_ids = [*byte_fallback.encode("ab" * 500), *byte_fallback.encode("€" * 100), *byte_fallback.encode("ab" * 500)]
    streamed(byte_fallback, token_ids)

    assert sum(sizes) <= 8 * len(token_ids)


def test_special_tokens_give_no_text(byte_level: Tokenizer) -> None:
    assert byte_level.decode([1, *byte_level.encode("hello"), 2]) == "hello"


def test_special_tokens_written_in_a_prompt_become_their_ids(byte_level: Tokenizer) -> None:
    assert byte_level.encode("<|im_start|>hello<|im_end|>") == [1, *byte_level.encode("hello"), 2]


def test_ids_outside_the_vocabulary_give_no_text(byte_level: Tokenizer) -> None:
    assert byte_level.decode([byte_level.vocab_size, *byte_level.encode("hello"), 2**31]) == "hello"


def test_a_lone_surrogate_is_refused_by_field(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode") as caught:
        byte_level.encode("\ud800")
    assert caught.value.field == "prompt"


def test_a_conversation_is_encoded_as_its_rendered_text(byte_level: Tokenizer) -> None:
    messages = [ChatMessage("user", "hello")]

    assert byte_level.encode_chat(messages) == byte_level.encode("<|im_start|>user\nhello<|im_end|>\n")


def test_a_lone_surrogate_in_a_message_is_refused_by_field(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        byte_level.encode_chat([ChatMessage("user", "\udfff")])
    assert caught.value.field == "messages"


def test_a_model_without_template_refuses_conversations_by_field(words: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no chat template") as caught:
        words.render_chat([ChatMessage("user", "one")])
    assert caught.value.field == "messages"


def test_a_chat_template_file_goes_before_the_one_in_the_settings(byte_level_copy: Path) -> None:
    (byte_level_copy / "chat_template.jinja").write_text("{{ messages[0].content }}!")

    assert Tokenizer.load(byte_level_copy).render_chat([ChatMessage("user", "hello")]) == "hello!"


def test_of_several_named_templates_the_default_one_counts(byte_level_copy: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (byte_level_copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))

    assert Tokenizer.load(byte_level_copy).render_chat([ChatMessage("user", "hello")]) == "plain"


def test_templates_see_the_special_tokens_of_the_settings(byte_level_copy: Path) -> None:
    settings = {"chat_template": "{{ bos_token }}|{{ eos_token }}", "bos_token": "<b>", "eos_token": {"content": "<e>"}}
    (byte_level_copy / "tokenizer_config.json").write_text(json.dumps(settings))

    assert Tokenizer.load(byte_level_copy).render_chat([ChatMessage("user", "hello")]) == "<b>|<e>"


@pytest.fixture
def byte_level_copy(tmp_path: Path) -> Path:
    write_tokenizer(GgufFile(TinyGguf().write(tmp_path / "tiny.gguf").path), tmp_path)
    return tmp_path


def test_padding_and_truncation_of_the_file_are_not_applied(byte_level_copy: Path) -> None:
    backend = Backend.from_file(str(byte_level_copy / "tokenizer.json"))
    backend.enable_padding(length=8)
    backend.enable_truncation(2)
    backend.save(str(byte_level_copy / "tokenizer.json"))

    assert len(Tokenizer.load(byte_level_copy).encode("xyz")) == 3


@pytest.mark.parametrize("content", [None, b"{", b"\xff", b"[]", b"{}"])
def test_a_missing_or_damaged_tokenizer_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)

    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.model
def test_every_recorded_prompt_has_the_recorded_number_of_tokens(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_folder)
    wrong = []
    for record in golden_records():
        if "messages" in record:
            token_ids = tokenizer.encode_chat([ChatMessage(**message) for message in record["messages"]])
        else:
            token_ids = tokenizer.encode(record["prompt"])
        if len(token_ids) != record["prompt_tokens"]:
            wrong.append((record["id"], len(token_ids), record["prompt_tokens"]))

    assert wrong == []


@pytest.mark.model
def test_every_recorded_output_streams_to_the_recorded_text(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_folder)

    assert [
        record["id"] for record in golden_records() if "".join(streamed(tokenizer, record["tokens"])) != record["text"]
    ] == []


@pytest.mark.model
def test_the_real_template_adds_a_system_prompt_only_where_there_is_none(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_folder)
    system, user = ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")

    assert tokenizer.render_chat([system, user]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render_chat([user]).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


@pytest.mark.model
def test_the_real_tokenizer_splits_numbers_into_digits(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_folder)

    assert [tokenizer.decode([token_id]) for token_id in tokenizer.encode("year 2024")] == [
        "year",
        " ",
        "2",
        "0",
        "2",
        "4",
    ]


@given(text=st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_its_bytes_demand(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.fewest_tokens(text.encode()) <= len(byte_level.encode(text))


def test_a_long_text_is_known_to_have_many_tokens_before_it_is_tokenized(byte_level: Tokenizer) -> None:
    longest = max(len(byte_level.decode([token_id]).encode()) for token_id in range(byte_level.vocab_size))

    assert byte_level.fewest_tokens(b"x" * 100_000) > 100_000 // (longest + 20)


@pytest.mark.parametrize("shrinks", ["normalizer", "pre_tokenizer", "added_token"])
def test_nothing_is_claimed_of_a_text_that_may_shrink_on_the_way(tmp_path: Path, shrinks: str) -> None:
    backend = byte_alphabet()
    if shrinks == "normalizer":
        backend.normalizer = normalizers.Strip()
    if shrinks == "pre_tokenizer":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer])
    if shrinks == "added_token":
        backend.add_tokens([AddedToken("<gap>", lstrip=True)])

    assert save_and_load(backend, tmp_path).fewest_tokens(b" " * 1000) == 0


def test_bytes_that_the_vocabulary_lacks_are_not_counted(tmp_path: Path) -> None:
    tokenizer = save_and_load(byte_alphabet(without="Ą"), tmp_path)

    assert tokenizer.encode("\x04" * 9 + "ab") == tokenizer.encode("ab")
    assert tokenizer.fewest_tokens(b"\x04" * 9 + b"ab") == 2


def byte_alphabet(without: str = "") -> Backend:
    """Every byte a token, but for the one that the character `without` stands for."""
    chars = [char for char in sorted(pre_tokenizers.ByteLevel.alphabet()) if char != without]
    backend = Backend(BPE(vocab={char: n for n, char in enumerate(chars)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend
