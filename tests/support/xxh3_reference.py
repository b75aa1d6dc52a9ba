"""XXH3-128 with a seed in plain Python, after the specification of xxHash: a second opinion, slow and short.

For inputs of 17 bytes or more; shorter ones have rules of their own.
"""

from __future__ import annotations

import struct

_M32, _M64, _M128 = 2**32 - 1, 2**64 - 1, 2**128 - 1
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_PMX_1 = 0x165667919E3779F9

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def xxh3_128(data: bytes, seed: int) -> bytes:
    """16 bytes, in canonical (big-endian) form."""
    if len(data) < 17:
        raise ValueError(f"inputs of {len(data)} bytes have rules that are not here")
    if len(data) <= 128:
        low, high = _of_17_to_128(data, seed)
    elif len(data) <= 240:
        low, high = _of_129_to_240(data, seed)
    else:
        low, high = _of_more(data, seed)
    return struct.pack(">QQ", high, low)


def _u64(data: bytes, offset: int) -> int:
    return int(struct.unpack_from("<Q", data, offset)[0])


def _fold(a: int, b: int) -> int:
    product = a * b & _M128
    return (product & _M64) ^ (product >> 64)


def _avalanche(h: int) -> int:
    h ^= h >> 37
    h = h * _PMX_1 & _M64
    return h ^ h >> 32


def _mix16(data: bytes, at: int, secret: int, seed: int) -> int:
    low, high = _u64(data, at), _u64(data, at + 8)
    return _fold(low ^ (_u64(_SECRET, secret) + seed & _M64), high ^ (_u64(_SECRET, secret + 8) - seed & _M64))


def _mix32(acc: tuple[int, int], data: bytes, first: int, second: int, secret: int, seed: int) -> tuple[int, int]:
    low = acc[0] + _mix16(data, first, secret, seed) & _M64
    low ^= _u64(data, second) + _u64(data, second + 8) & _M64
    high = acc[1] + _mix16(data, second, secret + 16, seed) & _M64
    high ^= _u64(data, first) + _u64(data, first + 8) & _M64
    return low, high


def _finish_middle(acc: tuple[int, int], length: int, seed: int) -> tuple[int, int]:
    low = acc[0] + acc[1] & _M64
    high = acc[0] * _P64_1 + acc[1] * _P64_4 + (length - seed & _M64) * _P64_2 & _M64
    return _avalanche(low), -_avalanche(high) & _M64


def _of_17_to_128(data: bytes, seed: int) -> tuple[int, int]:
    acc = (len(data) * _P64_1 & _M64, 0)
    for i in reversed(range((len(data) - 1) // 32 + 1)):
        acc = _mix32(acc, data, 16 * i, len(data) - 16 * (i + 1), 32 * i, seed)
    return _finish_middle(acc, len(data), seed)


def _of_129_to_240(data: bytes, seed: int) -> tuple[int, int]:
    acc = (len(data) * _P64_1 & _M64, 0)
    for i in range(4):
        acc = _mix32(acc, data, 32 * i, 32 * i + 16, 32 * i, seed)
    acc = (_avalanche(acc[0]), _avalanche(acc[1]))
    for i in range(4, len(data) // 32):
        acc = _mix32(acc, data, 32 * i, 32 * i + 16, 3 + 32 * (i - 4), seed)
    acc = _mix32(acc, data, len(data) - 16, len(data) - 32, 136 - 17 - 16, -seed & _M64)
    return _finish_middle(acc, len(data), seed)


def _of_more(data: bytes, seed: int) -> tuple[int, int]:
    secret = b"".join(
        struct.pack("<QQ", _u64(_SECRET, i) + seed & _M64, _u64(_SECRET, i + 8) - seed & _M64)
        for i in range(0, 192, 16)
    )
    acc = [_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1]
    stripes_per_block = (len(secret) - 64) // 8
    num_stripes = (len(data) - 1) // 64
    for stripe in range(num_stripes):
        _accumulate(acc, data, 64 * stripe, secret, 8 * (stripe % stripes_per_block))
        if (stripe + 1) % stripes_per_block == 0:
            _scramble(acc, secret, len(secret) - 64)
    _accumulate(acc, data, len(data) - 64, secret, len(secret) - 64 - 7)
    low = _merge(acc, secret, 11, len(data) * _P64_1 & _M64)
    high = _merge(acc, secret, len(secret) - 64 - 11, ~(len(data) * _P64_2) & _M64)
    return low, high


def _accumulate(acc: list[int], data: bytes, at: int, secret: bytes, secret_at: int) -> None:
    for i in range(8):
        value = _u64(data, at + 8 * i)
        key = value ^ _u64(secret, secret_at + 8 * i)
        acc[i ^ 1] = acc[i ^ 1] + value & _M64
        acc[i] = acc[i] + (key & _M32) * (key >> 32) & _M64


def _scramble(acc: list[int], secret: bytes, at: int) -> None:
    for i in range(8):
        acc[i] = (acc[i] ^ acc[i] >> 47 ^ _u64(secret, at + 8 * i)) * _P32_1 & _M64


def _merge(acc: list[int], secret: bytes, at: int, start: int) -> int:
    for i in range(0, 8, 2):
        start += _fold(acc[i] ^ _u64(secret, at + 8 * i), acc[i + 1] ^ _u64(secret, at + 8 * i + 8))
    return _avalanche(start & _M64)
