import dataclasses
import heapq
import random

import pytest

from solvers.brute_force import BruteForceSolver
from solvers.exact import ExactSolver
from solvers.problem import Problem
from solvers.solution import Compute, Status
from solvers.validate import validate
from tests.problems import (
    keep_all_peak,
    known_cases,
    least_demand,
    random_chain,
    random_problem,
    training_chain,
)

CASES = list(known_cases())


def staged_search(problem: Problem) -> int | None:
    """Least time of a staged schedule, by Dijkstra over (stage, next op that the stage may execute, resident)."""
    count = len(problem.time_ns)
    best = {(0, 0, frozenset()): 0}
    queue = [(0, 0, 0, ())]
    while queue:
        elapsed, stage, start, held = heapq.heappop(queue)
        resident = frozenset(held)
        if elapsed > best[stage, start, resident]:
            continue
        if stage == count and resident >= problem.live_at_end:
            return elapsed
        following = [(elapsed, stage, start, resident - {storage}) for storage in resident]
        for op in range(start, min(stage + 1, count)):
            made = problem.outputs[op]
            live = sum(problem.storage_bytes[s] for s in (*resident, *made)) + problem.workspace_bytes[op]
            allowed = op == stage or problem.recomputable[op]
            if allowed and resident.issuperset(problem.inputs[op]) and live <= problem.capacity_bytes:
                where = (stage + 1, 0) if op == stage else (stage, op + 1)
                following.append((elapsed + problem.time_ns[op], *where, resident.union(made)))
        for arrival, reached, then, holding in following:
            if arrival < best.get((reached, then, holding), arrival + 1):
                best[reached, then, holding] = arrival
                heapq.heappush(queue, (arrival, reached, then, tuple(sorted(holding))))
    return None


def assert_staged(solution) -> None:
    """Between two first executions ops run at most once, in order."""
    last = -1
    seen = -1
    for step in solution.steps:
        if isinstance(step, Compute):
            assert step.op > last
            last = -1 if step.op == seen + 1 else step.op
            seen = max(seen, step.op)


def assert_finds(problem: Problem, expected: int | None) -> None:
    solution = ExactSolver().solve(problem)
    assert solution.lower_bound_ns == problem.keep_all_time_ns
    if expected is None:
        assert solution.status is Status.INFEASIBLE
        assert not solution.steps
        assert "no staged schedule fits" in solution.message
    else:
        assert solution.status is Status.OPTIMAL
        assert solution.step_time_ns == expected
        assert f"staged optimum: {expected:,} ns" in solution.message
        assert_staged(solution)
        validate(problem, solution)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_known_staged_optima(case):
    assert_finds(case.problem, case.staged)


@pytest.mark.parametrize("seed", range(25))
def test_finds_what_a_search_over_staged_schedules_finds(seed):
    problem = random_problem(seed, max_ops=6)
    assert_finds(problem, staged_search(problem))


@pytest.mark.parametrize("seed", range(10))
def test_finds_what_a_search_finds_on_chains_with_gradients(seed):
    problem = random_chain(seed, length=3, budget=0.3)
    assert_finds(problem, staged_search(problem))


def test_staging_can_cost_time():
    problem = random_problem(39, plain=True)
    best, staged = BruteForceSolver().solve(problem), ExactSolver().solve(problem)
    assert staged.status is Status.OPTIMAL
    assert staged.step_time_ns > best.step_time_ns
    assert staged.lower_bound_ns <= best.step_time_ns
    validate(problem, staged)


@pytest.mark.parametrize("seed", [11, 12])
def test_staging_can_cost_every_plan(seed):
    problem = random_chain(seed, length=3, budget=0.0)
    assert BruteForceSolver().solve(problem).status is Status.OPTIMAL
    assert_finds(problem, None)
    assert staged_search(problem) is None


def test_a_storage_beside_a_lost_one_is_made_twice_and_counts_twice():
    """Op 0 makes 0 and 1. While op 2 runs there is no room for 0 (10 bytes), and 1 (2 bytes) is in use; making 0 again
    for op 3 makes 1 again. The old copy of 1, not needed any more, need not be there then."""
    problem = Problem(
        time_ns=(5, 1, 1, 1),
        workspace_bytes=(0, 0, 7, 0),
        inputs=((), (1,), (1, 2), (0, 3)),
        outputs=((0, 1), (2,), (3,), (4,)),
        recomputable=(True,) * 4,
        storage_bytes=(10, 2, 3, 1, 1),
        live_at_end=frozenset({1, 4}),
        forward_ops=0,
        budget_bytes=15,
    )
    assert_finds(problem, 13)
    assert_finds(problem, staged_search(problem))
    tight = dataclasses.replace(problem, recomputable=(False, True, True, True))
    assert_finds(tight, staged_search(tight))


def test_workspace_counts_while_its_op_runs():
    chain = training_chain(4, budget_bytes=5)
    scratch = dataclasses.replace(chain, workspace_bytes=(0, 0, 0, 0, 1, 0, 0, 0))
    assert_finds(chain, 8)
    assert_finds(scratch, staged_search(scratch))
    assert staged_search(scratch) > 8


def test_ops_that_must_not_be_recomputed_are_not():
    chain = training_chain(4, budget_bytes=3)
    assert ExactSolver().solve(chain).status is Status.OPTIMAL
    pinned = dataclasses.replace(chain, recomputable=(True, False, False, *[True] * 5))
    assert_finds(pinned, None)


def test_what_lives_to_the_end_may_be_made_again_after_the_last_op():
    """Op 1 has no room beside storage 0, which must be there in the end."""
    problem = Problem.from_single_outputs([3, 4], [5, 6], [[], []], 10, live_at_end=[0])
    assert_finds(problem, 10)


def test_static_bytes_are_part_of_the_budget():
    chain = dataclasses.replace(training_chain(4, budget_bytes=104), static_bytes=100)
    assert_finds(chain, 9)
    assert_finds(chain.with_budget(99), None)
    assert_finds(chain.with_budget(100), None)


def test_sizes_of_real_steps_are_scaled():
    """Bytes of tens of gigabytes and times of milliseconds, one byte over and under a threshold."""
    size, time = 9_876_543_211, 3_141_593
    chain = training_chain(4, activation_bytes=[size] * 4, gradient_bytes=size, time_ns=[time] * 4)
    chain = dataclasses.replace(chain, time_ns=(time,) * 8)
    assert_finds(chain.with_budget(4 * size), 9 * time)
    assert_finds(chain.with_budget(5 * size), 8 * time)
    assert ExactSolver().solve(chain.with_budget(5 * size - 1)).step_time_ns == 9 * time
    assert not ExactSolver().solve(chain.with_budget(3 * size - 1)).status.has_plan


@pytest.mark.parametrize("seed", range(6))
def test_budgets_are_met_to_the_byte(seed):
    """Sizes of gigabytes that differ by single bytes, under a budget that is what the best plan needs, or a byte less:
    far below the tolerance of the solver of the program."""
    rng = random.Random(seed)
    small = random_problem(seed, max_ops=6, budget=0.3)
    problem = dataclasses.replace(
        small,
        storage_bytes=tuple(size * 10**9 + rng.randint(0, 50) for size in small.storage_bytes),
        workspace_bytes=tuple(size * 10**9 for size in small.workspace_bytes),
        static_bytes=small.static_bytes * 10**9,
    )
    problem = problem.with_budget(BruteForceSolver().solve(problem.with_budget(0)).floor_bytes)
    assert_finds(problem, staged_search(problem))
    less = problem.with_budget(problem.budget_bytes - 1)
    impossible = ExactSolver().solve(less)  # it may not find that out, but must not find a plan
    assert impossible.status in {Status.INFEASIBLE, Status.TIME_LIMIT}
    assert not impossible.steps


def test_a_gap_is_kept_and_named():
    problem = random_chain(4, length=4, budget=0.2)
    best = ExactSolver().solve(problem)
    loose = ExactSolver(gap=0.5).solve(problem)
    assert loose.step_time_ns <= best.step_time_ns + 0.5 * problem.keep_all_time_ns
    assert "within 50.000%" in loose.message
    validate(problem, loose)


def test_no_time_gives_no_plan_and_says_so():
    problem = random_problem(3, ops=40, max_ops=40, budget=0.2)
    solution = ExactSolver(time_limit_s=0.01).solve(problem)
    assert solution.status is Status.TIME_LIMIT
    assert "no staged schedule found in" in solution.message


def test_the_same_problem_gives_the_same_plan():
    for seed in range(3):
        problem = random_problem(seed, budget=0.4)
        assert ExactSolver().solve(problem).steps == ExactSolver().solve(problem).steps


def test_problems_without_anything_to_decide():
    empty = Problem((), (), (), (), (), (), frozenset(), 0, 10, static_bytes=7)
    assert ExactSolver().solve(empty).status is Status.OPTIMAL
    free = random_problem(2, plain=True)
    assert_finds(dataclasses.replace(free, time_ns=(0,) * len(free.time_ns)).with_budget(keep_all_peak(free)), 0)
    assert_finds(free.with_budget(least_demand(free) - 1), None)
