"""Single fx nodes on fake tensors, as a captured graph holds them."""

from typing import Any

import torch
from torch import fx

from graphs._torch import FakeTensorMode

MODE = FakeTensorMode()


def fake(*size: int, dtype: torch.dtype = torch.float32, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    """A fake CPU tensor."""
    with MODE:
        if stride is not None:
            return torch.empty_strided(size, stride, dtype=dtype)
        return torch.empty(size, dtype=dtype)


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node that calls ``target``; every tensor among the arguments becomes a placeholder, equal ones the same."""
    graph = fx.Graph()
    placeholders: dict[int, fx.Node] = {}

    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in placeholders:
                node = graph.placeholder(f"arg{len(placeholders)}")
                node.meta["val"] = value
                placeholders[id(value)] = node
            return placeholders[id(value)]
        if isinstance(value, list | tuple):
            return [place(v) for v in value]
        return value

    placed, placed_kwargs = tuple(place(a) for a in args), {k: place(v) for k, v in kwargs.items()}
    node = graph.call_function(target, placed, placed_kwargs)
    with MODE:
        node.meta["val"] = target(*args, **kwargs)
    return node
