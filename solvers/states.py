"""The states that a schedule goes through, for searches that look at all schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from solvers.problem import Problem

State = tuple[int, int]  # (next op to execute for the first time, resident storages as a bit set)


class StateSpace:
    """Which states follow a state; see :class:`solvers.brute_force.BruteForceSolver` for why these suffice."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.inputs = [bits(storages) for storages in problem.inputs]
        self.outputs = [bits(storages) for storages in problem.outputs]
        self.live_at_end = bits(problem.live_at_end)
        self.needed = [self._needed_from(position) for position in range(len(problem.time_ns) + 1)]
        sizes = enumerate(problem.storage_bytes)
        self.largest_first = sorted(((size, storage) for storage, size in sizes if size), reverse=True)
        self.demand = [
            sum(problem.storage_bytes[storage] for storage in outputs) + workspace
            for outputs, workspace in zip(problem.outputs, problem.workspace_bytes, strict=True)
        ]

    def _needed_from(self, position: int) -> int:
        """Storages that a schedule can still need once the ops before ``position`` have executed."""
        problem = self.problem
        needed = self.live_at_end
        for op in range(len(problem.time_ns) - 1, -1, -1):
            if op >= position or (problem.recomputable[op] and self.outputs[op] & needed):
                needed |= self.inputs[op]
        return needed

    def is_goal(self, state: State) -> bool:
        """Whether every op has executed and what must live to the end is resident."""
        position, resident = state
        return position == len(self.problem.time_ns) and not self.live_at_end & ~resident

    def successors(self, state: State) -> Iterator[tuple[int, State]]:
        """Each op that can execute now, with each state that can follow."""
        position, resident = state
        for op in range(min(position + 1, len(self.problem.time_ns))):
            wanted = self.outputs[op] & self.needed[position] & ~resident
            if self.inputs[op] & ~resident or (op < position and not (self.problem.recomputable[op] and wanted)):
                continue
            follower = max(position, op + 1)
            for kept in self._kept(resident & ~self.outputs[op], op):
                yield op, (follower, (kept | self.outputs[op]) & self.needed[follower])

    def _kept(self, resident: int, op: int) -> Iterator[int]:
        """Inclusion-maximal subsets of ``resident`` that hold the inputs of ``op`` and leave room for it to run."""
        held = [(size, storage) for size, storage in self.largest_first if resident >> storage & 1]
        excess = sum(size for size, _ in held) + self.demand[op] - self.problem.capacity_bytes
        droppable = [(size, storage) for size, storage in held if not self.inputs[op] >> storage & 1]
        for dropped in _least_drops(droppable, excess):
            yield resident & ~dropped


def _least_drops(largest_first: list[tuple[int, int]], excess: int) -> Iterator[int]:
    """Inclusion-minimal sets of (size, storage) whose sizes sum up to at least ``excess``, as bit sets.

    Items are taken from the largest down and no further once they suffice: without its last and smallest item a set
    falls short, so each set found is minimal, and each minimal set is found once.
    """
    if excess <= 0:
        yield 0
        return
    for i, (size, storage) in enumerate(largest_first):
        for rest in _least_drops(largest_first[i + 1 :], excess - size):
            yield 1 << storage | rest


def bits(storages: Iterable[int]) -> int:
    """The set as the bits of an integer."""
    return sum(1 << storage for storage in set(storages))


def ops_of_path(came_from: Mapping[State, tuple[State, int]], state: State) -> list[int]:
    """Ops executed on the way from the start to ``state``, in order."""
    ops: list[int] = []
    while state in came_from:
        state, op = came_from[state]
        ops.append(op)
    ops.reverse()
    return ops
