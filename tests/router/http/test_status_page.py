"""The status page: who sees it, what is on it and what never is, and that it stays small."""

from __future__ import annotations

import base64
import itertools
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_router import ROUTE, STATUS, WATERFALL
from http_front import HttpFront
from tenants_file import bearer, write_tenants

from kvrelay.types import ClusterStatus, Explanation, Span, Waterfall, WorkerStatus
from kvrelay.v1 import router_pb2
from router.http import status_page, status_routes
from router.http.status_page import BAR, LiveRow, Piece, StatusDocument, StatusPage
from router.http.status_routes import HEADERS
from router.links import LinkUse

MESSAGES = [{"role": "user", "content": "a secret prompt"}]
CHAT = "/v1/chat/completions"
EVIL = '"><script>alert(1)</script>'


def explanation(request_id: str = "r", outcome: str = "stop") -> Explanation:
    message = router_pb2.ExplainResponse(request_id=request_id, route=ROUTE, waterfall=WATERFALL, outcome=outcome)
    return Explanation.from_proto(message)


def document(**changes: Any) -> StatusDocument:
    fields: dict[str, Any] = {
        "model": "smollm2",
        "generation_tokens": 12,
        "status": ClusterStatus.from_proto(STATUS),
        "links": [LinkUse("prefill-0", "decode-0", "shm", hand_overs=2, num_bytes=4096, transfer_us=900)],
        "live": [LiveRow(request_id="l", age_s=1.0, remaining_s=9.0, prefill_worker="", decode_worker="decode-0")],
        "recent": [explanation()],
        "request": explanation(),
        "errors": {"NoWorkers": 3},
        "omitted": {"workers": 0, "links": 0, "live": 0},
    }
    return StatusDocument(**fields | changes)


class Tags(HTMLParser):
    """Refuses tags that do not match, and attributes that the page's policy would ignore."""

    VOID = ("meta", "link", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        assert not {name for name, _ in attrs} & {"style", "onclick", "onload", "onerror"}
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    return tags


async def test_the_first_view_needs_no_script_and_brings_a_policy_that_forbids_others(front: HttpFront) -> None:
    await front.start()
    answer = await front.ok(CHAT, messages=MESSAGES, max_tokens=4)
    async with front.http.get("/") as response:
        page = await response.text()
        assert (response.status, response.content_type) == (200, "text/html")
        assert HEADERS.items() <= response.headers.items()
    text = " ".join("".join(parsed(page).text).split())
    for told in ("p0", "d0", "fake", answer["id"].removeprefix("chatcmpl-")[:8], "prefill compute", "shm", "length"):
        assert told in text, told
    assert "a secret prompt" not in page
    for path in re.findall(r'(?:href|src)="(static/[^"]+)"', page):
        async with front.http.get(f"/{path}") as response:
            assert response.status == 200


async def test_the_document_has_what_the_page_has_and_no_word_of_a_client(front: HttpFront) -> None:
    await front.start()
    await front.ok(CHAT, messages=MESSAGES, max_tokens=4)
    await front.refused("/v1/completions", prompt="x", stop=["a secret stop"], max_tokens=1000)
    status, told = await front.get("/status.json")
    assert status == 200
    assert [worker["worker_id"] for worker in told["status"]["workers"]] == ["p0", "d0"]
    assert [(link["prefill_worker"], link["transport"]) for link in told["links"]] == [("p0", "shm")]
    assert [each["outcome"] for each in told["recent"]] == ["INVALID_ARGUMENT", "length"]
    fall = told["request"]["waterfall"]
    assert sum(part["duration_us"] for part in fall["parts"]) == fall["ttft_us"] > 0
    assert told["errors"] == {"RequestError": 1}
    assert "secret" not in json.dumps(told)


async def test_a_live_request_is_listed_until_it_ends(front: HttpFront) -> None:
    await front.start()
    front.decode.hold(("output", 3))
    async with front.open_stream(CHAT, messages=MESSAGES, max_tokens=6) as response:
        await response.content.readuntil(b"\n\n")
        (live,) = (await front.get("/status.json"))[1]["live"]
        assert (live["prefill_worker"], live["decode_worker"]) == ("p0", "d0")
        assert 0 <= live["age_s"] < live["remaining_s"] <= 10
        front.decode.release(("output", 3))
        await response.read()
    await front.idle()
    assert (await front.get("/status.json?request=fresh"))[1]["live"] == []


async def test_with_keys_only_an_admin_sees_it_and_a_browser_is_asked_for_a_password(
    front: HttpFront, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = write_tenants(tmp_path / "keys.yaml", acme={}, ops={"admin": True})
    await front.start(api_keys=str(keys))
    password = base64.b64encode(b"any name:key-of-ops").decode()
    caplog.set_level(logging.INFO, "kvrelay.audit")
    for path in ("/", "/status.json", "/?part=main"):
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Basic !"}, 401),
            ({"Authorization": "Basic " + base64.b64encode(b"ops:wrong").decode()}, 401),
            (bearer("acme"), 403),
            (bearer("ops"), 200),
            ({"Authorization": f"Basic {password}"}, 200),
        ):
            async with front.http.get(path, headers=headers) as response:
                assert response.status == status, (path, headers)
                if status == 401:
                    assert response.headers["WWW-Authenticate"].startswith("Basic ")
    assert {record.getMessage().rpartition(" ")[2] for record in caplog.records} == {
        "OK",
        "UNAUTHENTICATED",
        "PERMISSION_DENIED",
    }
    assert "key-of" not in caplog.text
    async with front.http.get("/v1/models", headers={"Authorization": f"Basic {password}"}) as response:
        assert response.status == 401, "a password that a browser keeps opens the page alone"


async def test_however_many_look_the_page_is_made_once_a_second(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    await front.start()
    made: list[StatusDocument] = []
    main = StatusPage.main

    def counted(page: StatusPage, doc: StatusDocument) -> str:
        made.append(doc)
        return main(page, doc)

    monkeypatch.setattr(StatusPage, "main", counted)
    for fresh_s, expected in ((1000.0, 1), (1000.0, 1), (0.0, 2)):
        monkeypatch.setattr(status_routes, "FRESH_S", fresh_s)
        async with front.http.get("/?part=main") as response:
            assert response.status == 200
        assert len(made) == expected


def test_no_value_becomes_markup() -> None:
    worker = replace(ClusterStatus.from_proto(STATUS).workers[1], worker_id=EVIL, detail=EVIL, errors={EVIL: 1})
    page = StatusPage().whole(
        document(
            model=EVIL,
            status=replace(ClusterStatus.from_proto(STATUS), router_id=EVIL, version=EVIL, workers=(worker,)),
            links=[LinkUse(EVIL, EVIL, EVIL, hand_overs=1, failed=1, last_error=EVIL)],
            live=[LiveRow(request_id=EVIL, age_s=1, remaining_s=1, prefill_worker=EVIL, decode_worker=EVIL)],
            recent=[explanation(EVIL, f"INTERNAL: {EVIL}")],
            request=explanation(EVIL),
            errors={EVIL: 1},
        )
    )
    assert parsed(page).seen.count("script") == 1
    assert page.count("<script>alert") == 0
    assert page.count("&lt;script&gt;alert") > 15


def test_a_page_without_workers_and_requests_says_so() -> None:
    empty = replace(ClusterStatus.from_proto(STATUS), workers=())
    page = StatusPage().whole(document(status=empty, links=[], live=[], recent=[], request=None, errors={}))
    text = "".join(parsed(page).text)
    for told in ("No worker is known", "No KV has moved", "No request is live", "No request has ended"):
        assert told in text


def test_what_is_left_out_is_counted() -> None:
    page = StatusPage().main(document(omitted={"workers": 7, "links": 8, "live": 9}))
    for told in ("7 more workers", "8 more links", "9 more live requests"):
        assert told in page


@pytest.mark.parametrize("counts", [(0, 0), (1, 999_999), (333, 334), (64, 0), (10**9, 1)])
def test_pieces_of_a_bar_meet_and_stay_in_it(counts: tuple[int, int]) -> None:
    owned, cached = counts
    base = WorkerStatus.from_proto(STATUS.workers[0])
    worker = replace(base, blocks_total=sum(counts), blocks_owned=owned, blocks_cached=cached, blocks_free=0)
    pieces = status_page.block_pieces(worker)
    assert [(piece.label, piece.value) for piece in pieces] == [
        (name, str(count)) for name, count in (("owned", owned), ("cached", cached)) if count
    ]
    assert all(0 <= piece.x <= piece.x + piece.width <= BAR + 1 for piece in pieces)
    for before, after in itertools.pairwise(pieces):
        assert abs(before.x + before.width - after.x) <= 1


def test_a_waterfall_is_drawn_in_order_and_its_kinds_are_told_apart() -> None:
    fall = Waterfall(
        parts=(Span("admit", 100), Span("place", 100), Span("prefill_queue", 300), Span("prefill_compute", 400)),
        ttft_us=900,
        after_first=(Span("transfer", 40), Span("first_decode_step", 60)),
        second_token_us=100,
        decode_tokens_per_s=10.0,
    )
    assert [(p.kind, p.x, p.width) for p in status_page.spans(fall)] == [
        ("other", 0, 100),
        ("other", 100, 100),
        ("wait", 200, 300),
        ("compute", 500, 400),
        ("transfer", 900, 40),
        ("decode", 940, 60),
    ]
    assert [piece.kind for piece in status_page.mini(fall)] == ["other", "wait", "compute"]
    assert status_page.spans(fall)[3] == Piece("compute", 500, 400, "prefill_compute", "0.4 ms", "40.0%")
