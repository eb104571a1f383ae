"""What an order of the ops has to keep, and graphs and costs in another order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.errors import GraphFormatError
from graphs.ir import Costs, Op, Phase, Storage, StorageKind, TrainingGraph
from graphs.order import check_order, precedence
from tests.orders import random_order
from tests.problems import costs_of, graph_of, problems


def make_graph() -> TrainingGraph:
    """Two reads of a buffer around a write to it, a draw with its recording, a check, and a backward.

    ::

        0 read_before(buffer)  1 write(buffer)  2 read_after(buffer)  3 record  4 draw(record)  5 check(read_after)
        6 free(read_before)  | 7 tangents  8 gradient(tangents, draw)
    """
    kinds = StorageKind
    storages = [Storage(0, "buffer", 4, kinds.BUFFER, None)]
    ops: list[Op] = []

    def add(name: str, inputs: tuple[int, ...], kind: StorageKind | None, *, once: bool = False) -> int:
        outputs: tuple[int, ...] = ()
        if kind is not None:
            outputs = (len(storages),)
            storages.append(Storage(len(storages), name, 8, kind, len(ops)))
        phase = Phase.FORWARD if len(ops) < 7 else Phase.BACKWARD
        reason = "runs once" if once else ""
        ops.append(Op(len(ops), name, name, phase, inputs, outputs, recomputable=not once, reason=reason))
        return len(storages) - 1

    before = add("read_before", (0,), kinds.ACTIVATION)
    add("write", (0,), None, once=True)
    after = add("read_after", (0,), kinds.ACTIVATION)
    state = add("record", (), kinds.RNG_STATE, once=True)
    drawn = add("draw", (state,), kinds.ACTIVATION)
    add("check", (after,), None)
    add("free", (before,), kinds.ACTIVATION)
    tangent = add("tangents", (), kinds.TANGENT, once=True)
    add("gradient", (drawn, tangent), kinds.GRADIENT)
    return TrainingGraph(tuple(ops), tuple(storages), 7)


def test_precedence():
    known = precedence(make_graph())
    assert known.units == ((0,), (1,), (2,), (3, 4), (5,), (6,), (7,), (8,))
    assert known.before == (
        (),  # read_before
        (0,),  # the write comes after what reads the old value,
        (1,),  # and before what reads the new one
        (1,),  # the draw keeps its place among ops with an effect
        (2, 3),  # so does the check
        (0,),  # nothing binds the last one but its input
        (0, 1, 2, 3, 4, 5),
        (3, 6),
    )
    assert known.after[3] == (4, 6, 7)


@pytest.mark.parametrize(
    ("order", "named"),
    [
        ((1, 0, 2, 3, 4, 5, 6, 7, 8), "write"),
        ((0, 2, 1, 3, 4, 5, 6, 7, 8), "read_after"),
        ((0, 3, 4, 1, 2, 5, 6, 7, 8), "record"),
        ((0, 1, 2, 3, 6, 4, 5, 7, 8), "draw"),
        ((0, 1, 2, 5, 3, 4, 6, 7, 8), "check"),
        ((0, 1, 2, 3, 4, 5, 7, 6, 8), "tangents"),
        ((0, 1, 2, 3, 4, 5, 6, 8, 7), "gradient"),
        ((0, 1, 2, 3, 4, 5, 6, 7), "permutation"),
        ((0, 1, 2, 3, 4, 5, 6, 7, 7), "permutation"),
    ],
)
def test_an_order_that_breaks_one_is_refused(order, named):
    with pytest.raises(GraphFormatError, match=named):
        check_order(make_graph(), order)


def test_what_may_move():
    check_order(make_graph(), (0, 6, 1, 3, 4, 2, 5, 7, 8))


def test_a_graph_in_another_order_and_back():
    graph, order = make_graph(), (0, 6, 1, 3, 4, 2, 5, 7, 8)
    moved = graph.in_order(order)
    assert [op.name for op in moved.ops] == [graph.ops[i].name for i in order]
    assert [s.name for s in moved.storages] == [s.name for s in graph.storages]
    assert moved.order == order
    assert moved.fingerprint != graph.fingerprint
    assert moved.captured == graph == moved.in_order(())
    assert moved.in_order(order) == moved
    assert TrainingGraph.from_json(moved.to_json()) == moved
    assert graph.captured is graph
    with pytest.raises(GraphFormatError, match="permutation"):
        graph.in_order(order[1:])
    with pytest.raises(GraphFormatError, match="before they are produced"):
        graph.in_order((6, *range(6), 7, 8))
    with pytest.raises(GraphFormatError, match="permutation"):
        TrainingGraph(graph.ops, graph.storages, 7, order=(0, 1))


def test_costs_in_another_order_and_back():
    costs = Costs((1, 2, 3), (10, 20, 30), "cpu", "roofline")
    moved = costs.in_order((2, 0, 1))
    assert (moved.time_ns, moved.workspace_bytes) == ((3, 1, 2), (30, 10, 20))
    assert moved.in_order((1, 2, 0)).time_ns == (2, 3, 1)
    assert moved.in_order(()) == costs


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 9))
def test_random_orders_keep_the_graph(problem, seed):
    graph, costs = graph_of(problem), costs_of(problem)
    order = random_order(graph, seed)
    check_order(graph, order)
    moved = graph.in_order(order)
    assert moved.captured.fingerprint == graph.fingerprint
    assert costs.in_order(order).in_order(()) == costs
    assert {(op.name, op.inputs, op.outputs) for op in moved.ops} == {(o.name, o.inputs, o.outputs) for o in graph.ops}
