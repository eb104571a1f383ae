"""Runs the same step on a plain and on a scheduled module, and compares everything that training can see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from scheduler import plan_of, schedule
from tests.fuzz.budgets import Between
from tests.training import same_tensor

FLOOR, MIDDLE, UNLIMITED = 0.0, 0.5, 1.0


@pytest.fixture(autouse=True)
def fresh():
    """One thread, and nothing remembered by Dynamo from earlier tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


def bounded(model: nn.Module, fraction: float = FLOOR, **options: Any) -> Any:
    """Schedule a module at a share of the way from its floor to its keep-all peak."""
    return schedule(model, "100TB", solver=Between(fraction=fraction), costs="roofline", **options)


def data(*shape: int, seed: int = 0, requires_grad: bool = False) -> Tensor:
    """Normal numbers that move no global random state."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(requires_grad)


def observe(model: nn.Module, step: Callable[[nn.Module], Any], *, seed: int = 7) -> dict[str, Tensor | None]:
    """Run ``step(model)`` from a seed; its tensors, the gradients, the buffers and where the stream stands."""
    torch.manual_seed(seed)
    result = step(model)
    seen: dict[str, Tensor | None] = {
        f"result {i}": leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
        for i, leaf in enumerate(pytree.tree_leaves(result))
    }
    seen |= {f"gradient {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    seen |= {f"buffer {n}": b.detach().clone() for n, b in model.named_buffers()}
    return seen | {"random stream": torch.get_rng_state()}


def unequal(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """Names under which two observations differ, bit for bit."""
    assert expected.keys() == actual.keys()
    return [name for name in expected if not _same(expected[name], actual[name])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if isinstance(a, Tensor) and a.is_complex():
            return isinstance(b, Tensor) and torch.equal(a, b)
        return same_tensor(a, b)
    return bool(a == b)


def compare(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module], Any],
    *,
    fraction: float = FLOOR,
    recomputes: bool = True,
    **options: Any,
) -> nn.Module:
    """Assert that a step leaves a plain module and a scheduled one in the same state; return the scheduled one.

    ``recomputes``: assert also that the plan runs something twice, without which the comparison would show little.
    """
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = bounded(make(), fraction, **options)
    expected = observe(plain, step)
    assert unequal(expected, observe(model, step)) == []
    plan = plan_of(model)
    assert plan is not None
    if recomputes:
        assert not plan.is_noop
    return model


class Wave(nn.Module):
    """Pointwise ops that keep their inputs: cheap to compute again, so that a floor budget does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().exp().tanh()


class BranchOnShape(nn.Module):
    """Takes one of two ways by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).sin().exp()
        return h.tanh() if x.shape[0] > 8 else h.cos()


def layers(width: int = 16, *extra: nn.Module) -> nn.Sequential:
    """Linear layers around pointwise ops, with what else is given in between."""
    return nn.Sequential(nn.Linear(width, 2 * width), Wave(), *extra, nn.Linear(2 * width, 2 * width), Wave())


def trained(*inputs: Any, loss: Callable[[Any], Tensor] = lambda y: y.square().sum()) -> Callable[[nn.Module], Any]:
    """A step that calls the module on these inputs and backpropagates."""

    def step(model: nn.Module) -> Any:
        given = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
        output = model(*given)
        loss(output).backward()
        return output, [x.grad for x in given if isinstance(x, Tensor) and x.requires_grad]

    return step
