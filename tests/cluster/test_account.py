from __future__ import annotations

from pathlib import Path

import pytest

from cluster import state
from cluster.account import Account
from cluster.events import MemberView, Phase
from cluster.host import ReadyReport
from cluster.processes import ProcessId
from cluster.spec import ClusterSpec
from cluster.supervisor import Member, Snapshot
from cluster.updates import MemberTrouble, Ready, StageBegan, StageDone, Update

ADDRESSES = {"router": "127.0.0.1:8600", "prefill-0": "127.0.0.1:1", "decode-0": "127.0.0.1:2"}
HTTP = "127.0.0.1:8601"


@pytest.fixture
def told() -> list[Update]:
    return []


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[Update]) -> Account:
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path))
    record = state.ClusterRecord(
        name="default",
        cluster_id="c",
        process=ProcessId.mine(),
        router_address="",
        model="m",
        ready=False,
        started_at=1.0,
        log_path="",
        ray_address="",
    )
    return Account(record, ClusterSpec(), told.append, started=0.0)


def snapshot(phase: Phase, *, ready: bool = False, **other: tuple[Phase, int]) -> Snapshot:
    """All members in `phase`, but the `other` ones (with _ for -)."""
    members = []
    for member_id, address in ADDRESSES.items():
        its_phase, attempt = other.get(member_id.replace("-", "_"), (phase, 1))
        serves = its_phase is Phase.READY
        report = ReadyReport(address, f"life-{attempt}", ProcessId.mine(), http_address=HTTP) if serves else None
        reason, again = ("killed", its_phase is Phase.ABSENT) if attempt > 1 else ("", False)
        role = member_id.partition("-")[0]
        view = MemberView(member_id, its_phase, attempt, address if serves else "", reason, again, role)
        members.append(Member(view, report))
    return Snapshot(ready, tuple(members))


def test_the_record_follows_the_members(account: Account) -> None:
    assert state.read_record("default") == account.record
    account.changed(snapshot(Phase.STARTING))
    account.changed(snapshot(Phase.READY, ready=True))

    written = state.find_running()
    assert written.ready
    assert (written.router_address, written.http_address) == (ADDRESSES["router"], HTTP)
    assert {member.member_id: member.role for member in written.members} == {
        "router": "router",
        "prefill-0": "prefill",
        "decode-0": "decode",
    }


def test_a_replaced_worker_is_recorded_with_its_new_incarnation(account: Account) -> None:
    account.changed(snapshot(Phase.STARTING))
    account.changed(snapshot(Phase.READY, ready=True))
    account.changed(snapshot(Phase.READY, decode_0=(Phase.ABSENT, 1)))
    assert [member.member_id for member in state.find_running().members] == ["router", "prefill-0"]

    account.changed(snapshot(Phase.READY, decode_0=(Phase.STARTING, 2)))
    account.changed(snapshot(Phase.READY, ready=True, decode_0=(Phase.READY, 2)))
    assert [member.incarnation for member in state.find_running().members] == ["life-1", "life-1", "life-2"]


def test_each_step_of_a_member_and_the_first_readiness_are_told_once(account: Account, told: list[Update]) -> None:
    account.changed(snapshot(Phase.STARTING))
    account.changed(snapshot(Phase.STARTING))
    account.changed(snapshot(Phase.READY))
    account.changed(snapshot(Phase.READY, ready=True))
    account.changed(snapshot(Phase.READY, ready=True))

    assert [type(update) for update in told] == [StageBegan] * 3 + [StageDone] * 3 + [Ready]


def test_a_worker_that_serves_tells_its_pool_and_whether_it_was_started_again(
    account: Account, told: list[Update]
) -> None:
    pool = "16 blocks of 16 tokens"
    for attempt in (1, 2):
        report = ReadyReport("127.0.0.1:2", f"life-{attempt}", ProcessId.mine(), {}, pool)
        for phase, its_report in ((Phase.STARTING, None), (Phase.READY, report)):
            view = MemberView("decode-0", phase, attempt, "127.0.0.1:2" if its_report else "", "")
            account.changed(Snapshot(False, (Member(view, its_report),)))

    assert [update.detail for update in told if isinstance(update, StageDone)] == [pool, f"start 2, {pool}"]


def test_a_death_is_told_with_its_reason(account: Account, told: list[Update]) -> None:
    account.changed(snapshot(Phase.STARTING))
    account.changed(snapshot(Phase.READY, decode_0=(Phase.ABSENT, 2)))
    assert told[-1] == MemberTrouble("decode-0", "killed")


def test_a_death_that_ends_the_run_is_not_told_twice(account: Account, told: list[Update]) -> None:
    account.changed(snapshot(Phase.STARTING))
    account.changed(Snapshot(False, (Member(MemberView("decode-0", Phase.ABSENT, 1, "", "no memory"), None),)))
    assert [update for update in told if isinstance(update, MemberTrouble)] == []
