"""Transfers by themselves: several threads at once, and buffers that are in use as long as their tensor lives."""

from __future__ import annotations

import concurrent.futures
import sys

import pytest
import torch

from graphs.links import Link
from scheduler.runtime.host_pool import Slot
from scheduler.runtime.transfers import CudaTransfers, ThreadTransfers, TransferError
from tests.scheduler.copies import simulate_cuda

LINK = Link(1e12, 1e12, latency_ns=0, least_bytes=1)
CPU = torch.device("cpu")
SLOT = Slot(4000, "relu of h.3")


@pytest.fixture(params=["threads", "streams"])
def transfers(request, monkeypatch):
    if request.param == "threads":
        return ThreadTransfers([SLOT], LINK)
    simulate_cuda(monkeypatch)
    return CudaTransfers([SLOT], CPU)


def test_several_threads_get_buffers_of_their_own():
    transfers = ThreadTransfers([SLOT], LINK)

    def train(number):
        for step in range(60):
            x = torch.full((1000,), float(1000 * number + step))
            host = transfers.offload(x, SLOT)
            transfers.leave(host)
            back = transfers.fetch(host, SLOT.bytes, CPU)
            transfers.arrive(host)
            if not torch.equal(back.view(torch.float32), x):
                return False
        return True

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            assert all(pool.map(train, range(6)))
    finally:
        sys.setswitchinterval(interval)
    assert transfers.allocated_bytes <= 2 * 6 * SLOT.bytes  # a thread drops a buffer once it has the next


def test_what_is_saved_while_it_comes_back_is_as_it_was_saved():
    """A copy back that begins in the forward ends in the backward, and autograd looks at versions there."""
    transfers = ThreadTransfers([SLOT], LINK, delay=lambda: 0.05)
    x = torch.arange(1000.0)
    host = transfers.offload(x, SLOT)
    transfers.leave(host)
    back = transfers.fetch(host, SLOT.bytes, CPU)
    version = back._version
    transfers.arrive(host)
    assert back._version == version
    assert torch.equal(back.view(torch.float32), x)


def test_a_buffer_is_in_use_as_long_as_its_tensor(transfers):
    first = transfers.offload(torch.ones(1000), SLOT)
    second = transfers.offload(torch.full((1000,), 2.0), SLOT)
    assert first.data_ptr() != second.data_ptr()
    view, address = first.view(torch.float32)[:10], first.data_ptr()
    del first
    third = transfers.offload(torch.full((1000,), 3.0), SLOT)
    assert third.data_ptr() not in (address, second.data_ptr())
    transfers.leave(second)
    transfers.leave(third)
    del view
    fourth = transfers.offload(torch.full((1000,), 4.0), SLOT)
    assert fourth.data_ptr() == address
    transfers.leave(fourth)
    assert [float(t.view(torch.float32)[0]) for t in (second, third, fourth)] == [2.0, 3.0, 4.0]


def test_a_storage_of_another_size_than_planned_is_refused(transfers):
    with pytest.raises(TransferError, match=r"relu of h\.3 has 40 bytes, and 4000 were planned"):
        transfers.offload(torch.ones(10), SLOT)
