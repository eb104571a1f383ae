"""The best sub-order of a given order of executions, some of which may be left out: an exact program for CP-SAT.

Given are a problem and a *superorder*: executions q = 0..L-1 of ops v(q), each *fixed* or *optional*. Any subset of the
optional ones may be left out, as long as the rest can be executed and fits the budget. Storages are retained over
intervals that end with a use, cut into the stretches between consecutive *events* of a storage, which are the
executions that make or read it::

    x[q]      execution q takes place                                x[q] = 1 where it is fixed
    r[s,i]    storage s is resident from its event i to its event i + 1

    minimise  Σ w_v(q) x[q]

    inputs    x[q] ≤ r[s,i]             q reads s, and is its event i + 1
    retain    r[s,i+1] ≤ r[s,i]         event i + 1 of s reads it
    make      r[s,i+1] ≤ r[s,i] + x[q]  event i + 1 of s is execution q of its producer
    end       r[s,last] = 1             s must be live at the end
    memory    Σ m_s r[s,i] over the stretches that contain q + (outputs and workspace of v(q)) x[q] ≤ capacity

Every point is a schedule that needs no more than the program says: with frees after last uses it is live no longer than
r. Every schedule that is a subset of the superorder is a point. With all ops optional before each first execution, in
index order, these are the staged schedules of :mod:`solvers.exact`.

What cannot vary is not part of the program, so that its size is that of what can: storages without optional executions
among their events, and stretches that a fixed later use forces, are bytes that the memory rows have less.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from ortools.sat.python import cp_model

from solvers.live import LiveBytes
from solvers.problem import Problem

_Literal = cp_model.IntVar | bool


@dataclasses.dataclass(frozen=True)
class Superorder:
    """Executions of which some may be left out.

    Attributes:
        ops: what executes, in order.
        optional: for each execution whether it may be left out.
        known: for each execution whether it takes place in a sub-order that is known to fit: where the search starts.

    """

    ops: tuple[int, ...]
    optional: tuple[bool, ...]
    known: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Suborder:
    """What :func:`best_suborder` found.

    Attributes:
        ops: what executes, in order; ``None`` where nothing was found.
        proven: whether no sub-order is faster, or none fits.
        work: of the search, in CP-SAT's deterministic time.

    """

    ops: tuple[int, ...] | None
    proven: bool
    work: float


def best_suborder(
    problem: Problem,
    superorder: Superorder,
    *,
    most_work: float = math.inf,
    time_limit_s: float = math.inf,
    live: LiveBytes | None = None,
) -> Suborder:
    """Look for the fastest sub-order within the budget.

    Args:
        problem: whose budget holds.
        superorder: what may execute, and when.
        most_work: of the search, in CP-SAT's deterministic time, of which a second takes some seconds. Within it the
            same input has the same answer.
        time_limit_s: wall-clock limit of the search.
        live: of the problem, where there is one already.

    """
    program = _Program(problem, superorder, live or LiveBytes(problem))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = most_work
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
    solver.parameters.linearization_level = 2  # the relaxation is strong: most programs are solved at their root
    status = solver.solve(program.model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    left_out = {q for q, x in program.executed.items() if not solver.boolean_value(x)} if found else set()
    ops = tuple(op for q, op in enumerate(superorder.ops) if q not in left_out)
    proven = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    return Suborder(ops if found else None, proven, solver.response_proto.deterministic_time)


class _Program:
    """The program of the module's docstring; one method per group of constraints."""

    def __init__(self, problem: Problem, superorder: Superorder, live: LiveBytes) -> None:
        """Build all variables and rows."""
        self.problem = problem
        self.superorder = superorder
        self.model = cp_model.CpModel()
        self.executed = {q: self.model.new_bool_var("") for q, may in enumerate(superorder.optional) if may}
        for q, x in self.executed.items():
            self.model.add_hint(x, superorder.known[q])
        varying = {
            s for op in {superorder.ops[q] for q in self.executed} for s in (*problem.inputs[op], *problem.outputs[op])
        }
        self.always = live.during(superorder.ops, leaving_out=sorted(varying))
        self.changes: dict[int, list[tuple[int, _Literal]]] = {}  # after an execution: storages, and whether they stay
        for s, events in self._events(varying).items():
            self._storage(s, events)
        self._memory()
        times = [problem.time_ns[superorder.ops[q]] for q in self.executed]
        self.model.minimize(cp_model.LinearExpr.weighted_sum(list(self.executed.values()), times))

    def _events(self, storages: set[int]) -> dict[int, list[tuple[int, bool]]]:
        """Events of each storage: executions that read it (false) or make it (true)."""
        problem = self.problem
        events: dict[int, list[tuple[int, bool]]] = {s: [] for s in sorted(storages)}
        touching = sorted({op for s in storages for op in (problem.producer[s], *problem.readers[s])})
        for q in np.flatnonzero(np.isin(self.superorder.ops, touching)).tolist():
            op = self.superorder.ops[q]
            for s in storages.intersection(problem.inputs[op]):
                events[s].append((q, False))
            for s in storages.intersection(problem.outputs[op]):
                events[s].append((q, True))
        return events

    def _storage(self, s: int, events: Sequence[tuple[int, bool]]) -> None:
        """The variables r of a storage, and the rows inputs, retain, make and end."""
        size = self.problem.storage_bytes[s]
        ends = [*(q for q, _ in events[1:]), len(self.superorder.ops) - 1]
        stays = self._stretches(s, events)
        for i, (q, makes) in enumerate(events):
            executes = self.executed.get(q, True)
            if makes and executes is True:
                self.always[q] += size
            if i and makes:
                self._implied(stays[i], (stays[i - 1], executes))
            elif i:
                self._implied(executes, (stays[i - 1],))
                self._implied(stays[i], (stays[i - 1],))
            if stays[i] is True:
                self.always[q + 1 : ends[i] + 1] += size
            self.changes.setdefault(q, []).append((s, stays[i]))

    def _stretches(self, s: int, events: Sequence[tuple[int, bool]]) -> list[_Literal]:
        """The r of each stretch: a variable, or what it is in some best point, found from the last stretch on."""
        stays: list[_Literal] = [s in self.problem.live_at_end]
        needed = s in self.problem.live_at_end  # in the known sub-order
        for q, makes in reversed(events[1:]):
            following = stays[-1]
            if self.superorder.known[q]:
                needed = not makes
            if q not in self.executed:
                stays.append(not makes)
            elif isinstance(following, bool) and following is not makes:
                stays.append(following)
            else:
                variable = self.model.new_bool_var("")
                self.model.add_hint(variable, needed)
                stays.append(variable)
        stays.reverse()
        return stays

    def _implied(self, premise: _Literal, conclusions: Sequence[_Literal]) -> None:
        """If the premise holds, so does one of the conclusions."""
        if premise is False or any(c is True for c in conclusions):
            return
        variables = [c for c in conclusions if not isinstance(c, bool)]
        self.model.add_bool_or([*variables, *([] if isinstance(premise, bool) else [premise.negated()])])

    def _memory(self) -> None:
        """Live bytes during each optional execution; of fixed ones with nothing varying between, during the fullest."""
        problem, ops = self.problem, self.superorder.ops
        fixed = np.where(self.superorder.optional, np.int64(-1), self.always)
        active: dict[int, cp_model.IntVar] = {}
        start = 0
        for q in [*sorted(self.changes.keys() | self.executed.keys()), len(ops) - 1]:
            executes = self.executed.get(q)
            if executes is not None:
                made = sum(problem.storage_bytes[s] for s in problem.outputs[ops[q]])
                demand = made + problem.workspace_bytes[ops[q]]
                self._row(active, int(self.always[q]) - problem.workspace_bytes[ops[q]], (executes, demand))
            changes = self.changes.get(q, ())
            if q + 1 == len(ops) or any(s in active or not isinstance(stays, bool) for s, stays in changes):
                self._row(active, int(fixed[start : q + 1].max(initial=-1)))
                start = q + 1
            for s, stays in changes:
                active.pop(s, None)
                if not isinstance(stays, bool):
                    active[s] = stays

    def _row(
        self, active: dict[int, cp_model.IntVar], always: int, execution: tuple[cp_model.IntVar, int] | None = None
    ) -> None:
        """Bytes that are always there, Σ m_s r over what may be, and what an execution takes: at most the capacity."""
        terms = [(r, self.problem.storage_bytes[s]) for s, r in active.items()]
        if execution is not None:
            terms.append(execution)
        room = self.problem.capacity_bytes - always
        if sum(size for _, size in terms) > room:
            variables, sizes = [variable for variable, _ in terms], [size for _, size in terms]
            self.model.add(cp_model.LinearExpr.weighted_sum(variables, sizes) <= room)
