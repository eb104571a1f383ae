"""Offload solver: keep, recompute or move to the host, decided together at moments, with copies beside computation."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence

from solvers.bounds import FloorBound
from solvers.extract_offload import overlapped_steps
from solvers.milp import FEASIBILITY_TOLERANCE, MilpResult, MilpStatus, SolverFailedError
from solvers.moments import _near_relaxation, _spaced
from solvers.moments_model import Decisions
from solvers.offload_model import OffloadModel
from solvers.problem import Problem
from solvers.simulate import Simulation, simulate
from solvers.solution import Compute, Solution, Status, Step
from solvers.store_all import StoreAllSolver, keep_all_peak_op

_log = logging.getLogger(__name__)

_MODEL_SHARE = 0.3  # of the gap, to which each model is solved; the rest is for what the steps add to it
_ROOM_SHARE = 0.01  # of the capacity, taken from the model where its plan fits and stalls


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadSolver:
    """Least time subject to memory at lazily added moments and to the link; see :mod:`solvers.offload_model`.

    A model is solved for the peak of the keep-all schedule, :mod:`solvers.extract_offload` turns its decisions into
    steps, and the simulator says where these exceed the budget: the first executions that do become moments too. Where
    only rebuilding or copies do, or the steps stall, the capacity of the model is reduced a little.

    Its lower bound is valid for every schedule that first executes the ops in the given order, whatever it recomputes
    and copies. Deterministic as long as the time limit is not hit.

    Attributes:
        gap: stop when (step time − lower bound) / lower bound of the best plan is at most this.
        time_limit_s: wall-clock limit of the whole solve.
        max_rounds: models solved.
        max_moments: no more moments than this are added.
        moments_per_round: how many violated ops become moments at once.

    """

    gap: float = 0.005
    time_limit_s: float = 30.0
    max_rounds: int = 12
    max_moments: int = 16
    moments_per_round: int = 3

    def solve(self, problem: Problem) -> Solution:
        """Solve; ``INFEASIBLE`` means proven so, ``TIME_LIMIT`` that neither a plan nor a proof was found.

        Raises:
            ValueError: the problem has no host tier.

        """
        if not problem.has_host_tier:
            raise ValueError("the problem has no link to a host, or no bytes there: use another solver")
        return _Search(self, problem).run()


class _Search:
    """One solve: the best plan and bound so far."""

    def __init__(self, options: OffloadSolver, problem: Problem) -> None:
        self.options = options
        self.problem = problem
        self.start = time.perf_counter()
        self.bound_ns = problem.keep_all_time_ns
        self.best: tuple[Simulation, tuple[Step, ...]] | None = None

    def run(self) -> Solution:
        """Keep all if that fits, else solve models with ever more moments or ever less capacity."""
        problem, options = self.problem, self.options
        keep_all = StoreAllSolver().solve(problem)
        if keep_all.status is Status.OPTIMAL:
            return dataclasses.replace(keep_all, solver="offload")
        lower = offload_floor(problem)
        if lower.bytes > problem.budget_bytes:
            return self._infeasible((lower.op,))
        moments: tuple[int, ...] = (keep_all_peak_op(problem),)
        capacity = problem.capacity_bytes
        for _ in range(options.max_rounds):
            decisions, proven_infeasible = self._solve_model(moments, capacity)
            if proven_infeasible and capacity == problem.capacity_bytes:
                return self._infeasible(moments)
            if decisions is None:
                break
            excess, violated = self._consider(decisions)
            if self._done() or self._time_left() <= 0:
                break
            fresh = _spaced([op for op in violated if op not in moments], options.moments_per_round, problem)
            if fresh and len(moments) < options.max_moments:
                moments = tuple(sorted({*moments, *fresh}))
            else:
                capacity -= max(excess // 2, int(_ROOM_SHARE * problem.capacity_bytes), 1)
                if capacity <= 0:
                    break
        return self._solution()

    def _solve_model(self, moments: tuple[int, ...], capacity: int) -> tuple[Decisions | None, bool]:
        """Solve one model, raise the lower bound where it has the full capacity; say whether it is infeasible."""
        problem = self.problem
        model = OffloadModel(problem, moments, capacity)
        if not model.feasible:
            return None, True
        above = max(self.bound_ns / max(problem.keep_all_time_ns, 1), 1.0)  # gaps are relative to the bound
        try:
            result = _near_relaxation(
                model.milp,
                absolute_gap=100.0 * _MODEL_SHARE * self.options.gap * above,
                time_limit_s=0.6 * self._time_left(),
            )
        except SolverFailedError as error:  # the search goes on with what it has
            _log.warning("moments %s: %s", moments, error)
            return None, False
        _log.debug("moments %s, capacity %d: %s %s", moments, capacity, result.status, (result.bound, result.objective))
        if capacity == problem.capacity_bytes:
            self._raise_bound(result)
        if result.status is MilpStatus.INFEASIBLE:
            return None, True
        return (model.decisions(result.values) if result.values else None), False

    def _raise_bound(self, result: MilpResult) -> None:
        """Take over the model's dual bound, rounded to whole ns with room for the solver's tolerances."""
        if math.isfinite(result.bound):
            step = self.problem.keep_all_time_ns
            slack = 1e-3 + 2 * FEASIBILITY_TOLERANCE * step
            self.bound_ns = max(self.bound_ns, step + math.ceil(result.bound / 100.0 * step - slack))

    def _consider(self, decisions: Decisions) -> tuple[int, list[int]]:
        """Try the plan that the decisions suggest; return its excess bytes and the ops that exceed, worst first."""
        problem = self.problem
        steps = overlapped_steps(problem, decisions)
        simulation = simulate(problem, steps)
        fits = simulation.peak_bytes <= problem.budget_bytes and simulation.host_bytes <= problem.host_bytes
        if fits and (self.best is None or simulation.step_time_ns < self.best[0].step_time_ns):
            self.best = (simulation, steps)
        _log.debug(
            "peak %.4f of the budget, %d ns, of which %d stalled",
            simulation.peak_bytes / max(problem.budget_bytes, 1),
            simulation.step_time_ns,
            simulation.stall_ns,
        )
        return max(0, simulation.peak_bytes - problem.budget_bytes), _violated(problem, steps, simulation)

    def _done(self) -> bool:
        return self.best is not None and self.best[0].step_time_ns - self.bound_ns <= self.options.gap * self.bound_ns

    def _time_left(self) -> float:
        return self.options.time_limit_s - (time.perf_counter() - self.start)

    def _infeasible(self, moments: tuple[int, ...]) -> Solution:
        names = ", ".join(self.problem.describe_op(op) for op in moments)
        message = f"proven: no schedule fits {self.problem.budget_bytes:,} bytes while these run: {names}"
        seconds = time.perf_counter() - self.start
        return Solution(Status.INFEASIBLE, (), 0, 0, self.bound_ns, "offload", seconds, message)

    def _solution(self) -> Solution:
        seconds = time.perf_counter() - self.start
        if self.best is None:
            message = "no plan within the budget was found, and none was proven impossible"
            return Solution(Status.TIME_LIMIT, (), 0, 0, self.bound_ns, "offload", seconds, message)
        simulation, steps = self.best
        return Solution(
            status=Status.OPTIMAL if self._done() else Status.FEASIBLE,
            steps=steps,
            step_time_ns=simulation.step_time_ns,
            peak_bytes=simulation.peak_bytes,
            lower_bound_ns=min(self.bound_ns, simulation.step_time_ns),
            solver="offload",
            solve_seconds=seconds,
        )


def offload_floor(problem: Problem) -> FloorBound:
    """Most bytes that must be live while some op first executes, or at the end, whatever is copied to the host."""
    final = sum(problem.storage_bytes[s] for s in problem.live_at_end)
    best = FloorBound(problem.static_bytes + final, max(len(problem.time_ns) - 1, 0))
    for op, workspace in enumerate(problem.workspace_bytes):
        touched = (*problem.inputs[op], *problem.outputs[op])
        demand = problem.static_bytes + workspace + sum(problem.storage_bytes[s] for s in touched)
        if demand > best.bytes:
            best = FloorBound(demand, op)
    return best


def _violated(problem: Problem, steps: Sequence[Step], simulation: Simulation) -> list[int]:
    """Ops over the budget while they first execute, worst first; then those before which rebuilding or copies are."""
    first: dict[int, int] = {}
    before: dict[int, int] = {}
    due = 0
    for step, live in zip(steps, simulation.live_bytes, strict=True):
        excess = live - problem.budget_bytes
        if isinstance(step, Compute) and step.op == due:
            due += 1
            if excess > 0:
                first[step.op] = excess
        elif excess > 0:
            at = min(due, len(problem.time_ns) - 1)
            before[at] = max(excess, before.get(at, 0))
    ranked = sorted(first, key=lambda op: (-first[op], op))
    return ranked + sorted(before.keys() - first.keys(), key=lambda op: (-before[op], op))
