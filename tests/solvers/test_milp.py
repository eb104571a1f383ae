import pytest

from solvers.milp import Milp, MilpStatus


def knapsack(weights, least):
    """min Σ cost x with Σ weight x ≥ least."""
    milp = Milp()
    columns = [milp.column(cost=cost) for _, cost in weights]
    milp.row(zip(columns, (float(w) for w, _ in weights), strict=True), float(least))
    return milp


def test_optimum_and_bound():
    result = knapsack([(3, 4.0), (4, 5.0), (5, 6.0)], 8).solve(time_limit_s=10)
    assert result.status is MilpStatus.SOLVED
    assert result.objective == pytest.approx(10.0)
    assert result.bound == pytest.approx(10.0)
    assert result.values == pytest.approx((1.0, 0.0, 1.0))


def test_continuous_columns_and_bounds():
    milp = Milp()
    x = milp.column(cost=1.0, lower=0.25, integer=False)
    y = milp.column(cost=3.0, integer=False)
    milp.row([(x, 1.0), (y, 1.0)], 1.5)
    result = milp.solve(time_limit_s=10)
    assert result.values == pytest.approx((1.0, 0.5))


def test_infeasible():
    assert knapsack([(1, 1.0)], 2).solve(time_limit_s=10).status is MilpStatus.INFEASIBLE


@pytest.mark.parametrize("hint", [(1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.0, 0.0, 0.0), (7.0, -1.0, 0.5)])
def test_hints_of_any_quality_change_no_optimum(hint):
    result = knapsack([(3, 4.0), (4, 5.0), (5, 6.0)], 8).solve(time_limit_s=10, hint=hint)
    assert result.objective == pytest.approx(10.0)


def test_no_columns_and_no_rows():
    assert Milp().solve(time_limit_s=10).status is MilpStatus.SOLVED


def test_errors_of_highs_are_runtime_errors():
    milp = Milp()
    milp.row([(3, 1.0)], 1.0)  # a column that does not exist
    with pytest.raises((RuntimeError, ValueError)):
        milp.solve(time_limit_s=10)
