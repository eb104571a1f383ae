"""Large-neighbourhood search: free a part of the best plan, solve for it exactly with the rest fixed, and repeat."""

from __future__ import annotations

import bisect
import dataclasses
import math
import random
import time
from collections.abc import Iterable, Sequence

from solvers.live import LiveBytes
from solvers.problem import Problem
from solvers.suborder import Superorder, best_suborder

_SLACK = 0.1


class _Incumbent:
    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self.problem = problem
        self.order = tuple(order)
        self.live = LiveBytes(problem).during(order)
        self.first: list[int] = []
        self.stage: list[int] = []
        due = 0
        self.again: list[int] = []  # positions of recomputations
        for position, op in enumerate(order):
            self.stage.append(due)
            if op == due:
                self.first.append(position)
                due += 1
            else:
                self.again.append(position)
        self.stage_count = due
        self.events: list[list[int]] = [[] for _ in problem.storage_bytes]
        self.reads: list[list[int]] = [[] for _ in problem.storage_bytes]
        for position, op in enumerate(order):
            for s in problem.inputs[op]:
                self.events[s].append(position)
                self.reads[s].append(position)
            for s in problem.outputs[op]:
                self.events[s].append(position)
        self.tight = self.live >= (1 - _SLACK) * problem.capacity_bytes
        import numpy as np
        self.tight_before = np.concatenate(([0], np.cumsum(self.tight)))

    def idle_tight(self, s: int, position: int) -> bool:
        """Whether memory is short somewhere between the use of s before position, and position."""
        i = bisect.bisect_left(self.events[s], position)
        if i == 0:
            return False
        return bool(self.tight_before[position] > self.tight_before[self.events[s][i - 1] + 1])

    def superorder(self, free: Iterable[int], window: tuple[int, int]) -> Superorder:
        problem = self.problem
        low, high = window
        chosen = {v for v in free if problem.recomputable[v]}
        inserted: dict[int, list[int]] = {}
        reads_of: dict[int, dict[int, int]] = {}  # storage -> stage -> position of inserted reader
        has: dict[int, set[int]] = {}
        for position in self.again:
            has.setdefault(self.order[position], set()).add(self.stage[position])
        count = 0
        for v in sorted(chosen, reverse=True):
            places: dict[int, int] = {}
            for s in problem.outputs[v]:
                for position in self.reads[s]:
                    if low <= position < high and self.idle_tight(s, position):
                        t = self.stage[position]
                        places[t] = min(places.get(t, position), position)
                for t, position in reads_of.get(s, {}).items():
                    if self.idle_tight(s, position):
                        places[t] = min(places.get(t, position), position)
            for t, position in places.items():
                if t <= v or t in has.get(v, ()):
                    continue
                inserted.setdefault(position, []).append(v)
                count += 1
                for s in problem.inputs[v]:
                    d = reads_of.setdefault(s, {})
                    d[t] = min(d.get(t, position), position)
        ops: list[int] = []
        optional: list[bool] = []
        known: list[bool] = []
        firsts = set(self.first)
        for position, op in enumerate(self.order):
            extra = sorted(inserted.get(position, ()))
            ops.extend(extra)
            optional.extend([True] * len(extra))
            known.extend([False] * len(extra))
            ops.append(op)
            optional.append(position not in firsts and op in chosen and low <= position < high)
            known.append(True)
        return Superorder(tuple(ops), tuple(optional), tuple(known))


def neighbourhoods(inc: _Incumbent, rng: random.Random, kind: int, size: int) -> tuple[set[int], tuple[int, int]]:
    problem = inc.problem
    whole = (0, len(inc.order))
    weights = [problem.time_ns[inc.order[p]] + 1 for p in inc.again]
    position = rng.choices(inc.again, weights)[0]
    op = inc.order[position]
    if kind == 0:  # competitors at one moment
        s = problem.outputs[op][0]
        i = bisect.bisect_left(inc.events[s], position)
        previous = inc.events[s][i - 1]
        places = [p for p in range(previous + 1, position) if inc.tight[p]]
        if not places:
            return {op}, whole
        at = rng.choice(places)
        kept = []
        for u in range(len(problem.storage_bytes)):
            j = bisect.bisect_right(inc.events[u], at)
            if 0 < j < len(inc.events[u]) and problem.storage_bytes[u] and inc.events[u][j-1] != at:
                kept.append(u)
        chosen = {op}
        weights = [problem.storage_bytes[u] ** 0.5 for u in kept]
        while kept and len(chosen) < size:
            k = rng.choices(range(len(kept)), weights)[0]
            u = kept.pop(k); weights.pop(k)
            chosen.add(problem.producer[u])
        return chosen, whole
    if kind == 1:  # neighbours in the graph order
        low = max(0, op - rng.randrange(size))
        return set(range(low, low + size)), whole
    # time window
    around = sorted(inc.again)
    i = bisect.bisect_left(around, position)
    lo = around[max(0, i - size // 2)]
    hi = around[min(len(around) - 1, i + size // 2)] + 1
    inside = {inc.order[p] for p in around if lo <= p < hi}
    for p in range(lo, hi):
        inside.update(problem.producer[s] for s in problem.inputs[inc.order[p]])
    return inside, (lo, hi)


def improve(problem: Problem, order: Sequence[int], *, time_limit_s: float, log=None, kinds=(0, 1, 2), work=0.5, size0=16) -> tuple[int, ...]:
    start = time.process_time()
    rng = random.Random(0)
    inc = _Incumbent(problem, order)
    total = lambda o: sum(problem.time_ns[op] for op in o)
    best = total(order)
    sizes = dict.fromkeys(kinds, float(size0))
    it = 0
    most = dict.fromkeys(kinds, 150)
    gains = dict.fromkeys(kinds, 0)
    while time.process_time() - start < time_limit_s and inc.again:
        kind = kinds[it % len(kinds)]
        it += 1
        t0 = time.process_time()
        for attempt in range(6):
            free, window = neighbourhoods(inc, rng, kind, max(2, int(sizes[kind])))
            sup = inc.superorder(free, window)
            n = sum(sup.optional)
            if n <= most[kind]: break
            sizes[kind] = max(2.0, sizes[kind] * 0.8)
        else:
            continue
        t1 = time.process_time()
        found = best_suborder(problem, sup, work=work)
        t2 = time.process_time()
        new = total(found) if found is not None else None
        if log:
            log(f"{t2-start:6.2f} kind {kind} size {sizes[kind]:.0f} optional {n} build {t1-t0:.2f} solve {t2-t1:.2f} {'none' if new is None else round(100*(new/problem.keep_all_time_ns-1),3)} best {100*(best/problem.keep_all_time_ns-1):.3f}")
        if t2 - t1 < 0.4 * work:
            most[kind] = min(most[kind] * 1.1, 800)
            if n < 0.7 * most[kind]: sizes[kind] = sizes[kind] * 1.2
        elif t2 - t1 > 0.9 * work: most[kind] /= 1.3
        if new is not None and new < best:
            gains[kind] += best - new
            best = new
            inc = _Incumbent(problem, found)
    if log: log({k: round(100*v/problem.keep_all_time_ns,3) for k,v in gains.items()}, it)
    return inc.order
