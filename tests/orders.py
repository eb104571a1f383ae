"""Other orders of a step's ops, for tests: problems in one, random ones, and the least peak of all of them."""

from __future__ import annotations

import random

from graphs.ir import TrainingGraph
from graphs.order import Precedence, precedence
from solvers.problem import Problem
from tests.problems import costs_of, graph_of


def reordered(problem: Problem, order: tuple[int, ...]) -> Problem:
    """The problem with its ops in another order, storages as they were."""
    graph, costs = graph_of(problem).in_order(order), costs_of(problem).in_order(order)
    return Problem.from_graph(graph, costs, problem.budget_bytes, static_bytes=problem.static_bytes)


def least_peak_of_all_orders(problem: Problem, known: Precedence) -> int:
    """Least keep-all peak over all orders: dynamic programming over the sets of ops that have run."""
    assert all(len(unit) == 1 for unit in known.units)
    needed = [sum(1 << u for u in earlier) for earlier in known.before]
    readers = [sum(1 << op for op in ops) for ops in problem.readers]

    def live(done: int) -> int:
        return sum(
            size
            for s, size in enumerate(problem.storage_bytes)
            if done >> problem.producer[s] & 1 and (s in problem.live_at_end or readers[s] & ~done)
        )

    peaks = {0: 0}
    for _ in known.units:
        following: dict[int, int] = {}
        for done, peak in peaks.items():
            before = live(done)
            for op, earlier in enumerate(needed):
                if done >> op & 1 or earlier & ~done:
                    continue
                running = before + sum(problem.storage_bytes[s] for s in problem.outputs[op])
                reached = max(peak, running + problem.workspace_bytes[op])
                following[done | 1 << op] = min(reached, following.get(done | 1 << op, reached))
        peaks = following
    (least,) = peaks.values()
    return problem.static_bytes + least


def random_order(graph: TrainingGraph, seed: int) -> tuple[int, ...]:
    """A random legal order of a captured graph."""
    rng, known = random.Random(seed), precedence(graph)
    waiting = [len(earlier) for earlier in known.before]
    ready, order = [u for u, count in enumerate(waiting) if not count], list[int]()
    while ready:
        unit = ready.pop(rng.randrange(len(ready)))
        order += known.units[unit]
        for other in known.after[unit]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return tuple(order)
