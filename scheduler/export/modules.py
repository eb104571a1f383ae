"""The nearest plan that ``torch.utils.checkpoint`` around whole modules can express, for code that must stay eager."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scheduler.decisions import Action
from solvers.simulate import simulate, with_frees
from solvers.strategies import Segment, blocks, checkpointed_order

if TYPE_CHECKING:
    from torch import nn

    from scheduler.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class ModulePlan:
    """Modules to checkpoint, and what that costs by the plan's own costs.

    Attributes:
        modules: dotted paths, each to be wrapped as a whole.
        peak_bytes: predicted peak, static bytes included.
        step_time_ns: predicted time of forward and backward.
        overhead: added time / keep-all time.
        fits: whether the peak is within the plan's budget. Whole modules may be too coarse for it.

    """

    modules: tuple[str, ...]
    peak_bytes: int
    step_time_ns: int
    overhead: float
    fits: bool


class Applied:
    """Checkpointed modules of a model; :meth:`remove` gives them their own forward back.

    Attributes:
        plan: which modules, and the predicted peak and time.

    """

    def __init__(self, plan: ModulePlan, wrapped: Sequence[nn.Module]) -> None:
        self.plan = plan
        self._wrapped = tuple(wrapped)

    def remove(self) -> None:
        """Undo. A second call does nothing."""
        for module in self._wrapped:
            module.__dict__.pop("forward", None)
        self._wrapped = ()


def module_plan(plan: Plan) -> ModulePlan:
    """The fastest choice of whole modules within the budget, or the least memory where none fits.

    Tried are the blocks of the network, and the children of the blocks; of each kind the modules of which the plan
    recomputes most come first, and as many are taken as it needs. The last in the order of execution come first among
    equals: those the plan keeps are freed first.
    """
    best: ModulePlan | None = None
    for candidates in _granularities(plan):
        for count in range(len(candidates) + 1):
            tried = _simulated(plan, candidates[:count])
            if best is None or _rank(tried) < _rank(best):
                best = tried
            if tried.fits:
                break  # more modules only cost more time
    assert best is not None
    return best


def apply_modules(plan: Plan, model: nn.Module) -> Applied:
    """Wrap the modules of :func:`module_plan` in ``torch.utils.checkpoint``, in place.

    Class, parameters, buffers and ``state_dict`` keys of the model stay what they were.

    Args:
        plan: a plan of this model's step.
        model: the model, not scheduled.

    Raises:
        ValueError: the model lacks a module that the plan names, or one is wrapped already.

    """
    chosen = module_plan(plan)
    modules = []
    for path in chosen.modules:
        try:
            module = model.get_submodule(path)
        except AttributeError as error:
            raise ValueError(f"the plan is of another model: this one has no module {path!r}") from error
        if "forward" in module.__dict__:
            raise ValueError(f"module {path!r} has a forward of its own in the instance: it is wrapped already")
        modules.append(module)
    for module in modules:
        module.__dict__["forward"] = functools.partial(_checkpointed, module)
    return Applied(chosen, modules)


def _checkpointed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's forward, under a checkpoint where gradients are wanted."""
    import torch
    from torch.utils.checkpoint import checkpoint

    forward = functools.partial(type(module).forward, module)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _granularities(plan: Plan) -> list[list[tuple[str, Segment]]]:
    """Modules by kind, each with its forward ops, in the order in which they are to be tried."""
    problem = plan.captured_problem
    whole = {path: ops for path, ops in blocks(problem).items() if path in problem.op_modules or _is_path(plan, path)}
    children: dict[str, list[int]] = collections.defaultdict(list)
    for path, ops in whole.items():
        for op in ops:
            below = problem.op_modules[op].removeprefix(path).lstrip(".")
            if below:
                children[f"{path}.{below.partition('.')[0]}"].append(op)
    rebuilt: collections.Counter[str] = collections.Counter()
    for decision in plan.decisions:
        if decision.action is Action.RECOMPUTED:
            rebuilt[decision.module_path] += decision.bytes
    kinds = [whole, {path: tuple(ops) for path, ops in children.items()}]
    return [_ordered(kind, rebuilt) for kind in kinds if kind]


def _is_path(plan: Plan, path: str) -> bool:
    return any(module.startswith(f"{path}.") for module in plan.problem.op_modules)


def _ordered(kind: dict[str, Segment], rebuilt: collections.Counter[str]) -> list[tuple[str, Segment]]:
    def share(path: str) -> int:
        return sum(size for module, size in rebuilt.items() if module == path or module.startswith(f"{path}."))

    return sorted(kind.items(), key=lambda item: (-share(item[0]), item[1]))


def _simulated(plan: Plan, chosen: Sequence[tuple[str, Segment]]) -> ModulePlan:
    problem = plan.captured_problem  # eager execution keeps the order of plain training
    figures = simulate(problem, with_frees(problem, checkpointed_order(problem, (ops for _, ops in chosen))))
    return ModulePlan(
        modules=tuple(path for path, _ in sorted(chosen, key=lambda item: item[1])),
        peak_bytes=figures.peak_bytes,
        step_time_ns=figures.step_time_ns,
        overhead=figures.step_time_ns / problem.keep_all_time_ns - 1 if problem.keep_all_time_ns else 0.0,
        fits=figures.peak_bytes <= problem.budget_bytes,
    )


def _rank(tried: ModulePlan) -> tuple[bool, int, int]:
    """What fits first, then by time; what does not fit by memory."""
    return (not tried.fits, tried.step_time_ns if tried.fits else tried.peak_bytes, tried.peak_bytes)
