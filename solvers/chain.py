"""A training step as a chain: regions of forward ops with the backward ops that belong to them.

::

    forward    region 0 | region 1 | … | region N-1          cuts lie where few bytes cross
    backward   region N-1 | … | region 1 | region 0

Region j makes from what *enters* it (A_j, made by regions before it) what enters region j+1. Its backward turns what is
*incoming* (gradients that the backward of later regions made) into what later backward ops read. Whatever does not fit
this picture is *resident*: made in the first forward and there until its last reader is done. That is what crosses many
cuts (masks, rotary tables, an encoder's output, skip connections), what cannot be made again, outputs of the step.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from solvers.problem import Problem
from solvers.store_all import keep_all_peak_op

MOST_REGIONS = 128
_TINY = 0.001  # of the bytes that the forward makes: the least storages, together, may always be resident
_PLATEAU = 1.01  # a cut may be this much wider than the narrowest one near it


@dataclasses.dataclass(frozen=True)
class Region:
    """A stretch of the forward and the stretch of the backward that belongs to it.

    Attributes:
        forward: forward ops.
        backward: backward ops; may be empty.
        entering: storages made by earlier regions that forward ops of this or a later one read, resident ones left out.
        incoming: storages made by the backward of later regions whose last reader is in this backward.

    """

    forward: range
    backward: range
    entering: tuple[int, ...]
    incoming: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Chain:
    """A step cut into regions.

    Attributes:
        regions: in the order of the forward.
        resident: storages of the forward that are never dropped before their last reader is done.
        weight_bytes: per region t, what is resident apart from regions 0..t, what enters them, and their gradients,
            while the backward of region t is about to begin: resident storages, and what later regions' backward made
            that is read or must be there afterwards. What is incoming to t is part of it.

    """

    regions: tuple[Region, ...]
    resident: frozenset[int]
    weight_bytes: tuple[int, ...]


def forward_end(problem: Problem) -> int:
    """Number of forward ops; where phases are unknown, of the ops up to the peak of the keep-all schedule."""
    ops = len(problem.time_ns)
    return problem.forward_ops if 0 < problem.forward_ops < ops else keep_all_peak_op(problem) + 1


def cut(problem: Problem, *, reach: int, window: int) -> Chain | None:
    """Cut a step into a chain, or return ``None`` where it has fewer than two regions.

    Args:
        problem: the step.
        reach: storages whose last forward reader is more than this many ops after their producer are resident.
        window: a cut is no wider than any place within so many forward ops of it.

    """
    end = forward_end(problem)
    if not 1 < end < len(problem.time_ns):
        return None
    last_read = [max((r for r in readers if r < end), default=-1) for readers in problem.readers]
    side = _tiny(problem, end)
    side.update(s for s in range(len(last_read)) if last_read[s] - problem.producer[s] > reach)
    cuts = _narrow_places(_widths(problem, last_read, side, end), window, end)
    if not cuts:
        return None
    return _Builder(problem, cuts, last_read, side).chain()


def _tiny(problem: Problem, end: int) -> set[int]:
    """The least storages of the forward, up to ``_TINY`` of its bytes together."""
    made = [s for s, op in enumerate(problem.producer) if op < end]
    room = _TINY * sum(problem.storage_bytes[s] for s in made)
    sizes = sorted((problem.storage_bytes[s], s) for s in made)
    total = itertools.accumulate(size for size, _ in sizes)
    return {s for (_, s), sum_ in zip(sizes, total, strict=True) if sum_ <= room}


def _widths(problem: Problem, last_read: Sequence[int], side: set[int], end: int) -> list[int]:
    """Bytes that cross the place before each forward op, without those of ``side``."""
    change = [0] * (end + 1)
    for s, op in enumerate(problem.producer):
        if op < end and last_read[s] > op and s not in side:
            change[op + 1] += problem.storage_bytes[s]
            change[last_read[s] + 1] -= problem.storage_bytes[s]
    return list(itertools.accumulate(change))[:end]


def _narrow_places(widths: Sequence[int], window: int, end: int) -> list[int]:
    """Forward ops before which to cut: places about as narrow as the narrowest near them, at a least distance."""
    distance = max(1, -(-end // MOST_REGIONS))
    cuts: list[int] = []
    previous = 0
    for place in range(1, end):
        if place - previous < distance or widths[place] == 0:
            continue
        near = [w for w in widths[max(1, place - window) : place + window + 1] if w]
        if widths[place] <= _PLATEAU * min(near):
            cuts.append(place)
            previous = place
    return cuts


class _Builder:
    """Assigns ops and storages to the regions between given cuts."""

    def __init__(self, problem: Problem, cuts: Sequence[int], last_read: Sequence[int], side: set[int]) -> None:
        self.problem = problem
        self.cuts = list(cuts)
        self.last_read = last_read
        self.end = forward_end(problem)
        self.count = len(cuts) + 1
        crossing = {s for s in side if self._home(problem.producer[s]) < self._home(last_read[s])}
        self.resident = crossing | self._irreplaceable()

    def _home(self, op: int) -> int:
        """Region of a forward op."""
        return bisect.bisect_right(self.cuts, op)

    def _irreplaceable(self) -> set[int]:
        """Storages of the forward that must be there at the end, or that cannot be made again and may be needed."""
        problem = self.problem
        found = {s for s in problem.live_at_end if problem.producer[s] < self.end}
        for s, op in enumerate(problem.producer):
            if op < self.end and not problem.recomputable[op]:
                again = any(r >= self.end or problem.recomputable[r] for r in problem.readers[s])
                found.update((s,) if again else ())
        return found

    def chain(self) -> Chain:
        """The chain, under the assignment of backward ops that makes fewer bytes resident."""
        choices = [self._assign(late=late) for late in (False, True)]
        regions_of, extra = min(choices, key=lambda c: sum(self.problem.storage_bytes[s] for s in c[1]))
        self.resident |= extra
        bounds = [0, *self.cuts, self.end]
        last = [bisect.bisect_right(regions_of, -r, key=lambda region: -region) for r in range(self.count)]
        starts = [*last[1:], 0]
        incoming = self._incoming(regions_of)
        regions = tuple(
            Region(
                range(bounds[r], bounds[r + 1]),
                range(self.end + starts[r], self.end + last[r]),
                self._entering(bounds[r]),
                tuple(incoming[r]),
            )
            for r in range(self.count)
        )
        return Chain(regions, frozenset(self.resident), self._weights(regions_of))

    def _entering(self, start: int) -> tuple[int, ...]:
        made = (s for s, op in enumerate(self.problem.producer) if op < start <= self.last_read[s])
        return tuple(s for s in made if s not in self.resident) if start else ()

    def _assign(self, *, late: bool) -> tuple[list[int], set[int]]:
        """The region of each backward op, never rising, and what becomes resident since it is read elsewhere.

        A storage can be read where it was made and where it enters. Each op wants the latest such region; it moves the
        boundary there for all ops after it, or (``late``) waits until no later op wants a later region.
        """
        problem = self.problem
        wanted = [self.count - 1] * (len(problem.time_ns) - self.end)
        free = [True] * len(wanted)
        for index in range(len(wanted)):
            for s in problem.inputs[self.end + index]:
                if problem.producer[s] < self.end and s not in self.resident:
                    at_most = self._home(max(self.last_read[s], problem.producer[s]))
                    wanted[index] = min(wanted[index], at_most)
                    free[index] = False
        if late:
            lowest = -1
            for index in reversed(range(len(wanted))):
                lowest = max(lowest, -1 if free[index] else wanted[index])
                wanted[index] = max(lowest, 0)
        assigned = list(itertools.accumulate(wanted, min))
        misread = {
            s
            for index, region in enumerate(assigned)
            for s in problem.inputs[self.end + index]
            if problem.producer[s] < self.end and not self._readable(s, region)
        }
        return assigned, misread - self.resident

    def _readable(self, s: int, region: int) -> bool:
        home = self._home(self.problem.producer[s])
        return home <= region <= max(home, self._home(self.last_read[s]) if self.last_read[s] >= 0 else home)

    def _region(self, op: int, regions_of: Sequence[int]) -> int:
        return self._home(op) if op < self.end else regions_of[op - self.end]

    def _incoming(self, regions_of: Sequence[int]) -> list[list[int]]:
        problem = self.problem
        incoming: list[list[int]] = [[] for _ in range(self.count)]
        for s, op in enumerate(problem.producer):
            if op >= self.end and problem.readers[s] and s not in problem.live_at_end:
                last = regions_of[problem.readers[s][-1] - self.end]
                if last < regions_of[op - self.end]:
                    incoming[last].append(s)
        return incoming

    def _weights(self, regions_of: Sequence[int]) -> tuple[int, ...]:
        problem = self.problem
        change = [0] * (self.count + 1)
        for s, op in enumerate(problem.producer):
            lowest = min((self._region(r, regions_of) for r in problem.readers[s]), default=self.count)
            lowest = 0 if s in problem.live_at_end else lowest
            if op < self.end:
                if s in self.resident:
                    change[lowest] += problem.storage_bytes[s]
            elif lowest < regions_of[op - self.end]:
                change[lowest] += problem.storage_bytes[s]
                change[regions_of[op - self.end]] -= problem.storage_bytes[s]
        return tuple(itertools.accumulate(change))[: self.count]
