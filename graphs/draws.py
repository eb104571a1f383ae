"""Random numbers in the order in which eager mode draws them.

``tensor.bernoulli_(p)`` fills a tensor in the order of its memory. Tracing turns it into the op that makes a new
contiguous tensor, and a transposed tensor, such as the mask of a dropout behind an attention, would get the same
numbers in other places. ``tensor.normal_()`` takes the order of memory too, but draws otherwise where that has gaps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphs._torch import OpOverload
from graphs.errors import UnsupportedModelError
from graphs.modules import source_of


def draw_in_memory_order(joint: fx.GraphModule) -> None:
    """Have each traced ``bernoulli_`` of a tensor that is not contiguous fill it in the order of its memory.

    Where the model itself calls ``torch.bernoulli``, the new tensor is contiguous in eager mode too.

    Raises:
        UnsupportedModelError: ``normal_`` fills a part of a tensor.

    """
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.normal_functional.default):
        _refuse_gaps(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli.p):
        source, *probability = node.args
        assert isinstance(source, fx.Node)
        like = torch.empty_like(source.meta["val"])
        if like.is_contiguous() or _is_out_of_place(node):
            continue
        order = sorted(range(like.dim()), key=like.stride, reverse=True)
        back = sorted(range(like.dim()), key=order.__getitem__)
        with graph.inserting_before(node):
            laid_out = _call(graph, node, torch.ops.aten.permute.default, source, order)
            if not laid_out.meta["val"].is_contiguous():
                laid_out = _call(graph, node, torch.ops.aten.empty_like.default, laid_out)
            drawn = _call(graph, node, torch.ops.aten.bernoulli.p, laid_out, *probability)
            placed = _call(graph, node, torch.ops.aten.permute.default, drawn, back)
            result = _call(graph, node, torch.ops.aten.clone.default, placed, memory_format=torch.contiguous_format)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _refuse_gaps(node: fx.Node) -> None:
    value = node.all_input_nodes[0].meta["val"]
    # Fewer than 16 numbers are drawn one by one everywhere.
    if value.numel() >= 16 and value.stride() != torch.empty_like(value).stride():
        raise UnsupportedModelError(
            f"normal_() at {source_of(node) or node.name} fills a part of a tensor, whose numbers eager mode draws one "
            "by one: assign torch.randn_like(part) to the part instead"
        )


def _is_out_of_place(node: fx.Node) -> bool:
    stack: list[tuple[str, Any]] = node.meta.get("source_fn_stack") or [("", "")]
    _, called = stack[-1]
    return bool(getattr(called, "__name__", called) == "bernoulli")


def _call(graph: fx.Graph, like: fx.Node, op: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    """A node beside ``like`` with its origin in the model and a fake result of its own."""
    node = graph.call_function(op, args, kwargs)
    values: Any = fx.node.map_arg(args, lambda n: n.meta["val"])
    node.meta = {**like.meta, "val": op(*values, **kwargs)}
    return node
