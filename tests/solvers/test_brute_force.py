import dataclasses
import heapq

import pytest

from solvers.brute_force import BruteForceSolver
from solvers.problem import Problem
from solvers.solution import Compute, Status
from solvers.validate import validate
from tests.problems import (
    keep_all_peak,
    known_cases,
    least_demand,
    random_chain,
    random_problem,
    reversal,
    reversal_time,
)

SOLVER = BruteForceSolver()
CASES = list(known_cases())


def plain_dijkstra(problem: Problem) -> int | None:
    """Least time over the same states with nothing clever: execute any op, or free any storage, one at a time."""
    count = len(problem.time_ns)
    best = {(0, frozenset()): 0}
    queue = [(0, 0, ())]
    while queue:
        elapsed, position, held = heapq.heappop(queue)
        resident = frozenset(held)
        if elapsed > best[position, resident]:
            continue
        if position == count and resident >= problem.live_at_end:
            return elapsed
        following = [(elapsed, position, resident - {storage}) for storage in resident]
        for op in range(min(position + 1, count)):
            made = problem.outputs[op]
            live = sum(problem.storage_bytes[s] for s in (*resident, *made)) + problem.workspace_bytes[op]
            allowed = op == position or problem.recomputable[op]
            if allowed and resident.issuperset(problem.inputs[op]) and live <= problem.capacity_bytes:
                arrival = elapsed + problem.time_ns[op]
                following.append((arrival, max(position, op + 1), resident.union(made)))
        for arrival, reached, then in following:
            if arrival < best.get((reached, then), arrival + 1):
                best[reached, then] = arrival
                heapq.heappush(queue, (arrival, reached, tuple(sorted(then))))
    return None


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_known_optima(case):
    solution = SOLVER.solve(case.problem)
    if case.order is None:
        assert solution.status is Status.INFEASIBLE
        assert not solution.steps
    else:
        assert solution.status is Status.OPTIMAL
        assert solution.step_time_ns == solution.lower_bound_ns == case.order
        validate(case.problem, solution)


@pytest.mark.parametrize("seed", range(60))
def test_finds_what_the_plain_search_finds(seed):
    problem = random_problem(seed, max_ops=6)
    solution = BruteForceSolver(find_floor=False).solve(problem)
    expected = plain_dijkstra(problem)
    if expected is None:
        assert solution.status is Status.INFEASIBLE
        assert solution.lower_bound_ns == problem.keep_all_time_ns
    else:
        assert solution.step_time_ns == expected
        validate(problem, solution)


def test_the_plain_comparison_meets_both_outcomes_and_recomputes():
    found = [(p, plain_dijkstra(p)) for p in (random_problem(seed, max_ops=6) for seed in range(60))]
    assert sum(least is None for _, least in found) >= 5
    assert sum(least is not None and least > p.keep_all_time_ns for p, least in found) >= 5


@pytest.mark.parametrize("seed", range(30))
def test_the_floor_is_the_least_feasible_budget(seed):
    problem = random_problem(seed, max_ops=6, budget=0.0)
    solution = SOLVER.solve(problem.with_budget(least_demand(problem) - 1))
    assert solution.status is Status.INFEASIBLE
    assert least_demand(problem) <= solution.floor_bytes <= keep_all_peak(problem)
    assert solution.floor_lower_bound_bytes == solution.floor_bytes
    assert f"{solution.floor_bytes:,} bytes" in solution.message
    assert SOLVER.solve(problem.with_budget(solution.floor_bytes)).status is Status.OPTIMAL
    assert plain_dijkstra(problem.with_budget(solution.floor_bytes)) is not None
    assert plain_dijkstra(problem.with_budget(solution.floor_bytes - 1)) is None


def test_the_floor_is_left_out_where_it_is_not_asked_for():
    problem = random_problem(1).with_budget(0)
    solution = BruteForceSolver(find_floor=False).solve(problem)
    assert solution.status is Status.INFEASIBLE
    assert solution.floor_bytes is None


@pytest.mark.parametrize(("length", "budget"), [(length, b) for length in range(2, 8) for b in range(2, length + 1)])
def test_chain_reversal(length, budget):
    expected = reversal_time(length, budget - 1)
    solution = SOLVER.solve(reversal(length, budget))
    assert (solution.step_time_ns if solution.status.has_plan else float("inf")) == expected
    if budget == 3:
        assert expected == length**2 // 4


def test_an_op_that_must_not_be_recomputed_is_not():
    free = random_chain(5, length=4, budget=0.2)
    pinned = dataclasses.replace(free, recomputable=(False,) + (True,) * 7)
    solution = SOLVER.solve(free)
    assert solution.steps.count(Compute(0)) > 1
    other = SOLVER.solve(pinned)
    assert not other.status.has_plan or other.steps.count(Compute(0)) == 1


def test_a_storage_made_beside_a_lost_one_is_made_again_with_it():
    """Op 0 makes a large and a small storage. The large one is read late, the small one twice: rebuilding the large one
    makes a second copy of the small one, for which there is room only if the first is dropped before."""
    problem = Problem(
        time_ns=(5, 1, 1),
        workspace_bytes=(0, 0, 0),
        inputs=((), (1,), (0, 1)),
        outputs=((0, 1), (2,), (3,)),
        recomputable=(True, True, True),
        storage_bytes=(10, 2, 9, 1),
        live_at_end=frozenset({3}),
        forward_ops=0,
        budget_bytes=13,
    )
    solution = SOLVER.solve(problem)
    validate(problem, solution)
    assert [step.op for step in solution.steps if isinstance(step, Compute)] == [0, 1, 0, 2]


def test_the_same_problem_gives_the_same_plan():
    for seed in range(10):
        problem = random_problem(seed)
        assert SOLVER.solve(problem).steps == SOLVER.solve(problem).steps


def test_gives_up_after_its_limit_of_states():
    problem = CASES[0].problem
    solution = BruteForceSolver(max_states=3).solve(problem)
    assert solution.status is Status.TIME_LIMIT
    assert "3 states" in solution.message
    assert solution.lower_bound_ns == problem.keep_all_time_ns


def test_gives_up_on_the_floor_after_its_limit_of_states():
    problem = random_problem(3, ops=9)
    assert BruteForceSolver(max_states=1).solve(problem.with_budget(0)).status is Status.TIME_LIMIT


def test_an_empty_problem():
    empty = Problem((), (), (), (), (), (), frozenset(), 0, 10, static_bytes=7)
    solution = SOLVER.solve(empty)
    assert (solution.status, solution.peak_bytes) == (Status.OPTIMAL, 7)
    validate(empty, solution)
    too_little = SOLVER.solve(empty.with_budget(6))
    assert (too_little.status, too_little.floor_bytes) == (Status.INFEASIBLE, 7)
