import dataclasses

import pytest

from graphs.ir import Costs, Op, Phase, Storage, StorageKind, TrainingGraph
from solvers.problem import Problem
from tests.problems import keep_all_peak, known_cases, least_demand, random_problem, training_chain


def two_ops(**changes) -> Problem:
    """Op 0 makes storages 0 and 1, op 1 reads 1 and makes 2, which lives to the end."""
    fields = {
        "time_ns": (3, 4),
        "workspace_bytes": (0, 5),
        "inputs": ((), (1,)),
        "outputs": ((0, 1), (2,)),
        "recomputable": (True, False),
        "storage_bytes": (10, 20, 30),
        "live_at_end": frozenset({2}),
        "forward_ops": 1,
        "budget_bytes": 100,
        "static_bytes": 40,
    }
    return Problem(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"workspace_bytes": (0,)}, "workspace_bytes has 1 entries for 2 ops"),
        ({"inputs": ((),)}, "inputs has 1 entries"),
        ({"outputs": ((0, 1, 2),)}, "outputs has 1 entries"),
        ({"recomputable": (True, True, True)}, "recomputable has 3 entries"),
        ({"time_ns": (3, -4)}, "must not be negative"),
        ({"workspace_bytes": (0, -1)}, "must not be negative"),
        ({"storage_bytes": (10, -20, 30)}, "must not be negative"),
        ({"inputs": ((1,), ())}, r"op 0 reads storages \[1\] before"),
        ({"inputs": ((), (2,))}, r"op 1 reads storages \[2\] before"),
        ({"outputs": ((0, 1), (1,)), "storage_bytes": (10, 20)}, "op 1 produces storages that an earlier op produces"),
        ({"storage_bytes": (10, 20, 30, 40)}, r"storages \[3\] are produced by no op"),
        ({"storage_bytes": (10, 20)}, r"storages \[2\] are produced by no op or unknown"),
        ({"live_at_end": frozenset({3})}, "live_at_end names an unknown storage"),
        ({"forward_ops": 3}, "forward_ops is 3 of 2 ops"),
        ({"forward_ops": -1}, "forward_ops is -1 of 2 ops"),
    ],
)
def test_inconsistent_problems_are_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        two_ops(**changes)


def test_derived_figures():
    problem = two_ops()
    assert problem.capacity_bytes == 60
    assert problem.keep_all_time_ns == 7
    assert problem.producer == (0, 0, 1)
    assert problem.readers == ((), (1,), ())
    assert problem.with_budget(7) == two_ops(budget_bytes=7)


def test_an_op_is_described_by_what_is_known_of_it():
    assert two_ops().describe_op(1) == "op 1"
    assert two_ops(op_names=("a", "b")).describe_op(1) == "b"
    assert two_ops(op_names=("a", "b"), op_modules=("", "h.0")).describe_op(0) == "a"
    assert two_ops(op_names=("a", "b"), op_modules=("", "h.0")).describe_op(1) == "b in h.0"


def test_a_problem_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        two_ops().budget_bytes = 1  # type: ignore[misc]


def test_from_graph_drops_static_storages():
    graph = TrainingGraph(
        ops=(
            Op(0, "mm", "aten.mm.default", Phase.FORWARD, (0, 1), (2, 3), "h.0"),
            Op(1, "rand", "aten.rand.default", Phase.FORWARD, (3,), (4,), "", recomputable=False, reason="random"),
            Op(2, "mul", "aten.mul.Tensor", Phase.BACKWARD, (1, 2, 4), (5,), "h.0"),
        ),
        storages=(
            Storage(0, "weight", 100, StorageKind.PARAMETER, None),
            Storage(1, "x", 200, StorageKind.INPUT, None),
            Storage(2, "mm[0]", 7, StorageKind.ACTIVATION, 0),
            Storage(3, "mm[1]", 8, StorageKind.OUTPUT, 0),
            Storage(4, "rand", 9, StorageKind.ACTIVATION, 1),
            Storage(5, "mul", 10, StorageKind.GRADIENT, 2),
        ),
        forward_ops=2,
    )
    costs = Costs((1, 2, 3), (0, 0, 6), "paper", "roofline")
    problem = Problem.from_graph(graph, costs, 1000, static_bytes=300)
    assert Problem.graph_storages(graph) == (2, 3, 4, 5)
    assert problem == Problem(
        time_ns=(1, 2, 3),
        workspace_bytes=(0, 0, 6),
        inputs=((), (1,), (0, 2)),
        outputs=((0, 1), (2,), (3,)),
        recomputable=(True, False, True),
        storage_bytes=(7, 8, 9, 10),
        live_at_end=frozenset({1, 3}),
        forward_ops=2,
        budget_bytes=1000,
        static_bytes=300,
        op_names=("mm", "rand", "mul"),
        op_modules=("h.0", "", "h.0"),
        op_targets=("aten.mm.default", "aten.rand.default", "aten.mul.Tensor"),
    )


def test_from_single_outputs_makes_one_storage_per_op():
    problem = Problem.from_single_outputs([1, 2, 3], [4, 5, 6], [[], [0, 0], [1, 0]], 99, live_at_end=[2])
    assert problem.inputs == ((), (0,), (0, 1))
    assert problem.outputs == ((0,), (1,), (2,))
    assert problem.workspace_bytes == (0, 0, 0)
    assert all(problem.recomputable)
    assert problem.live_at_end == {2}


def test_random_problems_are_reproducible_and_of_every_kind():
    drawn = [random_problem(seed) for seed in range(100)]
    assert drawn == [random_problem(seed) for seed in range(100)]
    assert len(set(drawn)) == 100
    assert {len(p.time_ns) for p in drawn} == set(range(3, 10))
    assert any(len(o) > 1 for p in drawn for o in p.outputs)
    assert any(len(o) == 0 for p in drawn for o in p.outputs)
    assert any(w for p in drawn for w in p.workspace_bytes)
    assert any(not r for p in drawn for r in p.recomputable)
    assert any(p.live_at_end for p in drawn)
    assert any(p.static_bytes for p in drawn)
    assert all(least_demand(p) <= p.budget_bytes <= keep_all_peak(p) for p in drawn)
    assert any(p.budget_bytes < keep_all_peak(p) for p in drawn)


def test_the_training_chain_is_the_one_of_the_known_cases():
    known = next(case.problem for case in known_cases() if case.name == "chain_train_4@4")
    chain = training_chain(4, budget_bytes=4)
    assert dataclasses.replace(chain, forward_ops=0, live_at_end=frozenset()) == known
    assert chain.forward_ops == 4
    assert keep_all_peak(chain) == 5
    assert least_demand(chain) == 3
    assert len(list(known_cases())) == 25
