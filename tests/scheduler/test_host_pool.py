"""Host buffers: cut from blocks without overlap and with little left over, reused, and refused with a name."""

from __future__ import annotations

import random

import pytest
import torch

from scheduler.runtime.host_pool import ALIGNMENT, HostMemoryError, HostPool, Slot, blocks
from tests.scheduler.copies import refuse_memory

MB = 10**6


@pytest.mark.parametrize("seed", range(20))
def test_blocks_hold_every_buffer_once_without_overlap(seed):
    draw = random.Random(seed)
    sizes = [draw.randint(1, 5_000) for _ in range(draw.randint(0, 40))]
    seen = []
    for size, block in blocks(sizes):
        assert size.bit_count() == 1
        end = 0
        for index, offset in block:
            assert offset >= end
            assert offset % ALIGNMENT == 0
            end = offset + sizes[index]
            seen.append(index)
        assert end <= size
    assert sorted(seen) == list(range(len(sizes)))


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ([67 * MB] * 100, 0.05),  # alone each would take 134 MB
        ([234_881_024] * 32 + [67_108_864] * 64, 0.05),  # bf16 activations of an MLP and of a residual stream
        ([9 * MB + i for i in range(50)], 0.1),
    ],
)
def test_little_is_left_over(sizes, most):
    taken = sum(size for size, _ in blocks(sizes))
    assert sum(sizes) <= taken <= (1 + most) * sum(sizes)


def unpinned(monkeypatch):
    sizes = []

    def memory(self, size):
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(HostPool, "_memory", memory)
    return sizes


def test_a_pinned_pool_allocates_before_training_and_once(monkeypatch):
    asked = unpinned(monkeypatch)
    slots = [Slot(3000, "a"), Slot(1000, "b"), Slot(3000, "c")]
    pool = HostPool(slots, pinned=True)
    assert asked == [4096, 4096]
    assert pool.allocated_bytes == 7000
    first = [pool.take(slot) for slot in slots]
    for number, buffer in enumerate(first):
        buffer.fill_(number)
    assert [buffer.numel() for buffer in first] == [3000, 1000, 3000]
    assert all(bool((buffer == number).all()) for number, buffer in enumerate(first))
    for slot, buffer in zip(slots, first, strict=True):
        pool.give(slot.bytes, buffer)
    assert {pool.take(slot).data_ptr() for slot in slots} == {buffer.data_ptr() for buffer in first}
    assert asked == [4096, 4096]
    pool.take(slots[0])  # beyond the plan
    assert asked == [4096, 4096, 3000]
    assert pool.allocated_bytes == 7000 + 4096


@pytest.mark.parametrize(("pinned", "taken"), [(True, 1024), (False, 600)])
def test_room_counts_what_is_rounded_up_and_gives_up_other_sizes(monkeypatch, pinned, taken):
    unpinned(monkeypatch)
    pool = HostPool((), pinned=pinned)
    assert pool.has_room(600, taken)
    assert not pool.has_room(600, taken - 1)
    pool.give(600, pool.take(Slot(600, "a")))
    assert pool.allocated_bytes == taken
    assert pool.has_room(600, 0)
    assert pool.has_room(500, taken)
    assert pool.allocated_bytes == 0


@pytest.mark.parametrize("pinned", [True, False])
def test_refused_memory_is_an_error_that_says_for_what(monkeypatch, pinned):
    monkeypatch.setattr(HostPool, "_memory", refuse_memory)
    with pytest.raises(HostMemoryError, match=r"bytes of host memory for relu of h\.3( and 1 more)? were refused"):
        HostPool([Slot(77, "relu of h.3"), Slot(77, "relu of h.4")], pinned=pinned)


@pytest.mark.cuda
def test_memory_is_pinned():
    pool = HostPool([Slot(3000, "a")], pinned=True)
    assert pool.take(Slot(3000, "a")).is_pinned()
