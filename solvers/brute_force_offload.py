"""Exhaustive search over all schedules of a tiny problem with a host tier: the oracle of the offload solver."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

from solvers.problem import Problem
from solvers.simulate import simulate
from solvers.solution import Compute, Free, Offload, Prefetch, Solution, Status, Step


class _State(NamedTuple):
    """What matters for the rest of a schedule. Times are relative to where computation is, and 0 where past."""

    position: int  # next op to execute for the first time
    resident: frozenset[int]
    departing: tuple[tuple[int, int], ...]  # (storage, time until its copy on the host is whole), by storage
    arriving: tuple[tuple[int, int], ...]  # (storage, time until its copy back has arrived), under way only
    out_busy: int
    back_busy: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadBruteForceSolver:
    """Dijkstra's algorithm over the states of computation, memory, and both directions of the link.

    Every step of a plan is an edge of its own, whose length is what computation advances by: an execution takes the
    wait for its inputs and its time, a free the wait for copies of the storage, the start of a copy nothing. The goal
    is reached through an edge that waits for all copies. Nothing is pruned but storages that nothing can need, which
    are freed, or never copied. For about six ops.

    Attributes:
        max_states: the search gives up with ``TIME_LIMIT`` after expanding this many states.

    """

    max_states: int = 300_000

    def solve(self, problem: Problem) -> Solution:
        """Return an optimal plan, or ``INFEASIBLE``, or ``TIME_LIMIT`` without a plan."""
        start = time.perf_counter()
        steps, exhausted = self._least_time(problem)
        seconds = time.perf_counter() - start
        if steps is None:
            status = Status.INFEASIBLE if exhausted else Status.TIME_LIMIT
            return Solution(status, (), 0, 0, problem.keep_all_time_ns, "brute_force_offload", seconds)
        figures = simulate(problem, steps)
        found = figures.step_time_ns
        return Solution(Status.OPTIMAL, steps, found, figures.peak_bytes, found, "brute_force_offload", seconds)

    def _least_time(self, problem: Problem) -> tuple[tuple[Step, ...] | None, bool]:
        """The steps of a shortest path, or ``None`` and whether all states were seen."""
        if problem.capacity_bytes < 0:
            return None, True
        space = _Space(problem)
        start = _State(0, frozenset(), (), (), 0, 0)
        best = {start: 0}
        came_from: dict[_State, tuple[_State, Step]] = {}
        done: set[_State] = set()
        tie = itertools.count()
        queue: list[tuple[int, int, _State | None, _State]] = [(0, next(tie), start, start)]
        while queue:
            elapsed, _, state, last = heapq.heappop(queue)
            if state is None:  # the goal, reached from ``last``
                return _path(came_from, last), True
            if state in done:
                continue
            done.add(state)
            if len(done) > self.max_states:
                return None, False
            if space.is_goal(state):
                heapq.heappush(queue, (elapsed + _all_settled(state), next(tie), None, state))
            for step, took, successor in space.successors(state):
                if successor not in best or elapsed + took < best[successor]:
                    best[successor] = elapsed + took
                    came_from[successor] = (state, step)
                    heapq.heappush(queue, (elapsed + took, next(tie), successor, successor))
        return None, True


class _Space:
    """The edges of the search."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.needed = [self._needed_from(position) for position in range(len(problem.time_ns) + 1)]
        self.may_offload = frozenset(s for s in range(len(problem.storage_bytes)) if problem.may_offload(s))

    def _needed_from(self, position: int) -> frozenset[int]:
        """Storages that a schedule can still need once the ops before ``position`` have executed."""
        problem = self.problem
        needed = set(problem.live_at_end)
        for op in reversed(range(len(problem.time_ns))):
            if op >= position or (problem.recomputable[op] and needed.intersection(problem.outputs[op])):
                needed.update(problem.inputs[op])
        return frozenset(needed)

    def is_goal(self, state: _State) -> bool:
        return state.position == len(self.problem.time_ns) and self.problem.live_at_end <= state.resident

    def successors(self, state: _State) -> Iterator[tuple[Step, int, _State]]:
        """Each step that is legal now, what computation advances by, and the state after it."""
        on_host = dict(state.departing)
        arriving = dict(state.arriving)
        for s in sorted(state.resident):
            wait = max(on_host.get(s, 0), arriving.get(s, 0))
            yield Free(s), wait, _advanced(state._replace(resident=state.resident - {s}), wait, without=(s,))
        unneeded = state.resident - self.needed[state.position]
        if unneeded and not any(dict(state.departing).get(s, 0) for s in unneeded):
            return  # freeing them costs nothing: nothing else is worth trying first
        yield from self._executions(state, on_host, arriving)
        yield from self._copies(state, on_host)

    def _executions(
        self, state: _State, on_host: dict[int, int], arriving: dict[int, int]
    ) -> Iterator[tuple[Step, int, _State]]:
        problem = self.problem
        held = sum(problem.storage_bytes[s] for s in state.resident)
        for op in range(min(state.position + 1, len(problem.time_ns))):
            if not state.resident.issuperset(problem.inputs[op]):
                continue
            outputs = problem.outputs[op]
            useful = any(s not in state.resident for s in outputs)
            if op < state.position and not (problem.recomputable[op] and useful):
                continue
            live = held + sum(problem.storage_bytes[s] for s in outputs) + problem.workspace_bytes[op]
            if live > problem.capacity_bytes:
                continue
            waits = [arriving.get(s, 0) for s in problem.inputs[op]]
            waits += [max(on_host.get(s, 0), arriving.get(s, 0)) for s in outputs]
            took = max(waits, default=0) + problem.time_ns[op]
            after = state._replace(position=max(state.position, op + 1), resident=state.resident.union(outputs))
            yield Compute(op), took, _advanced(after, took, without=outputs)

    def _copies(self, state: _State, on_host: dict[int, int]) -> Iterator[tuple[Step, int, _State]]:
        problem = self.problem
        assert problem.link is not None
        taken = sum(problem.storage_bytes[s] for s in on_host)
        for s in sorted((state.resident & self.may_offload) - on_host.keys()):
            if taken + problem.storage_bytes[s] <= problem.host_bytes:
                end = state.out_busy + problem.link.to_host_ns(problem.storage_bytes[s])
                departing = tuple(sorted({**on_host, s: end}.items()))
                back = state.back_busy if problem.link.duplex else end
                yield Offload(s), 0, state._replace(departing=departing, out_busy=end, back_busy=back)
        held = sum(problem.storage_bytes[s] for s in state.resident)
        for s in sorted((on_host.keys() - state.resident) & self.needed[state.position]):
            if held + problem.storage_bytes[s] <= problem.capacity_bytes:
                end = max(state.back_busy, on_host[s]) + problem.link.to_device_ns(problem.storage_bytes[s])
                arriving = tuple(sorted({**dict(state.arriving), s: end}.items()))
                out = state.out_busy if problem.link.duplex else end
                after = state._replace(resident=state.resident | {s}, arriving=arriving, out_busy=out, back_busy=end)
                yield Prefetch(s), 0, after


def _advanced(state: _State, took: int, *, without: tuple[int, ...]) -> _State:
    """The state with ``took`` more on the clock; arrivals of ``without`` are over."""
    return state._replace(
        departing=tuple((s, max(0, left - took)) for s, left in state.departing),
        arriving=tuple((s, left - took) for s, left in state.arriving if left > took and s not in without),
        out_busy=max(0, state.out_busy - took),
        back_busy=max(0, state.back_busy - took),
    )


def _all_settled(state: _State) -> int:
    """Time until all copies have ended."""
    return max((left for _, left in (*state.departing, *state.arriving)), default=0)


def _path(came_from: dict[_State, tuple[_State, Step]], state: _State) -> tuple[Step, ...]:
    steps: list[Step] = []
    while state in came_from:
        state, step = came_from[state]
        steps.append(step)
    return tuple(reversed(steps))
