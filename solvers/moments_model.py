"""The relaxation behind the moments solver: memory is checked only while a few chosen ops first execute.

Notation. Ops 0..n-1 in the order of first executions; ``made(s)`` is the op that produces storage s. The moments are
op positions p_0 < ... < p_{K-1}; moment k is the first execution of op p_k. Interval k lies between the end of moment
k and the start of moment k + 1, the last one ends with the step. For moment k only *candidates* count: storages s with
made(s) < p_k that an execution after the start of moment k can still need (see :meth:`MomentsModel._candidates`).

Variables (0 or 1), and the point that a given schedule induces:
    S[k,s]  s is resident while op p_k first executes
    X[k,v]  op v < p_k executes at least once in interval k (necessarily again)
    Y[k,v]  op v < p_k executes at least once after moment k; only where several moments follow
Only S need be integer: with one moment X then takes whole values by itself, and with several the relaxation is valid
with fractional X and Y, and faster to solve.
The induced point costs Σ w_v X[k,v], no more than the schedule recomputes: X counts an op at most once per interval,
and recomputations before the first moment, or of ops that first execute inside the interval, not at all. Every
constraint below holds at the induced point of every schedule within the budget, so that the optimum, and any lower
bound on it, plus the keep-all time is a lower bound on every schedule's time.

Bytes are scaled by the capacity and times to per cent of the step, for the solver's tolerances.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from solvers.milp import Milp
from solvers.problem import Problem


@dataclasses.dataclass(frozen=True)
class Decisions:
    """What a point of the model decides.

    Attributes:
        moments: op positions, ascending.
        kept: per moment the storages kept.
        recomputed: per moment the ops recomputed in its interval.
        on_host: per moment the storages that are not kept and next come back from the host; empty without a host tier.

    """

    moments: tuple[int, ...]
    kept: tuple[frozenset[int], ...]
    recomputed: tuple[frozenset[int], ...]
    on_host: tuple[frozenset[int], ...] = ()


class MomentsModel:
    """The mixed-integer program for given moments.

    Args:
        problem: what to schedule; its budget is not used.
        moments: op positions, ascending, each once.
        capacity_bytes: what the storages resident at a moment, the op's outputs and its workspace may take together.

    """

    def __init__(self, problem: Problem, moments: Sequence[int], capacity_bytes: int) -> None:
        """Build all columns and rows."""
        self.problem = problem
        self.moments = tuple(moments)
        self.capacity_bytes = capacity_bytes
        self.milp = Milp()
        self.feasible = True
        self._ends = (*self.moments[1:], len(problem.time_ns))
        self._percent = 100.0 / max(problem.keep_all_time_ns, 1)
        self._keep: list[dict[int, int]] = []
        self._redo: list[dict[int, int]] = []
        self._redo_later: list[dict[int, int]] = []
        for k in range(len(self.moments)):
            self._add_columns(k)
        for k in range(len(self.moments)):
            self._add_memory(k)
            self._add_closure(k, self._redo[k])
            self._add_need(k, self._redo[k], self._ends[k])
            if k + 1 < len(self.moments):
                self._add_carry(k)
                self._add_closure(k, self._redo_later[k])
                self._add_need(k, self._redo_later[k], len(problem.time_ns))
                self._add_suffix(k)

    def _candidates(self, p: int) -> frozenset[int]:
        """Storages made before op ``p`` that an execution from the first one of ``p`` on can need.

        Those read by an op >= p, those live at the end, and the inputs of recomputable ops that make a candidate.
        Others are left out: setting their S and X to 0 keeps an induced point feasible, since they appear on the
        right-hand side of constraints of candidates nowhere, and lowers its memory and cost.
        """
        problem = self.problem
        stack = [
            s
            for s, op in enumerate(problem.producer)
            if op < p and (s in problem.live_at_end or (problem.readers[s] and problem.readers[s][-1] >= p))
        ]
        found = set(stack)
        while stack:
            op = problem.producer[stack.pop()]
            if problem.recomputable[op]:
                fresh = [s for s in problem.inputs[op] if s not in found]
                found.update(fresh)
                stack.extend(fresh)
        return frozenset(found)

    def _passing(self, k: int, candidates: frozenset[int]) -> dict[int, int]:
        """Storages that no plan need keep at moment ``k``, since they only pass on to one op; with that op.

        Let u < p_k be the only op that reads s, and what it makes, as far as it is a candidate, take no more bytes.
        Whoever keeps s does so to execute u again. Keeping what u makes instead, from its first execution on, takes no
        more memory at any moment and saves executing u: S[k,s] = 0. Where s was made again before the moment, u would
        have to be executed there as well, for which the other inputs of u may be missing: after the first moment the
        argument holds for ops that read s alone. With one moment the op that makes s alone is executed again where u
        is, and nowhere else: one column X serves both.
        """
        problem, p = self.problem, self.moments[k]
        found = {}
        for s in candidates:
            if len(problem.readers[s]) != 1 or s in problem.live_at_end or not problem.storage_bytes[s]:
                continue
            (reader,) = problem.readers[s]
            made = sum(problem.storage_bytes[o] for o in problem.outputs[reader] if o in candidates)
            alone = k == 0 or len(problem.inputs[reader]) == 1
            if reader < p and alone and made <= problem.storage_bytes[s]:
                found[s] = reader
        return found

    def _add_columns(self, k: int) -> None:
        """S, X and Y of moment ``k``. Inputs of the moment's op are resident; storages of no bytes may as well be."""
        problem, p = self.problem, self.moments[k]
        keep: dict[int, int] = {}
        redo: dict[int, int] = {}
        later: dict[int, int] = {}
        inputs = set(problem.inputs[p])
        several = k + 1 < len(self.moments)
        candidates = self._candidates(p)
        passing = self._passing(k, candidates)
        for s in sorted(candidates, key=lambda s: (-problem.producer[s], s)):  # readers before what they read
            if s not in passing:
                forced = s in inputs or problem.storage_bytes[s] == 0
                keep[s] = self.milp.column(lower=1.0 if forced else 0.0)
            op = problem.producer[s]
            if not problem.recomputable[op] or op in redo:
                continue
            if len(self.moments) == 1 and s in passing and len(problem.outputs[op]) == 1:
                redo[op] = redo[passing[s]]
                self.milp.add_cost(redo[op], problem.time_ns[op] * self._percent)
                continue
            redo[op] = self.milp.column(cost=problem.time_ns[op] * self._percent, integer=False)
            if several:
                later[op] = self.milp.column(integer=False)
        self._keep.append(keep)
        self._redo.append(redo)
        self._redo_later.append(later if several else redo)

    def _add_memory(self, k: int) -> None:
        """Memory: Σ bytes(s) S[k,s] + outputs and workspace of op p_k ≤ capacity.

        While op p_k first executes, none of its outputs is resident already, so live bytes are exactly this sum over
        all resident storages, candidates among them.
        """
        problem, p = self.problem, self.moments[k]
        room = (
            self.capacity_bytes - problem.workspace_bytes[p] - sum(problem.storage_bytes[s] for s in problem.outputs[p])
        )
        forced = sum(problem.storage_bytes[s] for s in problem.inputs[p])
        if room < forced or room < 0:
            self.feasible = False
            return
        scale = 1.0 / max(self.capacity_bytes, 1)
        terms = [(c, -problem.storage_bytes[s] * scale) for s, c in self._keep[k].items() if problem.storage_bytes[s]]
        self.milp.row(terms, -room * scale)

    def _available(self, k: int, s: int, redo: dict[int, int]) -> list[tuple[int, float]] | None:
        """Terms of S[k,s] + X[k,made(s)], or ``None`` where s is made by op p_k itself and so is simply there."""
        op = self.problem.producer[s]
        if op >= self.moments[k]:
            return None
        columns = (self._keep[k].get(s), redo.get(op))
        return [(column, 1.0) for column in columns if column is not None]

    def _add_closure(self, k: int, redo: dict[int, int]) -> None:
        """Inputs of recomputations: X[k,v] ≤ X[k,made(s)] + S[k,s] for every input s of v; the same for Y.

        If v executes in interval k, s is resident then: it was at moment k, or was produced since, by an execution of
        made(s) < v < p_k in interval k. For Y read "after moment k" for "in interval k".
        """
        for op, column in redo.items():
            for s in self.problem.inputs[op]:
                terms = self._available(k, s, redo)
                if terms is not None and (column, 1.0) not in terms:
                    self.milp.row([*terms, (column, -1.0)], 0.0)

    def _add_need(self, k: int, redo: dict[int, int], end: int) -> None:
        """Inputs of first executions: X[k,made(s)] + S[k,s] ≥ 1 for every s that an op in (p_k, end] reads.

        ``end`` is the next moment for X and the last op for Y; storages that are live at the end of the step are
        needed where the interval reaches it. The argument is that of :meth:`_add_closure`.
        """
        problem, p = self.problem, self.moments[k]
        last = len(problem.time_ns)
        needed = {s for op in range(p + 1, min(end + 1, last)) for s in problem.inputs[op] if problem.producer[s] < p}
        if end == last:
            needed.update(s for s in problem.live_at_end if problem.producer[s] < p)
        for s in sorted(needed):
            terms = self._available(k, s, redo)
            if terms is not None:
                self.milp.row(terms, 1.0)

    def _add_carry(self, k: int) -> None:
        """Carrying over: S[k+1,s] ≤ S[k,s] + X[k,made(s)] for s made before moment k.

        What is resident at moment k + 1 was so at moment k or was produced in between.
        """
        for s, column in self._keep[k + 1].items():
            if self.problem.producer[s] < self.moments[k]:
                terms = self._available(k, s, self._redo[k])
                if terms is not None:
                    self.milp.row([*terms, (column, -1.0)], 0.0)

    def _add_suffix(self, k: int) -> None:
        """Suffixes: X[k,v], Y[k+1,v] ≤ Y[k,v] ≤ X[k,v] + Y[k+1,v] for v < p_k.

        "At all after moment k" is "in interval k, or after moment k + 1". Valid for every schedule by definition.
        """
        following = self._redo_later[k + 1]
        for op, column in self._redo_later[k].items():
            now = self._redo[k][op]
            self.milp.row([(column, 1.0), (now, -1.0)], 0.0)
            if op in following:
                self.milp.row([(column, 1.0), (following[op], -1.0)], 0.0)
                self.milp.row([(now, 1.0), (following[op], 1.0), (column, -1.0)], 0.0)
            else:
                self.milp.row([(now, 1.0), (column, -1.0)], 0.0)

    def decisions(self, values: Sequence[float]) -> Decisions:
        """Read a point of the model."""
        return Decisions(
            self.moments,
            tuple(frozenset(s for s, c in keep.items() if values[c] > 0.5) for keep in self._keep),
            tuple(frozenset(v for v, c in redo.items() if values[c] > 1e-6) for redo in self._redo),
        )

    def hint(self, decisions: Decisions) -> list[float]:
        """A full assignment near earlier decisions, which may have been taken for fewer moments.

        New moments take over what the moment before them kept, or where there is none, everything that they can.
        """
        values = [0.0] * self.milp.columns
        for k, p in enumerate(self.moments):
            earlier = [i for i, moment in enumerate(decisions.moments) if moment <= p]
            source = earlier[-1] if earlier else 0
            for s, column in self._keep[k].items():
                made_since = self.problem.producer[s] >= decisions.moments[source]
                values[column] = 1.0 if made_since or s in decisions.kept[source] else 0.0
            for op, column in self._redo[k].items():
                values[column] = 1.0 if op in decisions.recomputed[source] else 0.0
                values[self._redo_later[k][op]] = values[column]
        return values
