"""Templates render as in Hugging Face `transformers`, and what they refuse is named."""

from __future__ import annotations

from datetime import datetime

import pytest

from engine.chat_template import ChatMessage, ChatTemplate
from engine.errors import ModelError, RequestError

USER, ASSISTANT = ChatMessage("user", "Hi"), ChatMessage("assistant", "Hello")


def render(source: str, *messages: ChatMessage, add_generation_prompt: bool = True) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, "a test", now=lambda: datetime(2026, 3, 1))
    return template.render(messages or (USER,), add_generation_prompt)


def test_a_block_takes_its_line_break_and_its_indentation_with_it() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n[{{ m['content'] }}]\n    {% endif %}\n{% endfor %}\nend"

    assert render(source, USER, ASSISTANT) == "[Hi]\n[Hello]\nend"


def test_messages_answer_to_keys_and_to_attributes() -> None:
    assert render("{{ messages[0]['role'] }} {{ messages[0].content }}") == "user Hi"


def test_the_generation_prompt_is_written_only_where_asked_for() -> None:
    source = "x{% if add_generation_prompt %}<assistant>{% endif %}"

    assert render(source) == "x<assistant>"
    assert render(source, add_generation_prompt=False) == "x"


def test_tojson_does_not_escape_for_html() -> None:
    assert render("{{ {'a': '<é & \"'} | tojson }}") == '{"a": "<é & \\""}'


def test_tojson_takes_an_indent() -> None:
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_strftime_now_reads_the_given_clock() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "01 Mar 2026"


def test_break_and_continue_work_in_loops() -> None:
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"


def test_generation_blocks_render_their_inside() -> None:
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"


def test_special_tokens_are_names_in_the_template() -> None:
    assert render("{{ bos_token }}") == "<s>"


def test_message_text_is_not_itself_a_template() -> None:
    assert render("{{ messages[0].content }}", ChatMessage("user", "{{ bos_token }}")) == "{{ bos_token }}"


ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


def test_a_refusal_by_the_template_names_message_and_reason() -> None:
    messages = [USER, ASSISTANT, USER, USER, ASSISTANT, USER]

    with pytest.raises(RequestError, match=r"message 3 \(role 'user'\): roles must alternate") as caught:
        render(ALTERNATE, *messages)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("position", range(9))
def test_the_message_at_fault_is_found_wherever_it_is(position: int) -> None:
    source = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    messages = [USER] * 9
    messages[position] = ChatMessage("tool", "x")

    with pytest.raises(RequestError, match=f"message {position} "):
        render(source, *messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content.upper() }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ 'x' | tojson(indent='a') | int + [] }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ range(999999) | list }}",
    ],
)
def test_whatever_goes_wrong_inside_a_template_is_a_refusal(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.field == "messages"


def test_a_message_without_role_is_refused_by_index() -> None:
    with pytest.raises(RequestError, match="message 1 has no role"):
        render("x", USER, ChatMessage("", "Hi"))


def test_a_conversation_without_messages_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one message"):
        ChatTemplate("x", {}, "a test").render([])


def test_a_template_that_does_not_compile_is_a_fault_of_the_model() -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        ChatTemplate("{% for %}", {}, "tokenizer_config.json")
