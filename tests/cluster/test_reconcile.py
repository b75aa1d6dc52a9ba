from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.events import (
    ROUTER_ID,
    ActorDied,
    ActorReady,
    Event,
    Finish,
    HostLost,
    Instruction,
    KillActor,
    MemberHung,
    Phase,
    PoolWanted,
    PublishWorkers,
    StartActor,
    StopActor,
    StopRequested,
    WorkersConnected,
)
from cluster.reconcile import Reconciler
from cluster.spec import SupervisionSpec

LIMITS = SupervisionSpec(start_timeout_s=100.0, backoff_min_s=1.0, backoff_max_s=8.0, stable_s=60.0, max_first_starts=3)
WORKERS = ("prefill-0", "decode-0")
POOLS = {"prefill": PoolWanted(1, "a"), "decode": PoolWanted(1, "a")}
MEMBERS = (ROUTER_ID, *WORKERS)


def bring_up(now: float = 0.0) -> Reconciler:
    reconciler = Reconciler(POOLS, LIMITS)
    reconciler.start(now)
    for member_id in MEMBERS:
        told = reconciler.handle(ActorReady(member_id, 1, address_of(member_id, 1)), now)
    assert isinstance(told[-1], PublishWorkers)
    reconciler.handle(WorkersConnected(told[-1]), now)
    assert reconciler.all_ready
    return reconciler


def start(member_id: str, attempt: int) -> StartActor:
    return StartActor(member_id, attempt, member_id.partition("-")[0])


def address_of(member_id: str, attempt: int) -> str:
    return f"{member_id}:{attempt}"


def test_all_members_are_started_at_once() -> None:
    instructions = Reconciler(POOLS, LIMITS).start(now=0.0)
    assert instructions == [start(member_id, 1) for member_id in (*WORKERS, ROUTER_ID)]


def test_workers_that_are_ready_before_the_router_are_published_when_it_comes() -> None:
    reconciler = Reconciler(POOLS, LIMITS)
    reconciler.start(now=0.0)

    assert reconciler.handle(ActorReady("decode-0", 1, "d"), now=1.0) == []
    assert reconciler.handle(ActorReady(ROUTER_ID, 1, "r"), now=2.0) == [PublishWorkers({"decode-0": "d"})]


def test_a_dead_worker_is_unpublished_at_once_and_started_again_after_the_pause() -> None:
    reconciler = bring_up()

    died = reconciler.handle(ActorDied("decode-0", 1, "killed"), now=10.0)

    assert died == [PublishWorkers({"prefill-0": "prefill-0:1"})]
    assert [view.member_id for view in reconciler.views() if view.starts_again] == ["decode-0"]
    assert reconciler.tick(now=10.9) == []
    assert reconciler.next_due == 11.0
    assert reconciler.tick(now=11.0) == [start("decode-0", 2)]
    published = reconciler.handle(ActorReady("decode-0", 2, "d2"), now=12.0)
    assert published == [PublishWorkers({"prefill-0": "prefill-0:1", "decode-0": "d2"})]
    reconciler.check_integrity()


def test_a_restarted_router_is_told_of_all_workers() -> None:
    reconciler = bring_up()
    assert reconciler.handle(ActorDied(ROUTER_ID, 1, "killed"), now=5.0) == []
    assert reconciler.tick(now=6.0) == [start(ROUTER_ID, 2)]

    published = reconciler.handle(ActorReady(ROUTER_ID, 2, "r2"), now=7.0)

    assert published == [PublishWorkers({worker_id: address_of(worker_id, 1) for worker_id in WORKERS})]


def test_pauses_double_up_to_the_limit_and_begin_anew_after_stable_service() -> None:
    reconciler = bring_up()
    now, pauses = 0.0, []
    for attempt in range(1, 7):
        reconciler.handle(ActorDied("decode-0", attempt, "crash"), now)
        due = reconciler.next_due
        assert due is not None
        pauses.append(due - now)
        now = due
        reconciler.tick(now)
        reconciler.handle(ActorReady("decode-0", attempt + 1, "d"), now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]

    reconciler.handle(ActorDied("decode-0", 7, "crash"), now + LIMITS.stable_s)
    assert reconciler.next_due == now + LIMITS.stable_s + 1.0


def test_late_words_of_an_earlier_actor_change_nothing() -> None:
    reconciler = bring_up()
    reconciler.handle(ActorDied("decode-0", 1, "killed"), now=1.0)
    reconciler.tick(now=2.0)

    assert reconciler.handle(ActorReady("decode-0", 1, "old"), now=3.0) == []
    assert reconciler.handle(ActorDied("decode-0", 1, "killed"), now=3.0) == []
    assert reconciler.handle(ActorDied("nobody", 1, "killed"), now=3.0) == []
    assert {view.member_id: view.phase for view in reconciler.views()}["decode-0"] is Phase.STARTING


def test_an_actor_that_is_not_ready_in_time_is_killed_and_started_again_only_when_it_is_gone() -> None:
    reconciler = Reconciler(POOLS, LIMITS)
    reconciler.start(now=0.0)
    for member_id in (ROUTER_ID, "prefill-0"):
        reconciler.handle(ActorReady(member_id, 1, "a"), now=1.0)

    assert reconciler.tick(now=100.0) == [KillActor("decode-0", 1, "not ready within 100 s")]
    assert reconciler.tick(now=1000.0) == []
    reconciler.handle(ActorDied("decode-0", 1, "killed"), now=1000.0)
    assert reconciler.tick(now=1001.0) == [start("decode-0", 2)]


def test_a_hung_worker_is_unpublished_and_killed_and_started_again_only_when_it_is_gone() -> None:
    reconciler = bring_up()

    hung = reconciler.handle(MemberHung("decode-0", 1, "no answer for 15 s"), now=10.0)

    assert hung == [
        KillActor("decode-0", 1, "no answer for 15 s"),
        PublishWorkers({"prefill-0": "prefill-0:1"}),
    ]
    assert reconciler.handle(MemberHung("decode-0", 1, "no answer for 15 s"), now=11.0) == []
    assert reconciler.tick(now=1000.0) == []
    reconciler.handle(ActorDied("decode-0", 1, "stopped"), now=1000.0)
    assert reconciler.tick(now=1001.0) == [start("decode-0", 2)]
    assert {view.member_id: view.last_reason for view in reconciler.views()}["decode-0"] == "no answer for 15 s"
    reconciler.check_integrity()


def test_a_hung_router_is_killed_and_its_successor_told_of_all_workers() -> None:
    reconciler = bring_up()

    assert reconciler.handle(MemberHung(ROUTER_ID, 1, "silent"), now=5.0) == [KillActor(ROUTER_ID, 1, "silent")]
    reconciler.handle(ActorDied(ROUTER_ID, 1, "stopped"), now=6.0)
    assert reconciler.tick(now=7.0) == [start(ROUTER_ID, 2)]
    published = reconciler.handle(ActorReady(ROUTER_ID, 2, "r2"), now=8.0)
    assert published == [PublishWorkers({worker_id: address_of(worker_id, 1) for worker_id in WORKERS})]


def test_only_the_present_actor_that_serves_can_hang() -> None:
    reconciler = Reconciler(POOLS, LIMITS)
    reconciler.start(now=0.0)
    assert reconciler.handle(MemberHung("decode-0", 1, "silent"), now=1.0) == []
    reconciler = bring_up()
    assert reconciler.handle(MemberHung("decode-0", 0, "silent"), now=1.0) == []
    reconciler.handle(StopRequested(), now=1.0)
    assert reconciler.handle(MemberHung("decode-0", 1, "silent"), now=1.0) == []


def test_a_worker_that_hangs_again_and_again_is_started_after_longer_pauses() -> None:
    reconciler, pauses = bring_up(), []
    for attempt in (1, 2, 3):
        now = 20.0 * attempt
        reconciler.handle(MemberHung("decode-0", attempt, "silent"), now)
        reconciler.handle(ActorDied("decode-0", attempt, "stopped"), now)
        due = reconciler.next_due
        assert due is not None
        pauses.append(due - now)
        reconciler.tick(due)
        reconciler.handle(ActorReady("decode-0", attempt + 1, "d"), due)
    assert pauses == [1.0, 2.0, 4.0]


def test_a_worker_that_can_never_start_fails_the_cluster_with_its_reason() -> None:
    reconciler = Reconciler(POOLS, LIMITS)
    reconciler.start(now=0.0)
    reconciler.handle(ActorReady("prefill-0", 1, "p"), now=1.0)

    reconciler.handle(ActorDied("decode-0", 1, "no such model", hopeless=True), now=1.0)
    assert not any(view.starts_again for view in reconciler.views())
    for member_id in (ROUTER_ID, "prefill-0"):
        last = reconciler.handle(ActorDied(member_id, 1, "killed"), now=2.0)

    assert last == [Finish("decode-0: no such model")]


def test_a_worker_that_never_served_is_given_up_after_the_limit() -> None:
    reconciler = Reconciler(POOLS, LIMITS)
    reconciler.start(now=0.0)
    for attempt in (1, 2):
        assert reconciler.handle(ActorDied("decode-0", attempt, "crash"), now=10.0 * attempt) == []
        reconciler.tick(now=10.0 * attempt + 8.0)
    stopping = reconciler.handle(ActorDied("decode-0", 3, "crash"), now=50.0)
    assert KillActor(ROUTER_ID, 1, "the cluster stops") in stopping


def test_a_worker_that_served_is_tried_again_whatever_its_error() -> None:
    reconciler = bring_up()
    reconciler.handle(ActorDied(ROUTER_ID, 1, "killed"), now=1.0)
    reconciler.tick(now=2.0)
    assert reconciler.handle(ActorDied(ROUTER_ID, 2, "the port is in use", hopeless=True), now=3.0) == []
    assert reconciler.next_due == 5.0


def test_a_stop_ends_the_router_first_and_then_the_workers() -> None:
    reconciler = bring_up()

    assert reconciler.handle(StopRequested(), now=1.0) == [StopActor(ROUTER_ID, 1)]
    assert reconciler.handle(ActorDied(ROUTER_ID, 1, "stopped"), now=2.0) == [StopActor(w, 1) for w in WORKERS]
    assert reconciler.handle(ActorDied("prefill-0", 1, "stopped"), now=3.0) == []
    assert reconciler.handle(ActorDied("decode-0", 1, "stopped"), now=3.0) == [Finish(None)]
    assert reconciler.finished
    reconciler.check_integrity()


def test_a_stop_during_the_start_kills_what_does_not_serve_yet() -> None:
    reconciler = Reconciler(POOLS, LIMITS)
    reconciler.start(now=0.0)
    instructions = reconciler.handle(StopRequested(), now=1.0)
    assert instructions == [KillActor(member_id, 1, "the cluster stops") for member_id in MEMBERS]


def test_nothing_is_published_or_started_after_a_stop() -> None:
    reconciler = bring_up()
    reconciler.handle(ActorDied("decode-0", 1, "killed"), now=0.0)
    reconciler.handle(StopRequested(), now=0.5)
    assert reconciler.next_due is None
    assert reconciler.tick(now=100.0) == []


def test_a_lost_host_finishes_with_its_reason() -> None:
    reconciler = bring_up()
    assert reconciler.handle(HostLost("Ray is gone"), now=1.0) == [Finish("Ray is gone")]
    assert reconciler.handle(HostLost("again"), now=1.0) == []
    reconciler.check_integrity()


class World:
    """Actors as they may really be: it carries out instructions and never lets two of one member live."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.finished = False

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartActor(member_id, attempt, _):
                    assert member_id not in self.live, f"two live actors of {member_id}"
                    self.live[member_id] = attempt
                case StopActor(member_id, attempt) | KillActor(member_id, attempt):
                    assert self.live.get(member_id) == attempt, "told to end an actor that does not live"
                case PublishWorkers(addresses):
                    for worker_id, address in addresses.items():
                        assert address == address_of(worker_id, self.live[worker_id]), "a dead worker was published"
                case Finish():
                    assert not self.live, "finished while actors live"
                    self.finished = True


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["ready", "die", "die hopeless", "hang", "stale", "stop", "wait"]),
            st.sampled_from(MEMBERS),
            st.floats(0.0, 200.0),
        ),
        max_size=60,
    )
)
def test_no_order_of_events_leaves_two_live_actors_of_one_member(steps: list[tuple[str, str, float]]) -> None:
    reconciler, world, now = Reconciler(POOLS, LIMITS), World(), 0.0
    world.carry_out(reconciler.start(now))
    for kind, member_id, pause in steps:
        now += pause
        event: Event | None = None
        attempt = world.live.get(member_id)
        if kind == "ready" and attempt is not None:
            event = ActorReady(member_id, attempt, address_of(member_id, attempt))
        elif kind.startswith("die") and attempt is not None:
            del world.live[member_id]
            event = ActorDied(member_id, attempt, "crash", hopeless=kind == "die hopeless")
        elif kind == "hang" and attempt is not None:
            event = MemberHung(member_id, attempt, "silent")
        elif kind == "stale":
            event = ActorDied(member_id, (attempt or 1) - 1, "late")
        elif kind == "stop":
            event = StopRequested()
        world.carry_out(reconciler.tick(now) if event is None else reconciler.handle(event, now))
        reconciler.check_integrity()
        due = reconciler.next_due
        assert due is None or due <= now + max(LIMITS.backoff_max_s, LIMITS.start_timeout_s)
    drain(reconciler, world, now)
    assert world.finished


def drain(reconciler: Reconciler, world: World, now: float) -> None:
    """Stop; every actor ends when its time comes."""
    world.carry_out(reconciler.handle(StopRequested(), now))
    for member_id in MEMBERS:
        if (attempt := world.live.pop(member_id, None)) is not None:
            world.carry_out(reconciler.handle(ActorDied(member_id, attempt, "stopped"), now))
    reconciler.check_integrity()


@pytest.mark.parametrize("failures", [1, 5, 2000])
def test_the_pause_is_bounded_after_any_number_of_deaths(failures: int) -> None:
    reconciler, now = bring_up(), 0.0
    for attempt in range(1, failures + 1):
        reconciler.handle(ActorDied("decode-0", attempt, "crash"), now)
        due = reconciler.next_due
        assert due is not None
        assert LIMITS.backoff_min_s <= due - now <= LIMITS.backoff_max_s
        now = due
        reconciler.tick(now)
        reconciler.handle(ActorReady("decode-0", attempt + 1, "d"), now)
