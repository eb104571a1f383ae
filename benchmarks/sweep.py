"""Plan and run a model at budgets spread from the least one with a plan to the peak of plain training."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from scheduler import Infeasible, Plan, measure_peak, plan_of, schedule, unschedule
from tests.models import Case, make_gpt, make_mlp, make_resnet50, make_unet
from tests.training import spread


def make_hf_gpt2(*, batch: int = 2, tokens: int = 256, layers: int = 12, width: int = 768) -> Case:
    """GPT-2 of the transformers library with random weights, dropout on, loss from its labels."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=12, vocab_size=50257, use_cache=False)
    model = GPT2LMHeadModel(config).train()

    def make_batch(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = torch.randint(config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(seed))
        return (), {"input_ids": ids, "labels": ids}

    return Case(model, make_batch, lambda output: output.loss)


# Sizes at which activations outweigh parameters, as they do where checkpointing is wanted.
MODELS: Mapping[str, Callable[[], Case]] = {
    "MLP": functools.partial(make_mlp, batch=4096, width=256, layers=8),
    "GPT": functools.partial(make_gpt, batch=8, context=128, width=128, layers=6, vocabulary=256),
    "ResNet-50": functools.partial(make_resnet50, batch=8, resolution=96, width=64),
    "U-Net": functools.partial(make_unet, batch=4, resolution=96, width=32),
    "HF GPT-2": make_hf_gpt2,
}


@dataclasses.dataclass(frozen=True)
class Point:
    """One budget of a sweep.

    Attributes:
        model: name of the model.
        share: how far the budget is up from the floor (0) to the plain peak (1).
        plan: the plan that ``schedule`` made.
        measured_bytes: peak of the first scheduled step and of the one after it, the larger one.
        schedule_seconds: wall time of ``schedule``: capture, costs, solve, lowering.

    """

    model: str
    share: float
    plan: Plan
    measured_bytes: int
    schedule_seconds: float

    @property
    def error(self) -> float:
        """(predicted − measured) / measured."""
        return self.plan.peak_bytes / self.measured_bytes - 1


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What :func:`sweep` found for one model: the ends of its range, in bytes, and a point per budget."""

    model: str
    floor_bytes: int
    floor_lower_bound_bytes: int
    plain_peak_bytes: int
    points: tuple[Point, ...]


def step_peak(case: Case, seed: int) -> int:
    """Measured peak of one forward and backward without gradients before it; the output lives to the end."""
    batch = case.make_batch(seed)
    case.model.zero_grad(set_to_none=True)
    gc.collect()

    def step() -> Any:
        output = case.model(*batch[0], **batch[1])
        case.loss_of(output).backward()
        return output

    peak = measure_peak(step, resident=(case.model, batch)).peak_bytes
    case.model.zero_grad(set_to_none=True)
    return peak


def sweep(
    name: str, make: Callable[[], Case], *, count: int = 5, time_limit_s: float = 60.0, run: bool = True
) -> Sweep:
    """Find the floor, then plan (and run, where ``run``) at ``count`` budgets between it and the plain peak."""
    case = make()
    args, kwargs = case.make_batch(0)
    samples: dict[str, Any] = {"sample_args": args, "sample_kwargs": kwargs, "time_limit_s": time_limit_s}
    plain_peak = max(step_peak(case, seed) for seed in range(2))
    try:
        schedule(case.model, "1B", **samples)
    except Infeasible as infeasible:
        floor, bound = infeasible.floor_bytes, infeasible.floor_lower_bound_bytes
    else:
        raise AssertionError("a budget of one byte was accepted")
    if floor is None:
        raise AssertionError(f"{name}: no floor was found")
    points = []
    for index, budget in enumerate(spread(floor, plain_peak, count)):
        begin = time.perf_counter()
        schedule(case.model, f"{budget}B", **samples)
        seconds = time.perf_counter() - begin
        plan = plan_of(case.model)
        if plan is None:
            raise AssertionError(f"{name}: schedule with samples made no plan")
        measured = max(step_peak(case, seed) for seed in range(2)) if run else 0
        points.append(Point(name, index / (count - 1), plan, measured, seconds))
        unschedule(case.model)
    return Sweep(name, floor, bound or 0, plain_peak, tuple(points))
