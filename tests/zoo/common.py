"""What every entry of the zoo is made of: the entry itself, seeded inputs, and labels that need no data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.models import Case

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One architecture of the zoo.

    Attributes:
        make: builds the model with seeded parameters, its batches and its loss.
        family: what kind of architecture it is.
        fast: whether it is in the subset that every test run covers.
        refused: part of the error's message where the model is rightly refused, else empty.
        rtol: relative tolerance; 0 compares bit for bit.
        atol: absolute tolerance; 0 compares bit for bit.
        tolerance_reason: why the plain kernels themselves differ, where a tolerance is given.
        outside_bytes: most that a loss which no graph can hold, and no plan counts, allocates beside its gradient.

    """

    make: Callable[[], Case]
    family: str
    fast: bool = False
    refused: str = ""
    rtol: float = 0.0
    atol: float = 0.0
    tolerance_reason: str = ""
    outside_bytes: int = 0

    def __post_init__(self) -> None:
        if (self.rtol or self.atol) and not self.tolerance_reason:
            raise ValueError("a tolerance needs its reason")


class LossInside(nn.Module):
    """A model that takes its loss itself, and returns it with its detached outputs.

    For losses that need as much memory as the outputs: taken outside of the module, it would not be in the budget, and
    a plan that holds much at the end of its forward would peak above it.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Loss, outputs."""
        outputs = self.model(*args, **kwargs)
        return self.loss(outputs), pytree.tree_map_only(Tensor, Tensor.detach, outputs)


def loss_inside(model: nn.Module, make_batch: Callable[[int], Batch], loss: Callable[[Any], Tensor]) -> Case:
    """A case of a model with its loss in the module (see :class:`LossInside`)."""
    return Case(LossInside(model, loss), make_batch, lambda result: result[0])


def generator(seed: int) -> torch.Generator:
    """A generator of its own, so that batches move no global random state."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    """Standard normal values."""
    return torch.randn(*shape, generator=generator(seed))


def integers(high: int, *shape: int, seed: int) -> Tensor:
    """Integers from 0 to ``high`` - 1."""
    return torch.randint(high, shape, generator=generator(seed))


def classes_loss(logits: Tensor) -> Tensor:
    """Cross entropy against labels that count up along the batch."""
    return F.cross_entropy(logits, torch.arange(logits.shape[0], device=logits.device) % logits.shape[1])
