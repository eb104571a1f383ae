"""Measuring peaks."""

import gc

import pytest
import torch
from torch import nn

from scheduler import measure_peak
from scheduler.memory import bytes_of, free_bytes, tensors_in


def test_a_peak_is_what_was_live_at_once():
    def step():
        first = torch.zeros(1000)
        second = torch.zeros(500)
        del first
        return second, torch.zeros(100)

    measured = measure_peak(step)
    assert measured.baseline_bytes == 0
    assert measured.increase_bytes == 4 * 1500
    assert measured.peak_bytes == 6000


def test_what_the_step_returns_is_held():
    kept = measure_peak(lambda: (torch.zeros(10), torch.zeros(20))[0]).increase_bytes
    assert kept == 4 * 30


def test_the_baseline_is_what_is_named():
    net = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    measured = measure_peak(lambda: None, resident=[net, optimizer, {"x": [torch.zeros(5)]}, net.weight])
    assert measured.baseline_bytes == 4 * (100 + 100 + 100 + 5)


def test_views_and_shared_storages_count_once():
    x = torch.zeros(10)
    assert bytes_of([x, x[2:], x.view(2, 5)], torch.device("cpu")) == 40
    assert bytes_of([x], torch.device("cuda")) == 0
    assert len(tensors_in([x, (x,), {"a": None, "b": "text"}])) == 2


def test_free_memory_is_positive():
    assert free_bytes(torch.device("cpu")) > 0


@pytest.mark.cuda
def test_peak_on_cuda():
    measured = measure_peak(lambda: torch.zeros(1 << 20, device="cuda"), device="cuda")
    assert measured.increase_bytes == 4 << 20


def test_no_garbage_is_collected_while_measuring():
    """Cycles of an earlier step that are freed in this one would count as memory that this one gave back."""
    seen = []
    measure_peak(lambda: seen.append(gc.isenabled()))
    assert seen == [False]
    assert gc.isenabled()
    with pytest.raises(ValueError, match="in the step"):
        measure_peak(failing_step)
    assert gc.isenabled()


def failing_step():
    raise ValueError("in the step")
