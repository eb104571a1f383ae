"""Plans from the chain: cut the step, find options per region, run the dynamic program, assemble, prune.

Its options copy nothing to the host. What copies can add to such plans, :mod:`solvers.copy_search` finds over all of
the step at once, where the link knows no regions: it takes the recomputations of a plan one by one and keeps those that
copies do not make superfluous.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence

from solvers.chain import Chain, cut, forward_end
from solvers.chain_dp import Action, ChainTable, PassBackward, PassForward, Stage, SweepForward, Turn
from solvers.heuristic import heuristic_solution
from solvers.live import LiveBytes
from solvers.problem import Problem
from solvers.prune import prune
from solvers.region_options import RegionOptions, sweep
from solvers.solution import Solution, Status
from solvers.store_all import StoreAllSolver

_log = logging.getLogger(__name__)

_ABOVE = 1.2  # tables reach so much further than the budget: sums of rounded peaks overestimate what a plan takes
_HALVINGS = 6  # in the search for the most that a table may be given
_OPTIONS_SHARE = 0.5  # of the time limit; tables and plans come after it
_SMALL = 128  # forward ops up to which every place is tried as a cut


class ChainModel:
    """A step cut into a chain in one way, with the options of its regions. Holds for every budget.

    Attributes:
        problem: the step; its budget does not matter.
        chain: how it is cut.
        stages: the chain as the dynamic program sees it.

    """

    def __init__(self, problem: Problem, chain: Chain, *, deadline: float = math.inf) -> None:
        """Find the options of all regions."""
        self.problem = problem
        self.chain = chain
        options = RegionOptions(problem, chain, deadline=deadline)
        last = len(chain.regions) - 1
        stages = []
        for i, region in enumerate(chain.regions):
            forward = sweep(problem, chain, i) if i < last else None
            stages.append(
                Stage(
                    input_bytes=sum(problem.storage_bytes[s] for s in region.entering),
                    input_gradient_bytes=sum(problem.storage_bytes[s] for s in region.incoming),
                    weight_bytes=chain.weight_bytes[i],
                    sweep=forward,
                    sweep_ns=sum(problem.time_ns[op] for op in forward.again) if forward else 0,
                    turns=options.turns[i],
                    passes=options.passes[i],
                )
            )
        self.stages = tuple(stages)

    def order(self, actions: Sequence[Action]) -> tuple[int, ...]:
        """The executions that a schedule of the chain stands for."""
        return order_of(self.chain, self.stages, actions)


def order_of(chain: Chain, stages: Sequence[Stage], actions: Sequence[Action]) -> tuple[int, ...]:
    """The executions that a schedule of a chain stands for."""
    order: list[int] = []
    for action in actions:
        match action:
            case SweepForward(start=start, stop=stop, first=first):
                for i in range(start, stop):
                    forward = stages[i].sweep
                    assert forward is not None
                    order.extend(chain.regions[i].forward if first else forward.again)
            case Turn(option=option) | PassForward(option=option):
                order.extend(option.forward_order if action.first else option.forward_again)
            case PassBackward(option=option):
                order.extend(option.backward_order)
    return tuple(order)


def chain_models(problem: Problem, *, deadline: float = math.inf) -> Iterator[ChainModel]:
    """The ways to cut a step that are worth trying; none is begun after ``deadline`` (``time.perf_counter``)."""
    end = forward_end(problem)
    seen = set()
    ways = [(end // 3, end // 20), (end // 8, end // 20)]
    if end <= _SMALL:
        ways.insert(0, (end, 0))
    for reach, window in ways:
        if time.perf_counter() > deadline:
            return
        chain = cut(problem, reach=max(reach, 1), window=window)
        if chain is not None and chain not in seen:
            seen.add(chain)
            _log.debug("chain of %d regions, %d storages resident", len(chain.regions), len(chain.resident))
            yield ChainModel(problem, chain, deadline=deadline)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainSolver:
    """Persistent schedules of the step cut into a chain, with several levels of recomputation; proves nothing.

    Deterministic unless the time limit is hit.

    Attributes:
        time_limit_s: wall-clock limit; half of it may go into the options of regions.

    """

    time_limit_s: float = 60.0

    def solve(self, problem: Problem) -> Solution:
        """Return the fastest plan found, or ``INFEASIBLE``, without proof, where there is none or no chain."""
        start = time.perf_counter()
        keep_all = StoreAllSolver().solve(problem)
        if keep_all.status is Status.OPTIMAL:
            return dataclasses.replace(keep_all, solver="chain")
        deadline = start + self.time_limit_s
        models = chain_models(problem, deadline=start + _OPTIONS_SHARE * self.time_limit_s)
        plans = (plan_within(model, problem, deadline=deadline) for model in models)
        found = [plan for plan in plans if plan is not None]
        return _solution(problem, min(found, key=lambda order: _time(problem, order)) if found else None, start)


def least_peak(problem: Problem, *, deadline: float = math.inf) -> Solution | None:
    """The plan of least peak of all chains, pruned within that peak; ``None`` where there is no chain, or no time.

    Half of the time until ``deadline`` (``time.perf_counter``) may go into the options of regions.
    """
    start = time.perf_counter()
    peak = StoreAllSolver().solve(problem.with_budget(sys.maxsize)).peak_bytes
    best: tuple[int, tuple[int, ...]] | None = None
    for model in chain_models(problem, deadline=start + _OPTIONS_SHARE * (deadline - start)):
        found = _least(model, peak, deadline)
        if found is not None and (best is None or found < best):
            best = found
    if best is None:
        return None
    within = problem.with_budget(best[0])
    return _solution(within, prune(within, best[1], deadline=deadline), start)


def _least(model: ChainModel, peak: int, deadline: float) -> tuple[int, tuple[int, ...]] | None:
    """Least peak, and its order, for one chain: a coarse table, and a fine one for what that finds."""
    best: tuple[int, tuple[int, ...]] | None = None
    live = LiveBytes(model.problem)
    capacity = peak - model.problem.static_bytes
    for _ in range(2):
        table = ChainTable(model.stages, capacity, deadline=deadline)
        level = table.least_level()
        if level is None:
            break
        for at in range(level, min(level + 3, table.levels + 1)):
            order = model.order(table.schedule(at))
            taken = live.peak(order)
            if best is None or taken < best[0]:
                best = (taken, order)
        capacity = (level + 2) * table.unit
    return best


def plan_within(model: ChainModel, problem: Problem, *, deadline: float = math.inf) -> tuple[int, ...] | None:
    """The fastest order of one chain within the budget of ``problem``, pruned, or ``None``, also where time is up.

    What the table counts as live is more than what is: it is given more than the budget where the plan still fits.
    """
    capacity = problem.capacity_bytes
    if capacity <= 0:
        return None
    table = ChainTable(model.stages, int(_ABOVE * capacity), deadline=deadline)
    least = table.least_level()
    if least is None:
        return None
    live = LiveBytes(problem)

    def fitting(level: int) -> tuple[int, ...] | None:
        order = model.order(table.schedule(level))
        return order if live.peak(order) <= problem.budget_bytes else None

    low, high = max(least, capacity // table.unit), table.levels
    best = fitting(low)
    if best is None:
        low = least
        best = fitting(low)
    for _ in range(_HALVINGS):
        if best is None or high <= low or time.perf_counter() > deadline:
            break
        middle = (low + high + 1) // 2
        order = best if table.cost(middle) == table.cost(low) else fitting(middle)
        if order is None:
            high = middle - 1
        else:
            low, best = middle, order
    return None if best is None else prune(problem, best, deadline=deadline)


def _time(problem: Problem, order: Sequence[int]) -> int:
    return sum(problem.time_ns[op] for op in order)


def _solution(problem: Problem, order: Sequence[int] | None, start: float) -> Solution:
    message = "no schedule of the step as a chain was found that fits" if order is None else ""
    return heuristic_solution(problem, order, solver="chain", start=start, message=message)
