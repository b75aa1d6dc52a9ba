"""Where the time to the first token went. Pure: the caller brings the clock.

Workers report durations, never times: clocks of two machines are not compared. What a worker reports is taken out of
the round trip that the router measured, and never more than that.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.v1 import router_pb2

FAILED_ATTEMPT = "failed_attempt"


class WaterfallRecorder:
    """Parts in the order in which they happen, whole microseconds.

    Invariant: the parts add up to the time of the last mark. So none is missing, and none is counted twice.
    """

    def __init__(self, received: float) -> None:
        """`received` and every `now` are seconds of one monotonic clock."""
        self._received = received
        self._parts: list[tuple[str, int]] = []
        self._marked_us = 0
        self._attempt_from = 0
        self._first_us: int | None = None
        self._handed_over_us: int | None = None
        self._second_us: int | None = None
        self._last = received

    @property
    def has_first_token(self) -> bool:
        return self._first_us is not None

    def mark(self, part: str, now: float, reported: Sequence[tuple[str, int]] = ()) -> None:
        """The time since the last mark was `part`; of it, `reported` (name, microseconds) came first, in order."""
        if self._first_us is not None:
            return
        rest = self._since_mark(now)
        for name, duration_us in reported:
            taken = min(max(0, duration_us), rest)
            self._parts.append((name, taken))
            rest -= taken
        self._parts.append((part, rest))

    def begin_attempt(self, now: float) -> None:
        """What follows belongs to a new placement. What an earlier one spent becomes one part."""
        if self._first_us is not None:
            return
        spent = sum(duration for _, duration in self._parts[self._attempt_from :]) + self._since_mark(now)
        del self._parts[self._attempt_from :]
        self._parts.append((FAILED_ATTEMPT, spent))
        self._attempt_from = len(self._parts)

    def admitted(self, now: float) -> None:
        self.mark("admit", now)
        self._attempt_from = len(self._parts)

    def after_admission(self) -> WaterfallRecorder:
        """A recorder for another output of the same call, which has been admitted and nothing more."""
        other = WaterfallRecorder(self._received)
        other._parts = self._parts[: self._attempt_from]
        other._marked_us = sum(duration_us for _, duration_us in other._parts)
        other._attempt_from = len(other._parts)
        return other

    def emitted(self, num_outputs: int, now: float) -> None:
        """The first `num_outputs` tokens are with gRPC."""
        if self._first_us is None:
            self.mark("emit", now)
            self._first_us = self._marked_us
        self._last = now
        if self._second_us is None and num_outputs > 1:
            self._second_us = self._us(now)

    def handed_over(self, now: float) -> None:
        """The decode worker has settled where the KV comes from. Only the first call counts."""
        if self._handed_over_us is None:
            self._handed_over_us = self._us(now)

    def to_proto(self, num_outputs: int) -> router_pb2.Waterfall:
        message = router_pb2.Waterfall(
            parts=_spans(self._parts), ttft_us=self._marked_us, handed_over_us=self._handed_over_us or 0
        )
        if self._first_us is None or self._second_us is None:
            return message
        wait = self._second_us - self._first_us
        transfer = 0
        if self._handed_over_us is not None:
            transfer = min(max(0, self._handed_over_us - self._first_us), wait)
        message.after_first.extend(_spans([("transfer", transfer), ("first_decode_step", wait - transfer)]))
        message.second_token_us = wait
        decoding_s = (self._us(self._last) - self._first_us) / 1e6
        message.decode_tokens_per_s = (num_outputs - 1) / decoding_s if decoding_s > 0 else 0.0
        return message

    def _us(self, now: float) -> int:
        return max(self._marked_us, round((now - self._received) * 1e6))

    def _since_mark(self, now: float) -> int:
        before, self._marked_us = self._marked_us, self._us(now)
        return self._marked_us - before


def _spans(parts: Sequence[tuple[str, int]]) -> list[router_pb2.Span]:
    return [router_pb2.Span(name=name, duration_us=duration_us) for name, duration_us in parts]
