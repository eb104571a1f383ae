"""The best sub-order of an order of executions, with copies to the host: what may be left out once they are there.

Given are a problem with a host tier and a superorder (:class:`solvers.suborder.Superorder`): executions q = 0..L-1 of
ops v(q), each fixed or optional. Storages are retained over the stretches between consecutive *events*, which are the
executions that make or read them. Memory and link are looked at at some *moments* p, positions of the order; a storage
may be away over a stretch that contains one::

    x[q]      execution q takes place                                                       x[q] = 1 where it is fixed
    r[s,i]    0 or 1: storage s is resident from its event i to its event i + 1
    o[s,i]    0 or 1: it is not, or not throughout, and comes back from the host by then
    H[s]      s is copied to the host at all
    G[s,p]    0 or 1: its copy has ended at p; for the first moments after its first production, then it is H[s]
    L[s,i,p]  s is not resident as r has it, and still leaves at p; for the same moments
    A[s,i,p]  0 or 1: it is on its way back at p already; for the last moments of the stretch
    C[q]      when execution q starts, at the positions that a row below names; C[L] when all has ended

    minimise  C[L]

    inputs    x[q] ≤ r[s,i] + o[s,i]               q reads s, and is its event i + 1
    retain    r[s,i+1] ≤ r[s,i] + o[s,i]           event i + 1 of s reads it
    make      r[s,i+1] ≤ r[s,i] + o[s,i] + x[q]    event i + 1 of s is execution q of its producer
    end       r[s,last] + o[s,last] = 1            s must be live at the end
    memory    Σ m_s (r + L + A) over the stretches that contain p + (outputs and workspace of v(p)) x[p] ≤ capacity
    clock     C[b] ≥ C[a] + Σ w x over [a, b)      what is more than the sum is a stall
    leaving   o[s,i], G[s,p] ≤ H[s],   G[s,p] ≤ G[s,next p],   L[s,i,p] ≥ H[s] - r[s,i] - G[s,p]
    arriving  A[s,i,p] ≤ A[s,i,next p] ≤ o[s,i]
    host      Σ m_s H[s] ≤ host bytes
    out       for every moment p and position τ before:  Σ out(s) G[s,p] ≤ C[p] - C[τ] - w x[τ]
              over the storages that are first made at τ or later
    back      for every moment p and position τ after:   Σ back(s) (o - A)[s,i,p] ≤ C[τ] - C[p] - w x[p]
              over the stretches that end after p, and by τ

The sums of transfer times are chained and looked at a few τ only, so that rows stay short. Between moments the program
does not look; :mod:`solvers.extract_offload` places the copies of a point, and the simulator says what that takes.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from solvers.host_spans import Point, Span, events_of
from solvers.milp import Milp
from solvers.problem import Problem
from solvers.suborder import Superorder

_Value = int | bool  # a column, or what the value is: compare by identity, since column 1 equals True
_Terms = list[tuple[int, float]]

_TOLERANCE = 1e-3  # of columns that are whole but for the solver's tolerances
_WINDOW = 3  # moments at each end of a stretch at which a copy may still be, or already, under way
_SUMS = 12  # sums of transfer times per moment and direction


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """From event ``index`` of a storage to the next, or to the end of the order: positions ``start`` to ``end``."""

    storage: int
    index: int
    start: int
    end: int
    read: bool  # it ends with a read, or with the end of the order


class HostSuborder:
    """The program for given moments; one method per group of rows.

    Args:
        problem: whose host tier is used; its budget is not.
        superorder: what may execute, and when.
        moments: positions of the superorder, ascending, each once.
        capacity_bytes: for what is resident at a moment, and the outputs and the workspace of what executes there.

    """

    def __init__(self, problem: Problem, superorder: Superorder, moments: Sequence[int], capacity_bytes: int) -> None:
        """Build all columns and rows."""
        self.problem = problem
        self.superorder = superorder
        self.moments = tuple(moments)
        self.milp = Milp()
        self.events = events_of(problem, superorder.ops)
        self._length = len(superorder.ops)
        self._percent = 100.0 / max(problem.keep_all_time_ns, 1)
        self._scale = 1.0 / max(capacity_bytes, 1)
        self._execute = {q: self.milp.column(integer=False) for q, may in enumerate(superorder.optional) if may}
        self._room = dict.fromkeys(self.moments, 1.0)
        self._held: dict[int, _Terms] = {p: [] for p in self.moments}
        self._resident: list[list[_Value]] = []
        self._on_host: dict[int, int] = {}
        self._whole: set[int] = set()
        self._left: dict[int, dict[int, int]] = {}
        self._back: list[tuple[_Stretch, int, dict[int, int]]] = []  # stretch, o, A
        self._starts: dict[int, list[int]] = {}  # of the stretches with an o, the last one first
        for s in range(len(problem.storage_bytes)):
            self._add_storage(s)
        self._add_memory()
        self._add_host()
        self._clock, self._most = self._add_clock()
        for p in self.moments:
            self._add_out(p)
            self._add_back(p)

    def _inside(self, stretch: _Stretch) -> tuple[int, ...]:
        """The moments that a stretch contains, without those at its ends."""
        first, last = bisect.bisect_right(self.moments, stretch.start), bisect.bisect_left(self.moments, stretch.end)
        return self.moments[first:last]

    def _add_storage(self, s: int) -> None:
        """The columns r and o of a storage and the rows inputs, retain, make and end, from the last stretch on."""
        events = self.events[s]
        following: _Value = s in self.problem.live_at_end
        resident: list[_Value] = []
        for i in reversed(range(len(events))):
            at_end = i + 1 == len(events)
            end, makes = (self._length, not following) if at_end else events[i + 1]
            executes: _Value = True if at_end else self._execute.get(end, True)
            stretch = _Stretch(s, i, events[i][0], end, not makes)
            premises = (following,) if makes else (following, executes)
            made = [executes] if makes and not at_end else []
            if all(p is False for p in premises) or any(m is True for m in made):
                value: _Value = False
                away = None
            else:
                away = self._add_away(stretch)
                is_forced = away is None and not made and any(p is True for p in premises)
                value = is_forced or self.milp.column(integer=bool(self._inside(stretch)))
                if value is not True and self._inside(stretch):
                    self._whole.add(value)
            if away is not None:
                self.milp.row([(value, -1.0), (away, -1.0)], -1.0)
            for premise in premises:
                self._implies(premise, [value, *made, *(() if away is None else (away,))])
            self._hold(stretch, value)
            self._add_leaving(stretch, value)
            resident.append(value)
            following = value
        self._resident.append(resident[::-1])

    def _implies(self, premise: _Value, conclusions: Iterable[_Value]) -> None:
        """The premise is at most the sum of the conclusions."""
        if premise is False or any(c is True for c in conclusions):
            return
        terms = [(c, 1.0) for c in conclusions if c is not False]
        self.milp.row(terms if premise is True else [*terms, (premise, -1.0)], float(premise is True))

    def _hold(self, stretch: _Stretch, value: _Value, *, at: Iterable[int] = ()) -> None:
        """Have a storage take memory at moments, by default at those of a stretch, its end among them."""
        size = self.problem.storage_bytes[stretch.storage] * self._scale
        if not size or value is False:
            return
        for p in at or (*self._inside(stretch), *((stretch.end,) if stretch.end in self._room else ())):
            if value is True:
                self._room[p] -= size
            else:
                self._held[p].append((value, -size))

    def _add_away(self, stretch: _Stretch) -> int | None:
        """The columns o, G, L and A of a stretch, and the rows leaving and arriving; ``None`` without any."""
        s, inside = stretch.storage, self._inside(stretch)
        if not inside or not self.problem.may_offload(s):
            return None
        if s not in self._on_host:
            self._add_departure(s)
        away = self.milp.column()
        self.milp.row([(self._on_host[s], 1.0), (away, -1.0)], 0.0)
        arriving: dict[int, int] = {}
        later = away
        for p in reversed(inside[-_WINDOW:]):
            arriving[p] = self.milp.column()
            self.milp.row([(later, 1.0), (arriving[p], -1.0)], 0.0)
            self._hold(stretch, arriving[p], at=(p,))
            later = arriving[p]
        if stretch.end in self._room and stretch.read:
            self._hold(stretch, away, at=(stretch.end,))
        self._back.append((stretch, away, arriving))
        self._starts.setdefault(s, []).append(stretch.start)
        return away

    def _add_leaving(self, stretch: _Stretch, value: _Value) -> None:
        """The columns L of a stretch: L[s,i,p] ≥ H[s] - r[s,i] - G[s,p]."""
        s = stretch.storage
        if s not in self._on_host or value is True:
            return
        resident = [] if value is False else [(value, 1.0)]
        for p in self._inside(stretch):
            if p in self._left[s]:
                leaving = self.milp.column(integer=False)
                terms = [(leaving, 1.0), (self._left[s][p], 1.0), (self._on_host[s], -1.0), *resident]
                self.milp.row(terms, 0.0)
                self._hold(stretch, leaving, at=(p,))

    def _add_departure(self, s: int) -> None:
        """The columns H and G of a storage."""
        self._on_host[s] = self.milp.column(integer=False)
        after = self.moments[bisect.bisect_right(self.moments, self.events[s][0][0]) :]
        self._left[s] = {p: self.milp.column() for p in after[:_WINDOW]}
        for earlier, later in itertools.pairwise((*self._left[s].values(), self._on_host[s])):
            self.milp.row([(later, 1.0), (earlier, -1.0)], 0.0)

    def _add_memory(self) -> None:
        """Memory at each moment."""
        problem = self.problem
        for p, terms in self._held.items():
            op = self.superorder.ops[p]
            demand = problem.workspace_bytes[op] + sum(problem.storage_bytes[s] for s in problem.outputs[op])
            if p in self._execute:
                self.milp.row([*terms, (self._execute[p], -demand * self._scale)], -self._room[p])
            else:
                self.milp.row(terms, demand * self._scale - self._room[p])

    def _add_host(self) -> None:
        """Host: Σ m_s H[s] ≤ host bytes, where that can bind."""
        problem = self.problem
        if sum(problem.storage_bytes[s] for s in self._on_host) > problem.host_bytes:
            scale = 1.0 / problem.host_bytes
            self.milp.row([(c, -problem.storage_bytes[s] * scale) for s, c in self._on_host.items()], -1.0)

    def _add_clock(self) -> tuple[dict[int, int], float]:
        """Clock: C at all positions that transfers refer to, and the most that it can be."""
        problem, link = self.problem, self.problem.link
        assert link is not None
        first = {self.events[s][0][0] for s in self._on_host}
        due = {stretch.end for stretch, _, _ in self._back}
        knots = sorted({0, self._length, *first, *due, *self.moments})
        times = [problem.time_ns[op] * self._percent for op in self.superorder.ops]
        copies = sum(link.to_host_ns(problem.storage_bytes[s]) for s in self._on_host)
        copies += sum(link.to_device_ns(problem.storage_bytes[stretch.storage]) for stretch, _, _ in self._back)
        most = sum(times) + copies * self._percent
        clock = {
            q: self.milp.column(upper=most if q else 0.0, cost=float(q == self._length), integer=False) for q in knots
        }
        for a, b in itertools.pairwise(knots):
            terms = [(self._execute[q], -times[q]) for q in range(a, b) if q in self._execute]
            fixed = sum(times[q] for q in range(a, b) if q not in self._execute)
            self.milp.row([(clock[b], 1.0), (clock[a], -1.0), *terms], fixed)
        return clock, most

    def _add_out(self, p: int) -> None:
        """Out in time: what has left at a moment, by first production, the last one first."""
        link = self.problem.link
        assert link is not None
        leaving: dict[int, _Terms] = collections.defaultdict(list)
        for s, whole in self._on_host.items():
            made = self.events[s][0][0]
            if made < p:
                ns = link.to_host_ns(self.problem.storage_bytes[s]) * self._percent
                leaving[made].append((self._left[s].get(p, whole), ns))
        self._chain(dict(sorted(leaving.items(), reverse=True)), lambda made: (made, p))

    def _add_back(self, p: int) -> None:
        """Back in time: what comes back after a moment, by when it is needed."""
        link = self.problem.link
        assert link is not None
        coming: dict[int, _Terms] = collections.defaultdict(list)
        for stretch, away, arriving in self._back:
            if stretch.end > p:
                ns = link.to_device_ns(self.problem.storage_bytes[stretch.storage]) * self._percent
                coming[stretch.end].append((away, ns))
                if p in arriving:
                    coming[stretch.end].append((arriving[p], -ns))
        self._chain(dict(sorted(coming.items())), lambda end: (p, end))

    def _chain(self, transfers: Mapping[int, _Terms], between: Callable[[int], tuple[int, int]]) -> None:
        """Sums of transfer times, at most the time from the end of one execution to the start of another; a few."""
        total = sum(ns for terms in transfers.values() for _, ns in terms if ns > 0)
        before: list[tuple[int, float]] = []
        terms: _Terms = []
        done, sums = 0.0, 1
        for index, (at, more) in enumerate(transfers.items(), 1):
            terms.extend(more)
            done += sum(ns for _, ns in more if ns > 0)
            if index < len(transfers) and done * _SUMS < total * sums:
                continue
            sums += 1
            column = self.milp.column(upper=self._most, integer=False)
            self.milp.row([(column, 1.0), *before, *((c, -ns) for c, ns in terms)], 0.0)
            early, late = between(at)
            ns = self.problem.time_ns[self.superorder.ops[early]] * self._percent
            ends = [(self._clock[late], 1.0), (self._clock[early], -1.0), (column, -1.0)]
            if early in self._execute:
                self.milp.row([*ends, (self._execute[early], -ns)], 0.0)
            else:
                self.milp.row(ends, ns)
            before, terms = [(column, -1.0)], []

    def point(self, values: Sequence[float]) -> Point:
        """Read a point of the program."""

        def holds(value: _Value) -> bool:
            return value if isinstance(value, bool) else values[value] > _TOLERANCE

        leave_by = {}
        for s, whole in self._on_host.items():
            if holds(whole):
                after = self.moments[bisect.bisect_right(self.moments, self.events[s][0][0]) :]
                leave_by[s] = next((p for p in after if holds(self._left[s].get(p, whole))), self._length)
        return Point(
            tuple(q for q in range(self._length) if q not in self._execute or holds(self._execute[q])),
            tuple(tuple(holds(v) for v in resident) for resident in self._resident),
            leave_by,
        )

    def fixed(self, spans: Sequence[Sequence[Span]], free: Container[int]) -> dict[int, float]:
        """The whole columns of a known plan, but for those of some storages.

        Args:
            spans: for each storage when it is on the device.
            free: storages whose columns are left out.

        """
        values: dict[int, float] = {}
        for s in range(len(self.events)):
            if s not in free:
                values.update(self._residence(s, spans[s]))
        for s, left in self._left.items():
            if s not in free:
                moved = any(span.fetched for span in spans[s])
                values.update({column: float(moved and spans[s][0].last < p) for p, column in left.items()})
        for stretch, away, arriving in self._back:
            if stretch.storage not in free:
                start = self._return(stretch, spans[stretch.storage])
                values[away] = float(start is not None)
                values.update({c: float(start is not None and start <= p) for p, c in arriving.items()})
        return values

    def _return(self, stretch: _Stretch, spans: Sequence[Span]) -> int | None:
        """From when on a storage comes back in a stretch, or in later ones that contain no moment."""
        later = self._starts[stretch.storage]
        until = next((start for start in reversed(later) if start > stretch.start), self._length)
        for before, span in itertools.pairwise(spans):
            if span.fetched and before.last < stretch.end and stretch.start < span.start <= until:
                return span.start
        return None

    def _residence(self, s: int, spans: Sequence[Span]) -> dict[int, float]:
        """The whole columns r of a storage."""
        ends = [*(q for q, _ in self.events[s][1:]), self._length]
        return {
            value: float(any(span.start <= start and end <= span.last for span in spans))
            for (start, _), end, value in zip(self.events[s], ends, self._resident[s], strict=True)
            if not isinstance(value, bool) and value in self._whole
        }
