"""Breaks off a forward pass whose requests were cancelled: when that pays, and how the model is told.

A pass that is broken off has computed nothing: no token counts as computed, no block becomes full or findable, nothing
is drawn. What it wrote lies behind the computed tokens of its requests, where the next pass writes before it reads.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from engine.batch import ScheduledBatch

PASS_TOKENS = 64
"""What a pass costs beside its tokens, as so many tokens of a prompt; from above, for CPUs."""


class PassStopped(Exception):
    """The model stopped between two layers, as it was told to."""


class PassControl(ctypes.Structure):
    """Between whoever cancels and the model that computes one pass; native code knows it as `Control`."""

    _fields_: ClassVar = [("stop", ctypes.c_int32), ("layers_done", ctypes.c_int32)]

    def enter(self, layer: int) -> None:
        """By the model, before each layer. Raises `PassStopped` if the rest is not wanted."""
        self.layers_done = layer
        if self.stop:
            raise PassStopped


def pays(num_cancelled: int, num_tokens: int, share_done: float) -> bool:
    """Whether all requests of a pass of `num_tokens`, of which some were cancelled, are better off without its rest.

    The others start again without the cancelled ones: worth it if that ends sooner than the rest would. So nobody
    waits longer for another's cancellation, but for the fixed cost of a pass, and passes cannot be broken off for ever.
    """
    if num_cancelled == 0 or num_cancelled == num_tokens:
        return num_cancelled > 0
    return num_cancelled > share_done * (num_tokens + PASS_TOKENS)


class CancelWatch:
    """Knows which requests are about to be cancelled, and what the pass that runs computes for them.

    Invariant: a request is in `_doomed` from `doom` until `forget`; both are called for every cancellation.
    """

    def __init__(self, num_layers: int, *, all_or_none: bool) -> None:
        """`all_or_none`: break off no pass that anybody still wants: the KV would not be the same a second time."""
        self._num_layers = num_layers
        self._all_or_none = all_or_none
        self._lock = threading.Lock()
        self._doomed: set[str] = set()
        self._tokens: dict[str, int] = {}
        """Of the pass that runs, by request."""
        self._num_tokens = 0
        self._control = PassControl()

    def doom(self, request_id: str) -> None:
        """From any thread: the engine will be told to cancel this request, if it has it."""
        with self._lock:
            self._doomed.add(request_id)
            self._decide()

    def forget(self, request_id: str) -> None:
        """The engine was told."""
        with self._lock:
            self._doomed.discard(request_id)

    @contextmanager
    def watching(self, batch: ScheduledBatch) -> Iterator[PassControl]:
        """While the body computes `batch`. Whoever draws along with a cancelled request still wants its tokens."""
        with self._lock:
            self._control = PassControl()
            self._num_tokens = batch.num_tokens
            self._tokens = {s.request.request_id: s.num_tokens for s in batch.sequences if not s.request.drawing_along}
            self._decide()
        try:
            yield self._control
        finally:
            with self._lock:
                self._tokens = {}

    def _decide(self) -> None:
        num_cancelled = sum(self._tokens[request_id] for request_id in self._doomed & self._tokens.keys())
        share_done = self._control.layers_done / self._num_layers
        if self._all_or_none and num_cancelled < self._num_tokens:
            return
        if pays(num_cancelled, self._num_tokens, share_done):
            self._control.stop = 1
