"""Pools that grow, shrink and are replaced, in a simulated world: what is done, and what never happens."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.events import (
    ROUTER_ID,
    ActorDied,
    ActorReady,
    AwaitDrained,
    DesiredChanged,
    Event,
    Instruction,
    KillActor,
    MemberMustMove,
    Phase,
    PoolWanted,
    PublishWorkers,
    RetireRouter,
    StartActor,
    StopActor,
    StopRequested,
    WorkerDrained,
    WorkersConnected,
)
from cluster.reconcile import Reconciler
from cluster.spec import SupervisionSpec

LIMITS = SupervisionSpec(start_timeout_s=100.0, worker_drain_s=30.0, backoff_min_s=1.0, backoff_max_s=8.0)


def wanted(
    prefill: int, decode: int, revision: str = "a", take_away: str = "", router: str | None = None
) -> DesiredChanged:
    pools = {"prefill": PoolWanted(prefill, revision), "decode": PoolWanted(decode, revision)}
    return DesiredChanged(pools, LIMITS, take_away, router)


@dataclass
class World:
    """Carries instructions out. What they bring about waits in `pending`, until a test lets it happen."""

    reconciler: Reconciler
    now: float = 0.0
    revision: str = "a"
    live: dict[str, int] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    published: PublishWorkers | None = None
    pending: list[Event] = field(default_factory=list)
    old_routers: set[int] = field(default_factory=set)
    """Attempts: that are to take over, or were taken over from."""

    @classmethod
    def up(cls, prefill: int = 1, decode: int = 1) -> World:
        world = cls(Reconciler(wanted(prefill, decode).pools, LIMITS))
        world.carry_out(world.reconciler.start(0.0))
        world.settle()
        return world

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartActor(member_id, attempt, _, takes_over):
                    if takes_over is not None:
                        assert member_id == ROUTER_ID
                        assert not self.old_routers, "three routers"
                        self.old_routers.add(self.live.pop(ROUTER_ID))
                    assert member_id not in self.live, f"two live actors of {member_id}"
                    self.live[member_id], self.revisions[member_id] = attempt, self.revision
                    self.pending.append(ActorReady(member_id, attempt, f"{member_id}:{attempt}"))
                case RetireRouter(member_id, attempt):
                    assert attempt in self.old_routers
                    self.pending.append(ActorDied(member_id, attempt, "stopped"))
                case StopActor(member_id, attempt) | KillActor(member_id, attempt):
                    assert self.live[member_id] == attempt
                    assert self.published is None or member_id not in self.published.addresses, "stopped before its end"
                    self.pending.append(ActorDied(member_id, attempt, "stopped"))
                case PublishWorkers():
                    self.published = instruction
                    self.pending.append(WorkersConnected(instruction))
                case AwaitDrained(member_id, attempt):
                    assert self.published is not None
                    assert member_id in self.published.draining
                    self.pending.append(WorkerDrained(member_id, attempt))

    def give(self, event: Event) -> None:
        if isinstance(event, DesiredChanged):
            self.revision = str(event.pools["decode"].revision)
        if isinstance(event, ActorDied):
            if event.member_id == ROUTER_ID and event.attempt in self.old_routers:
                self.old_routers.remove(event.attempt)
            elif self.live.get(event.member_id) != event.attempt:
                return
            else:
                del self.live[event.member_id]
                if event.member_id == ROUTER_ID and self.old_routers:  # it never took over
                    self.live[ROUTER_ID] = self.old_routers.pop()
        self.carry_out(self.reconciler.handle(event, self.now))
        self.reconciler.check_integrity()

    def happen(self, index: int = 0) -> None:
        event = self.pending.pop(index % len(self.pending))
        if isinstance(event, ActorReady) and self.live.get(event.member_id) != event.attempt:
            return
        self.give(event)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.reconciler.tick(self.now))
        self.reconciler.check_integrity()

    def settle(self) -> list[frozenset[str]]:
        """Let everything happen that is under way; returns who served new requests after each event."""
        seen: list[frozenset[str]] = []
        for _ in range(1000):
            if self.pending:
                self.happen()
            elif self.reconciler.settled:
                return seen
            else:
                due = self.reconciler.next_due
                assert due is not None, "nothing happens any more, and it is not as wanted"
                self.pass_time(max(0.0, due - self.now))
            seen.append(self.serving())
        raise AssertionError("it does not converge")

    def serving(self) -> frozenset[str]:
        """As the router knows it."""
        if self.published is None:
            return frozenset()
        return frozenset(self.published.addresses) - self.published.draining

    def workers(self) -> set[str]:
        return set(self.live) - {ROUTER_ID}


def test_a_pool_grows_at_once() -> None:
    world = World.up()
    world.give(wanted(1, 3))
    world.settle()
    assert world.serving() == {"prefill-0", "decode-0", "decode-1", "decode-2"}


def test_a_pool_shrinks_by_draining_and_only_a_drained_worker_is_stopped() -> None:
    world = World.up(decode=2)
    told = world.reconciler.handle(wanted(1, 1), 0.0)
    draining = PublishWorkers(
        {"prefill-0": "prefill-0:1", "decode-0": "decode-0:1", "decode-1": "decode-1:1"}, frozenset({"decode-1"})
    )
    assert told == [draining, AwaitDrained("decode-1", 1)]

    told = world.reconciler.handle(WorkerDrained("decode-1", 1), 1.0)

    left = PublishWorkers({"prefill-0": "prefill-0:1", "decode-0": "decode-0:1"})
    assert told == [left, StopActor("decode-1", 1)]


def test_a_worker_that_does_not_drain_in_time_is_unpublished_and_stopped() -> None:
    world = World.up(decode=2)
    world.give(wanted(1, 1))
    assert world.reconciler.next_due == 30.0
    told = world.reconciler.tick(30.0)
    assert told == [PublishWorkers({"prefill-0": "prefill-0:1", "decode-0": "decode-0:1"}), StopActor("decode-1", 1)]


def test_the_only_worker_is_replaced_by_one_that_serves_already() -> None:
    world = World.up()
    world.give(wanted(1, 1, "b"))
    seen = world.settle()
    assert all({name.partition("-")[0] for name in serving} == {"prefill", "decode"} for serving in seen)
    assert {world.revisions[name] for name in world.workers()} == {"b"}
    assert len(world.workers()) == 2


def test_the_pools_do_not_have_successors_at_the_same_time() -> None:
    world = World.up()
    world.give(wanted(1, 1, "b"))
    most = len(world.workers())
    while world.pending:
        world.happen()
        most = max(most, len(world.workers()))
    assert most == 3


def test_of_several_workers_one_is_replaced_after_the_other() -> None:
    world = World.up(prefill=2, decode=3)
    world.give(wanted(2, 3, "b"))
    seen = world.settle()
    assert min(len(serving) for serving in seen) == 4
    assert world.serving() == {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
    assert {world.revisions[name] for name in world.workers()} == {"b"}


def test_new_settings_that_do_not_start_stop_neither_the_cluster_nor_the_old_worker() -> None:
    world = World.up()
    world.give(wanted(1, 1, "bad"))
    for _ in range(10):
        world.pending.clear()
        for name in [name for name in world.workers() if world.revisions[name] == "bad"]:
            world.give(ActorDied(name, world.live[name], "no memory", hopeless=True))
        world.pass_time(10.0)
        assert world.serving() == {"prefill-0", "decode-0"}
    assert not world.reconciler.finished

    world.give(wanted(1, 1, "a"))
    world.settle()
    assert world.workers() == {"prefill-0", "decode-0"}


def test_the_worker_that_was_named_is_the_one_to_go() -> None:
    world = World.up(decode=3)
    world.give(wanted(1, 2, take_away="decode-0"))
    world.give(wanted(1, 2, take_away="decode-0"))
    world.settle()
    assert world.serving() == {"prefill-0", "decode-1", "decode-2"}


def test_what_does_not_serve_goes_before_what_serves() -> None:
    world = World.up(decode=2)
    world.give(ActorDied("decode-0", 1, "killed"))
    world.give(wanted(1, 1))
    world.settle()
    assert world.serving() == {"prefill-0", "decode-1"}


def test_a_worker_whose_node_goes_away_is_replaced_once_and_the_others_stay() -> None:
    world = World.up(decode=2)
    world.give(MemberMustMove("decode-1", 1))
    world.give(MemberMustMove("decode-1", 1))
    seen = world.settle()
    assert world.live == {ROUTER_ID: 1, "prefill-0": 1, "decode-0": 1, "decode-1": 2}
    assert all("decode-0" in serving for serving in seen)


def test_a_dead_worker_that_is_not_wanted_holds_nothing_up() -> None:
    world = World.up()
    world.give(ActorDied("prefill-0", 1, "killed"))
    world.happen()
    world.give(wanted(0, 1, "b"))
    world.settle()
    assert world.serving() == {"decode-1"}


def test_an_id_that_comes_back_goes_on_counting_its_starts() -> None:
    world = World.up(decode=2)
    world.give(wanted(1, 1))
    world.settle()
    world.give(wanted(1, 2))
    assert world.live["decode-1"] == 2


def test_without_a_router_there_is_nothing_to_drain() -> None:
    world = World.up(decode=2)
    world.give(ActorDied(ROUTER_ID, 1, "killed"))
    world.published = None
    assert world.reconciler.handle(wanted(1, 1), 1.0) == [StopActor("decode-1", 1)]


def test_another_router_starts_beside_the_one_that_serves_and_takes_over_once_it_does() -> None:
    world = World.up()
    told = world.reconciler.handle(wanted(1, 1, router="b"), 0.0)
    workers = PublishWorkers({"prefill-0": "prefill-0:1", "decode-0": "decode-0:1"})
    assert told == [StartActor(ROUTER_ID, 2, ROUTER_ID, workers)]
    assert [view.member_id for view in world.reconciler.views()][-1] == "router-next"
    assert not world.reconciler.settled

    assert world.reconciler.handle(ActorReady(ROUTER_ID, 2, "router:2"), 1.0) == [RetireRouter(ROUTER_ID, 1), workers]
    assert [view.member_id for view in world.reconciler.views()][-1] == "router-old"
    world.reconciler.handle(WorkersConnected(workers), 1.0)
    assert not world.reconciler.settled
    assert world.reconciler.handle(ActorDied(ROUTER_ID, 1, "stopped"), 2.0) == []
    assert world.reconciler.settled


def test_a_router_that_dies_is_succeeded_by_the_one_that_was_to_take_over() -> None:
    world = World.up()
    world.give(wanted(1, 1, router="b"))
    world.give(ActorDied(ROUTER_ID, 1, "crash"))
    world.published = None
    world.settle()
    assert world.live[ROUTER_ID] == 2
    assert world.serving() == {"prefill-0", "decode-0"}


def test_workers_and_router_are_not_replaced_at_the_same_time() -> None:
    world = World.up()
    world.give(wanted(1, 1, "b", router="b"))
    while world.pending:
        assert not (world.old_routers and len(world.workers()) > 2)
        world.happen()
    assert world.reconciler.settled
    assert world.live[ROUTER_ID] == 2


def test_a_stop_while_a_router_takes_over_ends_all_three() -> None:
    world = World.up()
    world.reconciler.handle(wanted(1, 1, router="b"), 0.0)
    world.reconciler.handle(ActorReady(ROUTER_ID, 2, "router:2"), 1.0)
    told = world.reconciler.handle(StopRequested(), 1.0)
    assert told == [StopActor(ROUTER_ID, 1), StopActor(ROUTER_ID, 2)]
    assert world.reconciler.handle(ActorDied(ROUTER_ID, 2, "stopped"), 1.0) == []
    told = world.reconciler.handle(ActorDied(ROUTER_ID, 1, "stopped"), 1.0)
    assert told == [StopActor("prefill-0", 1), StopActor("decode-0", 1)]


@settings(max_examples=300, deadline=None)
@given(
    orders=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from("abc"), st.just(""), st.sampled_from("xy")),
        min_size=1,
        max_size=4,
    ),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=40),
)
def test_whatever_happens_on_the_way_it_becomes_as_wanted_and_stays_so(
    orders: list[tuple[int, int, str, str, str]], steps: list[tuple[int, int]]
) -> None:
    """Events come in any order, workers die at any moment, and new orders come in the middle."""
    world, left = World.up(), list(orders)
    for kind, number in steps:
        if kind == 0 and left:
            world.give(wanted(*left.pop()))
        elif kind == 1 and world.live:
            name = sorted(world.live)[number % len(world.live)]
            world.give(ActorDied(name, world.live[name], "crash"))
            if name == ROUTER_ID:
                world.published = None
        elif kind == 2:
            world.pass_time(float(number))
        elif kind == 4 and world.old_routers:
            world.give(ActorDied(ROUTER_ID, min(world.old_routers), "crash"))
            world.published = None
        elif kind == 3 and world.workers():
            name = sorted(world.workers())[number % len(world.workers())]
            world.give(MemberMustMove(name, world.live[name]))
        elif world.pending:
            world.happen(number)
    last = left[0] if left else orders[0]
    world.give(wanted(*last))
    world.settle()

    prefill, decode, revision, _, _ = last
    assert sum(name.startswith("prefill") for name in world.workers()) == prefill
    assert sum(name.startswith("decode") for name in world.workers()) == decode
    assert {world.revisions[name] for name in world.workers()} == {revision}
    assert world.serving() == world.workers()
    assert (ROUTER_ID in world.live, world.old_routers) == (True, set())
    assert world.reconciler.handle(wanted(*last), world.now) == []


@settings(max_examples=200, deadline=None)
@given(
    before=st.tuples(st.integers(1, 3), st.integers(1, 3), st.just("a")),
    after=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from("ab")),
    order=st.lists(st.integers(0, 9), max_size=30),
)
def test_while_nothing_dies_a_pool_is_never_more_than_one_short_nor_empty(
    before: tuple[int, int, str], after: tuple[int, int, str], order: list[int]
) -> None:
    world = World.up(before[0], before[1])
    world.give(wanted(*after))
    seen = [world.serving()]
    for index in order:
        if world.pending:
            world.happen(index)
            seen.append(world.serving())
    seen += world.settle()
    for number, role in enumerate(("prefill", "decode")):
        needed = min(int(before[number]), int(after[number]))
        fewest = min(sum(name.startswith(role) for name in serving) for serving in seen)
        assert fewest >= max(1, needed - 1)
    assert Phase.DRAINING not in {view.phase for view in world.reconciler.views()}
