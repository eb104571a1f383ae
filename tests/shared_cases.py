"""Real situations, rebuilt from public bug reports, which lie beside the checkout: how to run each under a budget.

``run_case`` and ``run_situation`` are what the tests and ``python -m benchmarks.cases`` share. The floor of a case is
that of its hungriest batch; that of a situation counts the gradients that an accumulating step finds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphs.links import Link
from scheduler import Infeasible, plan, plan_of, schedule, unschedule
from scheduler.memory import bytes_of

SHARED = pathlib.Path(__file__).resolve().parents[1] / ".." / "shared" / "cases"
PATHS = {path.stem: path for path in sorted(SHARED.glob("cases/[0-9]*.py"))}
LEVELS = ("floor", "middle", "unlimited")
UNLIMITED = "100TB"

# Longest search for a plan of these small models.
TIME_LIMIT_S = 1.0

FREE_LINK = Link(1e12, 1e12, latency_ns=0, least_bytes=1)


@functools.cache
def load(name: str) -> ModuleType:
    """``run_cases`` or ``situations``, as a module."""
    spec = importlib.util.spec_from_file_location(f"shared_{name}", SHARED / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _budget(floor: int, peak: int, level: str) -> str:
    """Budget of a level; the floor with one per cent to spare, for a search that a busy machine cuts short."""
    if level == "unlimited":
        return UNLIMITED
    return f"{floor + floor // 100 if level == 'floor' else max(floor + floor // 100, (floor + peak) // 2)}B"


def _least_budget(ask_for_a_byte: Callable[[], object]) -> int:
    """Floor in bytes that the refusal of a budget of one byte names."""
    try:
        ask_for_a_byte()
    except Infeasible as infeasible:
        if infeasible.floor_bytes is not None:
            return infeasible.floor_bytes
    raise AssertionError("a budget of one byte was accepted, or no floor was found")


def _shapes(batch: Any) -> Any:
    return pytree.tree_map(lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf, batch)


@functools.cache
def range_of_case(name: str) -> tuple[int, int]:
    """Floor and keep-all peak in bytes over the three batches of a case, some of which are larger than the first."""
    model, make_batch, _ = load("run_cases").load(str(PATHS[name])).make()
    floors, peaks = [], []
    for args, kwargs in {str(_shapes(batch)): batch for batch in map(make_batch, range(3))}.values():
        samples = {"sample_args": args, "sample_kwargs": kwargs, "time_limit_s": TIME_LIMIT_S}
        floors.append(_least_budget(functools.partial(schedule, model, "1B", **samples)))
        schedule(model, UNLIMITED, **samples)
        found = plan_of(model)
        assert found is not None
        peaks.append(found.keep_all_peak_bytes)
        unschedule(model)
    return max(floors), max(peaks)


def run_case(name: str, level: str) -> str:
    """``"ok"``, or in what a scheduled training of a case differs from the plain one."""
    budget = UNLIMITED if level == "unlimited" else _budget(*range_of_case(name), level)

    def wrap(model: nn.Module, _args: Any, _kwargs: Any) -> nn.Module:
        return schedule(model, budget, time_limit_s=TIME_LIMIT_S)

    result: str = load("run_cases").run(str(PATHS[name]), wrap=wrap)
    return result


def run_case_with_copies(name: str) -> tuple[str, bool]:
    """As :func:`run_case` half-way up, with copies that cost next to nothing; and whether a plan has any.

    The first plan and the last are looked at: where lengths vary, the first batch may be a short one.
    """
    budget = _budget(*range_of_case(name), "middle")
    models: list[nn.Module] = []
    copies: list[bool] = []

    def look(model: nn.Module) -> None:
        found = plan_of(model)
        copies.append(found is not None and bool(found.host_use.copies))

    def wrap(model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        options: dict[str, Any] = {"offload": True, "link": FREE_LINK, "time_limit_s": TIME_LIMIT_S}
        schedule(model, budget, sample_args=args, sample_kwargs=kwargs, **options)
        look(model)
        models.append(model)
        return model

    result: str = load("run_cases").run(str(PATHS[name]), wrap=wrap)
    for model in models:
        look(model)
    return result, any(copies)


def run_situation(name: str, level: str) -> None:
    """Check how a scheduled module is used.

    Raises:
        AssertionError: the scheduled module behaves otherwise than the plain one.

    """
    options: dict[str, Any] = {"costs": "profiled", "time_limit_s": TIME_LIMIT_S}
    modes: list[contextlib.AbstractContextManager[Any]] = [contextlib.nullcontext()]
    if "autocast" in name:
        modes.append(torch.autocast("cpu", dtype=torch.bfloat16))

    def wrap(model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        budget = UNLIMITED if level == "unlimited" else _budget(*_range_with_gradients(model, args, kwargs), level)
        return schedule(model, budget, time_limit_s=TIME_LIMIT_S)

    def _range_with_gradients(model: nn.Module, args: Any, kwargs: Any) -> tuple[int, int]:
        floors, peaks = [], []
        for mode in modes:
            with mode:
                planned = functools.partial(plan, model, args=args, kwargs=kwargs, **options)
                floors.append(_least_budget(functools.partial(planned, budget_gb="1B")))
                peaks.append(planned(budget_gb=None).keep_all_peak_bytes)
        gradients = bytes_of([p for p in model.parameters() if p.requires_grad], torch.device("cpu"))
        return max(floors) + gradients, max(peaks) + gradients

    load("situations").CHECKS[name](wrap)
