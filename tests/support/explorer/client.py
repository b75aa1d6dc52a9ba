"""What the router does for one request: the path of `router.dispatch`, as a generator instead of a task.

It yields where the dispatcher waits: for messages, until the time that it yields at the latest (then `TimeoutError` is
thrown into it). Sessions, lanes, inbox and attempt are the router's own.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from math import inf
from typing import TYPE_CHECKING, TypeVar

from engine.block_hash import pack_tokens
from engine.errors import DeadlineExceeded, EngineError, InternalError, NoFreeBlocks, NoWorkers, RequestCancelled
from explorer.agenda import Actor
from explorer.model import MODEL_FAULT, expected_output
from explorer.node import run
from kvrelay.v1 import common_pb2, worker_pb2
from router.attempt import Attempt, AttemptFailed
from router.session import DrawnToken, Inbox, Lane, LaneMessage, drawn_token

if TYPE_CHECKING:
    from explorer.world import World

TIMEOUT_S = 60.0
MAX_ATTEMPTS = 3
NO_WORKER_WAIT_S = 20.0
RESERVE_SHARE = 0.5
PREFILL_SHARE = 0.6
HANDOVER_WAIT_S = 2.0

Waits = Generator[float, None, None]
WorkT = TypeVar("WorkT", worker_pb2.Reserve, worker_pb2.Prefill)


class Client:
    """One request, from its acceptance to its one terminal status."""

    def __init__(self, world: World, number: int, prompt: Sequence[int], max_tokens: int) -> None:
        self.world = world
        self.actor = Actor(f"request{number}")
        self.number = number
        self.prompt = list(prompt)
        self.output: list[int] = []
        self.outcome = ""
        """How it ended; empty as long as it has not."""
        self.origins: list[int] = []
        """Of what is in the inbox of the attempt."""
        self._expected = expected_output(prompt, max_tokens)
        self._deadline = world.clock.now + TIMEOUT_S
        self._sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._refused: set[str] = set()
        self._lost: set[str] = set()
        self._num_attempts = 0
        self._stop: EngineError | None = None
        self._path = self._serve()
        self.placing = True
        self._fleet_seen = -1
        self._wait_until = 0.0

    @property
    def deadline(self) -> float:
        return min(self._wait_until, self._deadline)

    @property
    def has_step(self) -> bool:
        if self.outcome:
            return False
        return self.has_news or self._stop is not None or self.deadline <= self.world.clock.now

    @property
    def has_news(self) -> bool:
        return self._fleet_seen != self.world.fleet_changes if self.placing else bool(self.origins)

    def cancel(self) -> None:
        self._stop = self._stop or RequestCancelled("the client went away")

    def step(self) -> None:
        """Go on until it waits again."""
        told, self._fleet_seen = self.has_news, self.world.fleet_changes
        self.origins.clear()
        now = self.world.clock.now
        if self._deadline <= now:
            self._stop = self._stop or DeadlineExceeded("the deadline passed")
        try:
            if self._stop is not None:
                self._wait_until = self._path.throw(self._stop)
            elif not told and self._wait_until <= now:
                self._wait_until = self._path.throw(TimeoutError())
            else:
                self._wait_until = next(self._path)
        except StopIteration:
            self._end("finished")
        except EngineError as error:
            self.world.require(not isinstance(error, InternalError) or MODEL_FAULT in str(error), str(error))
            self._end(type(error).__name__)

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self.world.require(outcome != "finished" or self.output == self._expected, f"{self.actor.name} lacks tokens")

    def _serve(self) -> Waits:
        failure: AttemptFailed | None = None
        for _ in range(MAX_ATTEMPTS):
            pair: list[str] = []
            yield from self._place(failure, pair)
            try:
                yield from self._attempt(*pair)
                return
            except AttemptFailed as failed:
                failure = failed
            if not failure.retryable:
                raise failure.error
            (self._lost if failure.lost else self._refused).add(failure.worker_id)
        assert failure is not None
        raise failure.error

    def _place(self, failure: AttemptFailed | None, pair: list[str]) -> Waits:
        """Fills in a decode worker, and a prefill worker if there is one."""
        self.placing = True
        by = self.world.clock.now + NO_WORKER_WAIT_S
        while not (decode := self._choose("d")):
            if failure is not None and self.world.ready("d"):
                raise failure.error
            try:
                yield by
            except TimeoutError:
                raise NoWorkers("no decode worker") from None
        self.placing = False
        pair += [decode, self._choose("p")]

    def _choose(self, role: str) -> str:
        known = [name for name in self.world.ready(role) if name not in self._refused]
        ready = [name for name in known if name not in self._lost] or known
        return ready[(self.number + self._num_attempts) % len(ready)] if ready else ""

    def _attempt(self, decode_worker: str, prefill_worker: str) -> Waits:
        self._num_attempts += 1
        wire_id = f"{self.number}.{self._num_attempts}"
        inbox = _NotedInbox(self)
        self.origins.clear()
        with ExitStack() as lanes:
            decode = lanes.enter_context(self.world.session(decode_worker).open(wire_id, inbox))
            prefill = None
            if prefill_worker:
                prefill = lanes.enter_context(self.world.session(prefill_worker).open(wire_id, inbox))
            attempt = Attempt(self._num_attempts, wire_id, inbox, decode, prefill)
            yield from self._reserve(attempt)
            if prefill is not None:
                yield from self._prefill(attempt, prefill)
            yield from self._relay(attempt)
            if attempt.started:
                yield from self._settle(attempt)

    def _reserve(self, attempt: Attempt) -> Waits:
        reserve = self._fill(attempt, worker_pb2.Reserve(compute_here=attempt.local, lane=attempt.decode.number))
        attempt.decode.send(worker_pb2.SessionRequest(reserve=reserve))
        patient = len(self.world.ready("d")) == 1
        by = inf if patient else self.world.clock.now + self._remaining_s() * RESERVE_SHARE
        try:
            while attempt.reserved is None:
                yield from self._listen(attempt, by)
                attempt.check_decode()
        except TimeoutError:
            error = NoFreeBlocks("no blocks in its share of the time")
            raise AttemptFailed(error, attempt.decode.worker.worker_id, retryable=True, lost=False) from None

    def _prefill(self, attempt: Attempt, lane: Lane) -> Waits:
        assert attempt.reserved is not None
        prefill = self._fill(attempt, worker_pb2.Prefill(ticket=attempt.reserved.ticket))
        lane.send(worker_pb2.SessionRequest(prefill=prefill))
        by = self.world.clock.now + self._remaining_s() * PREFILL_SHARE
        try:
            while attempt.prefilled is None and attempt.prefill_closed is None:
                yield from self._listen(attempt, by)
                attempt.check_decode()
        except TimeoutError:
            pass
        if attempt.prefilled is None:
            self._give_up_prefill(attempt, lane)
            return
        self._accept([drawn_token(attempt.prefilled.output)])
        if not self._complete:
            attempt.start(pack_tokens((attempt.prefilled.output.token_id,)))

    def _relay(self, attempt: Attempt) -> Waits:
        while True:
            outputs, attempt.outputs = attempt.outputs, []
            self._accept(outputs)
            if self._complete:
                return
            attempt.check_decode()
            if attempt.prefill is not None and attempt.kv_is_open and attempt.prefill_failed:
                self._give_up_prefill(attempt, attempt.prefill)
            yield from self._listen(attempt, inf)

    def _settle(self, attempt: Attempt) -> Waits:
        by = self.world.clock.now + HANDOVER_WAIT_S
        try:
            while attempt.kv_is_open:
                yield from self._listen(attempt, by)
        except TimeoutError:
            pass

    def _listen(self, attempt: Attempt, by: float) -> Waits:
        yield by
        run(attempt.listen())

    def _give_up_prefill(self, attempt: Attempt, lane: Lane) -> None:
        if attempt.compute_missing:
            return
        closed = attempt.prefill_closed
        (self._lost if closed is not None and closed.lost else self._refused).add(lane.worker.worker_id)
        attempt.ask_to_compute_missing()

    def _accept(self, outputs: Sequence[DrawnToken]) -> None:
        for at, token_id, _, _ in outputs:
            index, name = len(self.output), f"token {at} of {self.actor.name}"
            self.world.require(at == index, f"{name} came where {index} was next")
            self.world.require(index < len(self._expected), f"{name} is one too many")
            self.world.require(token_id == self._expected[index], f"{name} is wrong")
            self.output.append(token_id)

    @property
    def _complete(self) -> bool:
        return len(self.output) == len(self._expected)

    def _remaining_s(self) -> float:
        return self._deadline - self.world.clock.now

    def _fill(self, attempt: Attempt, message: WorkT) -> WorkT:
        message.request_id = attempt.wire_id
        message.token_ids = pack_tokens([*self.prompt, *self.output])
        message.num_prompt_tokens = len(self.prompt)
        message.sampling.CopyFrom(self._sampling)
        message.timeout_ms = max(1, int(self._remaining_s() * 1000))
        return message


class _NotedInbox(Inbox):
    """Tells its client that there is something to read."""

    def __init__(self, client: Client) -> None:
        super().__init__(256, lambda: client.world.require(False, "an inbox overflows"))
        self._client = client

    def put(self, lane: Lane, message: LaneMessage) -> bool:
        self._client.origins.append(self._client.world.origin())
        return super().put(lane, message)
