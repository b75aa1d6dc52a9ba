"""A GGUF file becomes the folder it was once made from; a damaged one becomes an error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
import torch
from families import load_family
from gguf_families import write_gguf
from golden import golden_records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_gguf import TinyGguf, TinyModel
from tiny_llama import PagedRunner

from engine.batch import ForwardBatch
from engine.config import RopeScaling
from engine.errors import ModelError
from engine.gguf_file import GgufFile
from engine.gguf_import import import_gguf
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.model.decoder import Model
from engine.model.registry import load_model
from engine.model_config import load_model_config
from engine.tokenizer import ChatMessage, Tokenizer


def converted(model: TinyModel) -> Path:
    folder = model.path.parent / "out"
    folder.mkdir(exist_ok=True)
    import_gguf(model.path, folder, lambda stage, share: None)
    return folder


def imports_or_is_refused(path: Path) -> bool:
    try:
        return (converted(TinyModel(path, {})) / "model.safetensors").exists()
    except ModelError as error:
        return str(path) in str(error)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyGguf(quantized=True).write(tmp_path_factory.mktemp("whole") / "tiny.gguf").path


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_under_their_names_and_in_their_order(path: Path, tied: bool) -> None:
    model = TinyGguf(tied=tied).write(path)
    tensors = load_file(converted(model) / "model.safetensors")

    assert tensors.keys() == model.weights.keys()
    for name, values in model.weights.items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name].float(), torch.from_numpy(values)), name


@pytest.mark.parametrize("name", ["llama2", "llama_linear", "smollm2", "qwen2", "qwen3", "gemma3_soft_cap"])
def test_each_family_comes_back_as_the_model_that_transformers_ran(path: Path, name: str) -> None:
    family = load_family(name)
    write_gguf(family, path)

    model = load_model(converted(TinyModel(path, {})), "float32")

    logits = PagedRunner(model, block_size=16).run("a", family.token_ids, [100])
    assert float((logits - family.logits).abs().max()) < 1e-4


def test_quantized_weights_come_back_near(path: Path) -> None:
    model = TinyGguf(quantized=True).write(path)
    tensors = load_file(converted(model) / "model.safetensors")

    for name, values in model.weights.items():
        assert torch.allclose(tensors[name].float(), torch.from_numpy(values), atol=0.02), name


def test_values_round_to_the_nearest_bfloat16_ties_to_even(path: Path) -> None:
    values = np.random.default_rng(1).standard_normal(tiny_gguf.HIDDEN).astype(np.float32)
    values[:2] = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)  # halfway, down and up
    model = TinyGguf(replaced={"output_norm.weight": values}).write(path)

    assert torch.equal(
        load_file(converted(model) / "model.safetensors")["model.norm.weight"], torch.from_numpy(values).bfloat16()
    )


def test_the_settings_come_back(path: Path) -> None:
    config = load_model_config(converted(TinyGguf().write(path)))

    assert config.vocab_size == len(tiny_gguf.vocabulary())
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert (config.hidden_size, config.intermediate_size, config.max_model_len) == (32, 64, 512)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-5, 10000.0, None)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.tie_word_embeddings


def test_llama_3_scaling_is_recognised_by_its_divisors(path: Path) -> None:
    frequencies = 1.0 / 500000.0 ** (np.arange(0, 8, 2) / 8)
    wavelengths = 2 * np.pi / frequencies
    divisors = []
    for wavelength in wavelengths:
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / 32 + smooth))
    model = TinyGguf(rope_divisors=np.array(divisors, np.float32), rope_theta=500000.0).write(path)

    assert load_model_config(converted(model)).rope_scaling == RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )


def test_another_scaling_is_refused(path: Path) -> None:
    model = TinyGguf(rope_divisors=np.array([1, 2, 3, 4], np.float32)).write(path)

    with pytest.raises(ModelError, match="not Llama 3's scaling"):
        converted(model)


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
def test_numbers_are_split_into_digits_where_the_file_says_so(path: Path, pre: str) -> None:
    tokenizer = Tokenizer.load(converted(TinyGguf(pre=pre).write(path)))

    assert [tokenizer.decode([token_id]) for token_id in tokenizer.encode("12")] == ["1", "2"]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_numbers_stay_whole_where_the_file_says_so(path: Path, pre: str) -> None:
    tokenizer = Tokenizer.load(converted(TinyGguf(pre=pre, add_bos=False).write(path)))

    assert [tokenizer.decode([token_id]) for token_id in tokenizer.encode("12")] == ["12"]


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"), [("smollm", None, 0), ("smollm", True, 1), ("llama-bpe", None, 1)]
)
def test_a_beginning_of_sequence_token_is_added_where_the_file_or_its_kind_says_so(
    path: Path, pre: str, add_bos: bool | None, expected: int
) -> None:
    tokenizer = Tokenizer.load(converted(TinyGguf(pre=pre, add_bos=add_bos).write(path)))

    assert tokenizer.encode("hello").count(1) == expected


def test_merges_and_template_come_back(path: Path) -> None:
    tokenizer = Tokenizer.load(converted(TinyGguf().write(path)))

    assert len(tokenizer.encode("hello hello")) == 2
    assert tokenizer.render_chat([ChatMessage("user", "x")]) == "<|im_start|>user\nx<|im_end|>\n"
    assert tokenizer.eos_token_ids == (2,)


def test_sentence_pieces_come_together_in_the_order_of_their_scores(path: Path) -> None:
    """Of `hell`, `ll` has the best score; so `he` + `ll`, and in `ell` the better `ll` leaves no `el`."""
    spelt = [*tiny_gguf.CONTROL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = ["\u2581", "h", "e", "l", "o", "ll", "el", "he", "hell", "hello", "\u2581hello"]
    scores = [0.0] * len(spelt) + [0.0] * 5 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    made = TinyGguf(tokens=[*spelt, *pieces], scores=scores, add_bos=False)
    tokenizer = Tokenizer.load(converted(made.write(path)))

    def pieces_of(text: str) -> list[str]:
        return [([*spelt, *pieces])[token_id] for token_id in tokenizer.encode(text)]

    assert pieces_of("hello hell") == ["\u2581hello", "\u2581", "hell"]
    assert pieces_of("ell") == ["\u2581", "e", "ll"]
    assert pieces_of("é") == ["\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hello héll")) == "hello héll"


def test_progress_rises_to_one(path: Path) -> None:
    shares: list[float] = []
    model = TinyGguf().write(path)
    (path.parent / "out").mkdir()
    import_gguf(model.path, path.parent / "out", lambda stage, share: shares.append(share))

    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (TinyGguf(architecture="mamba"), "architecture 'mamba' is not supported"),
        (TinyGguf(pre="tekken"), "tokenizer gpt2/tekken cannot be rebuilt, only gpt2/gpt-2, gpt2/smollm"),
        (TinyGguf(left_out=["blk.1.ffn_up.weight"]), r"blk\.1\.ffn_up\.weight is missing"),
        (TinyGguf(left_out=["token_embd.weight"]), r"no tensor token_embd\.weight"),
        (TinyGguf(replaced={"blk.0.attn_q.weight": np.zeros((8, 32), np.float32)}), r"of shape \[8, 32\], expected"),
        (TinyGguf(replaced={"blk.0.attn_q.bias": np.zeros(32, np.float32)}), r"not of a llama decoder: blk\.0\.attn_q"),
        (TinyGguf(replaced={"output_norm.weight": np.full(32, np.nan, np.float32)}), "not finite"),
        (TinyGguf(merges=["h e", "q q"]), "merge 'q q' is not of this vocabulary"),
        (TinyGguf(merges=["he"]), "merge 'he' is not of this vocabulary"),
        (TinyGguf(tokens=[*tiny_gguf.vocabulary(), "he"]), "there twice"),
        (TinyGguf(eos_token_id=9999), "eos_token_id is 9999"),
    ],
)
def test_what_is_not_a_whole_supported_model_is_refused_by_name(path: Path, made: TinyGguf, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        converted(made.write(path))


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.2, 0.5, 0.9, 0.9999])
def test_a_file_cut_short_anywhere_is_damaged(whole_file: Path, path: Path, share: float) -> None:
    data = whole_file.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])

    with pytest.raises(ModelError, match="damaged or incomplete"):
        GgufFile(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(data=st.data())
def test_changed_bytes_in_the_head_give_a_folder_or_a_model_error(
    whole_file: Path, path: Path, data: st.DataObject
) -> None:
    content = bytearray(whole_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 9000))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)

    assert imports_or_is_refused(path)


def test_another_kind_of_file_is_no_gguf(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + bytes(100))

    with pytest.raises(ModelError, match="no GGUF file"):
        GgufFile(path)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        GgufFile(path)


@pytest.mark.model
def test_the_real_folder_has_the_files_and_fields_of_hugging_face(smollm2_folder: Path) -> None:
    config = json.loads((smollm2_folder / "config.json").read_text())

    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100000.0
    assert load_file(smollm2_folder / "model.safetensors")["model.embed_tokens.weight"].shape == (49152, 576)


@pytest.mark.model
def test_the_real_weights_choose_as_llama_cpp_does_wherever_it_is_sure(smollm2_folder: Path) -> None:
    """One wrong row order, scale or name in the import, and the text is noise from the first token on."""
    tokenizer, model = Tokenizer.load(smollm2_folder), load_model(smollm2_folder, "float32")
    differing = []
    for record in golden_records()[::15]:
        if "messages" in record:
            prompt = tokenizer.encode_chat([ChatMessage(**message) for message in record["messages"]])
        else:
            prompt = tokenizer.encode(record["prompt"])
        steps = len(record["steps"])
        chosen = teacher_forced(model, [*prompt, *record["tokens"][: steps - 1]], steps)
        sure = [step for step in range(steps) if record["margin"][step] >= 0.5]
        assert sure
        differing += [(record["id"], step) for step in sure if chosen[step] != record["steps"][step][0][0]]

    assert differing == []


def teacher_forced(model: Model, token_ids: list[int], steps: int) -> list[int]:
    """The most likely token after each of the last `steps` of `token_ids`."""
    config = model.config
    layout = KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        dtype="float32",
    )
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // 16)
    kv = KvCache(layout, num_blocks)
    batch = ForwardBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.arange(num_tokens),
        query_starts=[0, num_tokens],
        context_lens=[num_tokens],
        block_tables=[list(range(num_blocks))],
        sample_rows=list(range(num_tokens - steps, num_tokens)),
    )
    try:
        return [int(token_id) for token_id in model.forward(batch, kv).argmax(-1)]
    finally:
        kv.close()
