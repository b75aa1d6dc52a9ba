from __future__ import annotations

import pytest

from cluster.quoting import MAX_CHARS, quoted, shortened


@pytest.mark.parametrize("text", ["", "short", "x" * 81, "a\nb" * 1000, "\0" * 5000])
def test_of_a_long_text_the_beginning_is_told_on_one_line(text: str) -> None:
    for told in (quoted(text), shortened(text)):
        assert "\n" not in told
    assert len(shortened(text)) <= MAX_CHARS
    assert len(quoted(text)) <= 4 * MAX_CHARS + 3  # a character that is not printable takes up to four


def test_a_short_text_is_told_whole() -> None:
    assert quoted("it's") == '"it\'s"'
    assert shortened("two words") == "two words"
