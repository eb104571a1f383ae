"""``mark``: a word on one tensor of a forward, for the planner to read in the captured step.

In a capture, a mark is an op without results that looks at the tensor; :func:`take_marks` reads these ops off the joint
graph and removes them. So values, gradients, views and in-place writes are what they are without marks, and eager
execution runs no op at all.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import torch
from torch import fx

from graphs.constraints import KINDS
from graphs.modules import source_of

TensorT = TypeVar("TensorT", bound=torch.Tensor)

_LIBRARY: Final[Any] = torch.library.Library("scheduler", "DEF")  # type: ignore[no-untyped-call]  # torch's
_LIBRARY.define("mark(Tensor tensor, str what) -> ()")
_LIBRARY.impl("mark", lambda tensor, what: None, "CompositeExplicitAutograd")  # noqa: ARG005 - the operator's schema
_MARK: Final = torch.ops.scheduler.mark.default
fx.node.has_side_effect(_MARK)  # else tracing would drop what nobody reads


def mark(tensor: TensorT, what: str) -> TensorT:
    """Say, in a module's forward, what a plan must not do with a tensor.

    >>> hidden = scheduler.mark(self.attention(x), "keep")     # doctest: +SKIP

    Nothing else changes: the tensor itself is returned, and without a schedule the call does nothing. A view is marked
    with the memory that it looks at, and with that all results of the op that makes it. Marks on parameters and inputs
    have no effect: these always stay.

    Args:
        tensor: made in the forward of a module that is scheduled.
        what: ``"keep"`` (it stays on the device until its last use), ``"never_recompute"`` or ``"never_offload"``.

    Raises:
        ValueError: ``what`` is something else.
        TypeError: ``tensor`` is none.

    """
    if what not in KINDS:
        raise ValueError(f"mark(tensor, {what!r}): give one of {', '.join(repr(kind) for kind in KINDS)}")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"mark() takes a tensor, and got {type(tensor).__name__}")
    if torch.compiler.is_compiling():
        _MARK(tensor, what)
    return tensor


def take_marks(joint: fx.GraphModule) -> list[tuple[torch.Tensor, str, str]]:
    """Remove the marks from a joint graph: for each the marked value, what it is marked with, and ``file:line``.

    Values are the fake ones of the graph: a marked view that nothing else reads is dropped later, its storage is not.
    """
    found = []
    for node in list(joint.graph.nodes):
        if node.op == "call_function" and node.target is _MARK:
            tensor, what = node.args
            assert isinstance(tensor, fx.Node)
            found.append((tensor.meta["val"], str(what), source_of(node, skip=__file__)))
            joint.graph.erase_node(node)
    return found
