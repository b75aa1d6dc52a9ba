"""How payload gets into a pool on a GPU: straight through a process group, or by way of pinned host memory.

Either way it is in its slot, as far as any compute to come is concerned, before a block can be adopted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.link_memory import LinkMemory
from kv_transfer.digest import UNVERIFIED
from kv_transfer.frames import Blocks
from kv_transfer.identity import NCCL
from kv_transfer.link import Intake, Landing
from kv_transfer.process_group import GroupIntake


def landing_of(intake: Intake, memory: LinkMemory) -> Landing:
    if intake.transport == NCCL:
        assert isinstance(intake, GroupIntake), "no other intake has a group"
        return DirectLanding(intake, memory)
    return StagedLanding(intake, memory)


class StagedLanding:
    """The digest is of the bytes in host memory, just before they are copied to the card."""

    def __init__(self, intake: Intake, memory: LinkMemory) -> None:
        self._intake = intake
        self._memory = memory

    def receive_into(self, frame: Blocks, slots: Sequence[int | None]) -> list[bytes]:
        digests: list[bytes] = []
        most = self._memory.num_places
        for start in range(0, len(slots), most):
            part = replace(frame, entries=frame.entries[start : start + most])
            wanted = slots[start : start + most]
            views = [None if slot is None else self._memory.place(n) for n, slot in enumerate(wanted)]
            digests += self._intake.receive_into(part, views)
            pairs = [(n, slot) for n, slot in enumerate(wanted) if slot is not None]
            self._memory.store([n for n, _ in pairs], [slot for _, slot in pairs])
        return digests

    def close(self) -> None:
        self._memory.close()


class DirectLanding:
    """Nobody has the bytes in host memory, so there is no digest. Verified are ticket, incarnation, slot, generation
    and content hash, that everything came, and whatever the links between the cards check themselves."""

    def __init__(self, intake: GroupIntake, memory: LinkMemory) -> None:
        self._intake = intake
        self._memory = memory

    def receive_into(self, frame: Blocks, slots: Sequence[int | None]) -> list[bytes]:
        granted = [slot for slot in slots if slot is not None]
        targets = iter(self._memory.tensors(granted))
        with self._memory.in_order():
            self._intake.receive([self._nowhere(frame) if slot is None else next(targets) for slot in slots])
        return [UNVERIFIED] * len(granted)

    def _nowhere(self, frame: Blocks) -> torch.Tensor:
        return torch.empty(frame.length, dtype=torch.uint8, device=self._memory.torch_device)

    def close(self) -> None:
        self._memory.close()
