"""A text key that says which kernel an fx node runs: same op on the same shapes, dtypes and strides, same key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphs._torch import HigherOrderOperator, OpOverload


def op_signature(node: fx.Node) -> str:
    """Stable text key of the kernel that ``node`` runs.

    Holds the name of the overload and, for each argument in order, dtype, shape, strides and device type of a tensor
    or the ``repr`` of anything else; lists are followed, keyword arguments come in alphabetical order. A tensor that
    is passed twice is written once and then referred to, since the kernel reads it once. Names of nodes, storage
    offsets and device indices are left out. Tensor arguments are described by the fake tensor in ``meta["val"]``.

    Args:
        node: a ``call_function`` node of a captured graph.

    """
    writer = _Writer()
    arguments = [writer.argument(a) for a in node.args]
    arguments += [f"{name}={writer.argument(node.kwargs[name])}" for name in sorted(node.kwargs)]
    return f"{target_name(node.target)}({', '.join(arguments)})"


def target_name(target: Callable[..., Any] | str) -> str:
    """Name of what a node calls: ``aten.mm.default`` for an overload, the qualified name for a plain function."""
    if isinstance(target, str | OpOverload):
        return str(target)
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{target.__name__}"
    module = getattr(target, "__module__", "")
    return f"{module}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def describe_tensor(tensor: torch.Tensor) -> str:
    """Dtype, shape, strides and device type of a tensor, for example ``float32[4,5;5,1]@cpu``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided:
        return f"{dtype}[{_join(tensor.shape)};{tensor.layout}]@{tensor.device.type}"
    return f"{dtype}[{_join(tensor.shape)};{_join(tensor.stride())}]@{tensor.device.type}"


def _join(numbers: Any) -> str:
    return ",".join(str(n) for n in numbers)


class _Writer:
    """Writes the arguments of one node, remembering the nodes it has met."""

    def __init__(self) -> None:
        self._met: dict[fx.Node, int] = {}

    def argument(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return self._node(argument)
        if isinstance(argument, list | tuple):
            return f"[{', '.join(self.argument(a) for a in argument)}]"
        if isinstance(argument, dict):
            return "{" + ", ".join(f"{k!r}: {self.argument(v)}" for k, v in argument.items()) + "}"
        if isinstance(argument, slice):
            return f"slice({', '.join(self.argument(a) for a in (argument.start, argument.stop, argument.step))})"
        if isinstance(argument, torch.device):
            return f"device({argument.type})"
        return repr(argument)

    def _node(self, node: fx.Node) -> str:
        if node in self._met:
            return f"#{self._met[node]}"
        self._met[node] = len(self._met)
        return self._value(node.meta["val"]) if "val" in node.meta else _attribute(node)

    def _value(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return describe_tensor(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._value(v) for v in value)}]"
        return repr(value)


def _attribute(node: fx.Node) -> str:
    """Describe an argument without ``meta["val"]``: a constant of the module, or a sub-graph by a hash of its text."""
    module = node.graph.owning_module
    if node.op == "get_attr" and module is not None:
        value: Any = module
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        if isinstance(value, torch.Tensor):
            return describe_tensor(value)
        if isinstance(value, fx.GraphModule):
            return f"graph({hashlib.sha256(str(value.graph).encode()).hexdigest()[:16]})"
    return f"?{node.op}"
