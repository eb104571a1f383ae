"""Replay of random ops, and forwards that stand in while capturing."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from scheduler import schedule
from scheduler.runtime import rng
from scheduler.substitutes import needing_substitute, substituted


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_replay_gives_the_same_bits_and_leaves_the_stream(device):
    x = torch.ones(1000, device=device)
    state = rng.record_state(device)
    first = functional.dropout(x, 0.5)
    expected_next = torch.rand(5, device=device)
    rng_after = rng.record_state(device)
    again = rng.replay(state, device, functional.dropout, x, p=0.5)
    assert torch.equal(first, again)
    assert torch.equal(rng.record_state(device), rng_after)
    assert not torch.equal(expected_next, torch.rand(5, device=device))


def test_replay_restores_the_stream_when_the_op_raises():
    before = rng.record_state("cpu")
    torch.rand(3)
    after = rng.record_state("cpu")

    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        rng.replay(before, "cpu", fail)
    assert torch.equal(rng.record_state("cpu"), after)


def norm_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.BatchNorm1d(8))


def test_cumulative_batch_norm_is_found_and_put_back():
    net = norm_net()
    layers = needing_substitute(net)
    assert layers == (net[1],)
    with substituted(layers):
        assert "forward" in net[1].__dict__
    assert "forward" not in net[1].__dict__


def test_cumulative_batch_norm_trains_as_the_plain_layer():
    plain = norm_net()
    scheduled = schedule(copy.deepcopy(plain), 1, costs="roofline")
    for seed in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        outputs = [model(x) for model in (plain, scheduled)]
        for output, model in zip(outputs, (plain, scheduled), strict=True):
            model.zero_grad()
            output.pow(2).sum().backward()
        assert torch.equal(*outputs)
        for p, q in zip(plain.parameters(), scheduled.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert torch.equal(plain[1].num_batches_tracked, scheduled[1].num_batches_tracked)
    torch.testing.assert_close(plain[1].running_mean, scheduled[1].running_mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(plain[1].running_var, scheduled[1].running_var, rtol=1e-6, atol=1e-7)
    scheduled.eval()
    plain.eval()
    torch.testing.assert_close(plain(x), scheduled(x), rtol=1e-6, atol=1e-6)
