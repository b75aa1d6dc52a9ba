"""A router's parts against scripted workers over real loopback connections, and a tiny tokenizer. No torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_worker import FINGERPRINT, FakeWorker
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.errors import EngineError
from engine.tokenizer import Tokenizer
from kvrelay.v1 import common_pb2, router_pb2
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.registry import Registry
from router.served_model import ServedModel

EOS = 256
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
CONFIG = RouterConfig(
    model_path="unused",
    model_name="fake",
    reconnect_min_s=0.01,
    reconnect_max_s=0.05,
    no_worker_wait_s=3.0,
    default_timeout_s=10.0,
)


def make_tokenizer(folder: Path) -> Tokenizer:
    """A token is a byte; the id of a byte is its value. Written to `folder` and read from there."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    backend = HuggingFaceTokenizer(BPE(vocab, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.load(folder)


def make_served_model(folder: Path, max_model_len: int = 200) -> ServedModel:
    """`folder` takes its tokenizer."""
    return ServedModel(
        name="fake",
        max_model_len=max_model_len,
        vocab_size=257,
        fingerprint=FINGERPRINT,
        tokenizer=make_tokenizer(folder),
        folder=folder,
    )


class Call:
    """One Generate, as the service would run it."""

    def __init__(self, dispatcher: Dispatcher, message: router_pb2.GenerateRequest, timeout_s: float | None) -> None:
        self.events: list[router_pb2.GenerateResponse] = []
        self._num_choices = message.n or 1
        self.reading = asyncio.Event()
        """Cleared: the client does not read."""
        self.reading.set()
        self._changed = asyncio.Condition()
        self.task = asyncio.create_task(dispatcher.generate(message, self._emit, timeout_s))

    async def _emit(self, event: router_pb2.GenerateResponse) -> None:
        await self.reading.wait()
        self.events.append(event)
        async with self._changed:
            self._changed.notify_all()

    @property
    def token_ids(self) -> list[int]:
        return self.token_ids_of(0)

    def token_ids_of(self, choice: int) -> list[int]:
        """Refuses a repeated or skipped index."""
        token_ids: list[int] = []
        for event in self.events:
            if event.WhichOneof("event") == "tokens" and event.tokens.choice == choice:
                assert event.tokens.index == len(token_ids)
                data = event.tokens.token_ids
                token_ids += [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
        return token_ids

    @property
    def text(self) -> str:
        return "".join(event.tokens.text or event.finished.text for event in self.events)

    @property
    def finished(self) -> router_pb2.Finished:
        assert self.events[-1].WhichOneof("event") == "finished"
        return self.events[-1].finished

    async def tokens(self, count: int) -> None:
        """Wait until the client has `count` tokens."""
        async with self._changed, asyncio.timeout(5):
            await self._changed.wait_for(lambda: len(self.token_ids) >= count)

    async def done(self) -> router_pb2.Finished:
        async with asyncio.timeout(5):
            await self.task
        kinds = [event.WhichOneof("event") for event in self.events]
        assert kinds[0] == "accepted"
        assert kinds[-1] == "finished"
        assert set(kinds[1:-1]) <= {"tokens", "finished"}
        finished = [event.finished.choice for event in self.events if event.HasField("finished")]
        assert sorted(finished) == list(range(self._num_choices))
        return self.finished

    async def leave(self) -> None:
        """As gRPC does when the client disconnects."""
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=5)
        assert self.task.cancelled()

    async def error(self) -> EngineError:
        async with asyncio.timeout(5):
            (result,) = await asyncio.gather(self.task, return_exceptions=True)
        assert isinstance(result, EngineError), result
        return result


class Fleet:
    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.workers: dict[str, FakeWorker] = {}
        self.registry: Registry
        self.dispatcher: Dispatcher

    async def start(self, workers: Sequence[FakeWorker], **settings: Any) -> None:
        """Connect a router to `workers`; all of them are ready then."""
        await self.start_router(workers, **settings)
        await self.ready(len(workers))

    async def ready(self, count: int) -> None:
        """Wait until `count` workers are."""
        async with asyncio.timeout(5):
            while len(self.registry.snapshots()) < count:
                await self.registry.changed()

    async def start_router(self, workers: Sequence[FakeWorker], **settings: Any) -> None:
        self.workers = {worker.worker_id: worker for worker in workers}
        config = replace(CONFIG, **settings)
        self.registry = Registry(config, FINGERPRINT)
        self.dispatcher = Dispatcher(config, self.model, self.registry, draw_seed=lambda: 7)
        self.registry.add_addresses([await worker.start() for worker in workers])

    def call(self, prompt: bytes = b"hello world", timeout_s: float | None = None, **fields: Any) -> Call:
        sampling = common_pb2.SamplingParams(**{"max_tokens": 6} | fields.pop("sampling", {}))
        message = router_pb2.GenerateRequest(prompt=prompt, sampling=sampling, **fields)
        return Call(self.dispatcher, message, timeout_s)

    async def first_to_reach(self, point: object, workers: Sequence[FakeWorker]) -> FakeWorker:
        waits = {asyncio.create_task(worker.reached(point)): worker for worker in workers}
        done, rest = await asyncio.wait(waits, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        return waits[next(iter(done))]

    async def check_idle(self) -> None:
        """Nothing of any request is left, here or on a worker."""
        self.dispatcher.admission.check_idle()
        self.dispatcher.prompts.check_idle()
        self.registry.check_idle()
        for worker in self.workers.values():
            await worker.idle()

    async def close(self) -> None:
        await self.check_idle()
        self.dispatcher.close()
        await self.registry.close()
        assert self.registry.workers == ()
        for worker in self.workers.values():
            await worker.stop()
