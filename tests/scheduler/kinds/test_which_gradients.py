"""Which gradients: each parameter and input gets one, or ``None``, exactly where plain training says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scheduler import plan_of
from tests.scheduler.kinds.comparing import FLOOR, MIDDLE, UNLIMITED, Wave, compare, data, fresh, layers, trained

__all__ = ["fresh"]

X = data(12, 16)


@pytest.mark.parametrize("frozen", ["0", "2", "0.weight", "2.bias"])
def test_frozen_parts(frozen):
    def make():
        model = nn.Sequential(nn.Linear(16, 32), Wave(), nn.Linear(32, 32), Wave())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        return model

    compare(make, trained(X))


class Adapted(nn.Module):
    """A frozen base with a low-rank adapter on token ids: no input and no first layer requires grad."""

    def __init__(self):
        super().__init__()
        self.table, self.base = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)
        self.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, ids):
        h = self.table(ids).sin().exp()
        h = (self.base(h) + self.up(self.down(h))).tanh().exp()
        return self.out(h).sin().exp()


@pytest.mark.parametrize("fraction", [FLOOR, UNLIMITED])
def test_adapters_over_a_frozen_base(fraction):
    ids = torch.randint(20, (6, 12), generator=torch.Generator().manual_seed(0))
    compare(Adapted, trained(ids), fraction=fraction, recomputes=fraction == FLOOR)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.inner(self.table(ids).sin().exp()).tanh().exp())


def test_tied_weights():
    ids = torch.randint(20, (6, 12), generator=torch.Generator().manual_seed(0))
    compare(Tied, trained(ids))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, x):
        h = self.body(x).sin().exp().tanh()
        return self.a(h).exp(), self.b(h).sin()


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("fraction", [FLOOR, MIDDLE])
def test_unused_heads_keep_none(used, fraction):
    model = compare(Heads, trained(X, loss=lambda y: y[used].sum()), fraction=fraction, recomputes=False)
    assert model.never.weight.grad is None
    assert (model.b if used == 0 else model.a).weight.grad is None


def test_head_used_in_one_step_and_not_in_the_next():
    def step(model):
        results = []
        for losses in ((0, 1), (0,), (1,)):
            model.zero_grad(set_to_none=True)
            outputs = model(X)
            sum(outputs[i].sum() for i in losses).backward()
            results.append([p.grad if p.grad is None else p.grad.clone() for p in model.parameters()])
        return results

    compare(Heads, step, recomputes=False)


def test_thaw_and_freeze_after_planning():
    def step(model):
        results = [trained(X)(model)]
        model[0].requires_grad_(requires_grad=False)
        model.zero_grad(set_to_none=True)
        results.append(trained(X)(model))
        frozen = model[0].weight.grad
        model[0].requires_grad_(requires_grad=True)
        model[3].requires_grad_(requires_grad=False)
        results.append(trained(X)(model))
        return results, frozen

    compare(lambda: layers(16, Wave()), step, recomputes=False)


@pytest.mark.parametrize("fraction", [FLOOR, UNLIMITED])
def test_inputs_that_require_grad(fraction):
    x = data(12, 16, requires_grad=True)
    compare(layers, trained(x), fraction=fraction, recomputes=fraction == FLOOR)


def test_input_that_requires_grad_in_a_frozen_module():
    x = data(12, 16, requires_grad=True)
    compare(lambda: layers().requires_grad_(requires_grad=False), trained(x))


def test_input_that_requires_grad_only_later():
    def step(model):
        return trained(X)(model), trained(data(12, 16, requires_grad=True))(model), trained(X)(model)

    compare(layers, step, recomputes=False)


def test_input_that_is_not_a_leaf():
    x = data(12, 16, requires_grad=True)

    def step(model):
        leaf = x.detach().clone().requires_grad_()
        model(leaf * 2 + 1).square().sum().backward()
        return leaf.grad

    compare(layers, step)


class Repeated(nn.Module):
    """A parameter used in two blocks, and a block called twice."""

    def __init__(self):
        super().__init__()
        self.block, self.scale = layers(16), nn.Parameter(torch.ones(32))
        self.back = nn.Linear(32, 16)

    def forward(self, x):
        h = self.block(x) * self.scale
        h = self.block(self.back(h).sin())
        return (h * self.scale).exp().tanh()


@pytest.mark.parametrize("fraction", [FLOOR, MIDDLE])
def test_parameter_in_two_blocks_and_a_block_called_twice(fraction):
    compare(Repeated, trained(X), fraction=fraction, recomputes=fraction == FLOOR)


def test_nothing_requires_grad():
    def step(model):
        return model(X)

    torch.manual_seed(0)
    plain = layers().requires_grad_(requires_grad=False)
    from tests.scheduler.kinds.comparing import bounded

    torch.manual_seed(0)
    model = bounded(layers().requires_grad_(requires_grad=False))
    assert torch.equal(step(plain), step(model))
    assert not step(model).requires_grad
    assert plan_of(model) is None
