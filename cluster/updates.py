"""What `kvrelay up` tells while it brings a cluster up: values that a display draws, or that go through a pipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class StageBegan:
    stage: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StageMoved:
    """Part of a long stage is done."""

    stage: str
    part: str
    share: float
    """Of the part, in [0, 1]."""


@dataclass(frozen=True, slots=True)
class StageDone:
    stage: str
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MemberTrouble:
    """A member died and is started again."""

    member_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Requests can be served."""

    name: str
    model: str
    router_address: str
    ray_address: str
    log_path: str
    """Empty if the cluster writes to the terminal."""
    pid: int
    seconds: float
    """Since the command began."""
    http_url: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The cluster did not come up, or ended by a failure; nothing of it is left."""

    reason: str


Update: TypeAlias = StageBegan | StageMoved | StageDone | MemberTrouble | Ready | Failed
Listener: TypeAlias = Callable[[Update], None]

_KINDS: dict[str, type[Update]] = {
    kind.__name__: kind for kind in (StageBegan, StageMoved, StageDone, MemberTrouble, Ready, Failed)
}


def to_line(update: Update) -> str:
    """One line of JSON, without its end."""
    return json.dumps({"update": type(update).__name__, **asdict(update)})


def from_line(line: str) -> Update:
    """The inverse of `to_line`. Raises `ValueError` for anything else."""
    fields = json.loads(line)
    kind = _KINDS.get(fields.pop("update", ""))
    if kind is None:
        raise ValueError(f"no update: {line[:200]}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"no {kind.__name__}: {line[:200]}") from error
