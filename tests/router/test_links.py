"""The account of links: what finished requests add to it, and its bound."""

from __future__ import annotations

from typing import Any

from kvrelay.v1 import router_pb2
from router.links import LinkAccount


def finished(prefill: str = "p0", decode: str = "d0", exposed_us: int = 0, **route: Any) -> router_pb2.Finished:
    message = router_pb2.Finished(route=router_pb2.Route(prefill_worker=prefill, decode_worker=decode, **route))
    message.waterfall.after_first.add(name="transfer", duration_us=exposed_us)
    message.waterfall.after_first.add(name="first_decode_step", duration_us=999)
    return message


def test_hand_overs_of_a_pair_and_transport_add_up() -> None:
    account = LinkAccount()
    sent: dict[str, Any] = {
        "blocks_sent": 3,
        "blocks_adopted": 3,
        "bytes_sent": 100,
        "transfer_us": 50,
        "transport": "shm",
    }
    account.note(finished(exposed_us=7, **sent))
    account.note(finished(exposed_us=1, **sent | {"transfer_error": "DigestMismatch: block 2", "blocks_adopted": 2}))
    account.note(finished(**sent | {"transport": "tcp"}))
    shm, tcp = account.newest(9)
    assert (shm.transport, shm.hand_overs, shm.blocks, shm.num_bytes) == ("shm", 2, 5, 200)
    assert (shm.transfer_us, shm.exposed_us, shm.failed, shm.last_error) == (100, 8, 1, "DigestMismatch")
    assert (tcp.transport, tcp.hand_overs, tcp.failed) == ("tcp", 1, 0)


def test_a_prompt_that_moved_no_block_is_no_hand_over() -> None:
    account = LinkAccount()
    account.note(finished(prefill=""))
    account.note(finished(blocks_cached=4))
    assert len(account) == 0


def test_the_link_that_was_used_longest_ago_is_forgotten_first() -> None:
    account = LinkAccount(capacity=2)
    for prefill in ("p0", "p1", "p0", "p2"):
        account.note(finished(prefill, blocks_sent=1))
    assert [link.prefill_worker for link in account.newest(9)] == ["p0", "p2"]
    assert [link.prefill_worker for link in account.newest(1)] == ["p2"]
