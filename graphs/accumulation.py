"""Sums of gradients, added in place as autograd adds them.

Where a value is used twice, its gradients are summed. The traced graph sums out of place: two gradients and their sum
are live at once, for tied embeddings three times the largest tensor of the model. Autograd's engine adds into the
first where nobody else holds it; so do we. The sum has the same bits.

What is added to cannot be produced again afterwards, so the op that makes it runs once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import fx

from graphs._torch import OpOverload, schema_of, storage_identity
from graphs.mutations import move_views

#: Ops of several results whose first result is a tensor of its own.
_FRESH_FIRST_RESULTS: Final = frozenset(
    {
        "aten::native_layer_norm_backward",
        "aten::_fused_rms_norm_backward",
        "aten::native_group_norm_backward",
        "aten::native_batch_norm_backward",
        "aten::convolution_backward",
    }
)


def add_gradients_in_place(backward: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """Rewrite sums in the backward to add into an operand that nothing else reads.

    Args:
        backward: call_function nodes of the backward, in order; sums among them are edited.

    Returns:
        The nodes of the kernels whose results are added to.

    """
    position = {node: i for i, node in enumerate(backward)}
    kernels: set[fx.Node] = set()
    for node in backward:
        if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        operands = [o for o in node.args if isinstance(o, fx.Node)]
        kernel_of = {o: kernel for o in operands if (kernel := _kernel_behind(o)) in position}
        for operand, kernel in sorted(kernel_of.items(), key=lambda item: -position[item[1]]):
            if not _may_take(node, operand, kernel):
                continue
            other = node.args[1] if operand is node.args[0] else node.args[0]
            node.target = torch.ops.aten.add_.Tensor
            node.args = (operand, other)
            moved_from = storage_identity(node.meta["val"])
            node.meta["val"] = operand.meta["val"]
            move_views(node, moved_from)
            kernels.add(kernel)
            break
    return frozenset(kernels)


def _kernel_behind(operand: fx.Node) -> fx.Node | None:
    """The kernel that makes a tensor and nothing that shares memory with it, or ``None``."""
    kernel = operand
    if operand.target is operator.getitem:
        kernel, position = operand.args  # type: ignore[assignment]
        if position != 0 or not isinstance(kernel.target, OpOverload):
            return None
        return kernel if schema_of(kernel.target).name in _FRESH_FIRST_RESULTS else None
    if not isinstance(kernel.target, OpOverload) or kernel.target.namespace != "aten":
        return None
    return None if schema_of(kernel.target).is_mutable else kernel


def _may_take(node: fx.Node, operand: Any, kernel: fx.Node) -> bool:
    """Whether the sum fits into the operand, and nobody else sees the operand."""
    value, result = operand.meta.get("val"), node.meta.get("val")
    if len(operand.users) != 1 or not isinstance(value, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    if (value.shape, value.stride(), value.dtype) != (result.shape, result.stride(), result.dtype):
        return False
    if value.untyped_storage().nbytes() != value.numel() * value.element_size():
        return False
    others = (node.args[0], node.args[1], *kernel.all_input_nodes)
    shared = {storage_identity(t) for o in others if o is not operand for t in _tensors(o)}
    return storage_identity(value) not in shared


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, list | tuple):
        yield from (t for t in found if isinstance(t, torch.Tensor))
