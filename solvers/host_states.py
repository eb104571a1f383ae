"""States of a schedule with a host tier, and the steps between them, for searches over all schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from solvers.problem import Problem
from solvers.solution import Compute, Free, Offload, Prefetch, Step


class HostState(NamedTuple):
    """What matters for the rest of a schedule. Times are relative to where computation is, and 0 where past."""

    position: int  # next op to execute for the first time
    resident: frozenset[int]
    departing: tuple[tuple[int, int], ...]  # (storage, time until its copy on the host is whole), by storage
    arriving: tuple[tuple[int, int], ...]  # (storage, time until its copy back has arrived), under way only
    out_busy: int
    back_busy: int


class HostStateSpace:
    """The states and steps of a problem's schedules.

    Nothing is left out but keeping storages that nothing can need, which are freed, and copying them.

    Attributes:
        start: the state before the first step.

    """

    start = HostState(0, frozenset(), (), (), 0, 0)

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

    def is_goal(self, state: HostState) -> bool:
        """Whether nothing is left but to wait for copies."""
        return state.position == len(self.problem.time_ns) and self.problem.live_at_end <= state.resident

    def successors(self, state: HostState) -> Iterator[tuple[Step, int, HostState]]:
        """Each step that is legal now, what computation advances by, and the state after it."""
        on_host = dict(state.departing)
        arriving = dict(state.arriving)
        for s in sorted(state.resident):
            wait = max(on_host.get(s, 0), arriving.get(s, 0))
            yield Free(s), wait, _advanced(state._replace(resident=state.resident - {s}), wait, without=(s,))
        unneeded = state.resident - self.needed[state.position]
        if unneeded and not any(on_host.get(s, 0) for s in unneeded):
            return  # freeing them costs nothing: nothing else is worth trying first
        yield from self._executions(state, on_host, arriving)
        yield from self._copies(state, on_host)

    def _executions(
        self, state: HostState, on_host: dict[int, int], arriving: dict[int, int]
    ) -> Iterator[tuple[Step, int, HostState]]:
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

    def _copies(self, state: HostState, on_host: dict[int, int]) -> Iterator[tuple[Step, int, HostState]]:
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


def _advanced(state: HostState, took: int, *, without: tuple[int, ...]) -> HostState:
    """The state with ``took`` more on the clock; arrivals of ``without`` are over."""
    return state._replace(
        departing=tuple((s, max(0, left - took)) for s, left in state.departing),
        arriving=tuple((s, left - took) for s, left in state.arriving if left > took and s not in without),
        out_busy=max(0, state.out_busy - took),
        back_busy=max(0, state.back_busy - took),
    )


def all_settled(state: HostState) -> int:
    """Time until all copies have ended."""
    return max((left for _, left in (*state.departing, *state.arriving)), default=0)


def steps_to(came_from: dict[HostState, tuple[HostState, Step]], state: HostState) -> tuple[Step, ...]:
    """The steps of the path that a search has found to a state."""
    steps: list[Step] = []
    while state in came_from:
        state, step = came_from[state]
        steps.append(step)
    return tuple(reversed(steps))
