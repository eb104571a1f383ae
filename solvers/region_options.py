"""Ways to run one region of a chain, found on the region alone.

A region is run in one of three ways (see :mod:`solvers.chain_dp`):

- *sweep*: forward only, to make what enters the next region;
- *turn*: forward and right after it backward;
- *pass*: forward, something is kept, later regions run forward and backward, then backward.

Turn and pass are scheduling problems of their own, of a few dozen ops, in which what enters the region is made by a
first op and, for pass, a *barrier* op stands for all that happens in between. They are solved for several limits on
what is kept over the barrier (moments model) and on what is live at any time (strict-budget walk).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from solvers.chain import Chain, Region
from solvers.extract import just_in_time
from solvers.live import LiveBytes
from solvers.milp import SolverFailedError
from solvers.moments_model import MomentsModel
from solvers.problem import Problem
from solvers.rematerialise import RULES, OutOfBudgetError, rematerialised_order

_WALK_RULES = (RULES[0], RULES[4], RULES[2])
_CLOSE = 0.01  # of the most live bytes: not worth a closer look
_HALVINGS = 5  # in the search for the least live bytes
_MODEL_S = 5.0
_MOST_LEVELS = 10
_LEVELS_IN_ALL = 120  # limits on what is kept, over all distinct regions

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to run a region, with bytes counted beyond what enters it, which is there anyway.

    Attributes:
        kept_bytes: live while later regions run, what enters the next region included; 0 for a turn.
        forward_peak_bytes: most bytes live before the barrier; for a turn, at all.
        backward_peak_bytes: most bytes live from the barrier on, incoming gradients included; 0 for a turn.
        first_ns: time beyond one execution of each op where the forward ops run for the first time.
        again_ns: the same where they have been run before.
        forward_order: ops of the problem up to the barrier, in order; of a turn, all of them.
        forward_again: the same where they have been run before: those of them that anything needs.
        backward_order: ops from the barrier on.

    """

    kept_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    first_ns: int
    again_ns: int
    forward_order: tuple[int, ...]
    forward_again: tuple[int, ...]
    backward_order: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Running a region forward, with bytes as in :class:`Option`.

    Attributes:
        again: ops that make what enters the next region; the first time all forward ops run.
        first_stays_bytes: peak of all forward ops, what enters staying.
        first_moves_bytes: the same with what enters freed after its last read, and counted.
        again_stays_bytes: peak of ``again``, what enters staying.
        again_moves_bytes: the same with what enters freed after its last read, and counted.

    """

    again: tuple[int, ...]
    first_stays_bytes: int
    first_moves_bytes: int
    again_stays_bytes: int
    again_moves_bytes: int


@dataclasses.dataclass(frozen=True)
class LocalProblem:
    """A region as a problem of its own.

    Attributes:
        problem: ops are one that makes what enters, forward ops, the barrier if there is one, backward ops.
        ops: for each of them the op of the whole problem; -1 for the ones that are not part of it.
        barrier: index of the barrier; -1 without.
        entering_bytes: made by the first op and counted elsewhere.

    """

    problem: Problem
    ops: tuple[int, ...]
    barrier: int
    entering_bytes: int


def local_problem(whole: Problem, chain: Chain, index: int, *, turn: bool, forward_only: bool = False) -> LocalProblem:
    """The problem of region ``index``: turn, pass, or only its forward.

    Of the latter, what enters the next region is live at the end. A turn leaves out forward ops that its backward does
    not need, except in the last region, whose forward has not been run before.
    """
    region = chain.regions[index]
    last = index + 1 == len(chain.regions)
    passes = not turn and not forward_only
    leaving = () if last else chain.regions[index + 1].entering
    forward: Iterable[int] = region.forward
    if turn and not last:
        forward = needed_ops(whole, region.forward, {s for op in region.backward for s in whole.inputs[op]})
    backward = () if forward_only else region.backward
    ops = (-1, *forward, *((-1,) if passes else ()), *backward)
    barrier = 1 + len(ops[1:]) - len(backward) - 1 if passes else -1
    made: list[tuple[int, ...]] = [whole.outputs[op] if op >= 0 else () for op in ops]
    made[0] = (*region.entering, *(region.incoming if turn else ()))
    read: list[tuple[int, ...]] = [whole.inputs[op] if op >= 0 else () for op in ops]
    if passes:
        made[barrier] = region.incoming
        read[barrier] = leaving
    local: dict[int, int] = {}
    workspace = []
    for position, outputs in enumerate(made):
        for s in outputs:
            if s not in chain.resident:
                local[s] = len(local)
        op = ops[position]
        second_copies = sum(whole.storage_bytes[s] for s in outputs if s in chain.resident)
        workspace.append(second_copies + (whole.workspace_bytes[op] if op >= 0 else 0))
    stay = set(leaving) if forward_only else {s for s in local if _outlives(whole, s, region)}
    problem = Problem(
        time_ns=tuple(whole.time_ns[op] if op >= 0 else 0 for op in ops),
        workspace_bytes=tuple(workspace),
        inputs=tuple(tuple(sorted(local[s] for s in inputs if s in local)) for inputs in read),
        outputs=tuple(tuple(local[s] for s in outputs if s in local) for outputs in made),
        recomputable=tuple(op >= 0 and whole.recomputable[op] for op in ops),
        storage_bytes=tuple(whole.storage_bytes[s] for s in local),
        live_at_end=frozenset(local[s] for s in stay if s in local),
        forward_ops=1 + (len(ops) - len(backward) - 1) if backward else 0,
        budget_bytes=0,
    )
    return LocalProblem(problem, ops, barrier, sum(whole.storage_bytes[s] for s in region.entering))


def _outlives(whole: Problem, s: int, region: Region) -> bool:
    """Whether a storage is there after the backward of its region.

    It is if it must be at the end or a later backward op reads it. What enters may also be held by an earlier region,
    which has ops that read it, and may use it to rebuild something.
    """
    readers = whole.readers[s]
    if s in whole.live_at_end or (bool(readers) and readers[-1] >= region.backward.stop):
        return True
    return bool(readers) and s in region.entering and readers[0] < region.forward.start


def needed_ops(whole: Problem, ops: Sequence[int], storages: set[int]) -> tuple[int, ...]:
    """Of the executions ``ops``, in order, those that make ``storages`` from what is there without them."""
    wanted = set(storages)
    found = []
    for op in reversed(ops):
        if whole.recomputable[op] and not wanted.isdisjoint(whole.outputs[op]):
            found.append(op)
            wanted.difference_update(whole.outputs[op])
            wanted.update(whole.inputs[op])
    return tuple(reversed(found))


def sweep(whole: Problem, chain: Chain, index: int) -> Sweep:
    """How to run region ``index`` forward; not for the last region."""
    local = local_problem(whole, chain, index, turn=False, forward_only=True)
    leaving = {s for s in chain.regions[index + 1].entering if s not in chain.resident}
    again = needed_ops(whole, chain.regions[index].forward, leaving)
    at = {op: position for position, op in enumerate(local.ops)}
    positions = [0, *(at[op] for op in again)]
    all_positions = range(len(local.ops))
    entering = range(len(local.problem.outputs[0]))
    staying = dataclasses.replace(local.problem, live_at_end=local.problem.live_at_end.union(entering))

    def peak(problem: Problem, order: Sequence[int]) -> int:
        return LiveBytes(problem).peak(order)

    return Sweep(
        again=again,
        first_stays_bytes=peak(staying, all_positions) - local.entering_bytes,
        first_moves_bytes=peak(local.problem, all_positions),
        again_stays_bytes=peak(staying, positions) - local.entering_bytes,
        again_moves_bytes=peak(local.problem, positions),
    )


def find_orders(local: LocalProblem, *, levels: int, deadline: float = math.inf) -> list[tuple[int, ...]]:
    """Orders of a turn or pass for ``levels`` limits on what is kept, and for low limits on what is live.

    After ``deadline`` (``time.perf_counter``) no more are looked for.
    """
    problem = local.problem
    keep_all = tuple(range(len(local.ops)))
    live = LiveBytes(problem).during(keep_all)
    peak = int(live.max())
    orders = [keep_all]
    if local.barrier < 0:
        return [*orders, *_low_orders(problem.with_budget, 0, peak, levels, deadline)]
    most = int(live[local.barrier])
    least = sum(problem.storage_bytes[s] for s in {*problem.inputs[local.barrier], *problem.outputs[local.barrier]})
    limits = sorted({least + (most - least) * level // levels for level in range(levels)})
    for level, limit in enumerate(limits):
        if time.perf_counter() > deadline:
            break
        if limit < most:
            orders.extend(_kept_within(local, limit))
        if level % 3 == 0:
            orders.extend(_low_orders(_limited_at_barrier(local, limit), limit, max(peak, limit), 2, deadline))
    return orders


def _kept_within(local: LocalProblem, limit: int) -> list[tuple[int, ...]]:
    """Least recomputation such that at most ``limit`` bytes are live at the barrier."""
    model = MomentsModel(local.problem, (local.barrier,), limit)
    if not model.feasible:
        return []
    try:
        result = model.milp.solve(absolute_gap=0.01, time_limit_s=_MODEL_S)
        return [just_in_time(local.problem, model.decisions(result.values))] if result.values else []
    except (SolverFailedError, ValueError) as error:
        _log.debug("no option that keeps %d bytes: %s", limit, error)
        return []


def _limited_at_barrier(local: LocalProblem, limit: int) -> Callable[[int], Problem]:
    """The problem under a budget, with so much workspace for the barrier that only ``limit`` bytes fit beside it."""

    def problem(budget: int) -> Problem:
        workspace = list(local.problem.workspace_bytes)
        workspace[local.barrier] = max(budget - limit, 0)
        return dataclasses.replace(local.problem, workspace_bytes=tuple(workspace), budget_bytes=budget)

    return problem


def _low_orders(
    problem_at: Callable[[int], Problem], low: int, high: int, count: int, deadline: float
) -> list[tuple[int, ...]]:
    """Orders for ``count`` budgets between the least that the walk gets by with and ``high``, the least included."""
    problem = problem_at(high)
    low = max(low, *(_demand(problem, op) for op in range(len(problem.time_ns))))
    floor = high
    for _ in range(_HALVINGS):
        if floor - low <= _CLOSE * high:
            break
        middle = (low + floor) // 2
        problem = problem_at(middle)
        order = next(_walks(problem, deadline), None)
        if order is None:
            low = middle
        else:
            floor = LiveBytes(problem).peak(order)
    orders: list[tuple[int, ...]] = []
    for budget in sorted({floor + (high - floor) * level // count for level in range(count)} - {high}):
        orders.extend(_walks(problem_at(budget), deadline))
    return orders


def _demand(problem: Problem, op: int) -> int:
    """Bytes of what an op reads, makes and works with."""
    storages = (*problem.inputs[op], *problem.outputs[op])
    return sum(problem.storage_bytes[s] for s in storages) + problem.workspace_bytes[op]


def _walks(problem: Problem, deadline: float) -> Iterator[tuple[int, ...]]:
    """What the strict-budget walk finds under several rules until ``deadline``."""
    for rule in _WALK_RULES:
        try:
            yield rematerialised_order(problem, rule=rule, time_limit_s=deadline - time.perf_counter())
        except OutOfBudgetError:
            continue


def evaluate(
    whole: Problem, chain: Chain, index: int, local: LocalProblem, found: tuple[Sequence[int], Sequence[int]]
) -> Option:
    """The option that an order of a local problem, with its live bytes, is for region ``index``.

    Its ops may take other times than those of the region that the order was found for.
    """
    order, live = found
    turn = local.barrier < 0
    split = len(order) if turn else order.index(local.barrier)
    region = chain.regions[index]
    ops = [local.ops[position] for position in order]
    forward = [op for op in ops[:split] if op >= 0]
    backward = [op for op in ops[split:] if op >= 0]
    again = forward
    kept = 0
    if not turn:
        at_barrier = live[split] - local.problem.workspace_bytes[local.barrier]
        kept = at_barrier - sum(local.problem.storage_bytes[s] for s in local.problem.outputs[local.barrier])
        leaving = set() if index + 1 == len(chain.regions) else set(chain.regions[index + 1].entering)
        again = _needed_later(whole, forward, backward, leaving)
    once = sum(whole.time_ns[op] for op in region.backward)
    first_once = sum(whole.time_ns[op] for op in region.forward)
    time_forward = sum(whole.time_ns[op] for op in forward)
    time_backward = sum(whole.time_ns[op] for op in backward)
    outside = local.entering_bytes
    return Option(
        kept_bytes=kept - outside if not turn else 0,
        forward_peak_bytes=max(live[:split], default=0) - outside,
        backward_peak_bytes=0 if turn else max(live[split:]) - outside,
        first_ns=max(time_forward + time_backward - once - first_once, 0),
        again_ns=sum(whole.time_ns[op] for op in again) + time_backward - once,
        forward_order=tuple(forward),
        forward_again=tuple(again),
        backward_order=tuple(backward),
    )


def _needed_later(whole: Problem, forward: Sequence[int], backward: Sequence[int], leaving: set[int]) -> list[int]:
    """Of the executions before the barrier those that make, directly or not, what is read after it or leaves."""
    wanted = set(leaving)
    made: set[int] = set()
    for op in backward:
        wanted.update(s for s in whole.inputs[op] if s not in made)
        made.update(whole.outputs[op])
    return list(needed_ops(whole, forward, wanted))


def pareto(options: Sequence[Option]) -> tuple[Option, ...]:
    """The options that no other one is at least as good as in all figures; the first of equal ones."""

    def figures(option: Option) -> tuple[int, ...]:
        return (
            option.again_ns,
            option.first_ns,
            option.kept_bytes,
            option.forward_peak_bytes,
            option.backward_peak_bytes,
        )

    best: list[Option] = []
    for option in sorted(options, key=figures):
        if not any(all(a <= b for a, b in zip(figures(other), figures(option), strict=True)) for other in best):
            best.append(option)
    return tuple(best)


class RegionOptions:
    """Turns and passes of all regions of a chain; regions that differ in nothing but times share what is searched."""

    def __init__(self, whole: Problem, chain: Chain, *, deadline: float = math.inf) -> None:
        """Search the distinct regions. The more there are, the fewer limits each is searched under.

        After ``deadline`` (``time.perf_counter``), regions not searched yet are run without recomputation inside.
        """
        self._orders: dict[tuple[object, ...], list[tuple[tuple[int, ...], list[int]]]] = {}
        count = len(chain.regions)
        jobs = [(i, turn) for i in range(count) for turn in (True, False) if turn or i + 1 < count]
        locals_ = {(i, turn): local_problem(whole, chain, i, turn=turn) for i, turn in jobs}
        distinct = len({_form(local) for local in locals_.values()})
        levels = min(_MOST_LEVELS, max(3, _LEVELS_IN_ALL // distinct))
        self.turns: list[tuple[Option, ...]] = [()] * count
        self.passes: list[tuple[Option, ...]] = [()] * count
        for (i, turn), local in locals_.items():
            form = _form(local)
            if form not in self._orders:
                late = time.perf_counter() > deadline
                keep_all = tuple(range(len(local.ops)))
                orders = [keep_all] if late else find_orders(local, levels=levels, deadline=deadline)
                live = LiveBytes(local.problem)
                self._orders[form] = [(order, live.during(order).tolist()) for order in dict.fromkeys(orders)]
            options = pareto([evaluate(whole, chain, i, local, found) for found in self._orders[form]])
            (self.turns if turn else self.passes)[i] = options


def _form(local: LocalProblem) -> tuple[object, ...]:
    """What two local problems have in common where they differ in times at most."""
    p = local.problem
    return (
        p.workspace_bytes,
        p.inputs,
        p.outputs,
        p.recomputable,
        p.storage_bytes,
        tuple(sorted(p.live_at_end)),
        p.forward_ops,
        local.barrier,
    )
