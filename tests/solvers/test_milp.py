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


def test_the_relaxation_bounds_and_shows_what_can_be_fixed():
    milp = knapsack([(3, 4.0), (4, 5.0), (5, 6.0), (1, 50.0)], 8)
    relaxation = milp.relax(time_limit_s=10)
    assert relaxation.status is MilpStatus.SOLVED
    assert relaxation.bound == pytest.approx(6.0 + 5.0 * 3 / 4)
    fixed = milp.near(relaxation, 10.0)
    assert fixed == {3: 0.0}
    assert milp.solve(time_limit_s=10, fixed=fixed, hint=(1.0, 0.0, 1.0, 1.0)).objective == pytest.approx(10.0)
    assert knapsack([(1, 1.0)], 2).relax(time_limit_s=10).status is MilpStatus.INFEASIBLE


def test_a_point_at_the_target_ends_the_search():
    weights = [(17 + i * 7 % 11, 20.0 + i * 5 % 13) for i in range(60)]
    optimum = knapsack(weights, 500).solve(time_limit_s=10)
    found = knapsack(weights, 500).solve(time_limit_s=10, target=1.2 * optimum.objective)
    assert found.values
    assert optimum.objective - 1e-6 <= found.objective <= 1.2 * optimum.objective
    assert found.bound <= optimum.objective + 1e-6
