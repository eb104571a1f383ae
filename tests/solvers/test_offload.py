"""Copies to the host: the simulator's clock by hand, the validator's refusals, and the solver against all schedules."""

import collections
import dataclasses
import functools
import random

import pytest

from graphs.links import Link
from solvers.auto import AutoSolver
from solvers.bounds import find_floor
from solvers.brute_force import BruteForceSolver
from solvers.brute_force_offload import OffloadBruteForceSolver
from solvers.host_search import HostSearchSolver
from solvers.offload import OffloadSolver
from solvers.offload_floor import find_offload_floor
from solvers.problem import Problem
from solvers.simulate import simulate
from solvers.solution import Compute, Free, Offload, Prefetch, Solution, Status
from solvers.validate import InvalidPlan, validate
from tests.problems import random_chain, random_problem

# op      0 → 1 → 2 → 3, and 3 reads 0 again; a byte takes a ns out and two back
LINK = Link(1e9, 0.5e9, latency_ns=3, least_bytes=1)
PROBLEM = dataclasses.replace(
    Problem.from_single_outputs((10, 20, 30, 40), (50, 5, 5, 5), ((), (0,), (1,), (0, 2)), 1000),
    link=LINK,
    host_bytes=50,
)
STEPS = (
    Compute(0),  # until 10
    Offload(0),  # leaves from 10 to 63
    Compute(1),  # until 30
    Free(0),  # waits until 63
    Compute(2),  # until 93; 1 and 2 live
    Free(1),
    Prefetch(0),  # arrives from 93 to 196
    Compute(3),  # waits for it; until 236
    Free(0),
    Free(2),
    Free(3),
)


def solution(problem=PROBLEM, steps=STEPS, **changes) -> Solution:
    figures = simulate(problem, steps)
    made = Solution(Status.FEASIBLE, tuple(steps), figures.step_time_ns, figures.peak_bytes, 0, "test")
    return dataclasses.replace(made, **changes)


def test_the_clock_by_hand():
    figures = simulate(PROBLEM, STEPS)
    assert figures.step_time_ns == 236
    assert figures.stall_ns == 33 + 103
    assert figures.start_ns[:8] == (0, 10, 10, 63, 63, 93, 93, 196)
    assert figures.peak_bytes == 60
    assert figures.live_bytes == (50, 50, 55, 5, 10, 5, 55, 60, 10, 5, 0)
    assert figures.host_bytes == 50
    validate(PROBLEM, solution())


def test_one_way_at_a_time_where_the_link_is_not_duplex():
    problem = dataclasses.replace(
        Problem.from_single_outputs((1, 1, 1), (10, 10, 1), ((), (), (0,)), 1000),
        link=dataclasses.replace(LINK, duplex=False, latency_ns=0),
        host_bytes=100,
    )
    steps = (
        Compute(0),
        Offload(0),
        Free(0),
        Compute(1),
        Offload(1),
        Prefetch(0),
        Compute(2),
        Free(0),
        Free(1),
        Free(2),
    )
    # 0 leaves from 1 to 11, op 1 until 12, 1 leaves until 22, 0 comes back until 42
    assert simulate(problem, steps).step_time_ns == 43
    both = problem.with_link(dataclasses.replace(problem.link, duplex=True), 100)
    assert simulate(both, steps).step_time_ns == 33
    validate(problem, solution(problem, steps))
    validate(both, solution(both, steps))


def test_a_new_copy_waits_until_the_old_one_has_left():
    steps = (*STEPS[:2], Compute(0), *STEPS[2:])
    assert simulate(PROBLEM, steps).start_ns[2] == 63


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ((Offload(0), *STEPS), "copies out storage 0"),
        ((*STEPS[:2], Offload(0), *STEPS[2:]), "on the host already"),
        ((Compute(0), Prefetch(0), *STEPS[1:]), "fetches storage 0"),
        ((*STEPS[:2], Prefetch(0), *STEPS[2:]), "fetches storage 0"),
        (tuple(s for s in STEPS if s != Prefetch(0)), "not resident"),
    ],
)
def test_steps_that_cannot_be(steps, reason):
    with pytest.raises(ValueError, match=reason):
        simulate(PROBLEM, steps)
    with pytest.raises(InvalidPlan, match=reason):
        validate(PROBLEM, dataclasses.replace(solution(), steps=tuple(steps)))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (dataclasses.replace(PROBLEM, host_bytes=49), "on the host"),
        (PROBLEM.with_link(dataclasses.replace(LINK, least_bytes=51), 50), "does not allow"),
        (PROBLEM.with_link(None, 0), "does not allow"),
        (PROBLEM.with_budget(54), "over the budget"),
        (PROBLEM.with_link(dataclasses.replace(LINK, latency_ns=4), 50), "step time"),
    ],
)
def test_the_validator_refuses(problem, reason):
    with pytest.raises(InvalidPlan, match=reason):
        validate(problem, solution())


def test_a_stated_time_that_leaves_out_a_stall_is_refused():
    with pytest.raises(InvalidPlan, match="step time of 133 ns"):
        validate(PROBLEM, solution(step_time_ns=133))


def hosted(seed: int) -> Problem:
    """A random tiny problem with a random host tier."""
    draw = random.Random(seed)
    shape = functools.partial(random_problem, max_ops=5, budget=0.6 * draw.random())
    problem = random_chain(seed, length=3) if seed % 2 else shape(seed)
    link = Link(
        draw.choice((0.5e9, 1e9, 3e9, 8e9)),
        draw.choice((1e9, 2e9, 4e9)),
        latency_ns=draw.randint(0, 1),
        duplex=draw.random() < 0.8,
        least_bytes=draw.randint(1, 3),
    )
    return problem.with_link(link, draw.choice((1000, 20)))


def campaign(seeds: range, max_states: int) -> collections.Counter:
    """What must hold against all schedules is asserted; what mostly does is counted."""
    facts: collections.Counter = collections.Counter()
    for seed in seeds:
        problem = hosted(seed)
        best = OffloadBruteForceSolver(max_states=max_states).solve(problem)
        found = OffloadSolver(gap=0.0).solve(problem)
        chosen = AutoSolver(gap=0.0).solve(problem)
        for plan in (found, chosen):
            if plan.status.has_plan:
                validate(problem, plan)
        if best.status is Status.TIME_LIMIT:
            facts["too large"] += 1
            continue
        if best.status is Status.INFEASIBLE:
            assert not found.status.has_plan, seed
            assert chosen.status is Status.INFEASIBLE, seed
            assert problem.budget_bytes < chosen.floor_lower_bound_bytes <= chosen.floor_bytes, seed
            continue
        validate(problem, best)
        assert found.status is not Status.INFEASIBLE, seed
        assert found.lower_bound_ns <= best.step_time_ns, seed
        facts["bounds"] += found.lower_bound_ns == best.step_time_ns
        if found.status.has_plan:
            assert found.step_time_ns >= best.step_time_ns, seed
            facts["plans"] += found.step_time_ns == best.step_time_ns
        assert chosen.step_time_ns == chosen.lower_bound_ns == best.step_time_ns, seed
        plain = BruteForceSolver(find_floor=False).solve(problem)
        assert not plain.status.has_plan or best.step_time_ns <= plain.step_time_ns, seed
        facts["helped"] += not plain.status.has_plan or best.step_time_ns < plain.step_time_ns
        facts["solved"] += 1
    return facts


def test_against_all_schedules():
    facts = campaign(range(24), max_states=1_500)
    assert facts["solved"] >= 10, facts
    assert facts["helped"] >= 5, facts
    assert facts["bounds"] >= 0.7 * facts["solved"], facts
    assert facts["plans"] >= 0.6 * facts["solved"], facts


@pytest.mark.parametrize("seed", [1013, 1020, 1042])
def test_the_search_proves_what_the_moments_leave_open(seed):
    problem = hosted(seed)
    best = OffloadBruteForceSolver().solve(problem)
    known = OffloadSolver(gap=0.0).solve(problem)
    assert known.status is not Status.OPTIMAL
    known = known if known.status.has_plan else None
    found = HostSearchSolver().solve(problem, known)
    validate(problem, found)
    assert found.status is Status.OPTIMAL
    assert found.step_time_ns == found.lower_bound_ns == best.step_time_ns
    below = HostSearchSolver().solve(problem.with_budget(find_offload_floor(problem).lower_bound.bytes - 1))
    assert below.status is Status.INFEASIBLE
    early = HostSearchSolver(max_states=5).solve(problem, known)
    assert early.lower_bound_ns <= best.step_time_ns
    assert early.status is (Status.TIME_LIMIT if known is None else Status.FEASIBLE)


@pytest.mark.slow
def test_hundreds_against_all_schedules():
    facts = campaign(range(1000, 1400), max_states=20_000)
    assert facts["solved"] >= 340, facts
    assert facts["bounds"] >= 0.8 * facts["solved"], facts
    assert facts["plans"] >= 0.65 * facts["solved"], facts


def test_the_portfolio_copies_where_that_is_faster_and_not_where_it_is_not():
    chain = random_chain(7, length=3)
    fast = chain.with_link(Link(1e12, 1e12, latency_ns=0, least_bytes=1), 10**6)
    slow = chain.with_link(Link(1e3, 1e3, latency_ns=0, least_bytes=1), 10**6)
    plain = AutoSolver(gap=0.0).solve(chain)
    moved, kept = AutoSolver(gap=0.0).solve(fast), AutoSolver(gap=0.0).solve(slow)
    validate(fast, moved)
    validate(slow, kept)
    assert any(isinstance(step, Offload) for step in moved.steps)
    assert moved.step_time_ns < plain.step_time_ns
    assert not any(isinstance(step, Offload) for step in kept.steps)
    assert kept.step_time_ns == plain.step_time_ns


def test_a_problem_without_a_host_tier_is_refused():
    with pytest.raises(ValueError, match="no link to a host"):
        OffloadSolver().solve(PROBLEM.with_link(None, 0))


@pytest.mark.parametrize("seed", range(0, 24, 2))
def test_the_floor_with_copies(seed):
    """A plan fits the floor, it is no higher than without copies, and no schedule fits below the proven bound."""
    problem = hosted(seed)
    floor = find_offload_floor(problem)
    validate(problem.with_budget(floor.bytes), floor.plan)
    assert floor.lower_bound.bytes <= floor.bytes <= find_floor(problem.with_link(None, 0)).bytes
    below = problem.with_budget(floor.lower_bound.bytes - 1)
    assert OffloadBruteForceSolver(max_states=2_000).solve(below).status in (Status.INFEASIBLE, Status.TIME_LIMIT)


def test_the_floor_with_copies_is_lower_where_nothing_may_run_again():
    chain = random_chain(7, length=3)
    pinned = dataclasses.replace(chain, recomputable=(False,) * len(chain.time_ns))
    linked = pinned.with_link(Link(1e9, 1e9, latency_ns=0, least_bytes=1), 10**6)
    plain, floor = find_floor(pinned), find_offload_floor(linked)
    assert floor.bytes < plain.bytes
    assert any(isinstance(step, Prefetch) for step in floor.plan.steps)
    below = AutoSolver().solve(linked.with_budget(floor.lower_bound.bytes - 1))
    assert below.status is Status.INFEASIBLE
    assert (below.floor_bytes, below.floor_without_copies_bytes) == (floor.bytes, plain.bytes)
    assert below.floor_lower_bound_bytes == floor.lower_bound.bytes
    assert f"with copies a plan exists from {floor.bytes} bytes on, without them from {plain.bytes}" in below.message
