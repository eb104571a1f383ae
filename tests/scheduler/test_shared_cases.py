"""Real situations, rebuilt from public bug reports: a scheduled training of each gives what the plain one gives."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys
from types import ModuleType

import pytest
import torch

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
def budget_of(path: pathlib.Path, level: str) -> str:
    """Floor, middle or no limit, found on a model of its own."""
    if level == "unlimited":
        return "100TB"
    model, make_batch, _ = run_cases.load(str(path)).make()
    args, kwargs = make_batch(0)
    with pytest.raises(Infeasible) as caught:
        schedule(model, "1B", sample_args=args, sample_kwargs=kwargs)
    floor = caught.value.floor_bytes
    assert floor is not None
    if level == "floor":
        return f"{floor}B"
    schedule(model, "100TB", sample_args=args, sample_kwargs=kwargs)
    middle = (floor + plan_of(model).keep_all_peak_bytes) // 2
    unschedule(model)
    return f"{middle}B"


def _case_parameters():
    for path in PATHS:
        for level in LEVELS:
            reason = CASES_NOT_YET.get((path.stem, level)) or CASES_NOT_YET.get((path.stem, "*"))
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            yield pytest.param(path, level, id=f"{path.stem}-{level}", marks=marks)


@pytest.mark.parametrize(("path", "level"), _case_parameters())
def test_case(path, level):
    budget = budget_of(path, level)
    assert run_cases.run(str(path), wrap=lambda model, args, kwargs: schedule(model, budget)) == "ok"


def _situation_parameters():
    for name in situations.CHECKS:
        reason = SITUATIONS_NOT_YET.get(name)
        yield pytest.param(name, marks=[pytest.mark.xfail(reason=reason, strict=True)] if reason else [])


@pytest.mark.parametrize("name", _situation_parameters())
def test_situation(name):
    situations.CHECKS[name](lambda model, args, kwargs: schedule(model, "100TB"))
