"""From the decisions of a moments model with a host tier to steps: copies out at once, copies back as late as possible.

Three passes, over the order of executions that :mod:`solvers.extract` has if what is on the host counts as resident, or
the latter two over one that is given:

1. *Order* (:class:`_Order`): ops, each right before its first use, and what must have come back before each.
2. *Out* (:class:`_Departures`): each storage that comes back later is copied out right after its production, or when
   its turn comes where it is said which are due first. It is dropped after its last use, as soon as its copy has ended
   or its memory is wanted: only the latter stalls.
3. *Back* (:func:`_place_fetches`): from the last use to the first, each copy starts as late as the link allows with
   those after it, and later where memory is short before.

The outcome need not fit the budget: :func:`solvers.simulate.simulate` says whether it does, and what the stalls are.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import sys
from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from solvers.extract import missing_ops
from solvers.moments_model import Decisions
from solvers.problem import Problem
from solvers.solution import Compute, Free, Offload, Prefetch, Step


@dataclasses.dataclass(slots=True, eq=False)
class Stay:
    """One stay of a storage on the device, over positions of the order, both inclusive; what stays ends at its length.

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
    planned = _Order(problem)
    planned.follow(decisions)
    return steps_of(problem, planned.order, planned.stays)


def steps_of(
    problem: Problem, order: Sequence[int], stays: Sequence[Stay], leave_by: Mapping[int, int] | None = None
) -> tuple[Step, ...]:
    """The steps of an order of executions whose storages stay on the device when they are said to.

    Args:
        problem: what is scheduled.
        order: ops that execute.
        stays: of all storages; of each the first one begins with its first production.
        leave_by: for each storage that comes back, the position by which its copy should have ended. Those that are
            due first are then copied out first; without it, those that are made first.

    """
    live = np.array([*(problem.workspace_bytes[op] for op in order), 0], dtype=np.int64)
    for stay in stays:
        live[stay.start : stay.last + 1] += problem.storage_bytes[stay.storage]
    departures = _Departures(problem, stays, live, leave_by)
    remaining = departures.walk(order)
    _place_fetches(problem, remaining, live, [0, *itertools.accumulate(problem.time_ns[op] for op in order)])
    return _steps(order, remaining, departures.copied_after)


class _Order:
    """Executions, and the stays that they make of each storage, by start."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.order: list[int] = []
        self.stays: list[Stay] = []
        self._current: dict[int, Stay] = {}
        self._resident: set[int] = set()
        self._on_host: frozenset[int] = frozenset()

    def follow(self, decisions: Decisions) -> None:
        """First executions in index order, with what they need before them, and the moments' drops."""
        kept_at = dict(zip(decisions.moments, decisions.kept, strict=True))
        host_at = dict(zip(decisions.moments, decisions.on_host, strict=True))
        for op, inputs in enumerate(self.problem.inputs):
            if op in kept_at and op != decisions.moments[0]:
                self._produce(sorted(kept_at[op]))
            self._produce(inputs)
            self._execute(op)
            if op in kept_at:
                self._on_host = host_at[op] | (kept_at[op] & self._on_host)  # kept, but not needed yet: it comes later
                self._resident.intersection_update(kept_at[op])
                self._resident.update(self.problem.outputs[op])
        final = sorted(self.problem.live_at_end)
        self._produce(final)
        for s in final:
            self._use(s, len(self.order))

    def _produce(self, storages: Iterable[int]) -> None:
        """Execute what it takes so that the storages are resident or on the host."""
        for s in storages:
            if s not in self._resident and s not in self._on_host:
                for op in missing_ops(self.problem, (s,), self._resident | self._on_host):
                    self._execute(op)

    def _execute(self, op: int) -> None:
        for s in self.problem.inputs[op]:
            self._use(s, len(self.order))
        for s in self.problem.outputs[op]:
            self._begin(s, len(self.order), fetched=False)
        self.order.append(op)

    def _use(self, s: int, position: int) -> None:
        """Have a storage resident at a position: it comes back where it is not."""
        if s not in self._resident:
            self._begin(s, position, fetched=True)
        self._current[s].last = position

    def _begin(self, s: int, position: int, *, fetched: bool) -> None:
        self._current[s] = Stay(s, position, position, fetched)
        self.stays.append(self._current[s])
        self._resident.add(s)


class _Departures:
    """A walk forward with the clock of copies out: what leaves stays until its copy has ended, or memory is short.

    A storage that is needed again before it has left stays for good. ``live``, the bytes live at each position, is kept
    up to date. Copies begin right after production, or with ``leave_by`` in the order in which they are due, as soon as
    the link is free, and all within the forward.

    Attributes:
        copied_after: after which execution each copy begins: storages, by position.

    """

    def __init__(
        self,
        problem: Problem,
        stays: Sequence[Stay],
        live: NDArray[np.int64],
        leave_by: Mapping[int, int] | None,
    ) -> None:
        self.problem = problem
        self.stays = stays
        self.live = live
        self.leave_by = leave_by
        self.copied_after: dict[int, list[int]] = {}
        self.starting: dict[int, list[Stay]] = {}
        self.ending: dict[int, list[Stay]] = {}
        self.leaving: list[Stay] = []  # those whose copies have begun first, by their ends
        self.waiting: list[tuple[int, int, int]] = []  # copies that have not begun: (due, number, storage), ascending
        self.copied_by: dict[int, float] = {}  # storage -> end of its copy; infinite where it has not begun
        self.held = self.now = self.link_free = 0  # bytes of ``leaving``, and times
        self.merged: set[Stay] = set()
        self.moved: set[int] = {stay.storage for stay in stays if stay.fetched}
        first: set[int] = set()
        for stay in stays:
            self.starting.setdefault(stay.start, []).append(stay)
            if stay.storage in self.moved and stay.storage not in first:
                first.add(stay.storage)
                self.ending.setdefault(stay.last, []).append(stay)

    def walk(self, order: Sequence[int]) -> list[Stay]:
        """Prolong the stays of what leaves; return the stays that are left."""
        last_forward = order.index(self.problem.forward_ops - 1) if self.problem.forward_ops else None
        for position, op in enumerate(order):
            self._settle(position)
            self.now += self.problem.time_ns[op]
            self._produce(op)
            following = order[position + 1] if position + 1 < len(order) else None
            self._start_copies(position, following, all_now=position == last_forward)
            for stay in self.ending.get(position, ()):
                if self.copied_by[stay.storage] > self.now:
                    bisect.insort(self.leaving, stay, key=self._leaves_at)
                    self.held += self.problem.storage_bytes[stay.storage]
        self._settle(len(order))
        return [stay for stay in self.stays if stay not in self.merged]

    def _leaves_at(self, stay: Stay) -> float:
        return self.copied_by[stay.storage]

    def _produce(self, op: int) -> None:
        """Have what an op has made for the first time wait for its copy."""
        for s in self.problem.outputs[op]:
            if s in self.moved and s not in self.copied_by:
                self.copied_by[s] = math.inf
                due = 0 if self.leave_by is None else self.leave_by.get(s, sys.maxsize)
                bisect.insort(self.waiting, (due, len(self.copied_by), s))

    def _start_copies(self, position: int, following: int | None, *, all_now: bool) -> None:
        """Begin copies: all that wait, or those for which the link is free before the next execution has ended."""
        all_now = all_now or self.leave_by is None or following is None
        until = self.now if following is None else self.now + self.problem.time_ns[following]
        while self.waiting and (all_now or self.link_free < until):
            self._copy_out(self.waiting.pop(0)[2], position)

    def _copy_out(self, s: int, position: int) -> None:
        """Begin a copy after the execution at a position."""
        link = self.problem.link
        assert link is not None
        self.link_free = max(self.now, self.link_free) + link.to_host_ns(self.problem.storage_bytes[s])
        self.copied_by[s] = self.link_free
        self.copied_after.setdefault(position, []).append(s)
        self.leaving.sort(key=self._leaves_at)

    def _settle(self, position: int) -> None:
        """End the stays of what has left before a position, or must have, since memory is short there."""
        for stay in self.starting.get(position, ()):
            self._meet(stay, position)
        while self.leaving and (self._leaves_at(self.leaving[0]) <= self.now or self._is_short(position)):
            stay = self.leaving[0]
            if math.isinf(self._leaves_at(stay)):
                self._hurry(position, {stay.storage for stay in self.leaving})
                continue
            self.leaving.pop(0)
            self.now = max(self.now, int(self._leaves_at(stay)))
            self._prolong(stay, position)

    def _hurry(self, position: int, wanted: Container[int]) -> None:
        """Begin the copy that is due first of some storages before a position."""
        index = next(i for i, (_, _, s) in enumerate(self.waiting) if s in wanted)
        self._copy_out(self.waiting.pop(index)[2], position - 1)

    def _is_short(self, position: int) -> bool:
        return bool(self.live[position] + self.held > self.problem.capacity_bytes)

    def _meet(self, stay: Stay, position: int) -> None:
        """A stay that begins while an earlier one of the same storage is leaving ends that one, or prolongs it."""
        entry = next((entry for entry in self.leaving if entry.storage == stay.storage), None)
        if entry is None:
            return
        if not stay.fetched and math.isinf(self._leaves_at(entry)):
            self._hurry(position, {stay.storage})
        self.leaving.remove(entry)
        self._prolong(entry, position)
        if stay.fetched:
            entry.last = stay.last
            self.merged.add(stay)
            self.ending.setdefault(stay.last, []).append(entry)

    def _prolong(self, stay: Stay, position: int) -> None:
        """Have a storage that was leaving stay until right before a position."""
        size = self.problem.storage_bytes[stay.storage]
        self.held -= size
        self.live[stay.last + 1 : position] += size
        stay.last = position - 1


def _place_fetches(problem: Problem, stays: list[Stay], live: NDArray[np.int64], clock: Sequence[int]) -> None:
    """Move the start of each fetched stay to where its copy must start, from the last needed to the first."""
    assert problem.link is not None
    previous: dict[int, int] = {}
    earliest: dict[Stay, int] = {}
    for stay in stays:
        earliest[stay] = previous.get(stay.storage, -1) + 1
        previous[stay.storage] = stay.last
    following = clock[-1]
    fetched = [stay for stay in stays if stay.fetched]
    for stay in sorted(fetched, key=lambda stay: stay.start, reverse=True):
        size = problem.storage_bytes[stay.storage]
        following = min(clock[stay.start], following) - problem.link.to_device_ns(size)
        begin = max(bisect.bisect_right(clock, following) - 1, earliest[stay], 0)
        short = np.flatnonzero(live[begin : stay.start] + size > problem.capacity_bytes)
        if len(short):
            begin += int(short[-1]) + 1
        if begin < stay.start:
            live[begin : stay.start] += size
            stay.start = begin


def _steps(order: Sequence[int], stays: list[Stay], copied_after: Mapping[int, Sequence[int]]) -> tuple[Step, ...]:
    """Write the stays out as steps: around each execution first what is fetched, at last what is dropped."""
    fetched: dict[int, list[tuple[int, int]]] = {}
    dropped: dict[int, list[int]] = {}
    for index, stay in enumerate(stays):
        if stay.fetched:
            fetched.setdefault(stay.start, []).append((index, stay.storage))
        dropped.setdefault(stay.last, []).append(stay.storage)
    comes_back = {stay.storage for stay in stays if stay.fetched}
    steps: list[Step] = []
    for position, op in enumerate(order):
        steps.extend(Prefetch(s) for _, s in sorted(fetched.get(position, ())))
        steps.append(Compute(op))
        steps.extend(Offload(s) for s in copied_after.get(position, ()) if s in comes_back)
        steps.extend(Free(s) for s in sorted(dropped.get(position, ())))
    steps.extend(Prefetch(s) for _, s in sorted(fetched.get(len(order), ())))
    return tuple(steps)
