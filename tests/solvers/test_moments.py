import dataclasses
import math
import random

import pytest

from solvers import AutoSolver, Compute, MomentsSolver, Problem, Status, compute_order, simulate, with_frees
from solvers.brute_force import BruteForceSolver
from solvers.extract import just_in_time, missing_ops
from solvers.milp import MilpStatus
from solvers.moments_model import Decisions, MomentsModel
from solvers.store_all import StoreAllSolver, keep_all_peak_op
from solvers.validate import validate
from tests.problems import keep_all_peak, known_cases, random_chain, random_problem, training_chain

CASES = list(known_cases())


def induced_point(problem, moments, steps):
    """S, X and Y of a schedule, by their definitions; see solvers/moments_model.py."""
    order = compute_order(steps)
    first = {op: order.index(op) for op in set(order)}
    resident: set[int] = set()
    resident_at = {}
    position = 0
    for step in steps:
        if isinstance(step, Compute):
            resident_at[position] = set(resident)
            resident |= set(problem.outputs[step.op])
            position += 1
        else:
            resident.discard(step.storage)
    ends = [first[m] for m in moments[1:]] + [len(order)]
    kept = [resident_at[first[m]] for m in moments]
    redone = [set(order[first[m] + 1 : end]) for m, end in zip(moments, ends, strict=True)]
    return kept, redone


class EverythingKept(MomentsModel):
    """The model before presolve: every candidate may be kept."""

    def _passing(self, k, candidates):
        return {}


def assert_feasible_and_no_dearer(problem, moments, steps):
    """The point that the schedule induces satisfies every row of the model, and costs no more than it recomputes."""
    model = EverythingKept(problem, moments, problem.capacity_bytes)
    assert model.feasible
    kept, redone = induced_point(problem, moments, steps)
    values = [0.0] * model.milp.columns
    for k, p in enumerate(moments):
        for s, column in model._keep[k].items():
            values[column] = float(s in kept[k] or problem.storage_bytes[s] == 0)
        later = set().union(*redone[k:])
        for op, column in model._redo_later[k].items():
            values[column] = float(op in later and op < p)
        for op, column in model._redo[k].items():
            values[column] = float(op in redone[k] and op < p)
    activity = [0.0] * model.milp.rows
    for row, column, factor in zip(model.milp._row_of, model.milp._column_of, model.milp._coefficient, strict=True):
        activity[row] += factor * values[column]
    assert all(a >= low - 1e-9 for a, low in zip(activity, model.milp._row_lower, strict=True))
    assert all(v >= low for v, low in zip(values, model.milp._lower, strict=True))
    cost = sum(c * v for c, v in zip(model.milp._cost, values, strict=True))
    added = simulate(problem, steps).step_time_ns - problem.keep_all_time_ns
    assert cost <= 100.0 * added / max(problem.keep_all_time_ns, 1) + 1e-9


@pytest.mark.parametrize("seed", range(60))
def test_every_optimal_schedule_induces_a_feasible_point_of_no_greater_cost(seed):
    problem = random_problem(seed) if seed % 2 else random_chain(seed)
    solution = BruteForceSolver(find_floor=False).solve(problem)
    if not solution.status.has_plan:
        assert solution.status is Status.INFEASIBLE
        return
    last = len(problem.time_ns)
    for moments in ((keep_all_peak_op(problem),), tuple(range(last)), tuple(range(0, last, 2)), (last - 1,)):
        assert_feasible_and_no_dearer(problem, moments, solution.steps)


def passing_problem(seed):
    """A problem in which many storages are read by one op only, whose result is no larger."""
    draw = random.Random(seed)
    count = draw.randrange(5, 9)
    inputs = [[]] + [sorted({v - 1, draw.randrange(v)} if draw.random() < 0.4 else {v - 1}) for v in range(1, count)]
    sizes = [draw.randrange(1, 6) for _ in range(count)]
    inputs += [[count - 1, *([draw.randrange(count)] if draw.random() < 0.6 else [])] for _ in range(2)]
    times = [draw.randrange(1, 9) for _ in inputs]
    problem = Problem.from_single_outputs(times, [*sizes, 1, 1], [sorted(set(i)) for i in inputs], 0)
    peak = StoreAllSolver().solve(problem.with_budget(10**9)).peak_bytes
    return problem.with_budget(max(1, int(peak * draw.uniform(0.5, 0.95))))


def least_cost(model):
    return model.milp.solve(absolute_gap=0.0, time_limit_s=30).objective if model.feasible else math.inf


def test_leaving_out_what_only_passes_on_changes_no_optimum():
    smaller = 0
    for seed in range(150):
        problem = passing_problem(seed)
        last = len(problem.time_ns)
        optimum = BruteForceSolver(find_floor=False).solve(problem)
        for moments in ((keep_all_peak_op(problem),), (last - 1,), tuple(range(0, last, 2)), tuple(range(last))):
            whole = EverythingKept(problem, moments, problem.capacity_bytes)
            model = MomentsModel(problem, moments, problem.capacity_bytes)
            smaller += model.milp.columns < whole.milp.columns
            assert model.feasible == whole.feasible
            cost, before = least_cost(model), least_cost(whole)
            assert cost >= before - 1e-6
            if len(moments) == 1:
                assert cost == pytest.approx(before, abs=1e-6)
            if optimum.status.has_plan:
                added = 100.0 * (optimum.step_time_ns / problem.keep_all_time_ns - 1)
                assert cost <= added + 1e-6
    assert smaller > 150


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_known_cases(case):
    solution = MomentsSolver(gap=0.0).solve(case.problem)
    if case.order is None:
        assert not solution.status.has_plan
        return
    assert solution.lower_bound_ns <= case.order
    assert solution.status.has_plan
    assert solution.step_time_ns >= case.order
    validate(case.problem, solution)


def test_known_cases_are_mostly_optimal():
    optimal = [MomentsSolver(gap=0.0).solve(c.problem).step_time_ns == c.order for c in CASES if c.order is not None]
    assert sum(optimal) >= len(optimal) - 2


@pytest.mark.parametrize("seed", range(40))
def test_bound_and_plan_enclose_the_optimum(seed):
    problem = random_problem(1000 + seed)
    best = BruteForceSolver(find_floor=False).solve(problem)
    solution = MomentsSolver(gap=0.0).solve(problem)
    if best.status is Status.INFEASIBLE:
        assert not solution.status.has_plan
        return
    assert solution.status is not Status.INFEASIBLE
    assert solution.lower_bound_ns <= best.step_time_ns
    if solution.status.has_plan:
        assert solution.step_time_ns >= best.step_time_ns
        validate(problem, solution)


def test_keeping_all_is_optimal_where_it_fits():
    problem = training_chain(6)
    solution = MomentsSolver().solve(problem.with_budget(keep_all_peak(problem)))
    assert (solution.status, solution.step_time_ns) == (Status.OPTIMAL, problem.keep_all_time_ns)


def test_same_problem_same_plan():
    problem = random_chain(3, length=30, budget=0.3)
    assert MomentsSolver().solve(problem).steps == MomentsSolver().solve(problem).steps


def test_infeasible_names_the_op():
    problem = dataclasses.replace(training_chain(4), budget_bytes=1, op_names=tuple("abcdefgh"))
    solution = MomentsSolver().solve(problem)
    assert solution.status is Status.INFEASIBLE
    assert "proven" in solution.message


def test_storages_are_modelled_apart_from_ops():
    """An op with a large output that dies and a small one that lives to the end: only the small one stays."""
    layers = 6
    inputs = [(2 * i - 2,) if i else () for i in range(layers)]
    inputs += [tuple({2 * i, *((2 * layers + layers - 2 - i,) if i < layers - 1 else ())}) for i in range(layers)][::-1]
    problem = Problem(
        time_ns=(10,) * (2 * layers),
        workspace_bytes=(0,) * (2 * layers),
        inputs=tuple(tuple(sorted(i)) for i in inputs),
        outputs=(*((2 * i, 2 * i + 1) for i in range(layers)), *((2 * layers + i,) for i in range(layers))),
        recomputable=(True,) * (2 * layers),
        storage_bytes=(*([100, 1] * layers), *([10] * layers)),
        live_at_end=frozenset(2 * i + 1 for i in range(layers)),
        forward_ops=layers,
        budget_bytes=400,
    )
    solution = AutoSolver().solve(problem)
    assert solution.status.has_plan
    assert solution.peak_bytes <= 400
    assert solution.step_time_ns < 1.6 * problem.keep_all_time_ns


def test_decisions_are_carried_out_just_in_time():
    problem = training_chain(3)  # f0 f1 f2 b2 b1 b0; storage i is made by op i
    decisions = Decisions((3,), (frozenset({1, 2}),), (frozenset({0}),))
    order = just_in_time(problem, decisions)
    assert order in {(0, 1, 2, 3, 0, 4, 5), (0, 1, 2, 3, 4, 0, 5)}
    simulate(problem, with_frees(problem, order))


def test_missing_ops_are_the_lost_ancestors_in_order():
    problem = training_chain(4)
    assert missing_ops(problem, (3,), {1}) == [2, 3]
    assert missing_ops(problem, (3,), {3}) == []
    fixed = dataclasses.replace(problem, recomputable=(True, True, False, *([True] * 5)))
    with pytest.raises(ValueError, match="not recomputable"):
        missing_ops(fixed, (3,), {1})


def test_infeasible_model_is_seen_before_it_is_solved():
    problem = training_chain(3)
    assert not MomentsModel(problem, (2,), 1).feasible
    model = MomentsModel(problem, (2,), 10)
    assert model.milp.solve(time_limit_s=5).status is MilpStatus.SOLVED


@pytest.mark.parametrize("seed", range(24))
def test_fixing_what_the_relaxation_decides_keeps_bound_and_optimum(seed, monkeypatch):
    monkeypatch.setattr("solvers.moments_search._FEW_COLUMNS", 0)
    problem = random_chain(seed) if seed % 2 else random_problem(seed)
    optimum = BruteForceSolver(find_floor=False).solve(problem)
    found = MomentsSolver(gap=0.02).solve(problem)
    if optimum.status is Status.INFEASIBLE:
        assert not found.status.has_plan
        return
    assert found.status is not Status.INFEASIBLE
    assert found.lower_bound_ns <= optimum.step_time_ns
    if found.status.has_plan:
        validate(problem, found)
        assert found.step_time_ns >= optimum.step_time_ns
