"""Turns what the supervisor sees into what others read: the record on disk, and updates for a display."""

from __future__ import annotations

import time
from dataclasses import replace

from cluster import state
from cluster.events import ROUTER_ID, Phase
from cluster.processes import ProcessId
from cluster.spec import ClusterSpec
from cluster.succession import NEXT_ID
from cluster.supervisor import Member, Snapshot
from cluster.updates import Listener, MemberTrouble, Ready, StageBegan, StageDone


class Account:
    """Owns the record of one run. Tells each start of a member, each death, and the first moment of readiness."""

    def __init__(self, record: state.ClusterRecord, spec: ClusterSpec, tell: Listener, started: float) -> None:
        """`started` is the monotonic time from which readiness is counted. Writes the first record."""
        self.record = record
        self._scheme = "https" if spec.router.tls_cert else "http"
        self._tell = tell
        self._started = started
        self._began: dict[str, float] = {}
        self._seen: dict[str, tuple[Phase, int]] = {}
        state.write_record(record)

    def ray_started(self, address: str, processes: tuple[ProcessId, ...]) -> None:
        self.record = replace(self.record, ray_address=address, ray_processes=processes)
        state.write_record(self.record)

    def changed(self, snapshot: Snapshot) -> None:
        """Take over the supervisor's view. On the event loop; the write is a small file on a local disk."""
        for member in snapshot.members:
            self._tell_member(member)
        first_ready = snapshot.ready and not self.record.ready
        members = tuple(
            state.MemberRecord(
                member_id=member.view.member_id,
                role=member.view.role,
                address=member.report.address,
                incarnation=member.report.incarnation,
                process=member.report.process,
            )
            for member in snapshot.members
            if member.report is not None
        )
        http_address = snapshot.http_address or self.record.http_address
        record = replace(
            self.record,
            ready=snapshot.ready or self.record.ready,
            router_address=snapshot.router_address or self.record.router_address,
            http_address=http_address,
            http_url=f"{self._scheme}://{http_address}" if http_address else "",
            members=members,
        )
        if record != self.record:
            self.record = record
            state.write_record(record)
        if first_ready:
            self._tell_ready()

    def _tell_member(self, member: Member) -> None:
        view = member.view
        before, self._seen[view.member_id] = self._seen.get(view.member_id), (view.phase, view.attempt)
        if before == (view.phase, view.attempt):
            return
        again = "" if view.attempt == 1 else f"start {view.attempt}"
        if view.phase is Phase.STARTING:
            self._began[view.member_id] = time.monotonic()
            self._tell(StageBegan(view.member_id, again))
        elif view.phase is Phase.READY:
            pool = member.report.pool if member.report is not None else ""
            detail = ", ".join(part for part in (again, pool) if part)
            took_over = view.member_id == ROUTER_ID and NEXT_ID in self._began
            began = self._began.pop(NEXT_ID if took_over else view.member_id)
            self._tell(StageDone(view.member_id, time.monotonic() - began, detail))
        elif view.starts_again:  # what ends the whole run is told as its end
            self._tell(MemberTrouble(view.member_id, view.last_reason))

    def _tell_ready(self) -> None:
        record = self.record
        self._tell(
            Ready(
                name=record.name,
                model=record.model,
                router_address=record.router_address,
                http_url=record.http_url,
                ray_address=record.ray_address,
                log_path=record.log_path,
                pid=record.process.pid,
                seconds=time.monotonic() - self._started,
            )
        )
