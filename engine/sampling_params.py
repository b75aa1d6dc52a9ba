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
MAX_PENALTY = 2.0
"""Of presence and frequency, up or down: OpenAI's limit."""
MAX_REPETITION_PENALTY = 100.0
"""And at least a hundredth."""
MAX_BIAS = 100.0
"""Up or down: OpenAI's limit."""
MAX_BIASED_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. Raises `RequestError` naming the field and the limit."""

    temperature: float = 1.0
    """0 is greedy: the most likely token, the lowest id among equals."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the most likely one's probability, before `top_k` and `top_p`; 0 keeps
    all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of all tokens of prompt and output, and multiplies the negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of all tokens of the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the output has it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), before the penalties; each id once."""
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
        self._check_logit_changes()
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise RequestError("seed", f"must be in [0, 2^64), got {self.seed}")
        if self.max_tokens < 1:
            raise RequestError("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError("min_tokens", f"must be in [0, max_tokens={self.max_tokens}], got {self.min_tokens}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestError("logprobs", f"must be in [0, {MAX_LOGPROBS}], got {self.logprobs}")
        self._check_stops()

    def _check_logit_changes(self) -> None:
        """The ranges also refuse NaN."""
        if not 0.0 <= self.min_p <= 1.0:
            raise RequestError("min_p", f"must be in [0, 1], got {self.min_p}")
        if not 1.0 / MAX_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY:
            limit = f"must be in [{1.0 / MAX_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]"
            raise RequestError("repetition_penalty", f"{limit}, got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY:
                limit = f"must be in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]"
                raise RequestError(name, f"{limit}, got {getattr(self, name)}")
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise RequestError("logit_bias", f"at most {MAX_BIASED_TOKENS} tokens, got {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias:
            if token_id < 0:
                raise RequestError("logit_bias", f"token ids must be >= 0, got {token_id}")
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise RequestError("logit_bias", f"each must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}], got {bias}")
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise RequestError("logit_bias", "a token id is given twice")

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

    @property
    def penalizes(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
