"""Each reason for which the validator refuses a plan has an error planted here that it catches."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings

from graphs.errors import CheckpointSchedulerError
from solvers.brute_force import BruteForceSolver
from solvers.problem import Problem
from solvers.solution import Compute, Free, Solution, Status
from solvers.validate import InvalidPlan, validate
from tests.problems import problems, random_chain, random_problem, schedules

# op        0 (makes 0, 1)   1 (reads 0, makes 2)   2 (reads 1 and 2, makes 3)   3 (reads 3 and 0, makes 4)
# bytes     10 + 20          30                     40                           50
# static 100; op 1 has 5 bytes of workspace; op 2 must not be recomputed; storages 2 and 4 live to the end
PROBLEM = Problem(
    time_ns=(1, 20, 300, 4000),
    workspace_bytes=(0, 5, 0, 0),
    inputs=((), (0,), (1, 2), (0, 3)),
    outputs=((0, 1), (2,), (3,), (4,)),
    recomputable=(True, True, False, True),
    storage_bytes=(10, 20, 30, 40, 50),
    live_at_end=frozenset({2, 4}),
    forward_ops=2,
    budget_bytes=1000,
    static_bytes=100,
    op_names=("zero", "one", "two", "three"),
    op_modules=("", "", "h.0.mlp", ""),
)

KEEP_ALL = (
    Compute(0),  # 100 + 10 + 20
    Compute(1),  # 100 + 10 + 20 + 30 + 5
    Compute(2),  # 100 + 10 + 20 + 30 + 40
    Free(1),
    Compute(3),  # 100 + 10 + 30 + 40 + 50 = 230, the peak
    Free(0),
    Free(3),
)

REBUILD = (
    Compute(0),
    Free(1),
    Compute(1),
    Free(0),
    Compute(0),  # 100 + 30 + 10 + 20: storages 0 and 1 again
    Compute(2),  # 100 + 30 + 10 + 20 + 40 = 200
    Free(1),
    Free(2),
    Compute(1),  # 100 + 10 + 40 + 30 + 5
    Compute(3),  # 100 + 10 + 40 + 30 + 50 = 230
)


def plan(steps=KEEP_ALL, **changes) -> Solution:
    """The keep-all plan with true figures, or a variant of it."""
    fields = {
        "status": Status.OPTIMAL,
        "steps": tuple(steps),
        "step_time_ns": 4321,
        "peak_bytes": 230,
        "lower_bound_ns": 4321,
        "solver": "test",
    }
    return Solution(**{**fields, **changes})


def refused(reason: str, solution: Solution, problem: Problem = PROBLEM) -> None:
    with pytest.raises(InvalidPlan, match=reason):
        validate(problem, solution)


def edited(position: int, *steps, remove: int = 0) -> tuple:
    """Keep-all with ``steps`` in the place of ``remove`` of its steps."""
    return KEEP_ALL[:position] + steps + KEEP_ALL[position + remove :]


# Plans that are right


def test_the_keep_all_plan_is_accepted():
    assert validate(PROBLEM, plan()) is None


def test_a_plan_that_recomputes_is_accepted():
    validate(PROBLEM, plan(REBUILD, status=Status.FEASIBLE, step_time_ns=4321 + 1 + 20, lower_bound_ns=4321))


def test_a_budget_met_exactly_is_accepted():
    validate(PROBLEM.with_budget(230), plan())


def test_storages_may_stay_when_nothing_needs_them():
    steps = tuple(step for step in KEEP_ALL if isinstance(step, Compute))
    validate(PROBLEM, plan(steps, peak_bytes=250))


def test_a_lower_bound_below_the_step_time_is_accepted():
    validate(PROBLEM, plan(status=Status.FEASIBLE, lower_bound_ns=0))


def test_what_must_live_to_the_end_may_be_dropped_and_made_again():
    steps = (*KEEP_ALL[:4], Free(2), Compute(1), *KEEP_ALL[4:])
    validate(PROBLEM, plan(steps, step_time_ns=4341))


def test_an_empty_problem_has_an_empty_plan():
    empty = Problem((), (), (), (), (), (), frozenset(), 0, 10, static_bytes=7)
    validate(empty, Solution(Status.OPTIMAL, (), 0, 7, 0, "test"))


# Status


@pytest.mark.parametrize("status", [Status.INFEASIBLE, Status.TIME_LIMIT])
def test_a_status_without_plan_is_refused(status):
    refused(f"status {status} carries no plan", plan(status=status))


# Compute


@pytest.mark.parametrize("op", [-1, 4, 99])
def test_an_unknown_op_is_refused(op):
    refused(rf"step 2 executes op {op}; the problem has ops 0 to 3", plan(edited(2, Compute(op))))


def test_a_first_execution_out_of_order_is_refused():
    problem = dataclasses.replace(PROBLEM, inputs=((), (), (), ()))
    steps = (Compute(0), Compute(2), Compute(1), Compute(3))
    refused("step 1 executes two in h.0.mlp for the first time before one", plan(steps), problem)


def test_a_skipped_op_is_refused():
    problem = dataclasses.replace(PROBLEM, inputs=((), (), (), ()))
    refused("step 2 executes three for the first time before two", plan((Compute(0), Compute(1), Compute(3))), problem)


def test_recomputing_what_must_not_be_recomputed_is_refused():
    steps = edited(3, Compute(2))
    refused("step 3 executes two in h.0.mlp again, which must not be recomputed", plan(steps))


def test_recomputing_it_after_its_output_was_freed_is_refused():
    steps = edited(3, Free(3), Compute(2))
    refused("step 4 executes two in h.0.mlp again", plan(steps))


def test_an_input_that_was_freed_is_refused():
    refused(r"step 2 \(one\) reads storages \[0\], which are not resident", plan(edited(1, Free(0))))


def test_an_input_freed_before_a_recompute_is_refused():
    steps = (*KEEP_ALL[:4], Free(0), Compute(1))
    refused(r"step 5 \(one\) reads storages \[0\]", plan(steps))


def test_all_missing_inputs_are_named():
    refused(r"reads storages \[1, 2\]", plan((Compute(0), Compute(1), Free(1), Free(2), Compute(2))))


# Free


def test_freeing_twice_is_refused():
    refused("step 4 frees storage 1, which is not resident", plan(edited(4, Free(1))))


def test_freeing_before_production_is_refused():
    refused("step 0 frees storage 0, which is not resident", plan(edited(0, Free(0))))


@pytest.mark.parametrize("storage", [-1, 5])
def test_freeing_an_unknown_storage_is_refused(storage):
    refused(f"step 1 frees storage {storage}, which is not resident", plan(edited(1, Free(storage))))


def test_a_step_of_an_unknown_kind_is_refused():
    refused("step 1 is 'compute', which is no step", plan(edited(1, "compute")))


# Budget: one byte less than is live, for each kind of bytes that counts


def test_inputs_outputs_and_static_bytes_count():
    refused(r"step 4 \(three\) has 230 bytes live, 1 over the budget of 229", plan(), PROBLEM.with_budget(229))


def test_workspace_counts_while_the_op_runs():
    steps = (Compute(0), Compute(1))
    refused(r"step 1 \(one\) has 165 bytes live, 1 over", plan(steps), PROBLEM.with_budget(164))


def test_workspace_is_gone_when_the_op_has_ended():
    problem = dataclasses.replace(PROBLEM, workspace_bytes=(0, 100, 0, 0))
    validate(problem, plan(peak_bytes=260))
    validate(dataclasses.replace(PROBLEM, workspace_bytes=(0, 70, 0, 0)), plan(peak_bytes=230))


def test_every_output_counts_even_one_that_is_freed_at_once():
    refused(r"step 0 \(zero\) has 130 bytes live", plan((Compute(0), Free(1))), PROBLEM.with_budget(129))


def test_a_second_copy_counts_while_it_is_made():
    steps = (Compute(0), Compute(0), *KEEP_ALL[1:])
    problem = dataclasses.replace(PROBLEM, storage_bytes=(100, 20, 30, 40, 50))
    made_again = 100 + 120 + 120
    validate(problem, plan(steps, step_time_ns=4322, peak_bytes=made_again))
    refused(r"step 1 \(zero\) has 340 bytes live, 1 over", plan(steps), problem.with_budget(made_again - 1))


def test_the_second_copy_replaces_the_first():
    """After recomputing op 0 twice, keep-all has the peak it always had: nothing piles up."""
    steps = (Compute(0), Compute(0), Compute(0), *KEEP_ALL[1:])
    validate(PROBLEM, plan(steps, step_time_ns=4323, peak_bytes=230))


def test_static_bytes_alone_can_be_over_the_budget():
    empty = Problem((), (), (), (), (), (), frozenset(), 0, 10, static_bytes=11)
    refused("static storages alone take 11 bytes", Solution(Status.OPTIMAL, (), 0, 11, 0, "test"), empty)


# The end


@pytest.mark.parametrize(("steps", "name"), [(KEEP_ALL[:4], "three"), (KEEP_ALL[:1], "one"), ((), "zero")])
def test_an_op_that_never_runs_is_refused(steps, name):
    refused(f"ends before {name} has run", plan(steps))


@pytest.mark.parametrize("storage", [2, 4])
def test_dropping_what_must_live_to_the_end_is_refused(storage):
    refused(rf"storages \[{storage}\] must live to the end", plan((*KEEP_ALL, Free(storage))))


# Figures


@pytest.mark.parametrize("peak", [0, 229, 231])
def test_a_wrong_peak_is_refused(peak):
    refused(f"states a peak of {peak} bytes; the replay has 230", plan(peak_bytes=peak))


@pytest.mark.parametrize("time", [0, 4320, 4322])
def test_a_wrong_step_time_is_refused(time):
    refused(f"states a step time of {time} ns; the replay takes 4321", plan(step_time_ns=time, lower_bound_ns=0))


def test_the_time_of_a_recompute_counts():
    steps = (Compute(0), Compute(0), *KEEP_ALL[1:])
    refused("states a step time of 4321 ns; the replay takes 4322", plan(steps))


def test_a_lower_bound_above_the_step_time_is_refused():
    refused("lower bound of 4322 ns is above the step time of 4321", plan(lower_bound_ns=4322))


# The error


def test_the_error_is_one_of_the_projects_and_a_value_error():
    assert issubclass(InvalidPlan, CheckpointSchedulerError)
    assert issubclass(InvalidPlan, ValueError)


def test_ops_are_named_by_number_where_they_have_no_name():
    nameless = dataclasses.replace(PROBLEM, op_names=(), op_modules=())
    refused(r"step 2 \(op 1\) reads storages \[0\]", plan(edited(1, Free(0))), nameless)


# Whatever the problem: keeping everything is legal, and no single change to the figures is


@given(problem=problems())
@settings(deadline=None)
def test_keeping_everything_for_good_is_always_legal(problem):
    steps = tuple(Compute(op) for op in range(len(problem.time_ns)))
    live = peak = problem.static_bytes
    for op in range(len(problem.time_ns)):
        live += sum(problem.storage_bytes[s] for s in problem.outputs[op])
        peak = max(peak, live + problem.workspace_bytes[op])
    time = sum(problem.time_ns)
    solution = Solution(Status.OPTIMAL, steps, time, peak, time, "test")
    validate(problem.with_budget(peak), solution)
    for field, reason in (("peak_bytes", "a peak"), ("step_time_ns", "a step time"), ("lower_bound_ns", "lower bound")):
        wrong = dataclasses.replace(solution, **{field: getattr(solution, field) + 1})
        refused(reason, wrong, problem.with_budget(peak))
    refused("over the budget", solution, problem.with_budget(peak - 1))


# The same rules once more, as definitions over whole prefixes of the schedule: slow, without any state carried along


def is_resident(problem: Problem, before: tuple, storage: int) -> bool:
    """By definition: the last step that concerns the storage is an execution of its producer."""
    maker = Compute(problem.producer[storage])
    concerning = [step for step in before if step in (maker, Free(storage))]
    return bool(concerning) and concerning[-1] == maker


def live_bytes(problem: Problem, before: tuple, op: int) -> int:
    held = sum(size for s, size in enumerate(problem.storage_bytes) if is_resident(problem, before, s))
    made = sum(problem.storage_bytes[s] for s in problem.outputs[op])
    return problem.static_bytes + held + made + problem.workspace_bytes[op]


def is_legal(problem: Problem, steps: tuple) -> bool:
    """Whether the steps form a schedule of the problem; budget and figures aside."""
    count, storages = len(problem.time_ns), len(problem.storage_bytes)
    for i, step in enumerate(steps):
        before = steps[:i]
        match step:
            case Free(storage=s):
                if s not in range(storages) or not is_resident(problem, before, s):
                    return False
            case Compute(op=op):
                if op not in range(count) or not all(is_resident(problem, before, s) for s in problem.inputs[op]):
                    return False
    computed = [step.op for step in steps if isinstance(step, Compute)]
    first_executions = list(dict.fromkeys(computed))
    once = all(computed.count(op) == 1 for op in range(count) if not problem.recomputable[op])
    kept = all(is_resident(problem, steps, s) for s in problem.live_at_end)
    return first_executions == list(range(count)) and once and kept


def is_accepted(problem: Problem, solution: Solution) -> bool:
    try:
        validate(problem, solution)
    except InvalidPlan:
        return False
    return True


@given(case=schedules())
@settings(max_examples=150, deadline=None)
def test_a_schedule_is_accepted_exactly_if_it_is_legal_by_definition(case):
    problem, steps = case
    places = [(i, step.op) for i, step in enumerate(steps) if isinstance(step, Compute)]
    legal = is_legal(problem, steps)
    if legal:
        peak = max((live_bytes(problem, steps[:i], op) for i, op in places), default=problem.static_bytes)
        time = sum(problem.time_ns[op] for _, op in places)
    else:
        peak, time = 0, 0
    roomy = problem.with_budget(max(peak, 10**6))
    solution = Solution(Status.FEASIBLE, steps, time, peak, 0, "test")
    if not legal:
        refused("^(?!the plan states)", solution, roomy)
        return
    assert is_accepted(roomy, solution)
    assert is_accepted(problem.with_budget(peak), solution)
    assert not is_accepted(problem.with_budget(peak - 1), solution)


# Errors planted in optimal plans, where every step is there for a reason


@pytest.fixture(scope="module")
def optimal_plans() -> list[tuple[Problem, Solution]]:
    drawn = [random_problem(seed, budget=0.6) for seed in range(60)] + [random_chain(s, budget=0.5) for s in range(30)]
    solved = [(problem, BruteForceSolver(find_floor=False).solve(problem)) for problem in drawn]
    return [(problem, solution) for problem, solution in solved if solution.status.has_plan]


def test_optimal_plans_are_accepted(optimal_plans):
    assert len(optimal_plans) > 60
    assert sum(s.step_time_ns > p.keep_all_time_ns for p, s in optimal_plans) > 20
    for problem, solution in optimal_plans:
        validate(problem, solution)


def test_leaving_out_any_execution_is_refused(optimal_plans):
    for problem, solution in optimal_plans:
        for i, step in enumerate(solution.steps):
            if isinstance(step, Compute):
                steps = solution.steps[:i] + solution.steps[i + 1 :]
                time = solution.step_time_ns - problem.time_ns[step.op]
                claim = dataclasses.replace(solution, steps=steps, step_time_ns=time, lower_bound_ns=0)
                refused("reads|frees|before|ends|must live|peak", claim, problem)


def test_freeing_an_input_first_is_refused(optimal_plans):
    for problem, solution in optimal_plans:
        for i, step in enumerate(solution.steps):
            for storage in problem.inputs[step.op] if isinstance(step, Compute) else ():
                steps = (*solution.steps[:i], Free(storage), *solution.steps[i:])
                refused("reads storages", dataclasses.replace(solution, steps=steps), problem)


def test_exchanging_a_free_with_the_execution_before_it_is_refused(optimal_plans):
    exchanged = 0
    for problem, solution in optimal_plans:
        for i, (first, second) in enumerate(itertools.pairwise(solution.steps)):
            if isinstance(first, Compute) and isinstance(second, Free):
                steps = (*solution.steps[:i], second, first, *solution.steps[i + 2 :])
                refused("reads|frees", dataclasses.replace(solution, steps=steps), problem)
                exchanged += 1
    assert exchanged > 100
