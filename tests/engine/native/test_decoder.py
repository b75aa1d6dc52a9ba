"""The native kernels against float64, on every instruction set that this machine has."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_reference import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import NativeUnavailable
from engine.kernels.reference import store_kv
from engine.model.int8 import Int8Linear
from engine.native import build, decoder
from engine.native.decoder import AttentionShape, NativeDecoder

X86 = ("-march=x86-64", "-march=x86-64-v3", "-march=x86-64-v4")
TARGETS = (build.THIS_CPU, *(X86 if platform.machine() == "x86_64" else ()))
NUM_LAYERS, LAYER = 2, 1


def supports(target: str) -> bool:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    needed = {"-march=x86-64-v3": {"avx2", "fma", "bmi2"}, "-march=x86-64-v4": {"avx512f", "avx512bw", "avx512vl"}}
    return needed.get(target, set()) <= flags


@pytest.fixture(scope="module", params=TARGETS)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeDecoder:
    if not supports(request.param):
        pytest.skip(f"this machine cannot run {request.param}")
    flags = ("-std=gnu++17", "-O2", request.param, "-fPIC", "-shared")
    return NativeDecoder(decoder._load(tmp_path_factory.getbasetemp() / "native", flags))


def random_bf16(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), outputs=st.integers(1, 100), seed=st.integers(0, 99))
def test_a_product_is_the_float64_one_and_writes_all_of_its_outputs(
    native: NativeDecoder, rows: int, columns: int, outputs: int, seed: int
) -> None:
    x, weight = random_bf16(rows, 2 * columns, seed=seed), random_bf16(outputs, 2 * columns, seed=seed + 1)
    padded = -(-outputs // decoder.TILE) * decoder.TILE
    packed = torch.full((padded * 2 * columns,), torch.nan, dtype=torch.bfloat16)
    y = torch.full((rows, padded), torch.nan)

    native.pack_weight(weight.data_ptr(), packed.data_ptr(), outputs, 2 * columns)
    native.linear(packed.data_ptr(), x.data_ptr(), y.data_ptr(), rows, 2 * columns, outputs)

    expected = x.double() @ weight.double().T
    torch.testing.assert_close(y[:, :outputs].double(), expected, rtol=1e-5, atol=1e-4)
    assert not y[:, outputs:].any()


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 12), outputs=st.integers(1, 100), seed=st.integers(0, 99))
def test_an_int8_product_is_the_references_to_the_last_bit(
    native: NativeDecoder, rows: int, columns: int, outputs: int, seed: int
) -> None:
    columns *= 16
    x, weight = random_bf16(rows, columns, seed=seed), random_bf16(outputs, columns, seed=seed + 1)
    x[0], weight[outputs // 2] = x[0] * 1e4, 0.0
    packed = torch.full((decoder.packed_bytes(outputs, columns, int8=True),), -1, dtype=torch.int8)
    y = torch.full((rows, -(-outputs // decoder.TILE) * decoder.TILE), torch.nan)

    native.pack_weight(weight.data_ptr(), packed.data_ptr(), outputs, columns, int8=True)
    native.linear(packed.data_ptr(), x.data_ptr(), y.data_ptr(), rows, columns, outputs, int8=True)

    assert torch.equal(y[:, :outputs], Int8Linear(weight).float_product(x))
    assert not y[:, outputs:].any()


def test_int8_extremes_are_exact_and_what_is_not_finite_becomes_nan(native: NativeDecoder) -> None:
    x, weight = torch.full((4, 4096), -1.0).bfloat16(), torch.full((32, 4096), 1.0).bfloat16()
    x[1, 7], x[2, 4095] = torch.nan, -torch.inf
    packed = torch.empty(decoder.packed_bytes(32, 4096, int8=True), dtype=torch.int8)
    y = torch.empty(4, 32)
    native.pack_weight(weight.data_ptr(), packed.data_ptr(), 32, 4096, int8=True)
    native.linear(packed.data_ptr(), x.data_ptr(), y.data_ptr(), 4, 4096, 32, int8=True)

    assert y[1:3].isnan().all()
    torch.testing.assert_close(y[[0, 3]], torch.full((2, 32), -4096.0), rtol=1e-6, atol=0.0)


def test_a_row_of_a_product_does_not_depend_on_the_others(native: NativeDecoder) -> None:
    x, weight = random_bf16(30, 64, seed=1), random_bf16(32, 64, seed=2)
    packed, y = torch.empty(32 * 64, dtype=torch.bfloat16), torch.empty(30, 32)
    native.pack_weight(weight.data_ptr(), packed.data_ptr(), 32, 64)
    native.linear(packed.data_ptr(), x.data_ptr(), y.data_ptr(), 30, 64, 32)

    for first, end in ((0, 1), (1, 3), (3, 7), (7, 20), (20, 30)):
        part = torch.empty(end - first, 32)
        native.linear(packed.data_ptr(), x[first].data_ptr(), part.data_ptr(), end - first, 64, 32)
        assert torch.equal(part, y[first:end])


@settings(max_examples=40, deadline=None)
@given(
    context_len=st.integers(1, 200),
    queries=st.integers(1, 70),
    heads=st.sampled_from([(1, 1), (3, 1), (6, 2), (8, 1), (14, 2), (4, 4)]),
    head_dim=st.sampled_from([16, 32, 64, 80, 128]),
    block_size=st.sampled_from([1, 8, 16, 32]),
    window=st.sampled_from([0, 1, 7, 64, 100]),
)
def test_attention_is_the_float64_one_and_reads_nothing_else(
    native: NativeDecoder,
    context_len: int,
    queries: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int,
) -> None:
    num_queries = min(queries, context_len)
    num_blocks = -(-context_len // block_size)
    table = torch.randperm(num_blocks + 2, generator=torch.Generator().manual_seed(3))[:num_blocks]
    pool = torch.full((num_blocks + 2, NUM_LAYERS, 2, heads[1], block_size, head_dim), torch.nan).bfloat16()
    k, v = (random_bf16(context_len, heads[1], head_dim, seed=seed) for seed in (4, 5))
    tokens = torch.arange(context_len)
    store_kv(k, v, pool, LAYER, table[tokens // block_size], tokens % block_size)
    q = random_bf16(num_queries, heads[0], head_dim, seed=6)
    out = torch.full_like(q, torch.nan)
    shape = AttentionShape(
        num_queries=num_queries,
        context_len=context_len,
        num_layers=NUM_LAYERS,
        layer=LAYER,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        block_size=block_size,
        head_dim=head_dim,
        window=window,
    )
    blocks = table.int()

    native.attention(q.data_ptr(), out.data_ptr(), pool.data_ptr(), blocks.data_ptr(), shape, head_dim**-0.5)

    for i in range(num_queries):
        end = context_len - num_queries + i + 1
        seen = slice(max(0, end - window) if window else 0, end)
        expected = dense_attention(
            q[i : i + 1].double().numpy(), k[seen].double().numpy(), v[seen].double().numpy(), head_dim**-0.5
        )
        np.testing.assert_allclose(out[i : i + 1].double().numpy(), expected, rtol=0.02, atol=0.03)


def test_it_is_built_again_for_another_text_of_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cpu_model.cpp", "simd.h", "tiles.h", "linear.h", "linear_int8.h", "attention.h"):
        (tmp_path / name).write_bytes((build.FOLDER / name).read_bytes())
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    decoder.load_decoder(tmp_path / "cache")
    (tmp_path / "attention.h").write_text("#error changed")

    with pytest.raises(NativeUnavailable, match="changed"):
        decoder.load_decoder(tmp_path / "cache")
