"""Turns chat messages into one prompt text with a model's Jinja template, as Hugging Face `transformers` renders it.

Knows templates and messages, not token ids. A template comes with a model, so it runs in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelError, RequestError

_RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template can raise on messages that it was not written for."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


class ChatTemplate:
    """A compiled template.

    `special_tokens` are the names that templates use (`bos_token`, `eos_token`, ...). `now` is the clock behind
    `strftime_now`, with which some templates tell the model the date. Raises `ModelError` if `source`, which came
    from `origin`, does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the chat template in {origin} does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> str:
        """The prompt text. With `add_generation_prompt` it ends where the model's answer begins.

        Raises `RequestError` (field `messages`) that names the message at fault.
        """
        if not messages:
            raise RequestError("messages", "at least one message is needed, got none")
        for index, message in enumerate(messages):
            if not message.role:
                raise RequestError("messages", f"message {index} has no role")
        try:
            return self._render(messages, add_generation_prompt)
        except _RENDER_ERRORS as error:
            index = self._first_at_fault(messages, add_generation_prompt)
            reason = f"the chat template refuses message {index} (role {messages[index].role!r}): {error}"
            raise RequestError("messages", reason) from error

    def _render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        return self._template.render(
            messages=[asdict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
        )

    def _first_at_fault(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> int:
        """Index of the last message of the shortest conversation that fails, found by bisection.

        Jinja names no message, but templates walk them in order: conversations fail from the bad message on.
        """
        renders, fails = 0, len(messages)
        while fails - renders > 1:
            middle = (renders + fails) // 2
            try:
                self._render(messages[:middle], add_generation_prompt)
                renders = middle
            except _RENDER_ERRORS:
                fails = middle
        return fails - 1


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012  (declared as a plain set by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own `tojson` escapes for HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
