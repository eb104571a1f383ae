"""The moments model with a host tier: what is not resident at a moment may be on the host instead of recomputed.

Variables besides those of :mod:`solvers.moments_model`, and the point that a given schedule induces:
    O[k,s]  0 or 1: s is not resident at moment k, and the next thing that makes it resident is a copy from the host
    H[s]    0 or 1: s is on the host at all
    E[k]    ≥ 0: time in interval k beyond first executions and Σ w X[k,v]: stalls, and recomputations that X does not
            count; E[-1] the same before the first moment
    D[k]    ≥ 0: at most the time by which interval k is stretched, E[k] + Σ w_v X[k,v]; D[-1] = E[-1]
    A[k,τ], B[k,τ]  ≥ 0: sums of transfer times, chained so that rows stay short

Constraints. In those of the base model O[k,s] stands beside S[k,s] + X[k,made(s)]: what is resident next because it was
fetched need not be recomputed. (Where s becomes resident first by a recomputation, O is 0 and X is 1.) Further::

    carry    S[k+1,s] + O[k+1,s] ≤ S[k,s] + X[k,made(s)] + O[k,s]
    host     O[k,s] ≤ H[s],   Σ bytes(s) H[s] ≤ host bytes
    out      for every op τ before p_k:  Σ_{made(s) ≥ τ} out(s) O[k,s]  ≤  T(τ, p_k) + Σ D over (τ, p_k)
    back     for every op τ after p_k:   Σ_{due(s) ≤ τ} back(s) O[k,s]  ≤  T(p_k, τ) + Σ D over (p_k, τ)

T is the time of first executions, from the end of op τ to the start of p_k, and from the end of p_k to the start of
τ. ``due(s)``: the first op after p_k that reads s; where only recomputations read it, the last op for which one can
be of use. They hold since O[k,s] = 1 says that s had left entirely when op p_k started (it is not resident, and only
what is copied whole is dropped), that its copy began after its production, and that it came back between p_k and its
use; copies of one direction exclude each other, and take their latency and their bytes at the link's rate. The clock
of a schedule runs as that of first executions, stretched by no more than what it adds in the intervals between, which
the objective counts: Σ w X + Σ E. So the optimum is a lower bound for schedules with copies as well.

Storages that the problem does not allow to copy have no O. Whether the link is duplex is not used.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from solvers.moments_model import Decisions, MomentsModel
from solvers.problem import Problem


class OffloadModel(MomentsModel):
    """The mixed-integer program for given moments, with a host tier; arguments as for :class:`MomentsModel`."""

    def __init__(self, problem: Problem, moments: Sequence[int], capacity_bytes: int) -> None:
        """Build all columns and rows."""
        self._host: list[dict[int, int]] = []
        self._most = self._all_copies_percent(problem)
        self._clock = (0, *itertools.accumulate(problem.time_ns))  # when each op starts if nothing else happens
        super().__init__(problem, moments, capacity_bytes)
        if not self.feasible:
            return
        self._add_host()
        self._stretch = self._add_stretch()
        for k in range(len(self.moments)):
            self._add_out(k)
            self._add_back(k)

    @staticmethod
    def _all_copies_percent(problem: Problem) -> float:
        """Time of copying everything both ways, per cent of the step: no sum or stretch need ever be more."""
        link = problem.link
        assert link is not None
        movable = [size for s, size in enumerate(problem.storage_bytes) if problem.may_offload(s)]
        total = sum(link.to_host_ns(size) + link.to_device_ns(size) for size in movable)
        return 100.0 * total / max(problem.keep_all_time_ns, 1)

    def _passing(self, k: int, candidates: frozenset[int]) -> dict[int, int]:
        """None: what would be kept instead might not be movable."""
        del k, candidates
        return {}

    def _add_columns(self, k: int) -> None:
        """Further columns of a moment: O for what may be copied and is not forced to be resident."""
        super()._add_columns(k)
        forced = set(self.problem.inputs[self.moments[k]])
        self._host.append(
            {s: self.milp.column() for s in self._keep[k] if s not in forced and self.problem.may_offload(s)}
        )

    def _available(self, k: int, s: int, redo: dict[int, int]) -> list[tuple[int, float]] | None:
        """Terms of S[k,s] + X[k,made(s)] + O[k,s], or ``None`` where s is made by op p_k itself."""
        terms = super()._available(k, s, redo)
        if terms is not None and s in self._host[k]:
            terms.append((self._host[k][s], 1.0))
        return terms

    def _add_carry(self, k: int) -> None:
        """Carrying over: S[k+1,s] + O[k+1,s] ≤ S[k,s] + X[k,made(s)] + O[k,s] for s made before moment k."""
        for s, column in self._keep[k + 1].items():
            if self.problem.producer[s] < self.moments[k]:
                terms = self._available(k, s, self._redo[k])
                if terms is not None:
                    later = [(c, -1.0) for c in (column, self._host[k + 1].get(s)) if c is not None]
                    self.milp.row([*terms, *later], 0.0)

    def _add_host(self) -> None:
        """Host: O[k,s] ≤ H[s] and Σ bytes(s) H[s] ≤ host bytes; S and O of a moment exclude each other."""
        problem = self.problem
        movable = sorted({s for host in self._host for s in host})
        scale = 1.0 / max(problem.host_bytes, 1)
        if sum(problem.storage_bytes[s] for s in movable) > problem.host_bytes:
            whole = {s: self.milp.column(integer=False) for s in movable}
            self.milp.row([(c, -problem.storage_bytes[s] * scale) for s, c in whole.items()], -1.0)
            for host in self._host:
                for s, column in host.items():
                    self.milp.row([(whole[s], 1.0), (column, -1.0)], 0.0)
        for keep, host in zip(self._keep, self._host, strict=True):
            for s, column in host.items():
                self.milp.row([(keep[s], -1.0), (column, -1.0)], -1.0)

    def _add_stretch(self) -> list[int]:
        """Stretch: D[-1] = E[-1], D[k] ≤ E[k] + Σ w_v X[k,v]. Returns the columns D, that of D[-1] first."""
        problem = self.problem
        stretch = [self.milp.column(cost=1.0, upper=self._most, integer=False)]
        for redo in self._redo:
            stalled = self.milp.column(cost=1.0, upper=self._most, integer=False)
            column = self.milp.column(upper=self._most, integer=False)
            terms = [(c, problem.time_ns[v] * self._percent) for v, c in redo.items() if problem.time_ns[v]]
            self.milp.row([*terms, (stalled, 1.0), (column, -1.0)], 0.0)
            stretch.append(column)
        return stretch

    def _stretched(self, start: int, end: int) -> list[tuple[int, float]]:
        """Terms of Σ D over the intervals that the executions of ops from ``start`` up to ``end`` lie in."""
        first, last = bisect.bisect_right(self.moments, start), bisect.bisect_left(self.moments, end)
        return [(column, 1.0) for column in self._stretch[first : last + 1]]

    def _add_out(self, k: int) -> None:
        """Out in time: A[k,τ] ≥ A[k,next τ] + Σ_{made(s) = τ} out(s) O[k,s], A[k,τ] ≤ T(τ, p_k) + Σ D."""
        problem, p = self.problem, self.moments[k]
        assert problem.link is not None
        made_by: dict[int, list[int]] = {}
        for s in self._host[k]:
            made_by.setdefault(problem.producer[s], []).append(s)
        chained: int | None = None
        for op in sorted(made_by, reverse=True):
            taken = {s: problem.link.to_host_ns(problem.storage_bytes[s]) for s in made_by[op]}
            room = self._clock[p] - self._clock[op + 1]
            chained = self._chain(k, taken, chained, room, self._stretched(op, p))

    def _add_back(self, k: int) -> None:
        """Back in time: B[k,τ] ≥ B[k,previous τ] + Σ_{due(s) = τ} back(s) O[k,s], B[k,τ] ≤ T(p_k, τ) + Σ D."""
        problem, p = self.problem, self.moments[k]
        assert problem.link is not None
        due = due_ops(problem, p, self._host[k])
        due_at: dict[int, list[int]] = {}
        for s, op in due.items():
            due_at.setdefault(op, []).append(s)
        chained: int | None = None
        for op in sorted(due_at):
            taken = {s: problem.link.to_device_ns(problem.storage_bytes[s]) for s in due_at[op]}
            room = self._clock[op] - self._clock[p + 1]
            chained = self._chain(k, taken, chained, room, self._stretched(p, op))

    def _chain(
        self, k: int, taken: dict[int, int], before: int | None, room_ns: int, stretch: list[tuple[int, float]]
    ) -> int:
        """One link of a chain of sums of transfer times, ``room_ns`` and the stretch as its limit."""
        total = self.milp.column(upper=self._most, integer=False)
        terms = [(self._host[k][s], -ns * self._percent) for s, ns in taken.items()]
        if before is not None:
            terms.append((before, -1.0))
        self.milp.row([*terms, (total, 1.0)], 0.0)
        self.milp.row([*stretch, (total, -1.0)], -room_ns * self._percent)
        return total

    def decisions(self, values: Sequence[float]) -> Decisions:
        """Read a point of the model."""
        on_host = tuple(frozenset(s for s, c in host.items() if values[c] > 0.5) for host in self._host)
        return dataclasses.replace(super().decisions(values), on_host=on_host)


def due_ops(problem: Problem, p: int, storages: dict[int, int]) -> dict[int, int]:
    """For each storage the op by whose first execution it must have come back, if it is on the host at op ``p``.

    Its first reader after p; without one, the last op that can need what recomputations make from it.
    """
    end = len(problem.time_ns)
    last: dict[int, int] = {}
    for s in sorted(range(len(problem.storage_bytes)), key=problem.producer.__getitem__, reverse=True):
        readers = problem.readers[s]
        uses = [reader for reader in readers if reader > p]
        for reader in readers:
            if reader <= p and problem.recomputable[reader]:
                uses.extend(last[made] for made in problem.outputs[reader] if made in last)
        if s in problem.live_at_end:
            uses.append(end)
        if uses:
            last[s] = max(uses)
    due = {}
    for s in storages:
        direct = [reader for reader in problem.readers[s] if reader > p]
        due[s] = direct[0] if direct else last.get(s, end)
    return due
