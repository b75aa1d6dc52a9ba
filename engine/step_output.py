"""What one step of an engine gave."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import EngineError
from engine.request import FinishReason
from engine.sampler import SampledToken, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What a step did for one request."""

    request_id: str
    num_computed_tokens: int
    """Leading tokens whose KV is complete in the request's blocks."""
    token: SampledToken | None
    """None: a chunk of the prompt was computed, or the request failed."""
    index: int
    """Output index of `token`; of the next one if there is none. Counts tokens emitted before a resume."""
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens that follow those told before, where the request asks for them."""
    error: EngineError | None = None
    """The request is over without a finish reason. Of what a link may touch, the blocks stay until `cancel`."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    updates: tuple[RequestUpdate, ...] = ()
