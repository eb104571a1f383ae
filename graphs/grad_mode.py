"""Ops whose kernel asks whether gradients are being recorded.

Rewritten graphs run under ``torch.no_grad``: autograd's part is the backward graph. A few kernels look at the mode to
decide what to return: oneDNN's LSTM makes the workspace that its backward reads only where gradients are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

#: Names of the ops that must see gradients switched on.
RECORDING_OPS: Final = frozenset({"aten.mkldnn_rnn_layer.default"})


def call_recording(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``op`` with gradients switched on, on tensors that take no part in autograd."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
    with torch.enable_grad():
        return op(*args, **kwargs)


def as_recorded(op: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and positional arguments to call for ``op`` so that it returns what it does while training."""
    return (call_recording, (op, *args)) if str(op) in RECORDING_OPS else (op, args)
