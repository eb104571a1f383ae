"""Every solver against exhaustive search on hundreds of random graphs, and the simulator against the validator.

What must hold on each: bound ≤ optimum ≤ plan, and no infeasibility is claimed where a schedule exists. How often the
bounds and plans *equal* the optimum is counted, logged and recorded in the test report; floors under these rates guard
against solvers that silently become weak.
"""

import functools
import logging
from collections import Counter

import pytest
from hypothesis import given, settings

from solvers.auto import AutoSolver
from solvers.brute_force import BruteForceSolver
from solvers.exact import ExactSolver
from solvers.moments import MomentsSolver
from solvers.problem import Problem
from solvers.simulate import simulate
from solvers.solution import Solution, Status
from solvers.state_search import StateSearchSolver
from solvers.validate import InvalidPlan, validate
from tests.problems import GRAPH_SHAPES, random_chain, random_problem, schedules

logger = logging.getLogger(__name__)

SHAPES = {
    **GRAPH_SHAPES,
    # Small ones for the exact solver, whose program has hundreds of rows at nine ops already.
    "general, small": lambda seed: random_problem(seed, max_ops=6),
    "single outputs, small": lambda seed: random_problem(seed, max_ops=6, plain=True),
    "training chain, small": lambda seed: random_chain(seed, length=3),
}
SMALL = [shape for shape in SHAPES if shape.endswith("small")]
LARGE = [shape for shape in SHAPES if shape not in SMALL]
GRAPHS_PER_SHAPE = 100


@functools.cache
def graphs(shape: str, first: int, count: int) -> tuple[tuple[Problem, Solution], ...]:
    """Random problems of a shape with their optimum."""
    oracle = BruteForceSolver()
    problems = [SHAPES[shape](seed) for seed in range(first, first + count)]
    return tuple((problem, oracle.solve(problem)) for problem in problems)


def compare(problem: Problem, best: Solution, found: Solution) -> list[str]:
    """Assert what must hold of a solver's answer, and say which of the things that may hold do."""
    facts = [found.status.value]
    if best.status is Status.INFEASIBLE:
        assert not found.status.has_plan, "a plan where none exists"
        facts.append("nothing to find")
        if found.floor_bytes is not None:
            assert found.floor_lower_bound_bytes <= best.floor_bytes <= found.floor_bytes
            facts.append("floor equal" if found.floor_bytes == best.floor_bytes else "floor above")
        return facts
    validate(problem, best)
    optimum = best.step_time_ns
    assert found.lower_bound_ns <= optimum, "the lower bound is above the optimum"
    facts.append("bound equal" if found.lower_bound_ns == optimum else "bound below")
    if found.status.has_plan:
        validate(problem, found)
        assert found.step_time_ns >= optimum
        assert found.lower_bound_ns <= found.step_time_ns
        facts.append("plan equal" if found.step_time_ns == optimum else "plan above")
    else:
        assert "no schedule fits" not in found.message
        facts.append("no plan")
    return facts


def campaign(solver, shape: str, first: int, count: int, record) -> Counter:
    """Compare on ``count`` graphs of a shape; log and record how often what held."""
    facts = Counter()
    for seed, (problem, best) in enumerate(graphs(shape, first, count), first):
        try:
            facts.update(compare(problem, best, solver.solve(problem)))
        except (AssertionError, InvalidPlan) as error:
            raise AssertionError(f"{shape}, seed {seed}: {error}") from error
    facts["feasible"] = sum(best.status.has_plan for _, best in graphs(shape, first, count))
    facts["recomputing"] = sum(best.step_time_ns > p.keep_all_time_ns for p, best in graphs(shape, first, count))
    logger.info("%s on %d graphs (%s): %s", type(solver).__name__, count, shape, dict(facts))
    record(f"{type(solver).__name__}, {shape}", dict(facts))
    return facts


@pytest.mark.parametrize("shape", SHAPES)
def test_the_graphs_leave_something_to_decide(shape):
    drawn = graphs(shape, 0, GRAPHS_PER_SHAPE)
    assert len({problem for problem, _ in drawn}) == GRAPHS_PER_SHAPE
    assert sum(best.step_time_ns > problem.keep_all_time_ns for problem, best in drawn) > GRAPHS_PER_SHAPE / 3


# Rates measured over 100 graphs each; the floors below leave room for another version of HiGHS.
@pytest.mark.parametrize("shape", LARGE)
def test_bound_optimum_plan(shape, record_property):
    facts = campaign(MomentsSolver(gap=0.0), shape, 0, GRAPHS_PER_SHAPE, record_property)
    assert facts["bound equal"] >= 0.85 * facts["feasible"]
    assert facts["plan equal"] >= 0.85 * facts["feasible"]


def assert_always_optimal(facts: Counter) -> None:
    """Equal cost and proof wherever there is a schedule, and a proof that there is none elsewhere."""
    assert facts["plan equal"] == facts["bound equal"] == facts["optimal"] == facts["feasible"]
    assert facts["infeasible"] == facts["nothing to find"]


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize(
    ("solver", "count"), [(StateSearchSolver(), 50), (AutoSolver(), 25)], ids=["StateSearchSolver-50", "AutoSolver-25"]
)
def test_always_optimal(solver, count, shape, record_property):
    assert_always_optimal(campaign(solver, shape, 0, count, record_property))


@pytest.mark.parametrize("shape", SMALL)
def test_the_staged_optimum_is_no_better_than_the_optimum_and_mostly_as_good(shape, record_property):
    facts = campaign(ExactSolver(), shape, 0, GRAPHS_PER_SHAPE, record_property)
    assert facts["plan equal"] >= 0.9 * facts["feasible"]


def test_optimal_within_a_gap_is_within_that_gap():
    gap = 0.05
    for shape in LARGE:
        for problem, best in graphs(shape, 0, 10):
            found = AutoSolver(gap=gap).solve(problem)
            if found.status is Status.OPTIMAL:
                assert found.step_time_ns <= (1 + gap) * best.step_time_ns
                assert found.gap <= gap


@pytest.mark.parametrize("solver", [MomentsSolver(), AutoSolver()], ids=lambda s: type(s).__name__)
def test_the_same_problem_gives_the_same_plan(solver):
    for shape in LARGE:
        for problem, _ in graphs(shape, 0, 5):
            first, second = solver.solve(problem), solver.solve(problem)
            assert (first.steps, first.status, first.lower_bound_ns) == (
                second.steps,
                second.status,
                second.lower_bound_ns,
            )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", LARGE)
def test_bound_optimum_plan_on_thousands_of_graphs(shape, record_property):
    facts = campaign(MomentsSolver(gap=0.0), shape, 100_000, 750, record_property)
    assert facts["bound equal"] >= 0.85 * facts["feasible"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("solver", [StateSearchSolver(), AutoSolver(), AutoSolver(gap=0.0)], ids=str)
def test_always_optimal_on_thousands_of_graphs(solver, shape, record_property):
    assert_always_optimal(campaign(solver, shape, 100_000, 750, record_property))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", LARGE)
def test_the_staged_optimum_on_hundreds_of_larger_graphs(shape, record_property):
    facts = campaign(ExactSolver(), shape, 100_000, 150, record_property)
    assert facts["plan equal"] >= 0.9 * facts["feasible"]


# Simulator against validator: two implementations of the same rules, on legal and on spoilt schedules


@given(case=schedules())
@settings(max_examples=200, deadline=None)
def test_simulator_and_validator_agree(case):
    problem, steps = case
    roomy = problem.with_budget(10**6)
    try:
        figures = simulate(problem, steps)
    except ValueError:
        figures = None
    claim = Solution(
        status=Status.FEASIBLE,
        steps=steps,
        step_time_ns=figures.step_time_ns if figures else 0,
        peak_bytes=figures.peak_bytes if figures else 0,
        lower_bound_ns=0,
        solver="test",
    )
    if figures is None:
        with pytest.raises(InvalidPlan, match=r"^(?!the plan states)"):
            validate(roomy, claim)
        return
    validate(roomy, claim)
    validate(problem.with_budget(figures.peak_bytes), claim)
    with pytest.raises(InvalidPlan, match="over the budget"):
        validate(problem.with_budget(figures.peak_bytes - 1), claim)
    assert max(figures.live_bytes, default=problem.static_bytes) == figures.peak_bytes


def test_spoilt_schedules_are_drawn_as_well_as_legal_ones():
    """The property above would be empty if the random schedules were all of one kind."""
    seen = Counter()

    @given(case=schedules())
    @settings(max_examples=100, deadline=None, database=None, derandomize=True)
    def look(case):
        problem, steps = case
        try:
            simulate(problem, steps)
        except ValueError:
            seen["illegal"] += 1
        else:
            seen["legal, recomputing" if len(steps) > 2 * len(problem.time_ns) else "legal"] += 1

    look()
    assert min(seen["illegal"], seen["legal"], seen["legal, recomputing"]) >= 5
