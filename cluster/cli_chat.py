"""`kvrelay chat`: a conversation on the terminal. The history is kept here; the router keeps nothing."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click

from cluster.cli import one_line
from cluster.cli_common import Endpoint, router_option, timeout_option
from cluster.cli_generate import given_sampling, sampling_options
from engine.errors import EngineError
from kvrelay import DEFAULT_TIMEOUT_S, ChatMessage, Client

with contextlib.suppress(ImportError):  # where there is one, `input` gets line editing and history from it
    import readline  # noqa: F401

PROMPT = "> "
NEW = "a new conversation"
HINT = "Ctrl-C cancels an answer, Ctrl-D leaves, /new starts over."


class Conversation:
    """Owns the messages so far.

    An answer that was cancelled stays, as far as it came: the user has read it. A message that could not be answered
    at all is taken back, so that it can be sent again.
    """

    def __init__(self, client: Client, system: str | None, options: dict[str, Any]) -> None:
        self._client = client
        self._options = options
        self._opening = [ChatMessage(role="system", content=system)] if system is not None else []
        self.messages = list(self._opening)

    def start_over(self) -> None:
        self.messages = list(self._opening)

    def say(self, text: str) -> None:
        """Send a message and write the answer as it arrives. Raises `EngineError`."""
        self.messages.append(ChatMessage(role="user", content=text))
        heard: list[str] = []
        try:
            with self._client.stream(messages=self.messages, **self._options) as stream:
                for chunk in stream:
                    heard.append(chunk.text)
                    click.echo(chunk.text, nl=False)
        except KeyboardInterrupt:
            click.echo(" [cancelled]", nl=False)
        finally:
            answer = "".join(heard)
            if answer:
                self.messages.append(ChatMessage(role="assistant", content=answer))
            else:
                self.messages.pop()
            click.echo()


@click.command()
@router_option
@sampling_options
@click.option("--system", metavar="TEXT", default=None, help="A system message before the first one.")
@timeout_option(DEFAULT_TIMEOUT_S)
def chat(endpoint: Endpoint, system: str | None, timeout_s: float, **options: Any) -> None:
    """Talk to the model. Ctrl-C cancels an answer, Ctrl-D leaves, /new starts over.

    From a pipe, each line is a message, and stdout holds the answers alone.
    """
    prompt = PROMPT if sys.stdin.isatty() else ""
    with endpoint.client(timeout_s) as client:
        names = ", ".join(card.name for card in client.models())
        click.echo(f"{names}. {HINT}", err=True)
        conversation = Conversation(client, system, given_sampling(options))
        while True:
            try:
                text = input(prompt).strip()
            except EOFError:
                if prompt:
                    click.echo()
                return
            except KeyboardInterrupt:
                click.echo(f"\n{HINT}", err=True)
                continue
            if text == "/new":
                conversation.start_over()
                click.echo(NEW, err=True)
            elif text:
                _say(conversation, text)


def _say(conversation: Conversation, text: str) -> None:
    """An error ends the turn, not the conversation."""
    try:
        conversation.say(text)
    except EngineError as error:
        click.echo(f"kvrelay: {one_line(error)}", err=True)
