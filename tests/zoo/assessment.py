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
from scheduler import Infeasible, MinimumBudget, Plan, measure_peak, plan_of, schedule
from scheduler.replan import least_budget
from tests.planning import UNLIMITED, exactly
from tests.training import TrainingOptions, differences, train
from tests.zoo.registry import ZOO

LEVELS = ("floor", "middle", "unlimited")
#: Seconds to plan in, and to look for the floor in: few, to keep the zoo short.
TIME_LIMIT_S, FLOOR_LIMIT_S = 1.0, 5.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What three steps of training under one budget gave.

    Attributes:
        plan: the plan that ran.
        peaks: measured peak bytes of each step.
        differences: against plain training.
        outside_bytes: most that the loss allocates outside of the step.

    """

    plan: Plan
    peaks: tuple[int, ...]
    differences: tuple[str, ...]
    outside_bytes: int = 0

    def failures(self) -> list[str]:
        """What is wrong: differences, steps over the budget, predictions more than 1 % off."""
        found = list(self.differences)
        budget, predicted = self.plan.budget_bytes, self.plan.peak_bytes
        for step, measured in enumerate(self.peaks):
            if budget is not None and measured > budget + self.outside_bytes:
                found.append(f"step {step}: {measured:,} B measured, {budget:,} B allowed")
            if not 0.99 * measured - self.outside_bytes <= predicted <= 1.01 * measured:
                found.append(f"step {step}: {measured:,} B measured, {predicted:,} B predicted")
        return found


@functools.cache
def _plain(name: str) -> list[dict[str, Any]]:
    return train(ZOO[name].make, None, TrainingOptions())


@functools.cache
def floor_of(name: str) -> MinimumBudget:
    """The least budget for which a plan of an entry is found; the step is not captured again.

    Raises:
        CheckpointSchedulerError: the model is refused.

    """
    return least_budget(assess(name, UNLIMITED).plan, time_limit_s=FLOOR_LIMIT_S)


def budgets_of(name: str) -> dict[str, str]:
    """The three budgets at which an entry is assessed. Raises as :func:`floor_of`."""
    floor, peak = floor_of(name).bytes, floor_of(name).plan.keep_all_peak_bytes
    return {"floor": exactly(floor), "middle": exactly((floor + peak) // 2), "unlimited": UNLIMITED}


@functools.cache
def assess(name: str, budget: str) -> Outcome:
    """Three optimizer steps of an entry under a budget, against three plain ones."""
    entry = ZOO[name]
    plans: list[Plan] = []
    peaks: list[int] = []

    def wrap(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
        _schedule(model, name, budget, args, kwargs)
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
    return Outcome(plans[0], tuple(peaks), tuple(found), entry.outside_bytes)


def _schedule(model: nn.Module, name: str, budget: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Plan for a budget. Where the short time leaves no plan at the floor, that with which the floor was found runs."""
    try:
        schedule(model, budget, sample_args=args, sample_kwargs=kwargs, time_limit_s=TIME_LIMIT_S)
    except Infeasible:
        if budget == UNLIMITED or budget != budgets_of(name)["floor"]:
            raise
        schedule(model, sample_args=args, sample_kwargs=kwargs, plan=floor_of(name).plan)


def refusal_of(name: str) -> str:
    """The message with which an entry is refused, or ``""`` where it is not."""
    try:
        assess(name, UNLIMITED)
    except CheckpointSchedulerError as error:
        return str(error)
    return ""
