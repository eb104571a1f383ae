"""What is called for an op when it runs, where that is not the op of the graph itself.

Rewritten graphs run under ``torch.no_grad``: autograd's part is the backward graph. A few kernels look at the mode to
decide what to return: oneDNN's LSTM makes the workspace that its backward reads only where gradients are recorded.

On CPU the fused dropout converts its mask between bool and float one element at a time, which costs as much as a
layer's normalisation. The same arithmetic in another order gives the same bits in the time of eager mode's dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphs._torch import OpOverload, suggest_memory_format


def call_recording(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``op`` with gradients switched on, on tensors that take no part in autograd."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
    with torch.enable_grad():
        return op(*args, **kwargs)


def cpu_dropout(x: torch.Tensor, p: float, train: bool | None = True) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: FBT001, FBT002 - the operator's schema
    """``aten.native_dropout``: the output and the mask of what was kept (bool), both of ``x``'s shape."""
    if train is False or not _is_plain(x):
        return torch.ops.aten.native_dropout.default(x, p, train)  # type: ignore[no-any-return]
    kept = torch.empty_like(x).bernoulli_(1.0 - p)
    mask = kept.to(torch.bool)
    return kept.mul_(1.0 / (1.0 - p) if p < 1.0 else 0.0).mul_(x), mask


def cpu_dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """``aten.native_dropout_backward``: the gradient of the input, of ``gradient``'s shape.

    Steps are traced with the layout that the operator has on CUDA, ``gradient``'s where that is dense in one of torch's
    memory formats and else contiguous. On CPU the operator keeps the strides of a transposed gradient.
    """
    layout = suggest_memory_format(gradient)
    if not (_is_supported(gradient) and mask.is_contiguous(memory_format=layout)):
        result = torch.ops.aten.native_dropout_backward.default(gradient, mask, scale)
        return result.contiguous(memory_format=layout)  # type: ignore[no-any-return]
    return mask.view(torch.int8).to(gradient.dtype).mul_(scale).mul_(gradient)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the arithmetic of :func:`cpu_dropout` is the fused op's for this tensor, down to the result's layout."""
    return _is_supported(tensor) and tensor.is_contiguous()


def _is_supported(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.float64) and tensor.device.type == "cpu" and tensor.numel() > 0


#: Ops that must see gradients switched on.
_RECORDING: Final = frozenset({"aten.mkldnn_rnn_layer.default"})

_ON_CPU: Final[dict[str, Callable[..., Any]]] = {
    "aten.native_dropout.default": cpu_dropout,
    "aten.native_dropout_backward.default": cpu_dropout_backward,
}


def kernel_of(op: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function that computes an op on a device, in place of the operator where there is one."""
    return _ON_CPU.get(str(op), op) if isinstance(op, OpOverload) and device.type == "cpu" else op


def as_executed(node: fx.Node, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and positional arguments to call for a node of a captured graph, given the values of its own."""
    op = node.target
    assert callable(op), node
    if str(op) in _RECORDING:
        return call_recording, (op, *args)
    return (kernel_of(op, device_of(node)) if str(op) in _ON_CPU else op), args


def device_of(node: fx.Node) -> torch.device:
    """Device of a node's value, or of the first tensor among several."""
    return first_tensor(node).device


def first_tensor(node: fx.Node) -> torch.Tensor:
    """A node's value, or the first tensor among several."""
    value = node.meta["val"]
    return value if isinstance(value, torch.Tensor) else next(v for v in value if isinstance(v, torch.Tensor))
