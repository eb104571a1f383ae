"""From the decisions of a moments model to an order of executions: produce what is missing right before its use."""

from __future__ import annotations

from collections.abc import Iterable

from solvers.moments_model import Decisions
from solvers.problem import Problem


def missing_ops(problem: Problem, storages: Iterable[int], resident: set[int]) -> list[int]:
    """Ops that must execute, in index order, so that ``storages`` are resident too, given what is resident now.

    Raises:
        ValueError: one of them may not be recomputed.

    """
    found: set[int] = set()
    stack = [s for s in storages if s not in resident]
    while stack:
        op = problem.producer[stack.pop()]
        if op not in found:
            if not problem.recomputable[op]:
                raise ValueError(f"{problem.describe_op(op)} (op {op}) is not recomputable, and its output was dropped")
            found.add(op)
            stack.extend(s for s in problem.inputs[op] if s not in resident)
    return sorted(found)


def just_in_time(problem: Problem, decisions: Decisions) -> tuple[int, ...]:
    """The order of executions that the decisions describe.

    Ops first execute in index order. Each moment drops what the decisions do not keep; a missing input is produced
    right before the op that reads it, with whatever that takes; what the next moment keeps is produced before it.
    With :func:`solvers.simulate.with_frees` the bytes live while a moment's op first executes are at most those of the
    decisions, and no op executes more often than they say, where every recomputation is bound to its interval.

    Raises:
        ValueError: the decisions drop something that is needed and cannot be recomputed.

    """
    order: list[int] = []
    resident: set[int] = set()

    def produce(storages: Iterable[int]) -> None:
        for s in storages:
            if s not in resident:
                for op in missing_ops(problem, (s,), resident):
                    order.append(op)
                    resident.update(problem.outputs[op])

    kept_at = dict(zip(decisions.moments, decisions.kept, strict=True))
    for op, inputs in enumerate(problem.inputs):
        if op in kept_at and op != decisions.moments[0]:
            produce(sorted(kept_at[op]))
        produce(inputs)
        order.append(op)
        if op in kept_at:
            resident.intersection_update(kept_at[op])
        resident.update(problem.outputs[op])
    produce(sorted(problem.live_at_end))
    return tuple(order)
