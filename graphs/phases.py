"""The two halves of a joint graph: which nodes run before ``backward()`` is called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import fx

from graphs import recomputability


def split_phases(graph: fx.Graph, forward_outputs: Sequence[Any]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Forward and backward nodes, each in the joint graph's order.

    The forward is what autograd had not yet begun to differentiate when it was traced, up to the last node that a
    forward output needs or that has an effect, and the writes to buffers, which are traced after everything else.
    What is traced later belongs to the backward, even where it depends on no gradient.
    """
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    depends_on_tangent: set[fx.Node] = {n for n in graph.nodes if is_tangent(n)}
    for node in nodes:
        if any(i in depends_on_tangent for i in node.all_input_nodes):
            depends_on_tangent.add(node)
    first_gradient = next((i for i, n in enumerate(nodes) if n in depends_on_tangent), len(nodes))
    needed = {n for n in forward_outputs if isinstance(n, fx.Node)}
    needed.update(n for n in nodes if recomputability.is_mutating(n) and n not in depends_on_tangent)
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    traced_first = range(first_gradient)
    end = max((i + 1 for i in traced_first if nodes[i] in needed or has_effect(nodes[i])), default=0)
    forward = [n for i, n in enumerate(nodes) if i < end or n in needed]
    chosen = set(forward)
    return forward, [n for n in nodes if n not in chosen]


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is the gradient of an output, as AOTAutograd names them."""
    return node.op == "placeholder" and re.match(r"tangents_\d+", node.name) is not None


def has_effect(node: fx.Node) -> bool:
    """Whether dropping or repeating the node would change more than its own result."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return False
    if recomputability.is_mutating(node) or recomputability.is_random(node):
        return True
    return bool(node.is_impure())
