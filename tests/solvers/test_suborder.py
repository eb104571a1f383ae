import pytest

from solvers import ExactSolver, simulate, with_frees
from solvers.live import LiveBytes
from solvers.problem import Problem
from solvers.suborder import Superorder, best_suborder
from tests.problems import keep_all_peak, random_problem, training_chain


def _superorder(problem: Problem, ops, known) -> Superorder:
    """All but first executions optional."""
    due = 0
    optional = []
    for op in ops:
        optional.append(op != due)
        due += op == due
    return Superorder(tuple(ops), tuple(optional), tuple(known))


def _staged(problem: Problem) -> Superorder:
    """Every op once, in index order, before each first execution and after the last one."""
    count = len(problem.time_ns)
    ops = [i for t in range(count + 1) for i in range(min(t + 1, count)) if i == t or problem.recomputable[i]]
    due = 0
    known = []
    for op in ops:
        known.append(op == due)
        due += op == due
    return _superorder(problem, ops, known)


@pytest.mark.parametrize("seed", range(15))
def test_all_staged_schedules_hold_the_staged_optimum(seed):
    problem = random_problem(seed, ops=8, budget=seed % 5 / 8)
    exact = ExactSolver().solve(problem)
    found = best_suborder(problem, _staged(problem))
    assert found.proven
    assert (found.ops is not None) == exact.status.has_plan
    if found.ops is not None:
        figures = simulate(problem, with_frees(problem, found.ops))
        assert figures.step_time_ns == exact.step_time_ns
        assert figures.peak_bytes <= problem.budget_bytes


def test_keeps_what_the_budget_needs_and_leaves_out_the_rest():
    problem = training_chain(5)
    order = (0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 0, 1, 2, 7, 0, 1, 8, 0, 9)
    superorder = _superorder(problem, order, [True] * len(order))
    assert best_suborder(problem.with_budget(keep_all_peak(problem)), superorder).ops == tuple(range(10))
    lean = best_suborder(problem.with_budget(4), superorder).ops
    assert lean is not None
    assert set(lean) == set(order)
    assert simulate(problem, with_frees(problem, lean)).peak_bytes <= 4


def test_one_recomputation_takes_the_place_of_another():
    """While op 2 runs one of two storages can be held; the known plan makes the dear one again."""
    problem = Problem.from_single_outputs([9, 1, 0, 0, 0], [2, 2, 3, 0, 0], [[], [], [], [0], [1]], 5)
    known = (True, True, True, True, True, False, True)
    found = best_suborder(problem, _superorder(problem, (0, 1, 2, 0, 3, 1, 4), known))
    assert found.proven
    assert found.ops == (0, 1, 2, 3, 1, 4)


@pytest.mark.parametrize("seed", range(5))
def test_storages_left_out_take_nothing(seed):
    problem = random_problem(seed, ops=12)
    order = range(12)
    live = LiveBytes(problem)
    everything = range(len(problem.storage_bytes))
    assert live.during(order, leaving_out=everything).tolist() == list(problem.workspace_bytes)
    some = [s for s in everything if s % 2]
    rest = [s for s in everything if not s % 2]
    halves = live.during(order, leaving_out=some) + live.during(order, leaving_out=rest)
    assert (halves - problem.workspace_bytes == live.during(order)).all()
