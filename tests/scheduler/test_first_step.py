"""The first step of a plan is measured, and a warning says where it took more than the plan says, and why."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from graphs._torch import is_profiled
from scheduler import measure_peak, plan_of, schedule
from tests.scheduler.kinds.comparing import Wave, bounded, data, fresh, layers

__all__ = ["fresh"]

CLASSES = 2000
X = data(64, 16)
TARGET = torch.arange(64) % CLASSES


def classifier(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), Wave(), nn.Linear(32, CLASSES))


def step(model, x=X):
    F.cross_entropy(model(x), TARGET).backward()


def small_step(model, x=X):
    model(x).square().sum().backward()


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = classifier()

    def forward(self, x, target):
        return F.cross_entropy(self.inner(x), target)


def warned(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_measured_as_predicted(fraction, caplog):
    model = bounded(WithLoss(), fraction)
    assert plan_of(model) is None
    model(X, TARGET).backward()
    plan = plan_of(model)
    assert abs(plan.measured_peak_bytes / plan.peak_bytes - 1) <= 0.01
    assert warned(caplog) == []
    model.zero_grad(set_to_none=True)
    peak = measure_peak(lambda: model(X, TARGET).backward(), resident=(model, X, TARGET)).peak_bytes
    assert plan.measured_peak_bytes == pytest.approx(peak, abs=64)


def test_a_loss_outside_is_named(caplog):
    model = bounded(classifier())
    step(model)
    plan = plan_of(model)
    model.zero_grad(set_to_none=True)
    peak = measure_peak(lambda: step(model), resident=(model, X)).peak_bytes
    assert plan.measured_peak_bytes == pytest.approx(peak, rel=0.01)
    assert peak > 1.02 * plan.peak_bytes  # else there is nothing to warn of
    (message,) = warned(caplog)
    assert f"{plan.measured_peak_bytes - plan.peak_bytes:,} bytes" in message
    assert "loss_fn=" in message


def test_other_shapes_are_not_warned_of_again(caplog):
    model = bounded(classifier())
    for n in (64, 32):
        F.cross_entropy(model(data(n, 16)), TARGET[:n]).backward()
    assert len(warned(caplog)) == 1


def test_several_forwards_before_a_backward_are_named(caplog):
    model = bounded(layers())
    outputs = [model(data(200, 16, seed=i)) for i in range(3)]
    sum(y.square().sum() for y in outputs).backward()
    del outputs
    assert plan_of(model).measured_peak_bytes > 1.5 * plan_of(model).peak_bytes
    assert "3 forwards" in warned(caplog)[0]


def test_only_the_first_step_is_measured():
    seen = []
    model = bounded(layers())
    for _ in range(3):
        output = model(X)
        output.register_hook(lambda _: seen.append(is_profiled()))
        output.square().sum().backward()
        del output
    assert seen == [True, False, False]
    assert not is_profiled()


def test_each_plan_is_measured():
    model = bounded(layers())
    for n in (8, 16):
        small_step(model, data(n, 16))
        assert plan_of(model).measured_peak_bytes is not None


def test_a_graph_that_lives_on_does_not_keep_the_recording_alive():
    model = bounded(layers())
    loss = model(X).square().sum()
    loss.backward()
    gc.collect()
    assert not is_profiled()
    assert plan_of(model).measured_peak_bytes is not None
    del loss


def test_a_forward_without_backward_ends_the_recording():
    model = bounded(layers())
    output = model(X)
    assert is_profiled()
    del output
    assert not is_profiled()
    assert plan_of(model).measured_peak_bytes is None
    small_step(model)
    assert plan_of(model).measured_peak_bytes is not None


def test_no_more_is_tried_after_many_forwards():
    model = bounded(layers())
    for _ in range(20):
        model(X)
    output = model(X)
    assert not is_profiled()
    del output


def events(profiler):
    return [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]


def test_a_profiler_of_the_user_is_left_alone():
    model = bounded(layers())
    with profile(profile_memory=True) as profiler:
        small_step(model)
    assert X.shape[0] * 64 * 4 // 2 in events(profiler)
    assert plan_of(model).measured_peak_bytes is None
    small_step(model)
    assert plan_of(model).measured_peak_bytes is not None


@pytest.mark.parametrize("when", ["between", "around the backward", "after"])
def test_a_profiler_started_meanwhile_has_precedence(when):
    model = bounded(layers())
    loss = model(X).square().sum()
    if when == "after":
        loss.backward()
    with profile(profile_memory=True) as profiler:
        torch.ones(12_345)
        if when == "around the backward":
            loss.backward()
    assert 4 * 12_345 in events(profiler)
    if when == "between":
        loss.backward()
    assert (plan_of(model).measured_peak_bytes is not None) == (when == "after")
    del loss
    small_step(model)
    assert plan_of(model).measured_peak_bytes is not None
    assert not is_profiled()


def test_backward_on_another_thread():
    model = bounded(layers())
    loss = model(X).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert plan_of(model).measured_peak_bytes is None
    assert all(p.grad is not None for p in model.parameters())
    del loss, thread
    assert not is_profiled()


def test_two_modules_in_one_step():
    first, second = bounded(layers()), bounded(nn.Sequential(nn.Linear(32, 16), Wave()))
    for _ in range(2):
        second(first(X)).square().sum().backward()
    assert plan_of(first).measured_peak_bytes is not None
    assert plan_of(second).measured_peak_bytes is not None


def test_a_failing_backward_ends_the_recording():
    model = bounded(layers())
    output = model(X)
    output.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    del output
    gc.collect()
    assert not is_profiled()


def test_copies_and_pickles_leave_a_measurement_that_goes_on_alone():
    model = schedule(layers(), "100TB", costs="roofline")
    output = model(X)
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(plan_of(model)))  # noqa: S301
    assert loaded.measured_peak_bytes is None
    assert plan_of(twin).measured_peak_bytes is None
    output.sum().backward()
    assert plan_of(model).measured_peak_bytes is not None


def test_a_forward_inside_of_a_backward_is_not_measured():
    """Autograd puts a thread's profilers back after each node: a recording begun in one would be lost."""
    model = schedule(classifier(), "1GB", costs="roofline")
    for _ in range(2):
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=True).sum().backward()
        assert plan_of(model).measured_peak_bytes is None
        assert not is_profiled()
    with profile(profile_memory=True) as profiler:
        step(model)
    assert events(profiler)
    step(model)
    assert plan_of(model).measured_peak_bytes is not None
