"""Output tokens to output text: whole characters only, cut at the first stop string. Knows no stream and no worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became final: never half a character."""

    def flush(self) -> str:
        """What is left at the end."""


class TextStream:
    """Text of one request's output as its tokens come.

    Text that may be the beginning of a stop string is held back until it is known not to be one. The result depends
    on the tokens alone, not on how they were grouped.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._held = ""
        self._stopped = False

    @property
    def stops(self) -> bool:
        """Whether any token may be the last: then each has to be pushed by itself."""
        return bool(self._stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found. The text is complete then."""
        return self._stopped

    def push(self, index: int, token_ids: Sequence[int]) -> str:
        """Take the output tokens from `index` on; return the text that became final.

        Stop strings are looked for only in the text from index `min_tokens` on. Nothing may be pushed once `stopped`.
        """
        assert len(token_ids) == 1 or not self._stop, "of several tokens, nobody could tell which was the last"
        text = self._detokenizer.push(token_ids)
        if not self._stop or index < self._min_tokens:
            return text
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._stopped = True
            self._held = ""
            return text[: min(found)]
        keep = self._longest_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back, now that no token follows. Empty after a stop string."""
        if self._stopped:
            return ""
        text = self._held + self._detokenizer.flush()
        self._held = ""
        return text

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
