import random

import pytest

from solvers import Compute, Free, Problem, compute_order, simulate, with_frees
from tests.problems import random_problem, random_steps


def chain(budget=100, **changes):
    """a(4) -> b(3) -> c(2), c reads a too; op b has 5 bytes of workspace; 10 static bytes."""
    figures = {
        "time_ns": (7, 11, 13),
        "workspace_bytes": (0, 5, 0),
        "inputs": ((), (0,), (0, 1)),
        "outputs": ((0,), (1,), (2,)),
        "recomputable": (True, True, True),
        "storage_bytes": (4, 3, 2),
        "live_at_end": frozenset({2}),
        "forward_ops": 0,
        "budget_bytes": budget,
        "static_bytes": 10,
        "op_names": ("first", "second", "third"),
        **changes,
    }
    return Problem(**figures)


def test_live_bytes_count_static_resident_outputs_and_workspace():
    result = simulate(chain(), [Compute(0), Compute(1), Compute(2), Free(1), Free(0)])
    assert result.live_bytes == (14, 10 + 4 + 3 + 5, 10 + 4 + 3 + 2, 16, 12)
    assert result.peak_bytes == 22
    assert result.peak_step == 1
    assert result.step_time_ns == 31


def test_second_copy_counts_on_top_of_the_first_while_the_op_runs_and_replaces_it():
    result = simulate(chain(), [Compute(0), Compute(0), Compute(1), Compute(2)])
    assert result.live_bytes[1] == 10 + 4 + 4
    assert result.live_bytes[2] == 10 + 4 + 3 + 5
    assert result.step_time_ns == 38


def test_recomputation_after_a_free():
    result = simulate(chain(), [Compute(0), Compute(1), Free(0), Compute(0), Compute(2)])
    assert result.live_bytes == (14, 22, 13, 17, 19)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Compute(1)], r"step 0 executes second \(op 1\) before the first execution of first \(op 0\)"),
        (
            [Compute(0), Free(0), Compute(1)],
            r"step 2 executes second \(op 1\), whose input storage 0 \(made by first\)",
        ),
        ([Compute(0), Free(1)], r"step 1 frees storage 1 \(made by second\), which is not resident"),
        ([Compute(0), Free(0), Free(0)], "step 2 frees storage 0"),
        ([Compute(0), Free(9)], "step 1 frees storage 9, which does not exist"),
        ([Compute(5)], "step 0 executes op 5, which does not exist"),
        ([Compute(0), Compute(1)], r"third \(op 2\) never executes"),
        ([Compute(0), Compute(1), Compute(2), Free(2)], r"storage 2 \(made by third\) must be live at the end"),
    ],
)
def test_illegal_steps_are_named(steps, message):
    with pytest.raises(ValueError, match=message):
        simulate(chain(), steps)


def test_op_that_may_run_once_only():
    problem = chain(recomputable=(False, True, True))
    with pytest.raises(ValueError, match=r"step 1 recomputes first \(op 0\), which is not recomputable"):
        simulate(problem, [Compute(0), Compute(0), Compute(1), Compute(2)])


def test_empty_problem():
    problem = Problem((), (), (), (), (), (), frozenset(), 0, 5, static_bytes=3)
    assert simulate(problem, []).peak_bytes == 3


def test_frees_come_right_after_the_last_read_of_each_copy():
    problem = chain()
    steps = with_frees(problem, [0, 1, 0, 2])
    assert steps == (Compute(0), Compute(1), Free(0), Compute(0), Compute(2), Free(0), Free(1))


def test_what_nobody_reads_is_freed_at_once_unless_it_lives_to_the_end():
    problem = chain(inputs=((), (), ()), live_at_end=frozenset({1}))
    assert with_frees(problem, [0, 1, 2]) == (Compute(0), Free(0), Compute(1), Compute(2), Free(2))


@pytest.mark.parametrize("seed", range(60))
def test_frees_after_last_use_never_raise_the_live_bytes_of_any_execution(seed):
    problem = random_problem(seed, max_ops=12)
    steps = random_steps(problem, random.Random(seed))
    order = compute_order(steps)
    lean = with_frees(problem, order)
    assert compute_order(lean) == order

    def live_at_executions(some_steps):
        result = simulate(problem, some_steps)
        return [b for s, b in zip(some_steps, result.live_bytes, strict=True) if isinstance(s, Compute)]

    assert all(a <= b for a, b in zip(live_at_executions(lean), live_at_executions(steps), strict=True))


def test_ten_thousand_ops_replay_in_linear_time():
    ops = 10_000
    problem = Problem.from_single_outputs([1] * ops, [1] * ops, [[i - 1] if i else [] for i in range(ops)], 10)
    result = simulate(problem, with_frees(problem, range(ops)))
    assert result.peak_bytes == 2
    assert result.step_time_ns == ops
