"""What is on the device besides the step's own tensors: the part of a budget that no schedule can lower."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphs.errors import UnsupportedModelError
from scheduler._torch import FakeTensorMode, unset_fake_temporarily
from scheduler.memory import bytes_of, tensors_in


def static_memory(
    module: nn.Module, inputs: Sequence[Any], optimizer: torch.optim.Optimizer | None, device: torch.device
) -> dict[str, int]:
    """Bytes resident throughout a step, by what they are for; a storage counts once, under the first name that fits.

    On CUDA ``other`` is what the allocator holds beyond these: other models, data prefetched, cuBLAS workspaces.

    Args:
        module: the scheduled module.
        inputs: the step's inputs, nested or flat.
        optimizer: its state counts, also where it is not allocated yet.
        device: where the step runs.

    """
    seen: set[int] = set()
    parameters, buffers = list(module.parameters()), list(module.buffers())
    static = {
        "parameters": bytes_of(parameters, device, seen),
        "buffers": bytes_of(buffers, device, seen),
        "gradients": bytes_of([p.grad for p in parameters if p.grad is not None], device, seen),
        "optimizer": optimizer_bytes(optimizer, device, seen) if optimizer is not None else 0,
        "inputs": bytes_of(tensors_in(inputs), device, seen),
        "other": 0,
    }
    if device.type == "cuda" and all(p.device.type == "cuda" for p in parameters):
        pending = _pending_optimizer_bytes(optimizer, device) if optimizer is not None else 0
        static["other"] = max(0, torch.cuda.memory_allocated(device) + pending - sum(static.values()))
    return static


def optimizer_bytes(optimizer: torch.optim.Optimizer, device: torch.device, seen: set[int] | None = None) -> int:
    """Bytes of an optimizer's state on a device, with the state that its first step will allocate.

    Raises:
        UnsupportedModelError: the state does not exist yet and the optimizer cannot step on fake tensors.

    """
    existing = bytes_of(tensors_in(optimizer), device, seen)
    return existing + _pending_optimizer_bytes(optimizer, device)


def _pending_optimizer_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """State that the next step will allocate: a copy of the optimizer steps on fake parameters with fake gradients."""
    without_state = [
        p for g in optimizer.param_groups for p in g["params"] if p.requires_grad and p not in optimizer.state
    ]
    if not without_state:
        return 0
    memo: dict[int, Any] = {}
    fakes = []
    with unset_fake_temporarily(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                fake = nn.Parameter(mode.from_tensor(parameter.detach()), requires_grad=parameter.requires_grad)
                memo[id(parameter)] = fake
        for parameter in without_state:
            fake = memo[id(parameter)]
            fake.grad = torch.empty_like(fake)
            fakes.append(fake)
        shadow = copy.copy(optimizer)
        shadow.__dict__ = dict(optimizer.__dict__)
        shadow.state = type(optimizer.state)(dict)  # type: ignore[call-arg]
        shadow.param_groups = [
            {
                key: [memo[id(p)] for p in value if id(memo[id(p)]) in {id(f) for f in fakes}]
                if key == "params"
                else value
                for key, value in group.items()
            }
            for group in optimizer.param_groups
        ]
        try:
            with torch.no_grad():
                type(optimizer).step(shadow)
        except Exception as error:
            raise UnsupportedModelError(
                f"the state of {type(optimizer).__name__} is not allocated yet and could not be found out on fake tensors "
                f"({error!r}); take one optimizer step first, or leave the optimizer out and lower the budget by its state"
            ) from error
        return bytes_of(tensors_in(shadow), device)
