"""Models, tokens, health and metrics."""

from __future__ import annotations

from http_front import HttpFront
from openai_schemas import check
from prometheus_client.parser import text_string_to_metric_families

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


async def samples(front: HttpFront) -> dict[str, float]:
    """Value by name and labels."""
    async with front.http.get("/metrics") as response:
        assert response.status == 200
        text = await response.text()
    return {
        "".join([sample.name, *(f",{key}={value}" for key, value in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_model_is_listed_and_found_by_name(front: HttpFront) -> None:
    await front.start()
    status, listed = await front.get("/v1/models")
    check("ListModelsResponse", listed)
    assert (status, [card["id"] for card in listed["data"]]) == (200, ["fake"])
    status, card = await front.get("/v1/models/fake")
    check("Model", card)
    assert card == listed["data"][0]
    assert card["max_model_len"] == 200


async def test_tokenize_gives_the_ids_of_a_text_or_a_chat_and_detokenize_the_way_back(front: HttpFront) -> None:
    await front.start()
    answer = await front.ok("/tokenize", prompt="ab")
    assert answer == {"count": 2, "max_model_len": 200, "tokens": [97, 98], "token_strs": None}
    rendered = b"user: Hi\nassistant: "
    assert (await front.ok("/tokenize", messages=MESSAGES))["tokens"] == list(rendered)
    assert await front.ok("/detokenize", tokens=[97, 98, 256]) == {"prompt": "ab<eos>"}


async def test_tokenize_and_detokenize_refuse_by_name(front: HttpFront) -> None:
    await front.start()
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x" * 2000}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("/detokenize", {"tokens": "ab"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 201}, "tokens"),
    ):
        status, error = await front.refused(path, **body)
        assert (status, error["param"]) == (400, param), body


async def test_health_tells_of_the_process_and_ready_of_the_service(front: HttpFront) -> None:
    await front.start()
    assert await front.get("/health") == (200, {"status": "alive"})
    assert await front.get("/ready") == (200, {"status": "ready"})
    front.server.set_workers({})
    assert await front.get("/health") == (200, {"status": "alive"})
    status, answer = await front.get("/ready")
    assert (status, answer["status"]) == (503, "not ready")
    assert "d0" in answer["reason"]


async def test_metrics_count_every_token_and_latency_once(front: HttpFront) -> None:
    await front.start()
    front.decode.cached_tokens = 8
    for _ in range(3):
        await front.ok(CHAT, messages=MESSAGES, max_tokens=10, n=2)
    await front.refused(CHAT, messages=MESSAGES, model="other")
    seen = await samples(front)
    assert seen["kvrelay_time_to_first_token_seconds_count"] == 3
    assert seen["kvrelay_e2e_request_latency_seconds_count"] == 3
    assert seen["kvrelay_inter_token_latency_seconds_count"] == 3 * 2 * 9
    assert seen["kvrelay_prompt_tokens_total"] == seen["kvrelay_prefix_cache_queries_total"] == 3 * 20
    assert seen["kvrelay_prefix_cache_hits_total,source=decode"] == 3 * 8
    assert seen["kvrelay_request_time_per_output_token_seconds_count"] == 6
    assert seen["kvrelay_kv_transfers_total,decode=d0,prefill=p0,transport=shm"] == 6
    assert (
        seen["kvrelay_kv_transfer_bytes_total,decode=d0,prefill=p0,transport=shm"]
        == seen["kvrelay_kv_bytes_sent_total"]
    )
    assert seen["kvrelay_generation_tokens_total"] == 60
    assert seen["kvrelay_request_success_total,finished_reason=length"] == 6
    assert seen["kvrelay_request_errors_total,error=RequestError"] == 1
    assert seen["kvrelay_http_requests_total,path=/v1/chat/completions,status=200"] == 3
    assert seen["kvrelay_http_requests_total,path=/v1/chat/completions,status=404"] == 1
    assert seen["kvrelay_requests_live"] == 0
    assert seen["kvrelay_worker_ready,role=decode,worker=d0"] == 1


async def test_metrics_show_live_requests_and_what_gRPC_served(front: HttpFront) -> None:
    await front.start()
    front.decode.hold(("output", 3))
    async with front.open_stream(CHAT, messages=MESSAGES, max_tokens=6) as response:
        await response.content.readuntil(b"\n\n")
        assert (await samples(front))["kvrelay_requests_live"] == 1
        front.decode.release(("output", 3))
        await response.read()
    assert (await samples(front))["kvrelay_requests_live"] == 0


async def test_paths_that_strangers_make_up_are_one_line_of_the_metrics(front: HttpFront) -> None:
    await front.start()
    for number in range(5):
        await front.get(f"/made-up-{number}")
    seen = await samples(front)
    assert seen["kvrelay_http_requests_total,path=unknown,status=404"] == 5
    assert not any("made-up" in name for name in seen)
