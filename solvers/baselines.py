"""Published strategies that look at the budget, as plans of the same type as everything else.

Each has one parameter. The values that make a difference are tried, more coarsely where there are many, and the fastest
plan that fits is taken; where none fits, the least peak is stated as ``floor_bytes``. Like the strategies of
:mod:`solvers.strategies` they are seen at their best: storages are freed after their last use.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Final

import numpy as np
from ortools.graph.python import max_flow

from solvers.chain import Chain, cut, forward_end
from solvers.chain_dp import ChainTable, Stage
from solvers.chain_solver import order_of
from solvers.extract import just_in_time
from solvers.heuristic import heuristic_solution
from solvers.live import LiveBytes
from solvers.moments_model import Decisions
from solvers.problem import Problem
from solvers.region_options import Option, Sweep, local_problem, sweep
from solvers.solution import Solution
from solvers.strategies import Segment, blocks, checkpointed_order, joined

_WEIGHTS = 20  # values of the price of a byte that the minimum cut is tried for
_MOST_CHECKPOINTS = 32
_EVERY = 16  # every k up to this one is tried, and some beyond
_COARSE = 1.25  # between those


@dataclasses.dataclass(frozen=True, order=True)
class Member:
    """One plan of a family.

    Attributes:
        time_ns: time of all executions.
        peak_bytes: most bytes live at once, static ones included.
        order: the executions.

    """

    time_ns: int
    peak_bytes: int
    order: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Baseline:
    """A family of plans.

    Attributes:
        time_limit_s: no further plan is tried after this.

    """

    name: ClassVar[str]
    time_limit_s: float = math.inf

    def orders(self, problem: Problem) -> Iterator[Sequence[int]]:
        """The orders of executions of the family."""
        raise NotImplementedError

    def solve(self, problem: Problem) -> Solution:
        """Return the fastest plan of the family that fits, ``OPTIMAL`` where it recomputes nothing.

        ``INFEASIBLE`` where none fits.
        """
        started = time.perf_counter()
        found = tuple(self.members(problem, deadline=started + self.time_limit_s))
        best = min((member for member in found if member.peak_bytes <= problem.budget_bytes), default=None)
        return heuristic_solution(
            problem,
            best.order if best else None,
            solver=self.name,
            start=started,
            message=f"best of {len(found)} plans",
            floor_bytes=min((member.peak_bytes for member in found), default=None),
        )

    def members(self, problem: Problem, *, deadline: float = math.inf) -> Iterator[Member]:
        """The distinct plans of the family, whatever the budget; no more after ``deadline`` (``time.perf_counter``)."""
        live = LiveBytes(problem)
        tried: set[tuple[int, ...]] = set()
        for order in map(tuple, self.orders(problem)):
            if order not in tried:
                tried.add(order)
                yield Member(live.time_ns(order), live.peak(order), order)
            if time.perf_counter() > deadline:
                return


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryK(_Baseline):
    """Blocks checkpointed for every k: each k-th block, the first k blocks, and k blocks at a time."""

    name: ClassVar[str] = "every-k"

    def orders(self, problem: Problem) -> Iterator[Sequence[int]]:
        """Three for each k up to the number of blocks, coarsely where that is large."""
        found = tuple(blocks(problem).values())
        for k in _spread(len(found)):
            for segments in (found[::k], found[:k], joined(found, k)):
                yield checkpointed_order(problem, segments)


def _spread(most: int) -> Iterator[int]:
    """The numbers from 1 to ``most``; the larger ones a quarter apart."""
    k = 1
    while k <= most:
        yield k
        k = max(k + 1, int(_COARSE * k)) if k >= _EVERY else k + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChenGreedy(_Baseline):
    """Segments closed as soon as what they make exceeds a limit; all limits that make a difference, coarsely.

    Chen, Xu, Zhang, Guestrin: "Training Deep Nets with Sublinear Memory Cost", 2016, algorithm 3, with segments between
    the narrow places of the graph. The last segment, whose backward begins at once, is not recomputed.
    """

    name: ClassVar[str] = "chen-greedy"

    def orders(self, problem: Problem) -> Iterator[Sequence[int]]:
        """One for each limit between the largest region and all of them, a tenth apart."""
        units = _units(problem)
        sizes = [sum(problem.storage_bytes[s] for op in unit for s in problem.outputs[op]) for unit in units]
        limit = float(max(sizes, default=0))
        while limit > 0 and limit < 1.1 * sum(sizes):
            segments = list(_closed_at(units, sizes, limit))
            yield checkpointed_order(problem, segments)
            yield checkpointed_order(problem, segments[:-1])
            limit *= 1.1


def _closed_at(units: Sequence[Segment], sizes: Sequence[int], limit: float) -> Iterator[Segment]:
    segment: Segment = ()
    total = 0
    for unit, size in zip(units, sizes, strict=True):
        if segment and total + size > limit:
            yield segment
            segment, total = (), 0
        segment += unit
        total += size
    if segment:
        yield segment


def _units(problem: Problem) -> list[Segment]:
    """Forward ops between the narrow places of the graph; single ops where it has none."""
    chain = _chain(problem)
    if chain is not None and problem.forward_ops:
        return [tuple(region.forward) for region in chain.regions]
    return [(op,) for op in range(problem.forward_ops)]


def _chain(problem: Problem) -> Chain | None:
    end = forward_end(problem)
    return cut(problem, reach=max(end // 3, 1), window=end // 20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Revolve(_Baseline):
    """Binomial checkpointing of the chain of regions, taken as uniform, with as many checkpoints as fit.

    Griewank, Walther: "Algorithm 799: revolve", 2000. No region is recomputed in part.
    """

    name: ClassVar[str] = "revolve"

    def orders(self, problem: Problem) -> Iterator[Sequence[int]]:
        """One for each number of checkpoints."""
        chain = _chain(problem)
        if chain is None:
            return
        count = len(chain.regions)
        most = min(count - 1, _MOST_CHECKPOINTS)
        stages = [_uniform(problem, chain, index) for index in range(count)]
        table = ChainTable(stages, most)
        least = table.least_level()
        assert least is not None  # one checkpoint always does
        for checkpoints in range(least, most + 1):
            yield order_of(chain, stages, table.schedule(checkpoints))


def _uniform(problem: Problem, chain: Chain, index: int) -> Stage:
    """A region that takes a unit of time to run and a unit of memory to store the input of."""
    last = index + 1 == len(chain.regions)
    ops = tuple(op for op in local_problem(problem, chain, index, turn=True).ops if op >= 0)
    forward = None if last else Sweep(sweep(problem, chain, index).again, 0, 0, 0, 0)
    return Stage(
        input_bytes=1 if index else 0,
        input_gradient_bytes=0,
        weight_bytes=0,
        sweep=forward,
        sweep_ns=1,
        turns=(Option(0, 0, 0, 0, 1, ops, ops, ()),),
        passes=(),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinCut(_Baseline):
    """What is kept over the end of the forward is a minimum cut, for a price of a byte in time; prices are searched.

    As the partitioner of AOTAutograd does, with the price in place of its rules about which ops are cheap. What is not
    kept is made again right before its use.
    """

    name: ClassVar[str] = "min-cut"

    def orders(self, problem: Problem) -> Iterator[Sequence[int]]:
        """One for each price, from about nothing to all that the step takes for a thousandth of the bytes."""
        end = forward_end(problem)
        if not 0 < end < len(problem.time_ns):
            return
        bytes_ = max(sum(problem.storage_bytes), 1)
        for step in range(_WEIGHTS):
            price = 10.0 ** (-4 + 7 * step / (_WEIGHTS - 1)) * problem.keep_all_time_ns / bytes_
            kept = _least_cut(problem, end, price)
            yield just_in_time(problem, Decisions((end,), (kept,), (frozenset(),)))


def _least_cut(problem: Problem, end: int, price: float) -> frozenset[int]:
    """Storages of the forward to keep: least time of what is made again, plus ``price`` for each byte kept.

    In the network an op is on the source's side if it executes again, a storage if the backward can come to need it::

        backward reads s    source → s      uncuttable
        keep s              s → its op      price · bytes
        op executes again   op → sink       time; uncuttable where it must not
        which needs inputs  op → input      uncuttable
    """
    ops, storages = len(problem.time_ns), len(problem.storage_bytes)
    source, sink = ops + storages, ops + storages + 1
    arcs: list[tuple[int, int, float]] = []  # nodes are ops, then storages; math.inf cannot be cut
    for s, op in enumerate(problem.producer):
        if op < end:
            arcs.append((ops + s, op, price * problem.storage_bytes[s]))
            if s in problem.live_at_end or (problem.readers[s] and problem.readers[s][-1] >= end):
                arcs.append((source, ops + s, math.inf))
    for op in range(end):
        if problem.recomputable[op]:
            arcs.append((op, sink, problem.time_ns[op]))
            arcs.extend((op, ops + s, math.inf) for s in problem.inputs[op])
        else:
            arcs.append((op, sink, math.inf))
    reached = _source_side(arcs, source, sink)
    return frozenset(
        s for s, op in enumerate(problem.producer) if op < end and ops + s in reached and op not in reached
    )


def _source_side(arcs: Sequence[tuple[int, int, float]], source: int, sink: int) -> set[int]:
    """Nodes on the source's side of a minimum cut, the fewest; capacities are taken to 2^-40 of their sum."""
    tail, head, capacity = (np.array(column) for column in zip(*arcs, strict=True))
    total = max(float(capacity[np.isfinite(capacity)].sum()), 1e-9)
    whole = np.where(np.isfinite(capacity), np.rint(np.minimum(capacity, total) * (2**40 / total)), 2**50)
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(tail.astype(np.int32), head.astype(np.int32), whole.astype(np.int64))
    flow.solve(source, sink)
    return set(flow.get_source_side_min_cut())


def least_peak(problem: Problem, *, deadline: float = math.inf) -> Solution | None:
    """The plan of least peak of all families; no plan is looked at after ``deadline`` (``time.perf_counter``)."""
    start = time.perf_counter()
    least: tuple[int, str, Member] | None = None
    for baseline in BASELINES.values():
        for member in baseline.members(problem, deadline=deadline):
            if least is None or (member.peak_bytes, member.time_ns) < (least[0], least[2].time_ns):
                least = (member.peak_bytes, baseline.name, member)
    if least is None:
        return None
    return heuristic_solution(problem.with_budget(least[0]), least[2].order, solver=least[1], start=start)


#: Families of plans that look at the budget, by the name under which reports show them.
BASELINES: Final[Mapping[str, _Baseline]] = {
    "checkpoint every k-th block": EveryK(),
    "Chen's greedy": ChenGreedy(),
    "Revolve": Revolve(),
    "minimum cut": MinCut(),
}
