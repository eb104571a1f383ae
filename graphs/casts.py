"""Weights that autocast casts once for several uses.

Autocast keeps the low-precision copy of a weight until its outermost region ends: every use in the region reads the
same copy, and the gradients of the uses meet in it, in the low precision. Tracing turns that cache off, so that each
use casts anew and the gradients meet in the weight's own precision, in other bits and with more casts. Here the copies
of a region become one again.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from graphs._torch import OpOverload, autocast_depth, has_kernel_for
from graphs.joint import tensors_of
from graphs.kernels import first_tensor

_LOW: Final = (torch.bfloat16, torch.float16)
#: Conversions that a model asks for itself, which autocast has no part in.
_EXPLICIT: Final = frozenset({"to", "bfloat16", "half", "type", "type_as", "_to_copy"})
_CAST: Final = torch.ops.aten._to_copy.default  # noqa: SLF001 - the op that autocast casts with
_ADD: Final = torch.ops.aten.add.Tensor


def cast_regions(gm: fx.GraphModule) -> Mapping[str, int]:
    """For each op of a Dynamo graph that runs under autocast with its cache on: in which outermost region.

    An autocast context around the call, if any, is the first region and ends with the call.
    """
    depth, region = autocast_depth(), 0
    states = [(_ambient(), torch.is_autocast_cache_enabled())]
    regions: dict[str, int] = {}
    for node in gm.graph.nodes:
        enabled, cached = states[-1]
        if node.target is _enter_autocast:
            kind, _dtype, on, keeps = (*node.args, None)[:4]
            states.append(((enabled | {kind}) if on else (enabled - {kind}), cached if keeps is None else bool(keeps)))
            depth += 1
        elif node.target is _exit_autocast:
            states.pop()
            depth -= 1
            region += depth == 0
        elif enabled and cached and getattr(node.target, "__name__", node.target) not in _EXPLICIT:
            regions[_traced_from(node, "source_fn_stack")] = region
    return regions


def _ambient() -> frozenset[str]:
    return frozenset(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


def share_casts(joint: fx.GraphModule, num_forward_outputs: int, regions: Mapping[str, int]) -> None:
    """Merge the casts of each weight within each region, and let their gradients meet before they are cast back.

    Args:
        joint: AOTAutograd's joint graph; edited.
        num_forward_outputs: how many of its outputs are the forward's; the others are the gradients of its primals.
        regions: of the Dynamo graph that it was traced from, see :func:`cast_regions`.

    """
    if not regions:
        return
    output = joint.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    primals = [n for n in joint.graph.nodes if n.op == "placeholder"]
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    for position, gradient in enumerate(results[num_forward_outputs:], num_forward_outputs):
        weight = primals[position - num_forward_outputs]
        if not isinstance(gradient, fx.Node) or weight.meta["val"].dtype is not torch.float32:
            continue
        shared = [casts for casts in _casts_by_region(weight, regions).values() if len(casts) > 1]
        for casts in shared:
            for cast in casts[1:]:
                cast.replace_all_uses_with(casts[0])
                joint.graph.erase_node(cast)
        if shared:
            results[position] = _summed_in_casts(joint.graph, gradient, regions, order)
            output.args = (results,)


def _casts_by_region(weight: fx.Node, regions: Mapping[str, int]) -> Mapping[int, Sequence[fx.Node]]:
    found: dict[int, list[fx.Node]] = collections.defaultdict(list)
    for user in weight.users:
        region = regions.get(_traced_from(user, "source_fn_stack"))
        if region is not None and user.target is _CAST and user.kwargs.get("dtype") in _LOW:
            found[region].append(user)
    return {r: casts for r, casts in found.items() if len({cast.kwargs["dtype"] for cast in casts}) == 1}


def _traced_from(node: fx.Node, key: str) -> str:
    """Name that Dynamo first gave the op which a node was traced from, or which a node of the backward belongs to.

    A Dynamo op may have been renamed since, after the variable of the model that its result went to.
    """
    stack = node.meta.get(key)
    return str(stack[0][0]) if stack else ""


def _summed_in_casts(
    graph: fx.Graph, gradient: fx.Node, regions: Mapping[str, int], order: dict[fx.Node, int]
) -> fx.Node:
    """The sum of a weight's gradients, where those of one region are added in the low precision and then cast.

    Autograd casts the sum of a region back when its last gradient has come in, so that is its place among the others.
    """
    terms = _terms(gradient)
    members: dict[int, list[fx.Node]] = collections.defaultdict(list)
    for term in terms:
        region = regions.get(_traced_from(term, "fwd_source_fn_stack"))
        if region is not None and _is_cast_back(term):
            members[region].append(term)
    merged: dict[fx.Node, fx.Node | None] = {}
    for group in members.values():
        if len(group) == 1:
            continue
        low = _chain(graph, [term.all_input_nodes[0] for term in group], group[0], order)
        with graph.inserting_after(low):
            cast = graph.call_function(_CAST, (low,), dict(group[-1].kwargs))
        cast.meta = dict(group[-1].meta)
        order[cast] = order[low]
        merged |= {**dict.fromkeys(group[:-1]), group[-1]: cast}
    remaining = [merged.get(term, term) for term in terms]
    return _chain(graph, [term for term in remaining if term is not None], gradient, order)


def _terms(gradient: fx.Node) -> list[fx.Node]:
    """What autograd adds up to a gradient, in that order: it adds each next one to the sum so far."""
    terms: list[fx.Node] = []
    total = gradient
    while total.target is _ADD and not total.kwargs and (total is gradient or len(total.users) == 1):
        before, term = total.args
        assert isinstance(before, fx.Node)
        assert isinstance(term, fx.Node)
        terms.append(term)
        total = before
    return [total, *reversed(terms)]


def _is_cast_back(term: fx.Node) -> bool:
    return (
        term.target is _CAST
        and len(term.users) == 1
        and term.kwargs.get("dtype") is torch.float32
        and term.all_input_nodes[0].meta["val"].dtype in _LOW
    )


def _chain(graph: fx.Graph, terms: Sequence[fx.Node], like: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """Add nodes up one after the other, each as soon as it is there."""
    total = terms[0]
    for term in terms[1:]:
        later = max(total, term, key=order.__getitem__)
        with graph.inserting_after(later):
            added = graph.call_function(_ADD, (total, term))
        added.meta = {k: v for k, v in like.meta.items() if k != "val"}
        added.meta["val"] = _ADD(total.meta["val"], term.meta["val"])
        order[added] = order[later]
        total = added
    return total


def changed_by_autocast(nodes: Iterable[fx.Node | None], device: torch.device) -> fx.Node | None:
    """The first of some traced ops whose result has another dtype under the autocast that is on now, if any.

    Args:
        nodes: ops with fake tensors in ``meta["val"]``.
        device: whose autocast is meant.

    """
    key = f"Autocast{device.type.upper()}"
    dtype = torch.get_autocast_dtype(device.type)
    for node in nodes:
        if node is None or not isinstance(node.target, OpOverload) or not has_kernel_for(node.target, key):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with first_tensor(node).fake_mode, torch.autocast(device.type, dtype=dtype):  # type: ignore[attr-defined]
            result = node.target(*args, **kwargs)
        if [t.dtype for t in tensors_of(result)] != [t.dtype for t in tensors_of(node.meta["val"])]:
            return node
    return None
