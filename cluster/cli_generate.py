"""`kvrelay generate`: one prompt, its answer as it arrives, and where it went."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console

from cluster.cli_common import CommandT, Endpoint, echo_json, json_option, router_option, timeout_option
from engine.errors import RequestError
from kvrelay import DEFAULT_TIMEOUT_S, ChatMessage, Client, Generation
from kvrelay.summary import summarize

_SAMPLING: dict[str, dict[str, Any]] = {
    "--max-tokens": {"type": int, "help": "Output tokens at most.  [default: 256]"},
    "--min-tokens": {"type": int, "help": "No stop before this many output tokens."},
    "--temperature": {
        "type": float,
        "default": 0.0,
        "help": "0 takes the most likely token each time; higher is more varied.  [default: 0; that of the API is 1.0]",
    },
    "--top-k": {"type": int, "help": "Keep the K most likely tokens; 0 keeps all."},
    "--top-p": {"type": float, "help": "Keep the most likely tokens up to this probability, in (0, 1]."},
    "--min-p": {"type": float, "help": "Keep tokens of at least this share of the most likely one's probability."},
    "--repetition-penalty": {"type": float, "help": "Above 1: against tokens of prompt and answer; 1 is none."},
    "--presence-penalty": {"type": float, "help": "Above 0: against tokens of the answer."},
    "--frequency-penalty": {"type": float, "help": "The same, for each time that a token is there."},
    "--seed": {"type": int, "help": "The same seed gives the same answer.  [default: drawn by the router]"},
    "--stop": {"multiple": True, "metavar": "TEXT", "help": "End before this text. May be repeated."},
    "--priority": {
        "type": int,
        "help": "From -8, which goes first, to 8.  [default: that of the tenant, which usually is 0]",
    },
    "--ignore-eos": {"is_flag": True, "default": None, "help": "Do not stop at the model's end-of-sequence token."},
}


def sampling_options(command: CommandT) -> CommandT:
    """Options named as in `GenerateOptions`. Those not given stay out, so that its defaults stand in one place.

    But for the temperature: small models talk nonsense at the API's default, and a command is often tried with one.
    """
    for name, settings in reversed(_SAMPLING.items()):
        command = click.option(name, **settings)(command)
    return command


def given_sampling(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, ())}


@click.command()
@click.argument("prompt")
@router_option
@sampling_options
@click.option(
    "--chat/--raw",
    "chat",
    default=None,
    help="Send the prompt as a user's message, or as it is.  [default: --chat if the model has a chat template]",
)
@click.option("--system", metavar="TEXT", default=None, help="A system message before the prompt.")
@click.option("--logprobs", type=int, metavar="N", default=None, help="With N alternatives a token; shown by --json.")
@click.option("--model", default="", help="Model name, if it must be a certain one.")
@click.option("--request-id", default="", help="Name the request, for `kvrelay explain`.")
@timeout_option(DEFAULT_TIMEOUT_S)
@json_option
def generate(
    prompt: str,
    endpoint: Endpoint,
    chat: bool | None,
    system: str | None,
    as_json: bool,
    timeout_s: float,
    **options: Any,
) -> None:
    """Answer PROMPT; "-" reads it from stdin.

    The answer goes to stdout as it arrives. Where the request ran, what moved and where the time went is told on
    stderr afterwards.
    """
    text = _read_stdin() if prompt == "-" else prompt
    if not text:
        raise RequestError("prompt", "must not be empty")
    if chat is False and system is not None:
        raise click.UsageError("--system needs a chat template: it cannot be used with --raw")
    call = {"timeout_s": timeout_s, **given_sampling(options)}
    write = _ignore if as_json else _write
    with endpoint.client(timeout_s) as client:
        if chat is False:
            answer = _stream(client, write, prompt=text, **call)
        else:
            answer = _chat(client, write, text, system, may_fall_back=chat is None and system is None, call=call)
    if as_json:
        echo_json(answer)
    else:
        click.echo()
        print_summary(answer)


def print_summary(generation: Generation) -> None:
    """On stderr, so that stdout holds the answer alone."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for line in summarize(generation):
        console.print(line, style="dim")


def _chat(
    client: Client,
    write: Callable[[str], None],
    text: str,
    system: str | None,
    may_fall_back: bool,
    call: dict[str, Any],
) -> Generation:
    """Sends the prompt as it is if the model turns out to have no chat template and the user left the choice open."""
    messages = [ChatMessage(role="system", content=system)] if system is not None else []
    messages.append(ChatMessage(role="user", content=text))
    try:
        return _stream(client, write, messages=messages, **call)
    except RequestError as error:
        # One user's message is a valid conversation: a refusal of `messages` is the template's, before any token.
        if not may_fall_back or error.field != "messages":
            raise
        click.echo(f"note: sent as a plain prompt, because {error.description}", err=True)
        return _stream(client, write, prompt=text, **call)


def _stream(client: Client, write: Callable[[str], None], **call: Any) -> Generation:
    with client.stream(**call) as stream:
        for chunk in stream:
            write(chunk.text)
        return stream.result


def _write(text: str) -> None:
    click.echo(text, nl=False)


def _ignore(_: str) -> None:
    pass


def _read_stdin() -> str:
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("prompt", f"stdin is no UTF-8: {error.reason} at byte {error.start}") from None
