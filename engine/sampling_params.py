"""What a client may ask of sampling, checked once. Knows nothing of tensors or messages."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import RequestError

MAX_SEED = 2**64 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
"""Alternatives per token, the limit of the peers' APIs."""
MAX_TOP_K = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. Raises `RequestError` naming the field and the limit."""

    temperature: float = 1.0
    """0 is greedy: the most likely token, the lowest id among equals."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    seed: int | None = None
    """Key of the counter-based random stream: the draw for a position depends on (seed, position) alone."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these. Checked where text is made: by the router."""
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """Neither stop tokens nor stop strings end the output before it has this many tokens."""
    max_tokens: int = 256
    logprobs: int | None = None
    """None: no logprobs. N >= 0: the sampled token's and those of the N most likely."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise RequestError("temperature", f"must be a finite number >= 0, got {self.temperature}")
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise RequestError("top_k", f"must be in [0, {MAX_TOP_K}], got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:  # also refuses NaN
            raise RequestError("top_p", f"must be in (0, 1], got {self.top_p}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise RequestError("seed", f"must be in [0, 2^64), got {self.seed}")
        if self.max_tokens < 1:
            raise RequestError("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError("min_tokens", f"must be in [0, max_tokens={self.max_tokens}], got {self.min_tokens}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestError("logprobs", f"must be in [0, {MAX_LOGPROBS}], got {self.logprobs}")
        self._check_stops()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError("stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise RequestError("stop", f"each must have 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}, got {len(self.stop_token_ids)}")
        for token_id in self.stop_token_ids:
            if token_id < 0:
                raise RequestError("stop_token_ids", f"must be >= 0, got {token_id}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
