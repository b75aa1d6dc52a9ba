"""The ten settings of KV memory: name, type, range, default, meaning and price of each, and the one check of them all.

Worker flags, fields of the cluster spec, error messages, `kvrelay plan` and docs/knobs.md are derived from `KNOBS`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from engine.errors import ConfigError

_MIB = 1024 * 1024
LARGEST = 2**53
"""Of any number here: beyond it the arithmetic of sizes and shares is not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting, as data."""

    name: str
    kind: type
    """bool, int, float or str."""
    default: Any
    """None: not set."""
    meaning: str
    too_high: str
    """What it costs to set it too high, or to switch it on."""
    too_low: str
    """What it costs to set it too low, or to switch it off."""
    unit: str = ""
    low: int | None = None
    """Smallest value; None: there is none."""
    high: int | None = None
    above: float | None = None
    """All values are larger."""
    power_of_two: bool = False
    choices: tuple[str, ...] = ()
    works: tuple[Any, ...] | None = None
    """The values that something implements; None: all in the range."""
    instead: str = ""
    """What to do where another value is wanted."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_size(self) -> bool:
        """Whether it counts bytes, so that `512MiB` is a value."""
        return self.unit == "bytes"

    @property
    def range(self) -> str:
        """What a value must be, in words that follow 'must be'."""
        if self.kind is bool:
            return "true or false"
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        words = "a power of two" if self.power_of_two else ""
        if self.above is not None:
            return f"in ({self.above:g}, {self.high}]"
        if self.high is not None:
            return f"{words} in [{self.low}, {self.high}]".strip()
        return f"at least {self.low}"

    def check(self, value: object) -> None:
        """Raises `ConfigError` with name, limit and value."""
        if value is None and self.default is None:
            return
        kinds = (int, float) if self.kind is float else (self.kind,)
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ConfigError(f"{self.name} must be {self.range}, and at most 2^53 in size")
        if type(value) not in kinds or not self._in_range(value):
            raise ConfigError(f"{self.name} must be {self.range}, got {value!r}")

    def check_works(self, value: object) -> None:
        """Raises `ConfigError`, which says what to do, for a value that nothing implements yet."""
        if self.works is not None and value not in self.works:
            raise ConfigError(f"{self.name} {value} is not supported yet: {self.instead}")

    def _in_range(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.power_of_two and (value < 1 or value & (value - 1)):
            return False
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )


def _knob(default: Any, **facts: Any) -> Any:
    return field(default=default, metadata=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """A value for each knob, within its range. Whether something implements it, `check_works` says."""

    block_size: int = _knob(
        16,
        unit="tokens",
        low=1,
        high=1024,
        power_of_two=True,
        meaning="Tokens of one KV block: the unit in which memory is taken, shared, evicted and sent. Prefill and "
        "decode workers must agree on it.",
        too_high="Each request wastes half a block, and prompts share whole blocks only: fewer hits.",
        too_low="More blocks to book, hash and send for the same tokens: slower steps and hand-overs.",
    )
    enable_prefix_caching: bool = _knob(
        True,
        meaning="Finished blocks stay findable by their content until their memory is wanted, so that the beginning "
        "of a prompt that was seen before is neither computed nor sent again.",
        too_high="A hash of each full block, some microseconds; never memory that a request could use.",
        too_low="Equal beginnings are computed, sent and held once for each request.",
    )
    gpu_memory_utilization: float | None = _knob(
        None,
        unit="share",
        above=0.0,
        high=1,
        meaning="Share of a GPU's memory that one worker takes: weights, activations and KV together; the pool gets "
        "what the others leave. Shares of workers on one card add up to less than 1. Not set: 0.9 with device cuda, "
        "and no GPU with device auto. Its sibling on a CPU is kv_memory_bytes.",
        too_high="A peak of activations runs out of memory in the middle of serving.",
        too_low="A smaller pool: requests wait, or are preempted.",
    )
    kv_memory_bytes: int = _knob(
        512 * _MIB,
        unit="bytes",
        low=1,
        meaning="KV pool of a worker on a CPU. Each worker of a machine has one of its own.",
        too_high="The machine swaps, or kills the worker; a pool larger than its memory is refused at start.",
        too_low="Fewer blocks: requests wait, or are preempted and compute their KV again.",
    )
    kv_cache_dtype: str = _knob(
        "auto",
        choices=("auto", "float32", "bfloat16", "float16", "fp8_e4m3", "int8"),
        meaning="Type in which KV is kept; auto is the type of the activations. fp8_e4m3 and int8 have scales for "
        "each block and KV head, inside the block. Prefill and decode workers must agree on it.",
        too_high="More bytes for each token, so fewer tokens fit and a hand-over takes longer.",
        too_low="K and V are rounded: answers part from those of a wider type after some tokens (bench.kv_quality "
        "measures when). FP8 and INT8 take longer to read and write on a CPU. float16 holds nothing above 65504: a "
        "request that needs more fails.",
    )
    swap_space: int = _knob(
        0,
        unit="bytes",
        low=0,
        meaning="Host memory of each worker for blocks that leave the pool, beside the pool itself: they come back "
        "from there instead of being computed again. Whole blocks of it are used.",
        too_high="Host memory that weights and other processes miss; below some length, computing again is faster "
        "than copying back.",
        too_low="Preempted requests and evicted prefixes compute their KV again.",
    )
    max_model_len: int | None = _knob(
        None,
        unit="tokens",
        low=1,
        meaning="Tokens of one request, prompt and output together. At most, and by default, what the model was "
        "trained for.",
        too_high="One request may fill the pool while all others wait.",
        too_low="Longer requests are refused.",
    )
    eviction_policy: str = _knob(
        "lru",
        choices=("lru",),
        meaning="Which cached block goes when memory is wanted: lru takes the one that was not used for longest, the "
        "deepest block of a chain first, so that what stays is always the beginning of a prompt.",
        too_high="There is one policy; nothing to get wrong.",
        too_low="There is one policy; nothing to get wrong.",
    )
    sliding_window: int | None = _knob(
        None,
        unit="tokens",
        low=1,
        meaning="Tokens that attention looks back on, in every layer; blocks that left the window are given back. Not "
        "set: as the model was trained.",
        too_high="Memory for tokens that the model was trained to ignore.",
        too_low="The model does not see what it was trained to see: worse answers.",
        works=(None,),
        instead="a model runs with the window that its config.json gives it; leave this unset",
    )
    tensor_parallel_size: int = _knob(
        1,
        unit="devices",
        low=1,
        high=64,
        meaning="Devices that hold one worker's model together, each with an equal share of the KV heads, whose "
        "number it must divide. On CPUs: processes, with the threads of one worker each, that share its KV pool.",
        too_high="Each layer waits for two exchanges between the devices, which get too little work to hide them.",
        too_low="Weights and KV of a large model do not fit on one device.",
    )
    num_blocks_override: int | None = _knob(
        None,
        unit="blocks",
        low=1,
        meaning="Blocks in the pool, whatever the settings of memory say. For tests and experiments.",
        too_high="As kv_memory_bytes: what the machine cannot hold is refused at start.",
        too_low="A request that needs more blocks than there are is refused.",
    )

    def __post_init__(self) -> None:
        for name, value in self.knobs().items():
            KNOBS[name].check(value)

    def kv_dtype(self, dtype: str) -> str:
        """The type of KV, beside activations of type `dtype`."""
        return dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def knobs(self) -> dict[str, Any]:
        """Each knob's name and value."""
        return {name: getattr(self, name) for name in KNOBS}

    def check_works(self) -> None:
        """Raises `ConfigError` for the first knob with a value that nothing implements yet."""
        for name, value in self.knobs().items():
            KNOBS[name].check_works(value)


def _table() -> dict[str, Knob]:
    hints = typing.get_type_hints(Knobs)
    return {
        each.name: Knob(name=each.name, kind=_kind(hints[each.name]), default=each.default, **each.metadata)
        for each in dataclasses.fields(Knobs)
    }


def _kind(hint: Any) -> type:
    """`int` of `int` and of `int | None`."""
    arms = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind: type = next(arm for arm in arms if arm is not types.NoneType)
    return kind


KNOBS: Mapping[str, Knob] = MappingProxyType(_table())
"""By name, in the order in which they are documented."""
