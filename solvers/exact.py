"""The exact mixed-integer program over stages, for small graphs.

Formulation (Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020, here
over storages instead of ops, so that an op may make several). Stage t ends with the first execution of op t; before
that it may execute any ops i < t once each, in index order. Stage n only recomputes, so that what must live to the end
may be dropped before and made again::

    R[t,i]       op i executes in stage t                                      R[t,t] = 1 (t < n); R[t,i] = 0 for i > t
    S[t,s]       storage s is resident when stage t starts                     S[t,s] = 0 where its producer is ≥ t
    FREE[t,s,k]  storage s is dropped in stage t right after op k              k makes or reads s
    TWICE[t,s]   s is resident when stage t starts and is made again in it
    U[t,k]       bytes live in stage t while op k runs

    minimise     Σ w_i R[t,i]                                                  over i < t

    inputs       R[t,i] ≤ S[t,s] + R[t,producer(s)]                            for each input s of i
    carry        S[t+1,s] ≤ S[t,s] + R[t,producer(s)]
    end          S[n+1,s] = 1                                                  for s live at the end
    purpose      R[t,i] ≤ Σ (1 − S[t,s]) over outputs s of i                   for i < t
    release      FREE[t,s,k] ≤ R[t,k],  ≤ 1 − S[t+1,s],  ≤ 1 − R[t,j]          for each reader j > k of s, j ≤ t
    replace      TWICE[t,s] ≤ S[t,s],  ≤ R[t,producer(s)]
    memory       U[t,0]   ≥ Σ m_s S[t,s] + (outputs and workspace of 0) R[t,0]
                 U[t,k+1] ≥ U[t,k] − workspace_k R[t,k] − Σ m_s TWICE[t,s] − Σ m_s FREE[t,s,k]
                            + (outputs and workspace of k+1) R[t,k+1]
                 U[t,k]   ≤ capacity

R and S are binary, FREE, TWICE and U continuous: with R and S integral the rows above leave 0 or 1 as the best value
of each. Ops that must not be recomputed have R[t,i] = 0 for i < t.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import defaultdict

from solvers.milp import Milp, MilpResult, MilpStatus
from solvers.problem import Problem
from solvers.simulate import Simulation, simulate, with_frees
from solvers.solution import Solution, Status, Step

logger = logging.getLogger(__name__)

_NAME = "exact"
# HiGHS lets a row be broken by 1e-6 of the capacity, and a binary be off by as much: a plan may be some bytes over the
# budget. Its executions are then cut off and others sought, so many times; then the capacity is made a little smaller.
_MOST_CUTS = 10
_MARGIN = 4e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactSolver:
    """Least time over all *staged* schedules: before each first execution, and after the last, one pass of recomputes.

    That is a restriction: no op executes twice within a pass, nor out of order. There are graphs and budgets where
    every staged schedule is slower than the best schedule, and some where none fits though a schedule exists. Therefore
    ``OPTIMAL`` and ``INFEASIBLE`` speak of staged schedules, as the message says, and ``lower_bound_ns`` is only what
    holds for all schedules: the keep-all time.

    The program has about n²/2 binaries for ops and as many for storages: seconds at 20 ops, a minute at 40.

    Attributes:
        time_limit_s: wall time after which the best plan found so far is returned (``FEASIBLE``) or none
            (``TIME_LIMIT``).
        gap: how far the plan may be above the staged optimum, as a fraction of the keep-all time.

    """

    time_limit_s: float = 60.0
    gap: float = 0.0

    def solve(self, problem: Problem) -> Solution:
        """Return the least-time staged schedule within the budget, or the reason why there is none."""
        started = time.perf_counter()
        result = MilpResult(MilpStatus.INFEASIBLE, (), 0.0, 0.0)
        model = _StagedModel(problem)
        exact = True
        for attempt in range(_MOST_CUTS + 1 if problem.capacity_bytes >= 0 else 0):
            if attempt == _MOST_CUTS:
                model = _StagedModel(problem, margin=_MARGIN)
                exact = False
            left = self.time_limit_s - (time.perf_counter() - started)
            result = model.milp.solve(absolute_gap=max(100 * self.gap, 1e-7), time_limit_s=left)
            if not result.values and model.milp.columns:
                break
            steps = with_frees(problem, model.order(result.values))
            figures = simulate(problem, steps)
            if figures.peak_bytes <= problem.budget_bytes:
                proven = exact and result.status is MilpStatus.SOLVED
                return self._plan(problem, steps, figures, proven=proven, seconds=time.perf_counter() - started)
            logger.debug("plan is %d bytes over the budget", figures.peak_bytes - problem.budget_bytes)
            model.cut_off(result.values)
        infeasible = exact and result.status is MilpStatus.INFEASIBLE
        seconds = time.perf_counter() - started
        return Solution(
            status=Status.INFEASIBLE if infeasible else Status.TIME_LIMIT,
            steps=(),
            step_time_ns=0,
            peak_bytes=0,
            lower_bound_ns=problem.keep_all_time_ns,
            solver=_NAME,
            solve_seconds=seconds,
            message=f"no staged schedule fits {problem.budget_bytes:,} bytes"
            if infeasible
            else f"no staged schedule found in {seconds:.3g} s, and none ruled out",
        )

    def _plan(
        self, problem: Problem, steps: tuple[Step, ...], figures: Simulation, *, proven: bool, seconds: float
    ) -> Solution:
        """The solution of a plan that fits."""
        what = "staged optimum" if proven else "best staged schedule found"
        within = f" (within {self.gap:.3%})" if proven and self.gap else ""
        return Solution(
            status=Status.OPTIMAL if proven else Status.FEASIBLE,
            steps=steps,
            step_time_ns=figures.step_time_ns,
            peak_bytes=figures.peak_bytes,
            lower_bound_ns=problem.keep_all_time_ns,
            solver=_NAME,
            solve_seconds=seconds,
            message=f"{what}{within}: {figures.step_time_ns:,} ns; schedules that are not staged may be faster",
        )


class _StagedModel:
    """The program of the module's docstring; one method per constraint."""

    def __init__(self, problem: Problem, margin: float = 0.0) -> None:
        """Build all columns and rows, for a capacity smaller by the fraction ``margin``."""
        self.problem = problem
        self.milp = Milp()
        self.ops = len(problem.time_ns)
        self.stages = self.ops + bool(problem.live_at_end)  # the last one has nothing to do where nothing lives on
        self.unit = max(problem.capacity_bytes, 1)
        self.capacity = max(problem.capacity_bytes / self.unit * (1 - margin), 0.0)
        self.computed: dict[tuple[int, int], int] = {}  # R
        self.resident: dict[tuple[int, int], int] = {}  # S
        self.free: dict[tuple[int, int, int], int] = {}  # FREE
        self.twice: dict[tuple[int, int], int] = {}  # TWICE
        self.freed_after: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._columns()
        self._inputs()
        self._carry()
        self._end()
        self._purpose()
        self._release()
        self._replace()
        self._memory()

    def order(self, values: tuple[float, ...]) -> list[int]:
        """The ops that a point executes, stage by stage."""
        return [i for (_, i), column in sorted(self.computed.items()) if values[column] > 0.5]

    def _share(self, size: int) -> float:
        """Bytes as a share of the capacity."""
        return size / self.unit

    def cut_off(self, values: tuple[float, ...]) -> None:
        """Exclude the executions of a point, which do not fit although storages are dropped as early as can be."""
        columns = self.computed.values()
        terms = [(column, -1.0 if values[column] > 0.5 else 1.0) for column in columns]
        self.milp.row(terms, 1.0 - sum(values[column] > 0.5 for column in columns))

    def _columns(self) -> None:
        """R for recomputable ops (and the fixed diagonal), S for storages that exist."""
        problem, milp = self.problem, self.milp
        step = max(problem.keep_all_time_ns, 1)
        for t in range(self.stages):
            for i in range(t):
                if problem.recomputable[i] and problem.outputs[i]:
                    self.computed[t, i] = milp.column(cost=100 * problem.time_ns[i] / step)
            if t < self.ops:
                self.computed[t, t] = milp.column(lower=1.0)
        for t in range(self.stages + 1):
            for s, producer in enumerate(problem.producer):
                if producer < t and (t < self.stages or s in problem.live_at_end):
                    self.resident[t, s] = milp.column()

    def _available(self, t: int, s: int) -> list[tuple[int, float]]:
        """The terms S[t,s] + R[t,producer(s)]."""
        columns = (self.resident.get((t, s)), self.computed.get((t, self.problem.producer[s])))
        return [(column, 1.0) for column in columns if column is not None]

    def _inputs(self) -> None:
        """An op executes only where each input is resident on entry or made in the same stage."""
        for (t, i), column in self.computed.items():
            for s in self.problem.inputs[i]:
                self.milp.row([*self._available(t, s), (column, -1.0)], 0.0)

    def _carry(self) -> None:
        """A storage is resident on entry only where it was on the last entry, or was made in between."""
        for (t, s), column in self.resident.items():
            self.milp.row([*self._available(t - 1, s), (column, -1.0)], 0.0)

    def _end(self) -> None:
        """What lives to the end is resident after the last stage."""
        for s in self.problem.live_at_end:
            self.milp.row([(self.resident[self.stages, s], 1.0)], 1.0)

    def _purpose(self) -> None:
        """An op is recomputed only where one of its outputs is not resident; holds in some optimum, and tightens."""
        for (t, i), column in self.computed.items():
            if i < t:
                outputs = [(self.resident[t, s], -1.0) for s in self.problem.outputs[i]]
                self.milp.row([*outputs, (column, -1.0)], -float(len(outputs)))

    def _release(self) -> None:
        """A storage is dropped after its last use in the stage, and only where it is not carried on."""
        problem, milp = self.problem, self.milp
        for s, producer in enumerate(problem.producer):
            uses = (producer, *problem.readers[s])
            for t in range(producer, self.stages):
                for k in uses:
                    later = [j for j in problem.readers[s] if k < j <= t]
                    if k > t or t in later or (t, k) not in self.computed:
                        continue
                    column = milp.column(integer=False)
                    self.free[t, s, k] = column
                    self.freed_after[t, k].append(s)
                    milp.row([(self.computed[t, k], 1.0), (column, -1.0)], 0.0)
                    carried = self.resident.get((t + 1, s))
                    ending = [self.computed[t, j] for j in later if (t, j) in self.computed]
                    for other in (*([] if carried is None else [carried]), *ending):
                        milp.row([(other, -1.0), (column, -1.0)], -1.0)

    def _replace(self) -> None:
        """Of two copies of a storage the older is gone once its producer has ended.

        Only ops of several outputs make a second copy (see purpose).
        """
        for (t, i), computed in self.computed.items():
            for s in self.problem.outputs[i] if i < t and len(self.problem.outputs[i]) > 1 else ():
                column = self.milp.column(integer=False)
                self.twice[t, s] = column
                self.milp.row([(self.resident[t, s], 1.0), (column, -1.0)], 0.0)
                self.milp.row([(computed, 1.0), (column, -1.0)], 0.0)

    def _memory(self) -> None:
        """Live bytes follow from op to op inside each stage and stay within the capacity."""
        sizes = self.problem.storage_bytes
        for t in range(self.stages):
            before = [
                (self.resident[t, s], self._share(size)) for s, size in enumerate(sizes) if (t, s) in self.resident
            ]
            for k in range(t + 1):
                if (t, k) not in self.computed:
                    continue
                executes = self.computed[t, k]
                workspace = self.problem.workspace_bytes[k]
                demand = self._share(workspace + sum(sizes[s] for s in self.problem.outputs[k]))
                live = self.milp.column(upper=self.capacity, integer=False)
                terms = [(column, -share) for column, share in before]
                self.milp.row([(live, 1.0), (executes, -demand), *terms], 0.0)
                dropped = [(self.free[t, s, k], s) for s in self.freed_after[t, k]]
                dropped += [(self.twice[t, s], s) for s in self.problem.outputs[k] if (t, s) in self.twice]
                before = [(live, 1.0), (executes, -self._share(workspace))]
                before += [(column, -self._share(sizes[s])) for column, s in dropped]
