from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InternalError
from engine.lru_list import LruList


def list_of(*items: int) -> LruList:
    members = LruList(6)
    for item in items:
        members.append(item)
    return members


def test_the_oldest_comes_first() -> None:
    members = list_of(4, 1, 3)
    assert [members.pop_oldest() for _ in range(3)] == [4, 1, 3]
    assert len(members) == 0
    members.check_integrity()


@pytest.mark.parametrize(("item", "left"), [(4, [1, 3]), (1, [4, 3]), (3, [4, 1])])
def test_a_member_leaves_from_anywhere(item: int, left: list[int]) -> None:
    members = list_of(4, 1, 3)
    members.remove(item)
    assert list(members) == left
    assert item not in members
    members.check_integrity()


def test_what_is_inserted_stands_right_before_the_other() -> None:
    members = list_of(4, 1)
    members.insert_before(5, 1)
    members.insert_before(0, 4)
    assert list(members) == [0, 4, 5, 1]


@pytest.mark.parametrize(
    "misuse",
    [
        lambda members: members.append(4),
        lambda members: members.remove(2),
        lambda members: members.insert_before(2, 5),
        lambda members: LruList(1).pop_oldest(),
    ],
    ids=["twice", "absent", "before an absent one", "empty"],
)
def test_misuse_changes_nothing(misuse: Callable[[LruList], object]) -> None:
    members = list_of(4, 1)
    with pytest.raises(InternalError):
        misuse(members)
    assert list(members) == [4, 1]
    members.check_integrity()


@given(
    st.lists(st.tuples(st.sampled_from(["append", "before", "remove", "pop"]), st.integers(0, 5), st.integers(0, 5)))
)
def test_it_orders_as_a_plain_list_does(steps: list[tuple[str, int, int]]) -> None:
    members, plain = LruList(6), list[int]()
    for step, item, other in steps:
        if step == "append" and item not in plain:
            members.append(item)
            plain.append(item)
        elif step == "before" and item not in plain and other in plain:
            members.insert_before(item, other)
            plain.insert(plain.index(other), item)
        elif step == "remove" and item in plain:
            members.remove(item)
            plain.remove(item)
        elif step == "pop" and plain:
            assert members.pop_oldest() == plain.pop(0)
        members.check_integrity()
        assert list(members) == plain
        assert [item in members for item in range(6)] == [item in plain for item in range(6)]
