"""Text to token ids and back, for one model folder. Knows no tensors; the router runs it without torch."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.pre_tokenizers import PreTokenizer

from engine.chat_template import ChatMessage, ChatTemplate
from engine.config_fields import read_json_object
from engine.errors import ModelError, RequestError
from engine.model_config import read_eos_token_ids

__all__ = ["ChatMessage", "IncrementalDetokenizer", "Tokenizer"]

MAX_CACHED_TOKENS = 1 << 16
"""Whose text is remembered; a few MB where all are used."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's vocabulary and chat template. Immutable after `load`; safe to use from several threads."""

    def __init__(
        self,
        backend: HuggingFaceTokenizer,
        template: ChatTemplate | None,
        eos_token_ids: tuple[int, ...],
        byte_level: bool,
        origin: Path,
    ) -> None:
        self._backend = backend
        self._template = template
        self._origin = origin
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes_of_char = _byte_level_alphabet() if byte_level else None
        self._sizes = _sizes(backend) if byte_level else None
        # A router does these for every token of every stream.
        self.visible_entry = lru_cache(MAX_CACHED_TOKENS)(self._visible_entry)
        self.visible_bytes = lru_cache(MAX_CACHED_TOKENS)(self._visible_bytes)
        self.bytes_of_entry = lru_cache(MAX_CACHED_TOKENS)(self._bytes_of_entry)

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Read `tokenizer.json`, and the template and special tokens beside it, where there are any.

        Raises `ModelError` that names the file.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        fields = read_json_object(path)  # also names a missing or torn file better than the library does
        try:
            backend = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # edge: the library raises nothing narrower
            raise ModelError(f"{path} is no tokenizer that this version of `tokenizers` reads: {error}") from error
        backend.no_padding()
        backend.no_truncation()
        return cls(backend, _load_template(folder), read_eos_token_ids(folder), _is_byte_level(fields), folder)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt.

        Special tokens are added only where `tokenizer.json` says so (Llama's beginning-of-sequence token). Special
        tokens written out in `text` become their ids, as peers do. Raises `RequestError` (field `prompt`) on lone
        surrogates.
        """
        return self._encode(text, field="prompt", add_special_tokens=True)

    def fewest_tokens(self, text: bytes) -> int:
        """A number of tokens that `encode` cannot stay below for this UTF-8 text, found without tokenizing it.

        0 for a vocabulary whose entries say nothing of the length of texts, or behind a step that may shrink them (a
        normaliser, dropped spaces).
        """
        if self._sizes is None:
            return 0
        return -(-len(text.translate(None, self._sizes.lost)) // self._sizes.max_token_bytes)

    def render_chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> str:
        """The conversation as one text. Raises `RequestError` (field `messages`)."""
        if self._template is None:
            raise RequestError("messages", f"the model in {self._origin} has no chat template; send a plain prompt")
        return self._template.render(messages, add_generation_prompt)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Ids of a conversation, ready for the model's answer. The template writes every special token itself."""
        return self.encode_rendered(self.render_chat(messages))

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what `render_chat` gave."""
        return self._encode(text, field="messages", add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Ids outside the vocabulary give no text.

        Bytes that are no UTF-8 become U+FFFD.
        """
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """What one vocabulary entry stands for: perhaps half a character, of a special token its name.

        Empty outside the vocabulary.
        """
        entry = self._backend.id_to_token(token_id)
        if entry is None:
            return b""
        if _is_byte(entry):
            return bytes([int(entry[3:5], 16)])
        if self._bytes_of_char is not None and token_id not in self._special_ids:
            return self.bytes_of_entry(entry)
        return str(entry).replace("\u2581", " ").encode()  # SentencePiece's space

    def _encode(self, text: str, field: str, add_special_tokens: bool) -> list[int]:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(field, f"is not valid Unicode: {error}") from error
        # The same ids without offsets into the text, in well under half the time.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def _visible_entry(self, token_id: int) -> str | None:
        """The vocabulary's entry of a token that gives text: neither special nor outside the vocabulary."""
        return None if token_id in self._special_ids else self._backend.id_to_token(token_id)

    def _visible_bytes(self, token_id: int) -> bytes:
        """Of a byte-level vocabulary: what a token adds to the text; nothing for those without a visible entry."""
        entry = self._visible_entry(token_id)
        return b"" if entry is None else self._bytes_of_entry(entry)

    def _bytes_of_entry(self, entry: str) -> bytes:
        """Of a byte-level vocabulary."""
        assert self._bytes_of_char is not None
        try:
            return bytes([self._bytes_of_char[char] for char in entry])
        except KeyError:  # an added token: its entry is its text
            return entry.encode()

    def incremental_decoder(self) -> _ByteLevelDecoder | _WindowDecoder:
        return _WindowDecoder(self) if self._bytes_of_char is None else _ByteLevelDecoder(self.visible_bytes)


class IncrementalDetokenizer:
    """Text of one output while its tokens arrive.

    What `push` returned is final: never half a character, never changed by later tokens. All pieces with the last
    one from `flush` equal `Tokenizer.decode` of all tokens. Constant work a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = tokenizer.incremental_decoder()

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that became final with `token_ids`; empty while a character is incomplete."""
        return self._decoder.push(token_ids)

    def flush(self) -> str:
        """The rest, once no token will follow."""
        return self._decoder.flush()


class _ByteLevelDecoder:
    """For vocabularies whose entries stand for bytes (GPT-2, Llama 3, SmolLM2): exact, whatever the bytes are."""

    def __init__(self, visible_bytes: Callable[[int], bytes]) -> None:
        self._visible_bytes = visible_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._visible_bytes, token_ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For any other vocabulary: decodes a sliding window of tokens and returns what is new at its end.

    The window begins with the tokens returned last, because the text of a token can depend on whether one comes
    before it (a leading space). Tokens that stand for single bytes (`<0x0A>`) wait for the end of their run: one
    invalid byte changes the text of the whole run.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._new: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        entry_of = self._tokenizer.visible_entry
        entries = [(token_id, entry_of(token_id)) for token_id in token_ids]
        return "".join([self._push(token_id, entry) for token_id, entry in entries if entry is not None])

    def _push(self, token_id: int, entry: str) -> str:
        self._new.append(token_id)
        return "" if _is_byte(entry) else self.flush()

    def flush(self) -> str:
        known = len(self._tokenizer.decode(self._before))
        text = self._tokenizer.decode(self._before + self._new)[known:]
        if self._new:
            self._before, self._new = self._new, []
        return text


def _is_byte(entry: str) -> bool:
    return len(entry) == 6 and entry.startswith("<0x") and entry.endswith(">")


def _is_byte_level(tokenizer_fields: dict[str, Any]) -> bool:
    decoder = tokenizer_fields.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [step.get("type") for step in steps] == ["ByteLevel"]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of a byte-level vocabulary on whose way nothing but single bytes gets lost."""

    max_token_bytes: int
    """Of text, for one token."""
    lost: bytes
    """Bytes that the vocabulary has no entry for; the library passes over them."""


def _sizes(backend: HuggingFaceTokenizer) -> _Sizes | None:
    if backend.normalizer is not None or not _keeps_all(backend.pre_tokenizer):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    vocab = backend.get_vocab(with_added_tokens=False)
    longest = max(*map(len, vocab), *(len(token.content.encode()) for token in added), 1)
    return _Sizes(longest, bytes(byte for char, byte in _byte_level_alphabet().items() if char not in vocab))


def _keeps_all(pre_tokenizer: PreTokenizer | None) -> bool:
    """Whether it is one of those that are known to drop nothing."""
    if pre_tokenizer is None:
        return False
    fields = json.loads(pre_tokenizer.__getstate__())
    for step in fields.get("pretokenizers", [fields]):
        if step["type"] == "Split" and step["behavior"] == "Removed":
            return False
        if step["type"] not in ("ByteLevel", "Digits", "Split"):
            return False
    return True


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins: printable Latin-1 characters are their own bytes, the rest count on from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _load_template(folder: Path) -> ChatTemplate | None:
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json_object(config_path) if config_path.exists() else {}
    source: Any = config.get("chat_template")
    origin = config_path
    if template_path.exists():
        origin = template_path
        try:
            source = template_path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{template_path} cannot be read: {error}") from error
    if isinstance(source, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"{origin}: chat_template must be a string, got {type(source).__name__}")
    texts = {name: _token_text(config.get(name)) for name in _SPECIAL_NAMES}
    return ChatTemplate(source, {name: text for name, text in texts.items() if text is not None}, str(origin))


def _token_text(value: Any) -> str | None:
    """Hugging Face writes a special token as its text, or as an object with its text under `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
