"""Budgets of the test models, and trainings under them, measured once and shared by the tests that look at them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from scheduler import Infeasible, Plan, measure_peak, schedule, unschedule
from tests.models import MODELS, Case
from tests.training import TrainingOptions, Wrap, differences, spread, train

# Shares of the way from the floor to the keep-all peak, and one budget that binds nothing.
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
UNLIMITED = "100TB"
TIME_LIMIT_S = 1.0


def exactly(size: int) -> str:
    """A budget of so many bytes, as ``schedule`` reads it."""
    return f"{size}B"


@dataclasses.dataclass(frozen=True)
class Range:
    """Bytes between which the budget matters: least one with a plan, and the peak of keeping everything."""

    floor_bytes: int
    keep_all_peak_bytes: int

    @property
    def low_bytes(self) -> int:
        """One per cent above the floor: what a search on a busy machine, cut short, reaches as well."""
        return self.floor_bytes + self.floor_bytes // 100

    def at(self, fraction: float) -> str:
        """Budget at a share of the way up; 0 is just above the floor, 1 the keep-all peak."""
        budgets = spread(self.low_bytes, self.keep_all_peak_bytes, 101)
        return exactly(budgets[round(100 * fraction)])


def range_of(case: Case, **options: Any) -> Range:
    """Find floor and keep-all peak of a model by asking for a byte and for everything; leaves the model plain."""
    args, kwargs = case.make_batch(0)
    options = {"time_limit_s": TIME_LIMIT_S, **options}
    try:
        schedule(case.model, exactly(1), sample_args=args, sample_kwargs=kwargs, **options)
    except Infeasible as infeasible:
        floor = infeasible.floor_bytes
    else:
        raise AssertionError("a budget of one byte was accepted")
    assert floor is not None, "no floor was found"
    schedule(case.model, UNLIMITED, sample_args=args, sample_kwargs=kwargs, **options)
    peak = case.model.plan.keep_all_peak_bytes
    unschedule(case.model)
    return Range(floor, peak)


@functools.cache
def model_range(name: str) -> Range:
    """Range of one of the four test models at its default size."""
    return range_of(MODELS[name]())


@dataclasses.dataclass(frozen=True)
class ScheduledRun:
    """What a training under a budget gave.

    Attributes:
        differences: against the plain training, bit for bit.
        plan: the plan the model ran.
        peaks: measured peak bytes of each step's forward and backward, the first step included.

    """

    differences: list[str]
    plan: Plan
    peaks: list[int]


def every_model_and_budget() -> list[Any]:
    """Each test model at each of :data:`FRACTIONS`; every run takes the floor and the middle of all but the largest.

    The others are slow: most of the time goes into tracing and timing ops, and into the search for the floor.
    """
    found = []
    for name in MODELS:
        for fraction in FRACTIONS:
            quick = fraction in (0.0, 0.5) and name != "resnet50"
            found.append(
                pytest.param(name, fraction, id=f"{name}-{fraction}", marks=[] if quick else [pytest.mark.slow])
            )
    return found


def assert_peak(measured: int, plan: Plan) -> None:
    """The budget held, and the predicted peak is within 1 % of the measured one."""
    assert measured <= plan.budget_bytes, f"{measured:,} B measured, {plan.budget_bytes:,} B allowed"
    error = plan.peak_bytes / measured - 1
    assert abs(error) <= 0.01, f"{plan.peak_bytes:,} B predicted, {measured:,} B measured: {error:+.2%}"


@functools.cache
def plain_run(name: str) -> list[dict[str, Any]]:
    """Records of the plain training of a test model."""
    return train(MODELS[name], None, TrainingOptions())


@functools.cache
def scheduled_run(name: str, fraction: float) -> ScheduledRun:
    """Train a test model plain and under a budget; the plan is made in advance, from the first batch."""
    return run_under(MODELS[name], model_range(name).at(fraction), plain=plain_run(name))


def bounded(budget: str) -> Wrap:
    """Wrap that bounds a model in place and plans on its first call."""
    return lambda model, args, kwargs: schedule(model, budget, time_limit_s=TIME_LIMIT_S)


def run_under(
    make: Callable[[], Case],
    budget: str,
    *,
    options: TrainingOptions = TrainingOptions(),  # noqa: B008  # frozen
    plain: list[dict[str, Any]] | None = None,
) -> ScheduledRun:
    """Train plain (unless ``plain`` records that already) and under ``budget``, and measure each scheduled step."""
    plans: list[Plan] = []
    peaks: list[int] = []

    def wrap(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
        scheduled = schedule(model, budget, sample_args=args, sample_kwargs=kwargs, time_limit_s=TIME_LIMIT_S)
        plans.append(scheduled.plan)
        return scheduled

    def measured(step: Callable[[], None], resident: tuple[Any, ...]) -> None:
        peaks.append(measure_peak(step, resident=resident).peak_bytes)

    wrapped = train(make, wrap, options, run_step=measured)
    return ScheduledRun(differences(plain or train(make, None, options), wrapped), plans[0], peaks)


def measured_peak(model: nn.Module, case: Case, seed: int = 0, *, resident: tuple[Any, ...] = ()) -> int:
    """Peak bytes of one forward and backward; the output lives to the end of the step."""
    batch = case.make_batch(seed)

    def step() -> Any:
        output = model(*batch[0], **batch[1])
        case.loss_of(output).backward()
        return output

    return measure_peak(step, resident=(model, batch, *resident)).peak_bytes
