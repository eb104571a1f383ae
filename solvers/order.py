"""An order of the ops in which keeping everything takes least memory, found by list scheduling in both directions.

Every solver takes the order of first executions as given, and every schedule of it holds at least what crosses the
boundary between forward and backward. But plain orders can hold much more elsewhere: where many large results are made
before the first of them is reduced to a small one, or many large gradients before the first of them is used.

A storage lives from the first to the last of the units that touch it, its producer and its readers. That is so read
from either end, so that one procedure serves both ways. Run a unit, and the live bytes change by::

    delta(u) = Σ bytes of storages that u touches first  −  Σ bytes of storages that u touches last

of what ``u`` touches (what must be live at the end is touched by the end as well). Of the units that may run next, take
one of negative delta, the least one; where there is none, the next one of the order so far. Forwards this brings
*frees* forward: what reduces a large result runs as soon as it may. Backwards it puts off *allocations*: what makes a
large result runs right before the first op that reads it. The two are applied in turns, from either one on. Graphs that
are not large are tried under the rule "the least delta, negative or not" too, which forgets the order so far but for
ties. Nothing is proven of the order that comes out; on tiny graphs it mostly has the least peak (see the tests).

The method is list scheduling (Graham, 1966) by memory, as register allocators use it before their colouring; the
problem, to order a graph for the least peak, is NP-hard (Sethi, 1975).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Final

from graphs.order import Precedence
from solvers.live import LiveBytes
from solvers.problem import Problem

#: Turns of the two directions, from each of them on.
_ROUNDS: Final = 4

#: Units up to which the second rule is tried: a pass over 10,000 takes a tenth of a second.
_MANY: Final = 3000

Order = tuple[int, ...]


def least_order_bound(problem: Problem, precedence: Precedence) -> int:
    """No order of the ops has a lower keep-all peak, static bytes included.

    While an op runs, what it touches is live, its workspace, and what must have been made by then and is read later, or
    at the end, in whatever order. That is looked at where the given order has its peak; at the boundary of the phases,
    which all orders share; and of each op for what it touches alone.
    """
    sizes = problem.storage_bytes
    alone = [
        sum(sizes[s] for s in {*problem.inputs[op], *problem.outputs[op]}) + problem.workspace_bytes[op]
        for op in range(len(problem.time_ns))
    ]
    live = LiveBytes(problem).during(range(len(alone)))
    candidates = {int(live.argmax()), min(problem.forward_ops, len(alone) - 1)} if alone else ()
    return problem.static_bytes + max(
        max(alone, default=0),
        sum(sizes[s] for s in problem.live_at_end),
        *(_must_be_live(problem, precedence, op) for op in candidates),
    )


def _must_be_live(problem: Problem, precedence: Precedence, op: int) -> int:
    """Bytes live while an op runs in every order, without static ones."""
    unit = next(u for u, ops in enumerate(precedence.units) if op in ops)
    earlier = {o for u in _reached(unit, precedence.before) for o in precedence.units[u] if u != unit or o <= op}
    later = {o for u in _reached(unit, precedence.after) for o in precedence.units[u] if u != unit or o >= op}
    return problem.workspace_bytes[op] + sum(
        size
        for s, size in enumerate(problem.storage_bytes)
        if problem.producer[s] in earlier
        and (problem.producer[s] == op or s in problem.live_at_end or not later.isdisjoint(problem.readers[s]))
    )


def _reached(unit: int, edges: Sequence[Sequence[int]]) -> set[int]:
    """A unit and all that lie behind it."""
    reached, pending = {unit}, [unit]
    while pending:
        for other in edges[pending.pop()]:
            if other not in reached:
                reached.add(other)
                pending.append(other)
    return reached


def least_peak_order(problem: Problem, precedence: Precedence) -> Order:
    """The order of least keep-all peak that is found; of equals that with the least live bytes summed over all ops.

    Deterministic. The given order is returned where none is better.

    Args:
        problem: its budget, times and recomputability do not matter.
        precedence: which of its ops stay together, and what comes before what.

    """
    lists = _Lists(problem, precedence)
    units = tuple(range(len(precedence.units)))
    best, best_rank = units, lists.rank(units)
    tried = {units}
    rules = (0, math.inf) if len(units) <= _MANY else (0,)
    for most, backwards_first in itertools.product(rules, (False, True)):
        order = units
        for turn in range(_ROUNDS):
            order = lists.scheduled(order, most, backwards=backwards_first ^ bool(turn % 2))
            if order in tried:
                break
            tried.add(order)
            rank = lists.rank(order)
            if rank < best_rank:
                best, best_rank = order, rank
    return lists.ops(best)


class _Lists:
    """List schedules of one problem, over units."""

    def __init__(self, problem: Problem, precedence: Precedence) -> None:
        self.problem = problem
        self.live = LiveBytes(problem)
        self.units = precedence.units
        self.before, self.after = precedence.before, precedence.after
        self.touched = [
            tuple({s: None for op in ops for s in (*problem.inputs[op], *problem.outputs[op])}) for ops in self.units
        ]
        self.touching: list[list[int]] = [[] for _ in problem.storage_bytes]
        for unit, storages in enumerate(self.touched):
            for s in storages:
                self.touching[s].append(unit)

    def ops(self, order: Sequence[int]) -> Order:
        """The ops of an order of units."""
        return tuple(op for unit in order for op in self.units[unit])

    def rank(self, order: Order) -> tuple[int, int, int]:
        """By which orders are compared: peak, live bytes summed over ops, units that moved."""
        live = self.live.during(self.ops(order))
        return int(live.max(initial=0)), int(live.sum()), sum(i != unit for i, unit in enumerate(order))

    def scheduled(self, order: Order, most: float, *, backwards: bool) -> Order:
        """The list schedule by deltas, greater ones than ``most`` alike, that falls back on the given order.

        It is made from the front, or from the back.
        """
        chosen = _Ready(self, order[::-1] if backwards else order, most, backwards=backwards).run()
        return tuple(chosen[::-1] if backwards else chosen)


class _Ready:
    """One pass: the units that may run next, by what they add to the live bytes."""

    def __init__(self, lists: _Lists, order: Order, most: float, *, backwards: bool) -> None:
        self.lists = lists
        self.most = most
        self.following: Sequence[Sequence[int]] = lists.before if backwards else lists.after
        preceding: Sequence[Sequence[int]] = lists.after if backwards else lists.before
        self.waiting = [len(units) for units in preceding]
        self.fallback = [0] * len(order)
        for position, unit in enumerate(order):
            self.fallback[unit] = position
        sizes, pinned = lists.problem.storage_bytes, lists.problem.live_at_end
        self.left = [len(units) for units in lists.touching]  # units that are still to touch each storage
        self.closes = [backwards or s not in pinned for s in range(len(sizes))]
        self.open = [backwards and s in pinned for s in range(len(sizes))]
        self.delta = [
            sum(sizes[s] * ((not self.open[s]) - (self.left[s] == 1 and self.closes[s])) for s in storages)
            for storages in lists.touched
        ]
        self.done = [False] * len(order)
        self.heap: list[tuple[float, int, int]] = []
        for unit in order:
            self._offer(unit)

    def run(self) -> list[int]:
        """All units, in the order taken."""
        chosen: list[int] = []
        while self.heap:
            delta, _, unit = heapq.heappop(self.heap)
            if self.done[unit] or delta != min(self.delta[unit], self.most):
                continue  # offered again since, for less
            self.done[unit] = True
            chosen.append(unit)
            for s in self.lists.touched[unit]:
                self._touch(s)
            for other in self.following[unit]:
                self.waiting[other] -= 1
                self._offer(other)
        return chosen

    def _offer(self, unit: int) -> None:
        """Let a unit be taken, if nothing has to come before it any more."""
        if not self.waiting[unit] and not self.done[unit]:
            heapq.heappush(self.heap, (min(self.delta[unit], self.most), self.fallback[unit], unit))

    def _touch(self, s: int) -> None:
        """Note that one more unit has touched a storage, and what that changes for the others."""
        was_open, self.open[s] = self.open[s], True
        self.left[s] -= 1
        is_closing = self.left[s] == 1 and self.closes[s]
        change = self.lists.problem.storage_bytes[s] * ((not was_open) + is_closing)
        if change:
            for other in self.lists.touching[s]:
                if not self.done[other]:
                    self.delta[other] -= change
                    self._offer(other)
