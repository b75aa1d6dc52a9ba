"""All parameters of a model as the native decoder reads them, in one piece of memory.

That is memory of this process, or a file beside the weights, made by the first worker of a machine and mapped by
all. The file is good for one checkpoint, one configuration and one packing, which its name and its first bytes say, and
holds a digest of its bytes: one that is damaged, or of another name, is made again. Weights in bfloat16 and in int8
are files of their own, side by side.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
import xxhash

from engine.config import ModelConfig
from engine.model.decoder import DecoderWeights
from engine.native.decoder import TILE, NativeDecoder, packed_bytes

logger = logging.getLogger(__name__)

PACKED = ("qkv", "attention_out", "gate_up", "down")
PLAIN = ("input_norm", "mlp_norm", "qkv_bias", "q_norm", "k_norm", "post_attention_norm", "post_mlp_norm")
_VERSION = b"kvrelay.packed.v1"
"""To be raised when the packing changes (`linear.h`), or the order of the parameters here."""
_PREFIXES = {False: ".kvrelay-packed-", True: ".kvrelay-int8-"}
"""Of the file's name, by whether it holds int8."""
_HEADER_BYTES = mmap.ALLOCATIONGRANULARITY
_DIGEST_BYTES = 16
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Where each parameter is: `embedding`, `lm_head` unless tied, `final_norm`, and `N.NAME` of layer N."""

    addresses: dict[str, int]
    memory: mmap.mmap
    """Owns them."""
    int8: bool
    """Whether what is packed is whole numbers and scales."""


def pack(config: ModelConfig, weights: DecoderWeights, decoder: NativeDecoder, *, int8: bool = False) -> PackedWeights:
    """In memory of this process, which asks for large pages: a step reads all weights once."""
    places, size = _places(config, weights, int8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # only a hint: the kernel may be built without it
            memory.madvise(mmap.MADV_HUGEPAGE)
    packed = PackedWeights(_addresses(memory, 0, places), memory, int8)
    _fill(packed, weights, decoder)
    return packed


def load_packed(
    folder: Path,
    checkpoint: bytes,
    config: ModelConfig,
    load: Callable[[], DecoderWeights],
    decoder: NativeDecoder,
    *,
    int8: bool = False,
) -> PackedWeights:
    """From the file beside the weights in `folder`, which is made if it is not there or damaged; where that cannot be,
    in memory of this process. `load` reads the weights, whose digest is `checkpoint`."""
    key = _key(checkpoint, config, int8)
    path = folder / f"{_PREFIXES[int8]}{key}.bin"
    places, size = _places(config, DecoderWeights(config, torch.bfloat16, device="meta"), int8)
    if (memory := _open(path, key, size)) is not None:
        return PackedWeights(_addresses(memory, _HEADER_BYTES, places), memory, int8)
    weights = load()
    try:
        _make(path, key, weights, decoder, places, size, int8)
    except OSError as error:
        logger.info("packed weights are not shared: %s cannot be made: %s", path, error.strerror or error)
        return pack(config, weights, decoder, int8=int8)
    if (memory := _open(path, key, size)) is None:  # another process took it away meanwhile
        return pack(config, weights, decoder, int8=int8)
    return PackedWeights(_addresses(memory, _HEADER_BYTES, places), memory, int8)


def _key(checkpoint: bytes, config: ModelConfig, int8: bool) -> str:
    parts = (_VERSION, checkpoint, repr(config).encode(), str(TILE).encode(), *([b"int8"] if int8 else []))
    return sha256(b"\0".join(parts)).hexdigest()[:32]


def _parameters(config: ModelConfig, weights: DecoderWeights) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Name, values, and whether they are packed; in the order in which a step reads them."""
    yield "embedding", weights.embedding, True
    for i, layer in enumerate(weights.layers):
        for name in (*PLAIN, *PACKED):
            if (tensor := getattr(layer, name)) is not None:
                yield f"{i}.{name}", tensor, name in PACKED
    yield "final_norm", weights.final_norm, False
    if not config.tie_word_embeddings:
        yield "lm_head", weights.lm_head, True


def _places(config: ModelConfig, weights: DecoderWeights, int8: bool) -> tuple[dict[str, int], int]:
    """Offset of each parameter, and the bytes of all."""
    places, end = {}, 0
    for name, tensor, is_packed in _parameters(config, weights):
        places[name] = end
        rows, *columns = tensor.shape
        size = packed_bytes(rows, columns[0], int8=int8) if is_packed else 2 * rows
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, end


def _addresses(memory: mmap.mmap, start: int, places: dict[str, int]) -> dict[str, int]:
    first = np.frombuffer(memory, np.uint8, 1, start).ctypes.data
    return {name: first + offset for name, offset in places.items()}


def _fill(packed: PackedWeights, weights: DecoderWeights, decoder: NativeDecoder) -> None:
    for name, tensor, is_packed in _parameters(weights.config, weights):
        values = tensor.contiguous()
        if is_packed:
            decoder.pack_weight(values.data_ptr(), packed.addresses[name], *values.shape, int8=packed.int8)
        else:
            ctypes.memmove(packed.addresses[name], values.data_ptr(), 2 * values.numel())


def _make(
    path: Path,
    key: str,
    weights: DecoderWeights,
    decoder: NativeDecoder,
    places: dict[str, int],
    size: int,
    int8: bool,
) -> None:
    """Under its name it is whole or not at all. Of processes that make it at once the first one's stays."""
    unfinished = path.with_name(f"{path.name}.{uuid4().hex}")
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, _HEADER_BYTES + size)  # a full disk is an error here, and a signal later
        with mmap.mmap(descriptor, _HEADER_BYTES + size) as memory:
            _fill(PackedWeights(_addresses(memory, _HEADER_BYTES, places), memory, int8), weights, decoder)
            memory[: len(_head(key))] = _head(key)
            memory[_HEADER_BYTES - _DIGEST_BYTES : _HEADER_BYTES] = _digest(memory)
        with suppress(FileExistsError):
            os.link(unfinished, path)
        for old in path.parent.glob(f"{_PREFIXES[int8]}*.bin"):
            if old != path:
                with suppress(OSError):  # somebody else's, perhaps: it only takes room
                    old.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
        unfinished.unlink(missing_ok=True)


def _open(path: Path, key: str, size: int) -> mmap.mmap | None:
    """The file, mapped; None if it is not there, or not what its name says: then it is gone, where that can be."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # which waits for nobody, were it a pipe
    except OSError:
        return None
    try:
        if (memory := _map(descriptor)) is not None and _is_whole(memory, key, size):
            return memory
    finally:
        os.close(descriptor)
    logger.warning("%s is damaged, and made again", path)
    with suppress(OSError):  # of a read-only folder
        path.unlink(missing_ok=True)
    return None


def _map(descriptor: int) -> mmap.mmap | None:
    """None if it is no file, or empty."""
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or not state.st_size:
        return None
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


def _head(key: str) -> bytes:
    return _VERSION + b"\0" + key.encode()


def _is_whole(memory: mmap.mmap, key: str, size: int) -> bool:
    head = _head(key)
    if len(memory) != _HEADER_BYTES + size or memory[: len(head)] != head:
        return False
    return _digest(memory) == memory[_HEADER_BYTES - _DIGEST_BYTES : _HEADER_BYTES]


def _digest(memory: mmap.mmap) -> bytes:
    with memoryview(memory) as view, view[_HEADER_BYTES:] as parameters:
        return xxhash.xxh3_128_digest(parameters)
