"""Which of the user's constraints leave no plan within a budget."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from graphs.constraints import is_from_user
from graphs.ir import TrainingGraph
from scheduler.units import format_bytes
from solvers.auto import AutoSolver
from solvers.problem import Problem

_MOST_TRIED: Final = 6  # one by one; each is a solve
_TIME_LIMIT_S: Final = 10.0  # of each


@dataclasses.dataclass(frozen=True, slots=True)
class Blame:
    """What :func:`blame` found.

    Attributes:
        binding: the constraints, as :mod:`graphs.constraints` names them, without which there is a plan: each by
            itself, or all together where only that helps; empty where they do not decide it.
        sentence: the same for a person; empty where the user has set none.

    """

    binding: tuple[str, ...] = ()
    sentence: str = ""


def blame(problem: Problem, graph: TrainingGraph) -> Blame:
    """Look for the constraints without which a problem that has no plan would have one.

    Args:
        problem: of the graph, without a plan within its budget.
        graph: says in its reasons what the user has asked for.

    """
    return blame_parts([(problem, graph)], lambda problems: _has_plan(problems[0]))


def blame_parts(
    parts: Sequence[tuple[Problem, TrainingGraph]], have_plans: Callable[[Sequence[Problem]], bool]
) -> Blame:
    """Look for the constraints without which problems that have no plans together would have them.

    Args:
        parts: each problem with its graph, as for :func:`blame`.
        have_plans: whether there are plans for such problems, in this order, once they are freed of constraints.

    """
    held: collections.Counter[str] = collections.Counter()
    for _, graph in parts:
        held.update(_bytes_held(graph))
    if not held:
        return Blame()

    def helps(*lifted: str) -> bool:
        return have_plans([_without(problem, graph, lifted) for problem, graph in parts])

    labels = sorted(held, key=lambda label: (-held[label], label))
    if not helps(*labels):
        return Blame(
            (), f"The constraints ({_listed(labels)}) do not decide it: no plan was found without them either."
        )
    alone = [label for label in labels[:_MOST_TRIED] if len(labels) > 1 and helps(label)]
    binding = tuple(alone or labels)
    named = " or ".join(f"{label} ({format_bytes(held[label])})" for label in alone) or _listed(labels)
    return Blame(binding, f"Within the budget there is a plan without {named}: lift that, or raise the budget.")


def _bytes_held(graph: TrainingGraph) -> dict[str, int]:
    """Bytes of the storages that each constraint of the user's is about."""
    held: dict[str, int] = {}
    for op in graph.ops:
        if is_from_user(op.reason):
            held[op.reason] = held.get(op.reason, 0) + sum(graph.storages[s].bytes for s in op.outputs)
    for storage in graph.storages:
        if is_from_user(storage.pinned):
            held.setdefault(storage.pinned, 0)
            if storage.producer is None or graph.ops[storage.producer].reason != storage.pinned:
                held[storage.pinned] += storage.bytes
    return held


def _without(problem: Problem, graph: TrainingGraph, labels: Iterable[str]) -> Problem:
    """The problem as it is without some constraints."""
    lifted = set(labels)
    free = tuple(may or op.reason in lifted for may, op in zip(problem.recomputable, graph.ops, strict=True))
    storages = tuple(dataclasses.replace(s, pinned="") if s.pinned in lifted else s for s in graph.storages)
    movable = Problem.movable_of(dataclasses.replace(graph, storages=storages))
    return dataclasses.replace(problem, recomputable=free, movable=movable if problem.movable is not None else None)


def _has_plan(problem: Problem) -> bool:
    return AutoSolver(time_limit_s=_TIME_LIMIT_S).solve(problem).status.has_plan


def _listed(labels: Iterable[str]) -> str:
    return " and ".join(labels)
