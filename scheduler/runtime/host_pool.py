"""Host memory that copies go to: buffers of exactly the sizes that a plan copies out, allocated once and reused.

An allocation of pinned memory takes milliseconds, so it happens before training and not within a step. torch rounds it
up to a power of two: the buffers of a plan are therefore cut from a few large blocks whose sizes are powers of two.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Final

import torch

from graphs.errors import CheckpointSchedulerError
from graphs.threads import on_own_thread
from scheduler._torch import unset_fake_temporarily

logger = logging.getLogger(__name__)

ALIGNMENT: Final = 512
"""Bytes between the beginnings of buffers in a block: those of the device's allocator."""


class HostMemoryError(CheckpointSchedulerError, MemoryError):
    """The host memory that a plan copies to could not be allocated, or not be pinned."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A storage that is copied out: its bytes, and what to call it in messages."""

    bytes: int
    label: str


class HostPool:
    """Free host buffers, by size. Not safe against threads: its owner holds a lock.

    Args:
        slots: what a plan copies out, in any order: each gets its buffer now.
        pinned: whether the memory is page-locked.

    Attributes:
        allocated_bytes: of all buffers, free or not; with what torch rounds up where they are allocated one by one.

    Raises:
        HostMemoryError: the buffers do not fit the host's memory.

    """

    def __init__(self, slots: Sequence[Slot], *, pinned: bool) -> None:
        self.pinned = pinned
        self.allocated_bytes = 0
        self.retired = False
        self.free: dict[int, list[torch.Tensor]] = {}
        with unset_fake_temporarily():  # a step is lowered while its graph is traced
            if pinned:
                self._cut(slots)
            else:
                # A CPU's memory is measured by thread: the host's share is no part of the step that makes the plan.
                buffers = on_own_thread(lambda: [self._allocate(s) for s in slots], name="checkpoint-scheduler-pool")
                for slot, memory in zip(slots, buffers, strict=True):
                    self.give(slot.bytes, memory)

    def _cut(self, slots: Sequence[Slot]) -> None:
        """Allocate the buffers of a plan in blocks."""
        for size, block in blocks([slot.bytes for slot in slots]):
            first = slots[block[0][0]]
            label = first.label if len(block) == 1 else f"{first.label} and {len(block) - 1} more"
            memory = self._allocate(Slot(size, label))
            self.allocated_bytes -= size
            for index, offset in block:
                self.give(slots[index].bytes, memory[offset : offset + slots[index].bytes])
                self.allocated_bytes += slots[index].bytes

    def take(self, slot: Slot) -> torch.Tensor:
        """A buffer for a storage, from those that are free if there is one of its size.

        A new one goes beyond the plan: a forward before the last one's backward, or a copy without a plan. Within a
        step, memory that cannot be had as it should be is taken as the host has it: a slower copy is better than a step
        that fails.
        """
        free = self.free.get(slot.bytes)
        if free:
            return free.pop()
        try:
            return self._allocate(slot)
        except HostMemoryError as error:
            try:
                memory = torch.empty(slot.bytes, dtype=torch.uint8)
            except (RuntimeError, MemoryError):
                raise error from None
            logger.warning("%s. This copy goes through pageable memory, and is slower", error)
            self.allocated_bytes += self._rounded(slot.bytes)
            return memory

    def give(self, size: int, memory: torch.Tensor) -> None:
        """Take a buffer back."""
        self.free.setdefault(size, []).append(memory)
        if self.retired:
            self._give_up()

    def retire(self) -> None:
        """Give up all free buffers, and from here on each that comes back."""
        self.retired = True
        self._give_up()

    def is_free(self, size: int) -> bool:
        """Whether there is a free buffer of this size."""
        return bool(self.free.get(size))

    def has_room(self, size: int, limit_bytes: int) -> bool:
        """Whether a buffer of this size is free, or can be had without more than the limit on the host in all.

        Free buffers of other sizes are given up for it where need be; for a pool without a plan.
        """
        if self.is_free(size):
            return True
        size = self._rounded(size)
        if self.allocated_bytes + size > limit_bytes:
            self._give_up()
        return self.allocated_bytes + size <= limit_bytes

    def _give_up(self) -> None:
        given_up = sum(self._rounded(size) * len(free) for size, free in self.free.items())
        self.allocated_bytes = max(self.allocated_bytes - given_up, 0)  # those cut from blocks were rounded together
        self.free.clear()

    def _rounded(self, size: int) -> int:
        return _power_of_two(size) if self.pinned else size

    def _allocate(self, slot: Slot) -> torch.Tensor:
        try:
            memory = self._memory(slot.bytes)
        except (RuntimeError, MemoryError) as error:
            raise HostMemoryError(
                f"{slot.bytes:,} bytes of host memory for {slot.label} were refused after {self.allocated_bytes:,}: "
                "lower host_budget_gb, or plan with offload=False"
            ) from error
        self.allocated_bytes += self._rounded(slot.bytes)
        return memory

    def _memory(self, size: int) -> torch.Tensor:
        """Fresh host memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)


def blocks(sizes: Sequence[int]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Cut buffers from blocks whose sizes are powers of two, so that little of these is left over.

    Each block is the largest that the buffers left can fill, or what the largest of them needs, and takes them from the
    largest down.

    Returns:
        For each block its bytes and its buffers: (index in ``sizes``, offset).

    """
    left = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    cut: list[tuple[int, list[tuple[int, int]]]] = []
    while left:
        total = sum(_aligned(sizes[i]) for i in left)
        size = max(_power_of_two(sizes[left[0]]), _power_of_two(total + 1) // 2)
        block: list[tuple[int, int]] = []
        end = 0
        for i in left:
            if end + sizes[i] <= size:
                block.append((i, end))
                end += _aligned(sizes[i])
        taken = {i for i, _ in block}
        left = [i for i in left if i not in taken]
        cut.append((size, block))
    return cut


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _power_of_two(size: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(size - 1, 0).bit_length()
