"""Rebuilds a model's `tokenizer.json` and `tokenizer_config.json` from the vocabulary inside a GGUF file.

GGUF names its pre-tokenizer instead of describing it; the descriptions are here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.errors import ModelError
from engine.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""


def _words(digits: str) -> str:
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split(_words(r"\p{N}{1,3}"))


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(_words(r"\p{N}"))


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "qwen2": _qwen2,
}


def write_tokenizer(gguf: GgufFile, folder: Path) -> None:
    """Write both files into `folder`. Raises `ModelError` if the vocabulary is damaged or of an unknown kind."""
    model, pre = gguf.get("tokenizer.ggml.model", str), gguf.get("tokenizer.ggml.pre", str, "")
    if model != "llama" and (model != "gpt2" or pre not in _PRE_TOKENIZERS):
        supported = ", ".join(f"gpt2/{name}" for name in _PRE_TOKENIZERS)
        raise ModelError(
            f"{gguf.path}: tokenizer {model}/{pre or '(unnamed)'} cannot be rebuilt, only {supported}, llama; "
            "use the model's safetensors folder, which comes with tokenizer.json"
        )
    tokens: list[str] = gguf.get("tokenizer.ggml.tokens", list)
    types: list[int] = gguf.get("tokenizer.ggml.token_type", list)
    if len(types) != len(tokens):
        raise gguf.damaged(f"{len(tokens)} tokens with {len(types)} types")
    tokenizer = _sentence_pieces(gguf, tokens) if model == "llama" else _byte_level(gguf, tokens, pre)
    tokenizer.add_special_tokens([_added(token) for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL])
    tokenizer.add_tokens([_added(token) for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED])
    bos = _token_text(gguf, "bos", tokens)
    if bos is not None and gguf.get("tokenizer.ggml.add_bos_token", bool, model == "llama" or pre == "llama-bpe"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.metadata.get(f"{gguf.get('general.architecture', str)}.context_length"),
        "bos_token": bos,
        "eos_token": _token_text(gguf, "eos", tokens),
        "unk_token": _token_text(gguf, "unknown", tokens),
        "pad_token": _token_text(gguf, "padding", tokens),
        "chat_template": gguf.metadata.get("tokenizer.chat_template"),
    }
    known = {name: value for name, value in settings.items() if value is not None}
    text = json.dumps(known, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_level(gguf: GgufFile, tokens: list[str], pre: str) -> Tokenizer:
    tokenizer = Tokenizer(_bpe(gguf, tokens, pre))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(gguf: GgufFile, tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE, of Llama 2, Mistral and Gemma: whichever two pieces make the one with the best score come
    together first, and what is in no piece is spelt in bytes."""
    vocab = _vocabulary(gguf, tokens)
    scores: list[float] = gguf.get("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise gguf.damaged(f"{len(tokens)} tokens with {len(scores)} scores")
    merges = [
        (-score, vocab[token[:i]], vocab[token[i:]], (token[:i], token[i:]))
        for token, score in zip(tokens, scores, strict=True)
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab
    ]
    unknown = _token_text(gguf, "unknown", tokens)
    ranked = [pair for *_, pair in sorted(merges)]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=ranked, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", _SPACE)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gguf.get("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _vocabulary(gguf: GgufFile, tokens: list[str]) -> dict[str, int]:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise gguf.damaged(f"{len(tokens) - len(vocab)} of {len(tokens)} tokens are there twice")
    return vocab


def _bpe(gguf: GgufFile, tokens: list[str], pre: str) -> BPE:
    vocab = _vocabulary(gguf, tokens)
    merges = [tuple(merge.split(" ")) for merge in gguf.get("tokenizer.ggml.merges", list)]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise gguf.damaged(f"merge {' '.join(merge)!r} is not of this vocabulary")
    # Llama 3 takes a word that is one token as that token, whatever the merges say.
    return BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _token_text(gguf: GgufFile, name: str, tokens: list[str]) -> str | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in gguf.metadata:
        return None
    token_id = gguf.get(key, int)
    if not 0 <= token_id < len(tokens):
        raise gguf.damaged(f"{key} is {token_id}, beyond {len(tokens)} tokens")
    return tokens[token_id]
