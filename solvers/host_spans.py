"""When storages are on the device, in positions of an order: read from steps, and turned into stays for new ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from solvers.extract_offload import Stay
from solvers.problem import Problem
from solvers.solution import Compute, Free, Prefetch, Step


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A storage is on the device from the execution at ``start`` to that at ``last`` of a superorder, both inclusive.

    ``last`` is the length of the superorder where it stays to the end; ``fetched``: it came back from the host.
    """

    start: int
    last: int
    fetched: bool


@dataclasses.dataclass(frozen=True)
class Point:
    """A sub-order of a superorder, and when its storages stay on the device.

    Attributes:
        executed: positions of the superorder that take place, ascending.
        resident: for each storage and event whether it stays resident from that event to the next, or to the end.
        leave_by: for each storage that is copied to the host, the position by which its copy should have ended.

    """

    executed: tuple[int, ...]
    resident: tuple[tuple[bool, ...], ...]
    leave_by: Mapping[int, int]


def events_of(problem: Problem, ops: Sequence[int]) -> list[list[tuple[int, bool]]]:
    """For each storage the positions at which it is read (false) or made (true)."""
    events: list[list[tuple[int, bool]]] = [[] for _ in problem.storage_bytes]
    for q, op in enumerate(ops):
        for s in problem.inputs[op]:
            events[s].append((q, False))
        for s in problem.outputs[op]:
            events[s].append((q, True))
    return events


def spans_of(problem: Problem, steps: Sequence[Step], executed: Sequence[int], length: int) -> list[list[Span]]:
    """For each storage when it is on the device, ascending.

    Args:
        problem: what the steps are a plan of.
        steps: a plan.
        executed: the position in a superorder of each execution.
        length: of that superorder.

    """
    spans: list[list[Span]] = [[] for _ in problem.storage_bytes]
    begun: dict[int, tuple[int, bool]] = {}
    positions = [*executed, length]
    done = 0
    for step in steps:
        match step:
            case Compute(op=op):
                for s in problem.outputs[op]:
                    begun.setdefault(s, (positions[done], False))
                done += 1
            case Prefetch(storage=s):
                begun[s] = (positions[done], True)
            case Free(storage=s):
                start, fetched = begun.pop(s)
                spans[s].append(Span(start, positions[done - 1], fetched))
    for s, (start, fetched) in begun.items():
        spans[s].append(Span(start, length, fetched))
    return spans


def stays_of(problem: Problem, events: Sequence[Sequence[tuple[int, bool]]], point: Point) -> list[Stay]:
    """The stays of a sub-order, each no longer than its uses; what comes back does so where it is needed.

    Args:
        problem: what is scheduled.
        events: of the superorder, as :func:`events_of` has them.
        point: the sub-order; positions of the stays count what it executes.

    """
    position = {q: i for i, q in enumerate(point.executed)}
    end = len(point.executed)
    stays: list[Stay] = []
    for s, happens in enumerate(events):
        current: Stay | None = None
        uses = [(position.get(q), makes) for q, makes in happens]
        if s in problem.live_at_end:
            uses.append((end, False))
        for i, (at, makes) in enumerate(uses):
            if i and not point.resident[s][i - 1]:
                current = None
            if at is None:
                continue
            if makes or current is None:
                current = Stay(s, at, at, fetched=not makes)
                stays.append(current)
            current.last = at
    return sorted(stays, key=lambda stay: (stay.start, stay.storage))
