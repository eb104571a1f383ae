"""Live bytes of an order of executions as arrays: what simulation says, for orders known to be executable, in bulk.

:func:`solvers.simulate.simulate` remains the judge of every plan. Searches look at far more orders than they keep.
"""

from __future__ import annotations

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
        size = self._size
        if len(leaving_out):
            size = size.copy()
            size[list(leaving_out)] = 0
        change = np.zeros(len(ops) + 2, dtype=np.int64)
        np.add.at(change, start, size[made])
        np.subtract.at(change, end + 1, size[made])
        live: _Ints = np.cumsum(change[: len(ops)]) + self._workspace[ops]
        return live


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
