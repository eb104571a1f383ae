"""From the decisions of a moments model with a host tier to steps: copies out at once, copies back as late as possible.

Three passes, over the order of executions that :mod:`solvers.extract` would run if what is on the host were resident:

1. *Order* (:func:`_order`): ops, each right before its first use, and what must have come back before each.
2. *Out* (:func:`_leave`): each storage that comes back later is copied out right after its production. It is dropped
   after its last use, as soon as its copy has ended or its memory is wanted, whichever is first; only the latter stalls.
3. *Back* (:func:`_place_fetches`): from the last use to the first, each copy starts as late as the link allows with those
   after it, and later where memory is short before.

The outcome need not fit the budget: :func:`solvers.simulate.simulate` says whether it does, and what the stalls are.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from solvers.extract import missing_ops
from solvers.moments_model import Decisions
from solvers.problem import Problem
from solvers.solution import Compute, Free, Offload, Prefetch, Step


@dataclasses.dataclass(slots=True)
class _Stay:
    """One stay of a storage on the device, over positions of the order, both inclusive.

    ``fetched``: it comes back from the host rather than being produced. ``start`` is then the position by which it is
    needed, until a place for the copy is found; the copy starts before the execution there.
    """

    storage: int
    start: int
    last: int
    fetched: bool


def overlapped_steps(problem: Problem, decisions: Decisions) -> tuple[Step, ...]:
    """The steps that the decisions describe. Linear, but for the memory profile over each copy's stretch.

    Raises:
        ValueError: the decisions drop something that is needed, is not on the host and cannot be recomputed.

    """
    order, stays = _order(problem, decisions)
    live = np.zeros(len(order), dtype=np.int64)
    for position, op in enumerate(order):
        live[position] += problem.workspace_bytes[op]
    for stay in stays:
        live[stay.start : stay.last + 1] += problem.storage_bytes[stay.storage]
    clock = [0, *itertools.accumulate(problem.time_ns[op] for op in order)]
    stays = _leave(problem, order, stays, live)
    _place_fetches(problem, stays, live, clock)
    return _steps(problem, order, stays)


def _order(problem: Problem, decisions: Decisions) -> tuple[list[int], list[_Stay]]:
    """Executions, and the stays that they make of each storage, by start."""
    order: list[int] = []
    resident: set[int] = set()
    on_host: set[int] = set()
    stays: list[_Stay] = []
    current: dict[int, _Stay] = {}

    def begin(s: int, *, fetched: bool) -> None:
        current[s] = _Stay(s, len(order), len(order), fetched)
        stays.append(current[s])
        resident.add(s)

    def execute(op: int) -> None:
        for s in problem.inputs[op]:
            if s not in resident:
                begin(s, fetched=True)
            current[s].last = len(order)
        for s in problem.outputs[op]:
            begin(s, fetched=False)
        order.append(op)

    def produce(storages: Iterable[int]) -> None:
        for s in storages:
            if s not in resident and s not in on_host:
                for op in missing_ops(problem, (s,), resident | on_host):
                    execute(op)

    kept_at = dict(zip(decisions.moments, decisions.kept, strict=True))
    host_at = dict(zip(decisions.moments, decisions.on_host, strict=True))
    for op, inputs in enumerate(problem.inputs):
        if op in kept_at and op != decisions.moments[0]:
            produce(sorted(kept_at[op] | host_at[op]))
        produce(inputs)
        execute(op)
        if op in kept_at:
            resident.intersection_update(kept_at[op])
            resident.update(problem.outputs[op])
            on_host = set(host_at[op])
    produce(sorted(problem.live_at_end))
    for s in sorted(problem.live_at_end):
        if s not in resident:
            current[s] = _Stay(s, len(order) - 1, len(order) - 1, fetched=True)
            stays.append(current[s])
        current[s].last = len(order) - 1
    return order, stays


def _leave(problem: Problem, order: Sequence[int], stays: list[_Stay], live: NDArray[np.int64]) -> list[_Stay]:
    """Walk forward with the clock of copies out, and let what leaves stay until its copy has ended, or memory is short.

    A storage that is needed again before it has left stays for good. ``live`` is kept up to date.
    """
    assert problem.link is not None
    back: dict[int, list[_Stay]] = {}
    for stay in stays:
        if stay.fetched:
            back.setdefault(stay.storage, []).append(stay)
    ending: dict[int, list[_Stay]] = {}
    first: dict[int, _Stay] = {}
    for stay in stays:
        if stay.storage in back and stay.storage not in first:
            first[stay.storage] = stay
            ending.setdefault(stay.last, []).append(stay)
    starts = collections.defaultdict(list)
    for stay in stays:
        starts[stay.start].append(stay)
    leaving: collections.deque[tuple[int, _Stay]] = collections.deque()  # (end of the copy, stay), by end
    ends: dict[int, int] = {}
    held = now = link_free = 0
    merged: set[int] = set()
    for position, op in enumerate(order):
        for stay in starts[position]:
            gone = next((entry for entry in leaving if entry[1].storage == stay.storage), None)
            if gone is not None:  # it comes back, or is made anew, before it has left
                leaving.remove(gone)
                held -= problem.storage_bytes[stay.storage]
                live[gone[1].last + 1 : position] += problem.storage_bytes[stay.storage]
                gone[1].last = position - 1
                if stay.fetched:
                    gone[1].last = stay.last
                    merged.add(id(stay))
        while leaving and (leaving[0][0] <= now or live[position] + held > problem.capacity_bytes):
            end, stay = leaving.popleft()
            now = max(now, end)
            held -= problem.storage_bytes[stay.storage]
            live[stay.last + 1 : position] += problem.storage_bytes[stay.storage]
            stay.last = position - 1
        now += problem.time_ns[op]
        for s in problem.outputs[op]:
            if s in first and s not in ends:
                link_free = ends[s] = max(now, link_free) + problem.link.to_host_ns(problem.storage_bytes[s])
        for stay in ending.get(position, ()):
            if ends[stay.storage] > now:
                bisect.insort(leaving, (ends[stay.storage], stay), key=lambda entry: entry[0])
                held += problem.storage_bytes[stay.storage]
    return [stay for stay in stays if id(stay) not in merged]


def _place_fetches(problem: Problem, stays: list[_Stay], live: NDArray[np.int64], clock: Sequence[int]) -> None:
    """Move the start of each fetched stay to where its copy must start, from the last needed to the first."""
    assert problem.link is not None
    previous: dict[int, int] = {}
    earliest: dict[int, int] = {}
    for stay in stays:
        earliest[id(stay)] = previous.get(stay.storage, -1) + 1
        previous[stay.storage] = stay.last
    following = clock[-1]
    fetched = [stay for stay in stays if stay.fetched]
    for stay in sorted(fetched, key=lambda stay: stay.start, reverse=True):
        size = problem.storage_bytes[stay.storage]
        following = min(clock[stay.start], following) - problem.link.to_device_ns(size)
        begin = max(bisect.bisect_right(clock, following) - 1, earliest[id(stay)], 0)
        short = np.flatnonzero(live[begin : stay.start] + size > problem.capacity_bytes)
        if len(short):
            begin += int(short[-1]) + 1
        if begin < stay.start:
            live[begin : stay.start] += size
            stay.start = begin


def _steps(problem: Problem, order: Sequence[int], stays: list[_Stay]) -> tuple[Step, ...]:
    """Write the stays out as steps: around each execution first what is fetched, at last what is dropped."""
    fetched: dict[int, list[tuple[int, int]]] = {}
    dropped: dict[int, list[int]] = {}
    last: dict[int, _Stay] = {}
    for index, stay in enumerate(stays):
        last[stay.storage] = stay
        if stay.fetched:
            fetched.setdefault(stay.start, []).append((index, stay.storage))
        dropped.setdefault(stay.last, []).append(stay.storage)
    comes_back = {stay.storage for stay in stays if stay.fetched}
    kept = {s for s in problem.live_at_end if s in last}
    steps: list[Step] = []
    copied: set[int] = set()
    for position, op in enumerate(order):
        steps.extend(Prefetch(s) for _, s in sorted(fetched.get(position, ())))
        steps.append(Compute(op))
        for s in problem.outputs[op]:
            if s in comes_back and s not in copied:
                copied.add(s)
                steps.append(Offload(s))
        for s in sorted(dropped.get(position, ())):
            if not (s in kept and last[s].last == position):
                steps.append(Free(s))
    return tuple(steps)
