"""Checkpointing whole modules: the choice, its simulated cost, and applying it to a model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from scheduler.export.modules import module_plan
from solvers.strategies import BY_HAND
from tests.scheduler.cli.steps import keep_all_plan
from tests.scheduler.export.test_sac import Blocks
from tests.scheduler.toy import MB


def budgeted(budget):
    return dataclasses.replace(keep_all_plan(), budget_bytes=budget)


def test_as_few_modules_as_the_budget_needs():
    plan = budgeted(2**40)
    assert module_plan(plan).modules == ()
    assert module_plan(plan).overhead == 0
    every = BY_HAND["checkpoint every block"].solve(plan.problem)
    whole = module_plan(budgeted(every.peak_bytes))
    assert whole.fits
    assert whole.peak_bytes <= every.peak_bytes
    assert whole.step_time_ns <= every.step_time_ns
    counts = []
    for budget in range(every.peak_bytes, plan.keep_all_peak_bytes + 1, 10 * MB):
        found = module_plan(budgeted(budget))
        assert found.fits
        assert found.peak_bytes <= budget
        counts.append(len(found.modules))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_too_coarse_for_the_budget():
    found = module_plan(budgeted(keep_all_plan().static_bytes + MB))
    assert not found.fits
    assert found.modules


class Stub:
    """A plan, as far as applying it is concerned."""


@pytest.fixture
def chosen(monkeypatch):
    import scheduler.export.modules as module

    found = module.ModulePlan(("blocks.0", "blocks.2"), 1, 1, 0.0, fits=True)
    monkeypatch.setattr(module, "module_plan", lambda plan: found)
    return module


def test_applied_and_removed(chosen):
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(8, 32)
    keys = list(model.state_dict())
    calls = {0: 0, 1: 0, 2: 0}
    for i, block in enumerate(model.blocks):
        block.up.register_forward_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    model(x).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    assert set(calls.values()) == {1}
    model.zero_grad()
    applied = chosen.apply_modules(Stub(), model)
    assert applied.plan.modules == ("blocks.0", "blocks.2")
    assert list(model.state_dict()) == keys
    with pytest.raises(ValueError, match="wrapped already"):
        chosen.apply_modules(Stub(), model)
    model(x).backward()
    assert calls == {0: 3, 1: 2, 2: 3}  # two more in the checkpointed blocks, one in the other
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
    with torch.no_grad():
        model(x)
    applied.remove()
    applied.remove()
    model(x).backward()
    assert calls == {0: 5, 1: 4, 2: 5}
    assert all("forward" not in block.__dict__ for block in model.blocks)


def test_another_model(chosen):
    with pytest.raises(ValueError, match=r"no module 'blocks\.0'"):
        chosen.apply_modules(Stub(), torch.nn.Linear(2, 2))
