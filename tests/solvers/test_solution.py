import dataclasses

import pytest

from solvers.solution import Compute, Free, Solution, Status


@pytest.mark.parametrize("status", list(Status))
def test_every_status_has_a_sentence_and_a_remedy_where_something_is_wrong(status):
    assert status.sentence.endswith(".")
    assert (status.remedy == "") == (status is Status.OPTIMAL)
    assert status.has_plan == (status in {Status.OPTIMAL, Status.FEASIBLE})


@pytest.mark.parametrize(
    ("status", "time", "bound", "gap"),
    [
        (Status.OPTIMAL, 100, 100, 0.0),
        (Status.FEASIBLE, 150, 100, 0.5),
        (Status.OPTIMAL, 0, 0, 0.0),
        (Status.FEASIBLE, 1, 0, float("inf")),
        (Status.INFEASIBLE, 0, 100, float("inf")),
        (Status.TIME_LIMIT, 0, 0, float("inf")),
        (Status.OPTIMAL, 99, 100, 0.0),
    ],
)
def test_gap_is_relative_to_the_lower_bound(status, time, bound, gap):
    assert Solution(status, (), time, 0, bound, "test").gap == gap


def test_steps_compare_by_value_and_are_immutable():
    assert Compute(3) == Compute(3) != Free(3)
    assert len({Compute(3), Compute(3), Free(3)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Compute(3).op = 4  # type: ignore[misc]
