"""Replaying random ops: record a generator's state, run an op again from it, leave the stream where it was.

The functions are called from rewritten graphs. A state is a CPU byte tensor: 5,056 bytes for the CPU generator
(Mersenne Twister), 16 for CUDA's (Philox seed and offset).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphs.kernels import kernel_of


def record_state(device: str) -> torch.Tensor:
    """State of the default generator of ``device`` (``"cpu"`` or ``"cuda:0"``): uint8, shape (state bytes,)."""
    resolved = torch.device(device)
    if resolved.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(resolved).get_rng_state(resolved)  # type: ignore[no-any-return]


def replay(state: torch.Tensor, device: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``op`` as it ran when ``state`` was recorded, and put the generator back to where it is now.

    Args:
        state: what :func:`record_state` returned before the first execution.
        device: the device whose generator the op draws from.
        op: operator to call, through the kernel that ran the first time.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        What ``op`` returns: the same bits as the first time.

    """
    kernel = kernel_of(op, torch.device(device))
    current = record_state(device)
    restore_state(device, state)
    try:
        return kernel(*args, **kwargs)
    finally:
        restore_state(device, current)


def restore_state(device: str, state: torch.Tensor) -> None:
    """Give the default generator of ``device`` a state that :func:`record_state` returned."""
    resolved = torch.device(device)
    if resolved.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(resolved).set_rng_state(state, resolved)


def record_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States of the generators that a step on ``device`` can draw from, the CPU's and its own, by name of device."""
    names = ("cpu", str(device)) if device.type == "cuda" else ("cpu",)
    return {name: record_state(name) for name in names}


def restore_states(states: Mapping[str, torch.Tensor]) -> None:
    """Give each generator the state that :func:`record_states` noted."""
    for device, state in states.items():
        restore_state(device, state)
