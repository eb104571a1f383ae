"""The measured link: its figures from the times of copies, and each copy timed once for a device."""

from __future__ import annotations

import pytest
import torch

from graphs.costs import link
from graphs.costs.link import SMALL, measured_link


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CHECKPOINT_SCHEDULER_CACHE", str(tmp_path))


def test_rates_and_latency_come_from_two_sizes_and_are_remembered(monkeypatch):
    asked = []

    def time_ns(size, device, *, outward):
        asked.append((size, outward))
        return (2000 if outward else 1000) + size // (10 if outward else 20)

    monkeypatch.setattr(link, "_time_ns", time_ns)
    found = measured_link(torch.device("cpu"))
    assert found.to_host_bytes_per_s == pytest.approx(10e9)
    assert found.to_device_bytes_per_s == pytest.approx(20e9)
    assert found.latency_ns == 2000 + SMALL // 10
    assert found.source == "measured"
    assert len(set(asked)) == len(asked) == 4
    assert measured_link(torch.device("cpu")) == found
    assert len(asked) == 4


@pytest.mark.cuda
def test_the_link_of_a_cuda_device():
    found = measured_link(torch.device("cuda:0"))
    assert 1e9 < found.to_host_bytes_per_s < 1e12
    assert 1e9 < found.to_device_bytes_per_s < 1e12
    assert 0 < found.latency_ns < 1e6
