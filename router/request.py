"""A validated request, and its token log: the only place that numbers output tokens.

The log is the request. Whatever a worker holds of it can be lost, because a worker that gets the log continues at the
very next index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.block_hash import TOKEN_BYTES, pack_tokens
from engine.errors import ProtocolError
from engine.sampling_params import SamplingParams
from kvrelay.v1 import common_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a client asked for, checked, tokenized and complete."""

    request_id: str
    prompt: bytes
    """Token ids, little-endian u32; at least one."""
    params: SamplingParams
    """With a seed."""
    sampling: common_pb2.SamplingParams
    """`params` as workers get them."""
    scope: bytes = b""
    """Of the tenant: part of block identity."""
    priority: int = 0
    """A smaller number goes first."""
    num_public_tokens: int = 0
    """Leading tokens of the prompt that are declared public."""
    later_fields: frozenset[str] = frozenset()
    """Fields of `params` that are used and that not every worker may know."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def max_total_tokens(self) -> int:
        return self.num_prompt_tokens + self.params.max_tokens


class TokenLog:
    """Prompt and output of one request, in order.

    Invariant: output index i is taken exactly once, after i - 1 and before i + 1; `num_outputs` are there.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._tokens = bytearray(request.prompt)
        self._prompt_bytes = len(request.prompt)
        self.limit = request.params.max_tokens
        """Tokens that the output may have."""
        self.num_outputs = 0

    @property
    def full(self) -> bool:
        """Whether the output has all the tokens that it may have."""
        return self.num_outputs >= self.limit

    def take(self, index: int, token_ids: Sequence[int]) -> None:
        """Output tokens from `index` on, at least one. On `ProtocolError` (a repeated or skipped index, or too many)
        the log is unchanged."""
        expected = self.num_outputs
        if index != expected or expected + len(token_ids) > self.limit:
            raise ProtocolError(f"output index {index} came where {expected} of {self.limit} was next")
        self._tokens += pack_tokens(token_ids)
        self.num_outputs = expected + len(token_ids)

    def outputs_from(self, index: int) -> bytes:
        """Output tokens from `index` on; little-endian u32."""
        return bytes(self._tokens[self._prompt_bytes + index * TOKEN_BYTES :])

    def tokens(self) -> bytes:
        """Prompt, then output so far; little-endian u32."""
        return bytes(self._tokens)
