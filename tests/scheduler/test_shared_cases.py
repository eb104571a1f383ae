"""Real situations, rebuilt from public bug reports: a scheduled training of each gives what the plain one gives."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys
from types import ModuleType

import pytest
import torch
from torch.utils import _pytree as pytree

from scheduler import Infeasible, plan_of, schedule, unschedule

SHARED = pathlib.Path(__file__).resolve().parents[2] / ".." / "shared" / "cases"
PATHS = sorted(SHARED.glob("cases/[0-9]*.py"))
LEVELS = ("floor", "middle", "unlimited")

if not PATHS:
    pytest.skip(f"the shared cases are not beside this checkout ({SHARED})", allow_module_level=True)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"shared_{name}", SHARED / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run_cases = _load("run_cases")
situations = _load("situations")

# Longest search for a plan of these small models.
TIME_LIMIT_S = 2.0

# What does not hold yet, with the reason; strict, so that a repair is noticed.
CASES_NOT_YET: dict[tuple[str, str], str] = {}
SITUATIONS_NOT_YET: dict[str, str] = {}


@pytest.fixture(autouse=True)
def settings():
    """One thread, and the deterministic setting that run_cases changes put back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@functools.cache
def range_of(path: pathlib.Path) -> tuple[int, int]:
    """Floor and keep-all peak over the three batches of a case, some of which are larger than the first."""
    model, make_batch, _ = run_cases.load(str(path)).make()
    floors, peaks = [], []
    for args, kwargs in {str(_shapes(batch)): batch for batch in map(make_batch, range(3))}.values():
        with pytest.raises(Infeasible) as caught:
            schedule(model, "1B", sample_args=args, sample_kwargs=kwargs, time_limit_s=TIME_LIMIT_S)
        schedule(model, "100TB", sample_args=args, sample_kwargs=kwargs)
        floors.append(caught.value.floor_bytes)
        peaks.append(plan_of(model).keep_all_peak_bytes)
        unschedule(model)
    return max(floors), max(peaks)


def _shapes(batch):
    return pytree.tree_map(lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf, batch)


def budget_of(path: pathlib.Path, level: str) -> str:
    """Budget of a level; the floor with one per cent to spare, for a search that a busy machine cuts short."""
    if level == "unlimited":
        return "100TB"
    floor, peak = range_of(path)
    return f"{floor + floor // 100 if level == 'floor' else (floor + peak) // 2}B"


def _bounded(budget, model, args, kwargs):
    return schedule(model, budget, time_limit_s=TIME_LIMIT_S)


def _case_parameters():
    for path in PATHS:
        for level in LEVELS:
            reason = CASES_NOT_YET.get((path.stem, level)) or CASES_NOT_YET.get((path.stem, "*"))
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            yield pytest.param(path, level, id=f"{path.stem}-{level}", marks=marks)


@pytest.mark.parametrize(("path", "level"), _case_parameters())
def test_case(path, level):
    budget = budget_of(path, level)
    assert run_cases.run(str(path), wrap=functools.partial(_bounded, budget)) == "ok"


def _situation_parameters():
    for name in situations.CHECKS:
        reason = SITUATIONS_NOT_YET.get(name)
        yield pytest.param(name, marks=[pytest.mark.xfail(reason=reason, strict=True)] if reason else [])


@pytest.mark.parametrize("name", _situation_parameters())
def test_situation(name):
    situations.CHECKS[name](functools.partial(_bounded, "100TB"))
