"""The torch-free graph: what it refuses, what it derives, and its saved form."""

import dataclasses
import json
import subprocess
import sys

import networkx as nx
import pytest

from graphs.errors import GraphFormatError
from graphs.ir import Op, Phase, Storage, StorageKind, TrainingGraph


def small_graph():
    """x (parameter) → o0 → a → o1 → b; backward: tangent t; o3 reads a and t, makes the gradient g."""
    storages = (
        Storage(0, "x", 8, StorageKind.PARAMETER, None),
        Storage(1, "a", 4, StorageKind.ACTIVATION, 0, "net.0"),
        Storage(2, "b", 2, StorageKind.OUTPUT, 1, "net.1"),
        Storage(3, "t", 2, StorageKind.TANGENT, 2),
        Storage(4, "g", 8, StorageKind.GRADIENT, 3, "net.0"),
    )
    ops = (
        Op(0, "mm", "aten.mm.default", Phase.FORWARD, (0,), (1,), "net.0", source="model.py:3"),
        Op(1, "sum", "aten.sum.default", Phase.FORWARD, (1,), (2,), "net.1"),
        Op(2, "tangents", "scheduler.tangents", Phase.BACKWARD, (), (3,), recomputable=False, reason="handed in"),
        Op(3, "mul", "aten.mul.Tensor", Phase.BACKWARD, (1, 3), (4,), "net.0"),
    )
    return TrainingGraph(ops, storages, 2, "small")


def test_readers_and_digraph():
    graph = small_graph()
    assert graph.readers == ((0,), (1, 3), (), (3,), ())
    assert nx.is_directed_acyclic_graph(graph.digraph)
    assert set(graph.digraph.successors(("op", 0))) == {("storage", 1)}
    assert set(graph.digraph.predecessors(("op", 3))) == {("storage", 1), ("storage", 3)}
    assert graph.digraph.nodes["op", 0]["op"] is graph.ops[0]
    assert graph.static_bytes() == 8


def test_json_round_trip():
    graph = small_graph()
    again = TrainingGraph.from_json(graph.to_json())
    assert again == graph
    assert again.fingerprint == graph.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda g: dataclasses.replace(g, ops=(dataclasses.replace(g.ops[0], target="aten.addmm.default"), *g.ops[1:])),
        lambda g: dataclasses.replace(g, ops=(dataclasses.replace(g.ops[0], recomputable=False), *g.ops[1:])),
        lambda g: dataclasses.replace(g, storages=(dataclasses.replace(g.storages[0], bytes=9), *g.storages[1:])),
    ],
)
def test_fingerprint_sees_what_a_plan_depends_on(change):
    graph = small_graph()
    assert change(graph).fingerprint != graph.fingerprint


def test_fingerprint_does_not_see_names():
    graph = small_graph()
    renamed = dataclasses.replace(
        graph, ops=(dataclasses.replace(graph.ops[0], name="other", source="elsewhere.py:9"), *graph.ops[1:]), name="x"
    )
    assert renamed.fingerprint == graph.fingerprint


def replace_op(graph, position, **changes):
    ops = list(graph.ops)
    ops[position] = dataclasses.replace(ops[position], **changes)
    return dataclasses.replace(graph, ops=tuple(ops))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda g: replace_op(g, 0, inputs=(4,)), "before they are produced"),
        (lambda g: replace_op(g, 1, index=5), "has index 5"),
        (lambda g: replace_op(g, 0, phase=Phase.BACKWARD), "is backward at 0"),
        (lambda g: replace_op(g, 1, outputs=(1,)), "made by another op"),
        (
            lambda g: dataclasses.replace(
                g, storages=(dataclasses.replace(g.storages[0], producer=1), *g.storages[1:])
            ),
            "has producer 1",
        ),
        (
            lambda g: dataclasses.replace(g, storages=(dataclasses.replace(g.storages[0], bytes=-1), *g.storages[1:])),
            "-1 bytes",
        ),
    ],
)
def test_inconsistent_graphs_are_refused(break_it, message):
    with pytest.raises(GraphFormatError, match=message):
        break_it(small_graph())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", "schema_version None"),
        (json.dumps({"schema_version": 99}), "schema_version 99"),
        (json.dumps({"schema_version": 1}), "not a training graph"),
        (json.dumps({"schema_version": 1, "ops": [[1]], "storages": [], "forward_ops": 0}), "not a training graph"),
    ],
)
def test_other_files_are_refused(text, message):
    with pytest.raises(GraphFormatError, match=message):
        TrainingGraph.from_json(text)


def test_kinds():
    assert [k for k in StorageKind if k.is_static] == [StorageKind.PARAMETER, StorageKind.BUFFER, StorageKind.INPUT]
    assert [k for k in StorageKind if k.lives_to_end] == [StorageKind.OUTPUT, StorageKind.GRADIENT]


def test_the_graph_needs_no_torch():
    code = "import sys, graphs.ir; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
