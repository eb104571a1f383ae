"""The floor: the least budget that any schedule needs, from below by proof and from above by finding a plan."""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
import threading
import time

from solvers import baselines, chain_solver
from solvers.moments import MomentsSolver
from solvers.problem import Problem
from solvers.prune import pruned
from solvers.rematerialise import RULES, Rematerialiser
from solvers.solution import Solution, Status
from solvers.store_all import StoreAllSolver, keep_all_peak_op
from solvers.strategies import BY_HAND

FLOOR_RULES = (RULES[0], RULES[4])
_MORE_FLOOR_RULES = (*FLOOR_RULES, RULES[5], RULES[6], RULES[1])
_MEDIUM = 500  # ops up to which the walk is tried under more rules
_BASELINES_SHARE = 0.3  # of the time limit; the following ones count from the start too
_CHAIN_SHARE = 0.6
_WALKS_SHARE = 0.9
# Any plan at all, soon: it is called a dozen times.
_SMALL_SOLVER = MomentsSolver(gap=math.inf, model_gap=0.05, max_rounds=5, shrink_rounds=4, time_limit_s=0.3)
_SMALL = 50  # ops up to which models are solved for the floor, in a second or two


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

    These are the static bytes, the op's inputs, outputs and workspace, and the storages made before it that cannot be
    dropped, which a later op reads when it first executes or which must be live at the end. Those are what ops make
    that may not be recomputed, unless it may be copied to the host. All storages that live to the end count together
    for the last op.
    """
    ops = len(problem.time_ns)
    if not ops:
        return FloorBound(problem.static_bytes, 0)
    change = [0] * (ops + 1)  # of the bytes that cannot be dropped, before each op
    for s, made in enumerate(problem.producer):
        if not _droppable(problem, s):
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
    """Whether a storage can be produced again, or come back from the host."""
    return problem.recomputable[problem.producer[storage]] or problem.may_offload(storage)


@dataclasses.dataclass(frozen=True)
class Floor:
    """The floor from both sides, static bytes included.

    Attributes:
        plan: the plan of least peak that was found.
        lower_bound: a proof that no schedule fits in less than its ``bytes``. Where several ops bind together, its
            ``op`` is the one at the peak of the keep-all schedule.

    """

    plan: Solution
    lower_bound: FloorBound

    @property
    def bytes(self) -> int:
        """Least budget for which a plan was found."""
        return self.plan.peak_bytes


_found: collections.OrderedDict[Problem, Solution] = collections.OrderedDict()
_MOST_FOUND = 4
_lock = threading.Lock()


def known_plan(problem: Problem) -> Solution | None:
    """A plan within the budget that a search for the floor of this step has found in this process; ``None`` without.

    Searches near the floor succeed by chance: what one has found another, with less time, may miss.
    """
    plan = _found.get(problem.with_budget(0))
    return plan if plan is not None and plan.peak_bytes <= problem.budget_bytes else None


def find_floor(
    problem: Problem, *, tolerance: float = 0.005, time_limit_s: float = 30.0, enough_bytes: int = 0
) -> Floor:
    """Look for the least budget with a plan; the problem's own budget does not matter.

    The search starts from the least peak of keeping all, of the strategies applied by hand, of the published families
    and of the step as a chain. From there on, bisection down to :func:`floor_lower_bound` by the strict-budget walk, to
    ``tolerance`` of the least peak so far: with late storages pinned, which is fast where it works, then without, under
    more rules the fewer ops there are. Small problems are then searched by the moments solver, whose proofs raise the
    lower bound. The work is limited by counts: the same problem has the same floor, unless ``time_limit_s`` has passed,
    after which no walk goes on and no model is begun. It ends with the first plan whose peak is ``enough_bytes``.
    :func:`known_plan` then knows the plan.
    """
    floor = _search(problem, tolerance=tolerance, time_limit_s=time_limit_s, enough_bytes=enough_bytes)
    key = problem.with_budget(0)
    with _lock:
        if key not in _found or floor.bytes < _found[key].peak_bytes:
            _found[key] = floor.plan
        _found.move_to_end(key)
        while len(_found) > _MOST_FOUND:
            _found.popitem(last=False)
    return floor


def _search(problem: Problem, *, tolerance: float, time_limit_s: float, enough_bytes: int) -> Floor:
    """The search of :func:`find_floor`."""
    start = time.perf_counter()
    lower = floor_lower_bound(problem)
    plan = _least_known(problem, start, time_limit_s, enough_bytes)
    slack = tolerance * plan.peak_bytes
    rules = FLOOR_RULES if len(problem.time_ns) > _MEDIUM else _MORE_FLOOR_RULES
    deadline = start + _WALKS_SHARE * time_limit_s
    for rule in rules:
        left = deadline - time.perf_counter()
        if left < 0 or plan.peak_bytes <= enough_bytes:
            break
        walk = Rematerialiser(rules=(rule,), improve=False, time_limit_s=left)
        interval = (lower.bytes, plan)
        _, plan = _bisect(problem, walk, interval, slack, deadline=deadline, enough_bytes=enough_bytes)
    if plan.peak_bytes <= enough_bytes:
        return Floor(plan, lower)
    plan = pruned(problem.with_budget(plan.peak_bytes), plan, deadline=start + time_limit_s)
    if len(problem.time_ns) > _SMALL:
        return Floor(plan, lower)
    at_low = _SMALL_SOLVER.solve(problem.with_budget(lower.bytes))
    if at_low.status.has_plan:
        return Floor(at_low, lower)
    proven, plan = _bisect(problem, _SMALL_SOLVER, (lower.bytes, plan), slack, deadline=start + time_limit_s)
    return Floor(plan, lower if proven <= lower.bytes else FloorBound(proven, keep_all_peak_op(problem)))


def _least_known(problem: Problem, start: float, time_limit_s: float, enough_bytes: int) -> Solution:
    """The plan of least peak of those that are made without a budget in mind, or the first of ``enough_bytes``."""
    keep_all = StoreAllSolver().solve(problem.with_budget(sys.maxsize))
    ample = problem.with_budget(keep_all.peak_bytes)
    by_hand = (strategy.solve(ample) for strategy in BY_HAND.values())
    least = min((keep_all, *(plan for plan in by_hand if plan.status.has_plan)), key=_peak)
    for search, share in ((baselines.least_peak, _BASELINES_SHARE), (chain_solver.least_peak, _CHAIN_SHARE)):
        if least.peak_bytes > enough_bytes:
            found = search(problem, deadline=start + share * time_limit_s)
            least = min((least, found), key=_peak) if found else least
    return least


def _peak(plan: Solution) -> int:
    return plan.peak_bytes


def _bisect(
    problem: Problem,
    solver: MomentsSolver | Rematerialiser,
    interval: tuple[int, Solution],
    slack: float,
    *,
    deadline: float,
    enough_bytes: int = 0,
) -> tuple[int, Solution]:
    """Between a budget and a plan: what is proven to be too little, plus one, and the plan of least peak found."""
    low, plan = interval
    proven = low
    while plan.peak_bytes - low > slack and plan.peak_bytes > enough_bytes and time.perf_counter() < deadline:
        candidate = (low + plan.peak_bytes) // 2
        solution = solver.solve(problem.with_budget(candidate))
        if solution.status.has_plan:
            plan = solution
        else:
            low = candidate + 1
            if solution.status is Status.INFEASIBLE and isinstance(solver, MomentsSolver):
                proven = low
    return proven, plan
