"""Train an entry of the zoo plain and under a budget, and measure the peak of every scheduled step."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphs.errors import CheckpointSchedulerError
from scheduler import Infeasible, Plan, measure_peak, plan_of, schedule
from solvers import AutoSolver, Problem
from tests.planning import UNLIMITED, exactly
from tests.training import TrainingOptions, differences, train
from tests.zoo.registry import ZOO

LEVELS = ("floor", "middle", "unlimited")
#: Seconds to plan in: 1 keeps the zoo short. Where another load leaves no plan within that, it is tried again.
TIME_LIMITS_S = (1.0, 20.0)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What three steps of training under one budget gave.

    Attributes:
        plan: the plan that ran.
        peaks: measured peak bytes of each step.
        differences: against plain training.

    """

    plan: Plan
    peaks: tuple[int, ...]
    differences: tuple[str, ...]

    def failures(self) -> list[str]:
        """What is wrong: differences, steps over the budget, predictions more than 1 % off."""
        found = list(self.differences)
        budget, predicted = self.plan.budget_bytes, self.plan.peak_bytes
        for step, measured in enumerate(self.peaks):
            if budget is not None and measured > budget:
                found.append(f"step {step}: {measured:,} B measured, {budget:,} B allowed")
            if abs(predicted / measured - 1) > 0.01:
                found.append(f"step {step}: {measured:,} B measured, {predicted:,} B predicted")
        return found


@functools.cache
def _plain(name: str) -> list[dict[str, Any]]:
    return train(ZOO[name].make, None, TrainingOptions())


def floor_of(plan: Plan) -> int:
    """Least budget, in bytes, for which the portfolio finds a plan of this step; found without capturing it again."""
    problem = Problem.from_graph(plan.graph, plan.costs, 1, static_bytes=plan.static_bytes)
    floor = AutoSolver(time_limit_s=TIME_LIMITS_S[0]).solve(problem).floor_bytes
    assert floor is not None, "no floor was found"
    return floor


@functools.cache
def budgets_of(name: str) -> dict[str, str]:
    """The three budgets at which an entry is assessed.

    Raises:
        CheckpointSchedulerError: the model is refused.

    """
    plan = assess(name, UNLIMITED).plan
    floor, peak = floor_of(plan), plan.keep_all_peak_bytes
    return {"floor": exactly(floor), "middle": exactly((floor + peak) // 2), "unlimited": UNLIMITED}


@functools.cache
def assess(name: str, budget: str) -> Outcome:
    """Three optimizer steps of an entry under a budget, against three plain ones."""
    entry = ZOO[name]
    plans: list[Plan] = []
    peaks: list[int] = []

    def wrap(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
        _schedule(model, budget, args, kwargs)
        plan = plan_of(model)
        assert plan is not None
        plans.append(plan)
        return model

    def measured(step: Callable[[], None], resident: tuple[Any, ...]) -> None:
        gc.collect()  # or what an earlier model left would be freed during the measurement
        peaks.append(measure_peak(step, resident=resident).peak_bytes)

    try:
        wrapped = train(entry.make, wrap, TrainingOptions(), run_step=measured)
    finally:
        torch.compiler.reset()  # Dynamo keeps what it compiled for every model that lived
    found = differences(_plain(name), wrapped, rtol=entry.rtol, atol=entry.atol)
    return Outcome(plans[0], tuple(peaks), tuple(found))


def _schedule(model: nn.Module, budget: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    first, second = TIME_LIMITS_S
    try:
        schedule(model, budget, sample_args=args, sample_kwargs=kwargs, time_limit_s=first)
    except Infeasible:
        schedule(model, budget, sample_args=args, sample_kwargs=kwargs, time_limit_s=second)


def refusal_of(name: str) -> str:
    """The message with which an entry is refused, or ``""`` where it is not."""
    try:
        assess(name, UNLIMITED)
    except CheckpointSchedulerError as error:
        return str(error)
    return ""
