"""``allow_graph_breaks=True``: a step in several pieces, under one budget."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import nn

from scheduler import Infeasible, measure_peak, plan_of, schedule
from scheduler.backend import checkpoint_scheduler
from scheduler.pieces import OTHER_PIECES
from tests.scheduler.kinds.comparing import (
    FLOOR,
    UNLIMITED,
    Wave,
    bounded,
    data,
    fresh,
    layers,
    observe,
    trained,
    unequal,
)

__all__ = ["fresh"]


class Branch(nn.Module):
    """Three parts; which one is last depends on the data."""

    def __init__(self, width=32):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, width), Wave(), Wave(), nn.Dropout(0.2))
        self.left = nn.Sequential(nn.Linear(width, width), Wave(), Wave())
        self.right = nn.Sequential(nn.Linear(width, width), Wave(), Wave(), Wave())

    def forward(self, x):
        h = self.first(x)
        h = self.left(h) if h.sum() > 0 else self.right(h)
        torch._dynamo.graph_break()
        return self.left(h).square().mean()


def made(seed=0):
    torch.manual_seed(seed)
    return Branch()


def steps(model, *signs):
    """Steps without gradients left over, on inputs that take either branch."""
    losses = []
    for i, sign in enumerate(signs):
        model.zero_grad(set_to_none=True)
        x = sign * data(64, 16, seed=i).abs()
        loss = model(x)
        loss.backward()
        losses.append(loss.detach().clone())
        del loss
    return losses


@pytest.mark.parametrize("fraction", [FLOOR, UNLIMITED])
def test_numbers_are_those_of_plain_training(fraction):
    def step(model):
        return steps(model, 1, -1, 1, -1)

    model = bounded(made(), fraction, allow_graph_breaks=True)
    assert unequal(observe(made(), step), observe(model, step)) == []


def peaks(model, count=3, sign=1):
    found = []
    for _ in range(count):
        model.zero_grad(set_to_none=True)
        x = sign * data(64, 16).abs()
        found.append(measure_peak(lambda x=x: model(x).backward(), resident=(model, x)).peak_bytes)
    return found


@functools.cache
def least_budget():
    """What the first step of all needs, which runs each piece at its floor."""
    model = schedule(made(), "1GB", costs="roofline", allow_graph_breaks=True)
    steps(model, 1)
    return plan_of(model).peak_bytes


@pytest.mark.slow
def test_the_whole_step_keeps_the_budget():
    plain = max(peaks(made(), 2))
    low = least_budget()
    assert low < 0.9 * plain
    for budget in (low, (low + plain) // 2, plain):
        torch._dynamo.reset()
        model = schedule(made(), f"{budget}B", costs="roofline", allow_graph_breaks=True, time_limit_s=1)
        measured = peaks(model)
        assert max(measured) <= budget
        assert plan_of(model).peak_bytes <= budget
        assert max(measured) <= 1.01 * plan_of(model).peak_bytes
        assert plan_of(model).static[OTHER_PIECES] > 0


@pytest.mark.slow
def test_the_first_steps_keep_the_least_budget():
    model = schedule(made(), f"{least_budget()}B", costs="roofline", allow_graph_breaks=True, time_limit_s=1)
    assert max(peaks(model, 2)) <= least_budget()
    assert plan_of(model).peak_bytes <= least_budget()


@pytest.mark.slow
def test_ample_memory_is_used_from_the_second_step_on():
    model = schedule(made(), "1GB", costs="roofline", allow_graph_breaks=True)
    steps(model, 1)
    assert not plan_of(model).is_noop
    steps(model, 1, 1)
    assert plan_of(model).is_noop
    compiled = dict(model._compiled_call_impl._steps)
    steps(model, 1)
    assert model._compiled_call_impl._steps == compiled  # nothing more is captured


def test_pieces_that_do_not_fit_together_are_refused():
    with pytest.raises(Infeasible, match="pieces"):
        steps(schedule(made(), f"{least_budget() * 9 // 10}B", costs="roofline", allow_graph_breaks=True), 1)


def test_a_refusal_names_the_constraint():
    budget = f"{least_budget()}B"
    steps(schedule(made(), budget, costs="roofline", allow_graph_breaks=True), 1)
    held = schedule(
        made(), budget, costs="roofline", allow_graph_breaks=True, keep=["left"], never_recompute=["first.0"]
    )
    with pytest.raises(Infeasible, match=r"pieces.*a plan without keep='left'") as caught:
        steps(held, 1)
    assert caught.value.constraints == ("keep='left'",)


def test_a_refusal_after_the_first_piece_moves_nothing():
    """Buffers that are written, and one that is replaced; the random stream."""

    class Counting(Branch):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(16)
            self.register_buffer("last", torch.zeros(()))

        def forward(self, x):
            self.last = x.mean().detach()
            return super().forward(self.norm(x))

    torch.manual_seed(0)
    model = Counting()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    schedule(model, f"{least_budget() * 9 // 10}B", costs="roofline", allow_graph_breaks=True)
    last, x, stream = model.last, data(64, 16).abs(), torch.get_rng_state()
    with pytest.raises(Infeasible, match="first 3 pieces"):
        model(x)
    assert model.last is last
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), stream)


def test_measured_as_a_whole(caplog):
    model = schedule(made(), "1GB", costs="roofline", allow_graph_breaks=True)
    steps(model, 1)
    first = plan_of(model)
    x = data(64, 16).abs()
    steps(model, 1)
    assert "more than" not in caplog.text
    model.zero_grad(set_to_none=True)
    peak = measure_peak(lambda: model(x).backward(), resident=(model, x)).peak_bytes
    assert first.measured_peak_bytes is not None
    assert plan_of(model).measured_peak_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.slow
def test_the_same_piece_several_times():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(16, 16), Wave())

        def forward(self, x):
            while x.abs().max() < 3:
                x = self.inner(x) + x + 0.5
            return x

    def step(model):
        return [trained(data(8, 16, seed=i) / 10)(model) for i in range(2)]

    torch.manual_seed(0)
    plain = Loop()
    model = bounded(copy.deepcopy(plain), allow_graph_breaks=True)
    assert unequal(observe(plain, step), observe(model, step)) == []


def test_a_graph_without_breaks_is_one_piece():
    torch.manual_seed(0)
    plain = layers()
    model = bounded(copy.deepcopy(plain), allow_graph_breaks=True, loss_fn=F.mse_loss)
    x, y = data(12, 16), data(12, 32)
    for m, loss in ((plain, lambda: F.mse_loss(plain(x), y)), (model, lambda: model(x, loss_args=(y,)))):
        m.zero_grad(set_to_none=True)
        loss().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    assert plan_of(model).static[OTHER_PIECES] == 0


def test_what_cannot_be_known_before_the_step_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        schedule(made(), 1, allow_graph_breaks=True, sample_args=(data(4, 16),))
    with pytest.raises(ValueError, match="do not go together"):
        schedule(made(), 1, allow_graph_breaks=True, dynamic="bucket")
    with pytest.raises(ValueError, match="only schedule"):
        checkpoint_scheduler(None, (), options={"allow_graph_breaks": True})
