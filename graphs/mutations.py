"""Inputs that the step overwrites: nothing may read them after the write as if it had not happened."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphs import recomputability
from graphs._torch import storage_identity


def insert_snapshots(
    joint: fx.GraphModule, forward_outputs: Sequence[Any]
) -> tuple[dict[fx.Node, fx.Node], frozenset[fx.Node]]:
    """Copy each input that the step overwrites before its first use; all other readers read the copy.

    A recompute, or a backward op, that read the input itself would see the value written by the forward. Lowering
    drops a snapshot again where no reader runs after the write.
    """
    snapshots: dict[fx.Node, fx.Node] = {}
    overwritten: set[fx.Node] = set()
    graph = joint.graph
    for placeholder in [n for n in graph.nodes if n.op == "placeholder"]:
        writers = [u for u in placeholder.users if placeholder in recomputability.written_by(u)]
        if not writers and not _is_written_outside(joint, placeholder, forward_outputs):
            continue
        overwritten.add(placeholder)
        readers = [u for u in placeholder.users if u not in writers and u.op != "output"]
        if not readers:
            continue
        value = placeholder.meta["val"]
        first = min(readers, key=_positions(graph).__getitem__)
        with graph.inserting_before(first):
            snapshot = graph.call_function(torch.ops.aten.clone.default, (placeholder,))
        with value.fake_mode:
            snapshot.meta["val"] = value.clone()
        for key in ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr"):
            if key in first.meta:
                snapshot.meta[key] = first.meta[key]
        for reader in readers:
            reader.replace_input_with(placeholder, snapshot)
        move_views(snapshot, storage_identity(value))
        snapshots[snapshot] = placeholder
    return snapshots, frozenset(overwritten)


def move_views(base: fx.Node, identity: int) -> None:
    """Have the views taken of a node lie in its storage, after its value has moved from the one of ``identity``."""
    pending = list(base.users)
    while pending:
        node = pending.pop()
        tensors = [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
        if not any(storage_identity(t) == identity for t in tensors) or recomputability.is_mutating(node):
            continue
        assert callable(node.target), node
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with base.meta["val"].fake_mode:
            node.meta["val"] = node.target(*args, **kwargs)
        pending += node.users


def written_in_checkpoints(joint: fx.GraphModule) -> list[fx.Node]:
    """Ops inside of ``torch.utils.checkpoint`` whose results the step writes into an input, such as running statistics.

    Plain training runs them twice, and writes twice: once in the forward and once when the backward recomputes.
    """
    found: list[fx.Node] = []
    for node in joint.graph.nodes:
        if node.target is not torch.ops.aten.copy_.default or node.args[0].op != "placeholder":
            continue
        maker = node.args[1]
        while isinstance(maker, fx.Node) and maker.target is operator.getitem:
            maker = maker.args[0]
        if isinstance(maker, fx.Node) and "recompute" in maker.meta and maker not in found:
            found.append(maker)
    return found


def _is_written_outside(joint: fx.GraphModule, placeholder: fx.Node, forward_outputs: Sequence[Any]) -> bool:
    """Whether the runtime, not the graph, writes a new value into this input after the forward."""
    described = placeholder.meta.get("desc")
    if described is None:
        return False
    for description in (joint.graph.output_node().meta.get("desc") or ())[: len(forward_outputs)]:
        if getattr(description, "mutated_input", None) == described:
            return True
    return False


def _positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}
