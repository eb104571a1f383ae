"""Train a model plain and wrapped from the same seeds, and say where the two differ; budgets between floor and peak.

A scheduled module runs the kernels of the plain one in another order, so everything is compared bit for bit unless a
tolerance is asked for: outputs, losses, gradients of parameters and inputs (``None`` where plain gives ``None``),
buffers, parameters after the optimizer's step, optimizer state, and where the generators stand after each step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.models import Case

Wrap = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Callable[..., Any]]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain stochastic gradient descent: no state."""
    return torch.optim.SGD(parameters, lr=0.05)


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """How :func:`compare_training` trains.

    Attributes:
        steps: optimizer steps.
        accumulate: backward calls before each optimizer step.
        optimizer: makes the optimizer from the parameters.
        device: where the model and the batches are moved to.
        input_gradients: whether floating-point inputs require gradients, which are compared too.
        rtol: relative tolerance; 0 compares bit for bit.
        atol: absolute tolerance; 0 compares bit for bit.

    """

    steps: int = 3
    accumulate: int = 1
    optimizer: MakeOptimizer = sgd
    device: str = "cpu"
    input_gradients: bool = False
    rtol: float = 0.0
    atol: float = 0.0


def move_batch(
    batch: tuple[tuple[Any, ...], dict[str, Any]], device: str, *, require_grad: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch on a device, its floating-point tensors as leaves that require gradients if asked."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        moved = leaf.detach().to(device)
        return moved.requires_grad_(leaf.requires_grad or (require_grad and leaf.is_floating_point()))

    args, kwargs = pytree.tree_map(move, batch)
    return args, kwargs


def _copy(tree: Any) -> list[Tensor]:
    return [leaf.detach().clone() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _generator_states(device: str) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _optimizer_state(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> dict[str, Tensor]:
    return {
        f"{names[parameter]}.{key}": value.detach().clone()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def _run(step: Callable[[], None], resident: tuple[Any, ...]) -> None:  # the default measures nothing
    step()


def train(
    make: Callable[[], Case],
    wrap: Wrap | None,
    options: TrainingOptions,
    *,
    run_step: Callable[[Callable[[], None], tuple[Any, ...]], None] = _run,
) -> list[dict[str, Any]]:
    """Train from fixed seeds and record every tensor that could differ, by step and by name.

    ``run_step(step, resident)`` runs one forward and backward; ``resident`` is what lives on the device before it.
    """
    model, make_batch, loss_of = make()
    model.to(options.device)
    optimizer = options.optimizer(model.parameters())
    names = {parameter: name for name, parameter in model.named_parameters()}
    call: Callable[..., Any] = model
    records: list[dict[str, Any]] = []
    for step in range(options.steps):
        record: dict[str, Any] = {}
        optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(1000 + step)
        for micro in range(options.accumulate):
            seed = step * options.accumulate + micro
            batch = move_batch(make_batch(seed), options.device, require_grad=options.input_gradients)
            if wrap is not None and seed == 0:
                call = wrap(model, *batch)
            results: list[Any] = []

            def step_once(call: Any = call, batch: Any = batch, results: list[Any] = results) -> None:
                results.append(call(*batch[0], **batch[1]))
                results.append(loss_of(results[0]))
                results[1].backward()

            run_step(step_once, (model, optimizer, batch))
            record[f"outputs of batch {micro}"] = _copy(results[0])
            record[f"loss of batch {micro}"] = results[1].detach().clone()
            leaves = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]
            record[f"input gradients of batch {micro}"] = [
                None if t.grad is None else t.grad.clone() for t in leaves if t.requires_grad
            ]
            del results, batch, leaves, step_once
        record["generator"] = _generator_states(options.device)
        record["gradient"] = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        record["buffer"] = {n: b.detach().clone() for n, b in model.named_buffers()}
        optimizer.step()
        record["parameter"] = {n: p.detach().clone() for n, p in model.named_parameters()}
        record["optimizer state"] = _optimizer_state(optimizer, names)
        records.append(record)
    return records


def same_tensor(a: Tensor | None, b: Tensor | None, *, rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Whether both are ``None``, or tensors of equal shape, dtype and values (NaN equals NaN)."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if rtol == atol == 0.0 or not (a.is_floating_point() or a.is_complex()):
        return bool(((a == b) | (a.isnan() & b.isnan())).all()) if a.is_floating_point() else torch.equal(a, b)
    return torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def _describe(a: Tensor | None, b: Tensor | None) -> str:
    if a is None or b is None:
        return f"{'None' if a is None else 'a tensor'} plain, {'None' if b is None else 'a tensor'} wrapped"
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return f"{a.dtype} {tuple(a.shape)} on {a.device} plain, {b.dtype} {tuple(b.shape)} on {b.device} wrapped"
    return f"differs by up to {(a.double() - b.double()).abs().max().item():.3g}" if a.numel() else "differs"


def differences(
    plain: list[dict[str, Any]], wrapped: list[dict[str, Any]], *, rtol: float = 0.0, atol: float = 0.0
) -> list[str]:
    """One sentence for each recorded tensor in which two trainings differ; empty where they agree."""
    found: list[str] = []
    for step, (expected, actual) in enumerate(zip(plain, wrapped, strict=True)):
        for what, value in expected.items():
            items = _named(value)
            others = _named(actual[what])
            if items.keys() != others.keys():
                found.append(f"step {step}: {what} has {sorted(items)} plain and {sorted(others)} wrapped")
                continue
            found += [
                f"step {step}: {what} {name}: {_describe(items[name], others[name])}"
                for name in items
                if not same_tensor(items[name], others[name], rtol=rtol, atol=atol)
            ]
    return found


def _named(value: Any) -> dict[str, Tensor | None]:
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        return {str(i): item for i, item in enumerate(value)}
    return {"": value}


def compare_training(make: Callable[[], Case], wrap: Wrap, **options: Any) -> list[str]:
    """Train plain and wrapped, and return the differences; ``options`` are those of :class:`TrainingOptions`.

    ``wrap(model, args, kwargs)`` is called once, before the first step, and returns what is called instead of the
    model. It must move no random state, parameter or buffer.
    """
    chosen = TrainingOptions(**options)
    plain = train(make, None, chosen)
    wrapped = train(make, wrap, chosen)
    return differences(plain, wrapped, rtol=chosen.rtol, atol=chosen.atol)


def spread(low: int, high: int, count: int = 5) -> list[int]:
    """``count`` byte budgets spread evenly from ``low`` to ``high``, both included.

    Rounded up, so that none is below ``low``.
    """
    return [low + -(-(high - low) * i // (count - 1)) for i in range(count)]
