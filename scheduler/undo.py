"""Putting back what a step has moved, where it is refused after a part of it has run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from scheduler.runtime import rng


@dataclasses.dataclass(frozen=True, slots=True)
class Before:
    """Buffers and random streams as they were before a step.

    Attributes:
        buffers: of each buffer its module, its name there, the tensor, its version counter, and a copy on the host.
        rng_states: by device, the state of its default generator.

    """

    buffers: tuple[tuple[nn.Module, str, torch.Tensor, int, torch.Tensor], ...]
    rng_states: Mapping[str, torch.Tensor]

    @classmethod
    def record(cls, modules: Iterable[nn.Module], device: torch.device) -> Before:
        """Note the state of modules, and of the generators of the CPU and of ``device``."""
        buffers = tuple(
            (owner, name, buffer, buffer._version, buffer.detach().to("cpu", copy=True))  # noqa: SLF001
            for module in modules
            for owner in module.modules()
            for name, buffer in owner._buffers.items()  # noqa: SLF001 - the dict, to put back the same tensor
            if buffer is not None and buffer.device.type != "meta"
        )
        return cls(buffers, rng.record_states(device))

    def restore(self) -> None:
        """Give each buffer its tensor and its values back, and each generator its state."""
        with torch.no_grad():
            for owner, name, buffer, version, values in self.buffers:
                owner._buffers[name] = buffer  # noqa: SLF001
                if buffer._version != version:  # noqa: SLF001
                    buffer.copy_(values)
        rng.restore_states(self.rng_states)
