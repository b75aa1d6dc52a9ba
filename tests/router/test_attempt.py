from __future__ import annotations

import pytest

from kvrelay.v1 import common_pb2, worker_pb2
from router.attempt import Attempt, AttemptFailed
from router.peer import Peer
from router.session import Inbox, WorkerSession

WELCOME = worker_pb2.Welcome(
    protocol=1, worker_id="d0", incarnation="1", role="decode", block_size=4, num_blocks=8, max_model_len=32
)


async def test_a_worker_that_ends_in_the_same_breath_as_its_last_token_has_not_failed() -> None:
    inbox = Inbox(8, lambda: None)
    session = WorkerSession(Peer.from_welcome(WELCOME, "address"), 8, lambda: None)
    attempt = Attempt(1, "r.1", inbox, session.open("r.1", inbox), None)
    output = worker_pb2.Output(index=0, token_id=5, finish_reason=common_pb2.FINISH_REASON_LENGTH)
    step = worker_pb2.Step(outputs=[worker_pb2.StepOutput(request_id="r.1", output=output)])
    session.deliver(worker_pb2.SessionResponse(reserved=worker_pb2.Reserved(request_id="r.1")))
    session.deliver(worker_pb2.SessionResponse(step=step))
    session.deliver(worker_pb2.SessionResponse(ended=worker_pb2.Ended(request_id="r.1")))

    await attempt.listen()

    attempt.check_decode()
    attempt.outputs.clear()
    with pytest.raises(AttemptFailed, match="before its last token"):
        attempt.check_decode()
