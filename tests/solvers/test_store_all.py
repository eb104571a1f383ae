import pytest

from solvers import Status, StoreAllSolver, simulate, store_all_steps
from solvers.store_all import keep_all_peak_op
from tests.problems import keep_all_peak, random_problem, training_chain


@pytest.mark.parametrize("seed", range(40))
def test_peak_is_that_of_plain_training(seed):
    problem = random_problem(seed, max_ops=12)
    assert simulate(problem, store_all_steps(problem)).peak_bytes == keep_all_peak(problem)


def test_fits_exactly_or_not_at_all():
    problem = training_chain(4)
    peak = keep_all_peak(problem)
    fits = StoreAllSolver().solve(problem.with_budget(peak))
    assert (fits.status, fits.peak_bytes, fits.step_time_ns) == (Status.OPTIMAL, peak, problem.keep_all_time_ns)
    assert fits.gap == 0.0
    refused = StoreAllSolver().solve(problem.with_budget(peak - 1))
    assert (refused.status, refused.steps, refused.floor_bytes) == (Status.INFEASIBLE, (), peak)
    assert str(peak) in refused.message


def test_peak_op_is_where_forward_turns_into_backward():
    assert keep_all_peak_op(training_chain(5)) in {4, 5}
