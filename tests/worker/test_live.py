from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from engine.errors import QueueFull
from worker.live import LiveRequests
from worker.session import MalformedRequest, Session


@dataclass(eq=False)
class Record:
    key: str
    session: Session
    request_id: str
    traceparent: str = ""


async def test_a_record_is_found_by_its_key_and_by_its_session_and_id_until_it_is_removed() -> None:
    live: LiveRequests[Record] = LiveRequests(4)
    mine, other = Session("r0", 1), Session("r1", 1)
    record = Record("k", mine, "a")
    live.add(record)

    assert live.by_key("k") is record
    assert live.by_request(mine, "a") is record
    assert live.by_request(other, "a") is None
    assert live.of(mine) == [record]
    assert live.of(other) == []
    live.remove(record)
    assert (live.by_key("k"), live.by_request(mine, "a"), list(live)) == (None, None, [])


async def test_an_id_in_use_is_refused_on_its_own_session_only() -> None:
    live: LiveRequests[Record] = LiveRequests(4)
    session = Session("r0", 1)
    live.add(Record("k", session, "a"))

    with pytest.raises(MalformedRequest):
        live.check_new(session, "a")
    live.check_new(Session("r1", 1), "a")
    live.check_new(session, "b")


async def test_one_more_than_the_limit_is_refused() -> None:
    live: LiveRequests[Record] = LiveRequests(1)
    session = Session("r0", 1)
    live.add(Record("k", session, "a"))

    with pytest.raises(QueueFull, match="holds 1 requests"):
        live.check_new(session, "b")


async def test_keys_never_repeat() -> None:
    live: LiveRequests[Record] = LiveRequests(1)

    assert len({live.new_key() for _ in range(1000)}) == 1000


async def test_waiting_for_the_last_record_ends_with_it() -> None:
    live: LiveRequests[Record] = LiveRequests(2)
    records = [Record(name, Session("r0", 1), name) for name in "ab"]
    for record in records:
        live.add(record)
    waiting = asyncio.ensure_future(live.wait_empty())
    live.remove(records[0])
    done, _ = await asyncio.wait({waiting}, timeout=0)
    assert not done

    live.remove(records[1])
    await asyncio.wait_for(waiting, 5)
    assert len(live) == 0
