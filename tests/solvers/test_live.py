import contextlib

import pytest

from solvers.live import LiveBytes
from solvers.problem import Problem
from solvers.rematerialise import OutOfBudgetError, rematerialised_order
from solvers.simulate import simulate, with_frees
from solvers.solution import Compute
from tests.problems import random_chain, random_problem


@pytest.mark.parametrize("make", [random_problem, random_chain])
def test_as_the_simulator_has_it(make):
    seen = 0
    for seed in range(60):
        problem = make(seed)
        orders = [tuple(range(len(problem.time_ns)))]
        with contextlib.suppress(OutOfBudgetError):
            orders.append(rematerialised_order(problem, improve=seed % 2 == 0))
        live = LiveBytes(problem)
        for order in orders:
            steps = with_frees(problem, order)
            figures = simulate(problem, steps)
            assert live.peak(order) == figures.peak_bytes
            assert live.time_ns(order) == figures.step_time_ns
            during = [b for step, b in zip(steps, figures.live_bytes, strict=True) if isinstance(step, Compute)]
            assert (live.during(order) + problem.static_bytes).tolist() == during
            seen += len(order) > len(problem.time_ns)
    assert seen >= 10


def test_no_ops_no_bytes():
    problem = Problem((), (), (), (), (), (), frozenset(), 0, 10, static_bytes=7)
    assert LiveBytes(problem).peak(()) == 7
