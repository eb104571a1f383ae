import threading

import pytest
import torch
from torch.profiler import profile

from graphs.costs.memory_events import memory_deltas, peak_bytes, record_cpu_memory, record_op_memory

X = torch.ones(100, 100)


def run():
    return (X @ X).exp()  # two results of 40,000 bytes; the first is released when the second exists


@pytest.mark.parametrize("record", [record_cpu_memory, record_op_memory])
def test_allocations_and_releases_in_order(record):
    run()
    result, deltas = record(run)
    assert deltas == [40_000, 40_000, -40_000]
    assert torch.equal(result, run())
    assert peak_bytes(deltas) == 80_000


def test_peak_is_the_greatest_running_sum():
    assert peak_bytes([5, -5, 7, 1, -8]) == 8
    assert peak_bytes([-5, 3]) == 0
    assert peak_bytes([]) == 0


def test_recording_ends_when_the_op_raises():
    def fail():
        raise KeyError("op")

    with pytest.raises(KeyError):
        record_op_memory(fail)
    assert record_op_memory(run)[1] == [40_000, 40_000, -40_000]


def test_an_op_is_recorded_beside_a_profile_of_the_user():
    found = []
    with profile(profile_memory=True) as users:
        before = X + 1
        worker = threading.Thread(target=lambda: found.append(record_op_memory(run)[1]))
        worker.start()
        worker.join()
        after = X + 2
    assert found == [[40_000, 40_000, -40_000]]
    assert memory_deltas(users).count(40_000) == 2
    assert before.numel() == after.numel() == 10_000


def test_a_profile_that_has_not_run_is_refused():
    with pytest.raises(ValueError, match="no results"):
        memory_deltas(profile(profile_memory=True))
