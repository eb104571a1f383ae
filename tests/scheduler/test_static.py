"""What is resident besides the step: every category, once, and optimizer state that does not exist yet."""

import pytest
import torch
from torch import nn

from graphs.errors import UnsupportedModelError
from scheduler.memory import bytes_of, tensors_in
from scheduler.static import optimizer_bytes, static_memory

CPU = torch.device("cpu")
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "two groups": lambda p: torch.optim.Adam([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}]),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Linear(20, 5))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_pending_optimizer_state_is_what_the_first_step_allocates(make):
    net = model()
    optimizer = make(list(net.parameters()))
    before = [p.detach().clone() for p in net.parameters()]
    state = torch.get_rng_state()
    predicted = optimizer_bytes(optimizer, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert predicted == bytes_of(tensors_in(optimizer), CPU)
    assert optimizer_bytes(optimizer, CPU) == predicted


def test_an_optimizer_that_cannot_step_on_stand_ins_says_so():
    with pytest.raises(UnsupportedModelError, match="LBFGS"):
        optimizer_bytes(torch.optim.LBFGS(model().parameters()), CPU)


def test_each_storage_counts_once_under_the_first_name_that_fits():
    net = model()
    net[0].weight.grad = torch.zeros_like(net[0].weight)
    x = torch.zeros(3, 10)
    static = static_memory(net, [net[0].weight, x, x[1:], net[1].running_mean], None, CPU)
    assert static["parameters"] == 4 * sum(p.numel() for p in net.parameters())
    assert static["buffers"] == 4 * 20 * 2 + 8
    assert static["gradients"] == 4 * 200
    assert static["inputs"] == 4 * 30
    assert static["optimizer"] == 0


def test_frozen_parameters_need_no_optimizer_state():
    net = model()
    net[0].requires_grad_(requires_grad=False)
    trained = 4 * sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert optimizer_bytes(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), CPU) == trained
