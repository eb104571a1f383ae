"""The floor: the least budget that any schedule needs, from below by proof and from above by finding a plan."""

from __future__ import annotations

import dataclasses
import time

from solvers.problem import Problem
from solvers.rematerialise import OutOfBudgetError, rematerialised_order
from solvers.simulate import simulate, with_frees
from solvers.store_all import store_all_steps


@dataclasses.dataclass(frozen=True)
class FloorBound:
    """A proven lower bound on the floor.

    Attributes:
        bytes: no schedule fits in less, static bytes included.
        op: the op that binds: while it first executes so many bytes must be live.

    """

    bytes: int
    op: int


def floor_lower_bound(problem: Problem) -> FloorBound:
    """Most bytes that must be live while some op first executes, in every schedule.

    These are the static bytes, the op's inputs, outputs and workspace, and the storages made before it by ops that may
    not be recomputed which a later op reads when it first executes or which must be live at the end: once dropped they
    never come back. All storages that live to the end count together for the last op.
    """
    ops = len(problem.time_ns)
    if not ops:
        return FloorBound(problem.static_bytes, 0)
    change = [0] * (ops + 1)  # of the bytes that cannot be dropped, before each op
    for s, made in enumerate(problem.producer):
        if not problem.recomputable[made]:
            last = ops - 1 if s in problem.live_at_end else max(problem.readers[s], default=made)
            change[made + 1] += problem.storage_bytes[s]
            change[last + 1] -= problem.storage_bytes[s]
    pinned = 0
    best = FloorBound(-1, 0)
    for op in range(ops):
        pinned += change[op]
        inputs = sum(problem.storage_bytes[s] for s in problem.inputs[op] if _droppable(problem, s))
        outputs = sum(problem.storage_bytes[s] for s in problem.outputs[op])
        live = problem.static_bytes + pinned + inputs + outputs + problem.workspace_bytes[op]
        if live > best.bytes:
            best = FloorBound(live, op)
    at_end = problem.static_bytes + sum(problem.storage_bytes[s] for s in problem.live_at_end)
    return best if best.bytes >= at_end else FloorBound(at_end, ops - 1)


def _droppable(problem: Problem, storage: int) -> bool:
    """Whether a storage can be produced again."""
    return problem.recomputable[problem.producer[storage]]


def find_floor(problem: Problem, *, tolerance: float = 0.002, time_limit_s: float = 10.0) -> int:
    """Least budget, static bytes included, for which the strict-budget walk finds a plan; an upper bound on the floor.

    Bisection between :func:`floor_lower_bound` and the keep-all peak, to ``tolerance`` of the latter; the peak of each
    plan found tightens it. The problem's own budget does not matter.
    """
    start = time.perf_counter()
    low = floor_lower_bound(problem).bytes
    high = simulate(problem, store_all_steps(problem)).peak_bytes
    candidate = low
    while high - low > tolerance * high or candidate == low:
        try:
            order = rematerialised_order(problem.with_budget(candidate), improve=False)
            high = min(high, simulate(problem, with_frees(problem, order)).peak_bytes)
        except OutOfBudgetError:
            low = candidate + 1
        if time.perf_counter() - start > time_limit_s or high <= low:
            break
        candidate = (low + high) // 2
    return high
