"""Capturing a training step without running it and without its memory.

``torch.compile``'s front end (Dynamo, then AOTAutograd) traces the model on fake tensors; the joint graph it would
hand to a compiler is taken instead. The same path serves a model on ``meta`` and one whose weights exist: parameters
and inputs are replaced by fake tensors in a copy of the module tree that shares nothing with the model.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphs._torch import FakeTensorMode

TraceBackend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def fake_module(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a module tree whose parameters and buffers are fake tensors on CPU.

    Tensors that are shared (tied weights) stay shared. Hooks, attributes and modes are copied.
    """
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if id(tensor) in memo:
            continue
        fake = fake_tensor(tensor, mode)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake
        if tensor.grad is not None:
            memo[id(tensor.grad)] = None
    with mode:
        return copy.deepcopy(module, memo)


def fake_tensor(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor with the shape, strides, dtype and ``requires_grad`` of a tensor on any device."""
    with mode:
        fake = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad) if tensor.is_leaf and tensor.requires_grad else fake


def fake_inputs(
    args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with every tensor replaced by a fake one; the same tensor twice stays the same."""
    memo: dict[int, torch.Tensor] = {}

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in memo:
            memo[id(leaf)] = fake_tensor(leaf, mode)
        return memo[id(leaf)]

    return pytree.tree_map(convert, (tuple(args), dict(kwargs)))  # type: ignore[no-any-return]


@contextlib.contextmanager
def fake_step(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Within the context, a fake module and fake arguments to trace it with."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = fake_module(module, mode)
    fake_args, fake_kwargs = fake_inputs(args, kwargs, mode)
    with mode:
        yield twin, fake_args, fake_kwargs
