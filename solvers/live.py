"""Live bytes of an order of executions as arrays: what simulation says, for orders known to be executable, in bulk.

:func:`solvers.simulate.simulate` remains the judge of every plan. Searches look at far more orders than they keep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from solvers.problem import Problem

_Ints = NDArray[np.int64]


class LiveBytes:
    """Evaluates orders of one problem, each storage freed after its last use (:func:`solvers.simulate.with_frees`).

    Args:
        problem: what the orders are orders of; its budget does not matter.

    """

    def __init__(self, problem: Problem) -> None:
        """Lay out reads and productions of the ops as arrays."""
        self.static_bytes = problem.static_bytes
        self._time = np.array(problem.time_ns, dtype=np.int64)
        self._workspace = np.array(problem.workspace_bytes, dtype=np.int64)
        self._size = np.array(problem.storage_bytes, dtype=np.int64)
        self._stays = np.zeros(len(self._size), dtype=bool)
        self._stays[sorted(problem.live_at_end)] = True
        self._reads = _Rows(problem.inputs)
        self._makes = _Rows(problem.outputs)

    def time_ns(self, order: Sequence[int]) -> int:
        """Time of all executions."""
        return int(self._time[np.asarray(order, dtype=np.int64)].sum())

    def peak(self, order: Sequence[int]) -> int:
        """Most bytes live at once, static ones included."""
        return self.static_bytes + int(self.during(order).max(initial=0))

    def during(self, order: Sequence[int], *, leaving_out: Sequence[int] = ()) -> _Ints:
        """Bytes live during each execution of an executable order, static ones and some storages left out."""
        return self.of(order, self.copies(order), leaving_out=leaving_out)

    def of(self, order: Sequence[int], copies: Copies, *, leaving_out: Sequence[int] = ()) -> _Ints:
        """The same, where the copies of the order are known."""
        size = self._size
        if len(leaving_out):
            size = size.copy()
            size[list(leaving_out)] = 0
        ops = np.asarray(order, dtype=np.int64)
        change = np.zeros(len(ops) + 2, dtype=np.int64)
        np.add.at(change, copies.start, size[copies.storage])
        np.subtract.at(change, copies.end + 1, size[copies.storage])
        live: _Ints = np.cumsum(change[: len(ops)]) + self._workspace[ops]
        return live

    def copies(self, order: Sequence[int]) -> Copies:
        """What each production of an executable order makes, and until when it lives."""
        ops = np.asarray(order, dtype=np.int64)
        read, read_at = self._reads.of(ops)
        made, made_at = self._makes.of(ops)
        storage = np.concatenate((read, made))
        at = np.concatenate((read_at, made_at))
        is_made = np.zeros(len(at), dtype=bool)
        is_made[len(read) :] = True
        sequence = np.lexsort((at, storage))  # an executable order reads nothing that it makes at the same place
        storage, at, is_made = storage[sequence], at[sequence], is_made[sequence]
        first = np.flatnonzero(is_made)  # one copy for each production, up to the next production of the storage
        last = np.append(first, len(at))[1:] - 1
        start, end, made = at[first], at[last], storage[first]
        final = np.ones(len(first), dtype=bool)
        final[:-1] = made[1:] != made[:-1]
        end = np.where(final & self._stays[made], len(ops), end)
        return Copies(made, start, end, storage * (len(ops) + 1) + at, len(ops))


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies of storages over an order of executions, by storage and then by place: one for each production.

    Attributes:
        storage: of which each is a copy.
        start: where it is made.
        end: its last use; the length of the order where it stays.
        events: of every use and production storage · (length + 1) + place, ascending.
        length: of the order.

    """

    storage: _Ints
    start: _Ints
    end: _Ints
    events: _Ints
    length: int

    def next_use(self, storages: _Ints, place: int) -> _Ints:
        """For each storage the first place after ``place`` where it is used or made; the length if nowhere."""
        base = storages * (self.length + 1)
        following = np.searchsorted(self.events, base + place, side="right")
        at = np.append(self.events, np.iinfo(np.int64).max)[following] - base
        return np.minimum(at, self.length)


class _Rows:
    """Lists of integers, one per op, end to end."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.length = np.array([len(row) for row in rows], dtype=np.int64)
        self.start = np.cumsum(self.length) - self.length
        self.values = np.array([v for row in rows for v in row], dtype=np.int64)

    def of(self, ops: _Ints) -> tuple[_Ints, _Ints]:
        """The rows of ``ops`` end to end, and for each value the place in ``ops`` that it belongs to."""
        length = self.length[ops]
        place = np.repeat(np.arange(len(ops)), length)
        within = np.arange(len(place)) - np.repeat(np.cumsum(length) - length, length)
        return self.values[self.start[ops][place] + within], place
