"""What is on the device besides the step's own tensors: the part of a budget that no schedule can lower."""

from __future__ import annotations

import collections
import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphs.errors import UnsupportedModelError
from graphs.joint import CUDA_ALLOCATION_BYTES
from scheduler._torch import FakeTensorMode, unset_fake_temporarily
from scheduler.memory import bytes_of, tensors_in

logger = logging.getLogger(__name__)

_LOSS_SCALARS = 2


def static_memory(
    module: nn.Module, inputs: Sequence[Any], optimizer: torch.optim.Optimizer | None, device: torch.device
) -> dict[str, int]:
    """Bytes resident throughout a step, by what they are for; a storage counts once, under the first name that fits.

    ``other`` is the loss and its gradient, which the caller of ``backward()`` holds until it ends, and on CUDA what the
    allocator holds beyond all these: other models, data prefetched, cuBLAS workspaces.

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
        "other": _LOSS_SCALARS * (CUDA_ALLOCATION_BYTES if device.type == "cuda" else 4),
    }
    if device.type == "cuda" and all(p.device.type == "cuda" for p in parameters):
        pending = _pending_optimizer_bytes(optimizer, device) if optimizer is not None else 0
        static["other"] += max(0, torch.cuda.memory_allocated(device) + pending - sum(static.values()))
    return static


def optimizer_bytes(optimizer: torch.optim.Optimizer, device: torch.device, seen: set[int] | None = None) -> int:
    """Bytes of an optimizer's state on a device, with the state that its first step will allocate.

    Raises:
        UnsupportedModelError: the state does not exist yet and the optimizer cannot step on fake tensors.

    """
    existing = bytes_of(tensors_in(optimizer), device, seen)
    return existing + _pending_optimizer_bytes(optimizer, device)


def _pending_optimizer_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """State that the next step will allocate.

    A copy of the optimizer steps on fake parameters with fake gradients. Where it wants to read numbers from them, it
    steps on real zeros instead, one parameter at a time, so that no more than one parameter's state is ever allocated.
    """
    pending = [
        (g, p) for g in optimizer.param_groups for p in g["params"] if p.requires_grad and p not in optimizer.state
    ]
    if not pending:
        return 0
    with unset_fake_temporarily(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                stand_ins = [(g, torch.empty_strided(p.shape, p.stride(), dtype=p.dtype)) for g, p in pending]
                return _state_after_step(optimizer, stand_ins, device)
        except Exception:
            logger.debug("%s cannot step on fake tensors", type(optimizer).__name__, exc_info=True)
        try:
            return sum(
                _state_after_step(optimizer, [(g, torch.zeros_like(p, device="cpu"))], device) for g, p in pending
            )
        except Exception as error:
            raise UnsupportedModelError(
                f"the state of {type(optimizer).__name__} is not allocated yet, and trying a step on stand-ins failed "
                f"({error!r}): take one optimizer step before scheduling, or leave the optimizer out and lower the "
                "budget by the size of its state"
            ) from error


def _state_after_step(
    optimizer: torch.optim.Optimizer, stand_ins: Sequence[tuple[dict[str, Any], torch.Tensor]], device: torch.device
) -> int:
    """Bytes of state that a copy of the optimizer has after one step on these tensors."""
    shadow = copy.copy(optimizer)
    shadow.__dict__ = dict(optimizer.__dict__)
    shadow.state = collections.defaultdict(dict)
    plain = {"foreach": False, "fused": False, "capturable": False}
    shadow.param_groups = []
    for group, tensor in stand_ins:
        parameter = nn.Parameter(tensor)
        parameter.grad = torch.zeros_like(tensor)
        options = {key: plain.get(key, value) for key, value in group.items()}
        shadow.param_groups.append(options | {"params": [parameter]})
    with torch.no_grad():
        type(optimizer).step(shadow)
    state = tensors_in(list(shadow.state.values()))
    if device.type == "cpu":
        return bytes_of(state, device)
    # On an accelerator state of a parameter's shape lies beside it; step counters stay on the CPU.
    return bytes_of([t for t in state if t.dim() > 0], torch.device("cpu"))
