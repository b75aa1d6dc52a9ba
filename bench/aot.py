"""Compiles Triton kernels for GPUs that are not here, from the launches of the code that would run there.

A launch is recorded where it would happen, with tensors on torch's `meta` device, so what is compiled is what
`engine.kernels` launches: its types, strides and constants, specialised as Triton specialises them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as nvidia_backend
from triton.compiler import ASTSource

SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block may have, by compute capability."""

_MATRIX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)")
_USAGE = re.compile(r"\b(REG|STACK|LOCAL):(\d+)")
_POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as it was recorded."""

    kernel: Any
    arguments: Mapping[str, object]
    """By parameter: a tensor, an int, a float, or the value of a constexpr."""
    options: Mapping[str, int]
    """`num_warps` and `num_stages`, where they were given."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one launch became for one GPU."""

    kernel: str
    case: str
    arch: int
    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of stack and local memory of a thread: there are none unless registers were spilled."""
    shared: int
    """Bytes of a block."""
    matrix: tuple[str, ...]
    """Kinds of matrix instructions in it."""

    @property
    def shared_limit(self) -> int:
        return SHARED_LIMITS[self.arch]


def recorded(kernels: Iterable[Any], launch: Callable[[], object]) -> list[Launch]:
    """What `launch` launches of these kernels; none of it runs."""
    launches: list[Launch] = []
    with _recording(kernels, launches):
        launch()
    return launches


@contextmanager
def _recording(kernels: Iterable[Any], launches: list[Launch]) -> Iterator[None]:
    kernels = list(kernels)
    for kernel in kernels:
        kernel.run = partial(_record, kernel, launches)
    try:
        yield
    finally:
        for kernel in kernels:
            del kernel.run


def _record(kernel: Any, launches: list[Launch], *args: object, grid: object, warmup: bool, **kwargs: Any) -> None:
    options: dict[str, int] = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
    arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    missing = set(kernel.arg_names) - arguments.keys()
    if missing or len(arguments) != len(kernel.arg_names):
        raise ValueError(f"{kernel.__name__} is launched without {sorted(missing)}, or with more than it takes")
    launches.append(Launch(kernel, arguments, options))


def compile_launch(launch: Launch, case: str, arch: int) -> Compiled:
    """Raises whatever Triton raises for a kernel that this GPU cannot have."""
    constants = {name: value for name, value in launch.arguments.items() if _is_constant(launch.kernel, name, value)}
    names = launch.kernel.arg_names
    signature = {name: "constexpr" if name in constants else _type(launch.arguments[name]) for name in names}
    aligned = [name for name in names if name not in constants and _is_aligned(launch.arguments[name])]
    source = ASTSource(
        launch.kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(launch.options))
    usage = _resource_usage(binary.asm["cubin"])
    return Compiled(
        kernel=launch.kernel.__name__,
        case=case,
        arch=arch,
        registers=usage["REG"],
        spilled=usage["STACK"] + usage["LOCAL"],
        shared=binary.metadata.shared,
        matrix=tuple(sorted(set(_MATRIX.findall(binary.asm["ptx"])))),
    )


def _is_constant(kernel: Any, name: str, value: object) -> bool:
    # Triton makes a constant of an integer argument that is 1, as many strides are.
    return kernel.params[kernel.arg_names.index(name)].is_constexpr or (type(value) is int and value == 1)


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int), value
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.element_size() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(nvidia_backend).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, timeout=60, check=True)
    usage = {name: int(number) for name, number in _USAGE.findall(done.stdout)}
    if usage.keys() != {"REG", "STACK", "LOCAL"}:
        raise ValueError(f"cuobjdump says neither registers nor stack: {done.stdout!r}")
    return usage
