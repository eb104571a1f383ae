"""How much memory a step really takes.

On CUDA the allocator counts it. On CPU the exact peak is the running sum of the memory events of ``torch.profiler``;
what was allocated before the step is counted from the objects that the caller names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from graphs._torch import storage_identity
from graphs.costs.memory_events import record_cpu_memory
from graphs.joint import CUDA_ALLOCATION_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class PeakMemory:
    """Memory of one run of a step, in bytes.

    Attributes:
        baseline_bytes: live before the step: on CPU the storages of ``resident``, on CUDA all that is allocated.
        increase_bytes: most that was live during the step beyond the baseline.

    """

    baseline_bytes: int
    increase_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once."""
        return self.baseline_bytes + self.increase_bytes

    def __repr__(self) -> str:
        return (
            f"PeakMemory(peak_bytes={self.peak_bytes}, "
            f"baseline_bytes={self.baseline_bytes}, increase_bytes={self.increase_bytes})"
        )


def measure_peak(
    step: Callable[[], object],
    *,
    resident: Iterable[object] = (),
    device: torch.device | str | None = None,
) -> PeakMemory:
    """Run a training step once and measure the most memory that was live at once.

    Args:
        step: called once, without arguments. What it returns is held until the end of the measurement, so a step that
            returns the model's output measures what a loop that keeps the output takes.
        resident: what is alive on the device before the step: modules (parameters, buffers, gradients), optimizers
            (state), tensors, containers of these. Needed on CPU only.
        device: where to measure; by default the device of the first tensor in ``resident``, or CPU.

    Raises:
        RuntimeError: on CPU, a profiler is already running in this process.

    """
    tensors = list(_tensors_in(resident))
    where = torch.device(device) if device is not None else (tensors[0].device if tensors else torch.device("cpu"))
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        torch.cuda.reset_peak_memory_stats(where)
        baseline = torch.cuda.memory_allocated(where)
        with _garbage_stays():
            kept = step()
        torch.cuda.synchronize(where)
        peak = torch.cuda.max_memory_allocated(where)
        del kept
        return PeakMemory(baseline, peak - baseline)
    baseline = bytes_of(tensors, where)
    with _garbage_stays():
        kept, deltas = record_cpu_memory(step)
    del kept
    return PeakMemory(baseline, max(itertools.accumulate(deltas, initial=0)))


@contextlib.contextmanager
def _garbage_stays() -> Iterator[None]:
    """Collect no cycles: those of earlier steps, freed in this one, would count as memory that this one gave back."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def bytes_of(tensors: Iterable[torch.Tensor], device: torch.device, seen: set[int] | None = None) -> int:
    """Bytes of the distinct storages behind tensors on a device, as its allocator counts them.

    Args:
        tensors: any tensors; those on other devices count nothing.
        device: the device.
        seen: identities of storages already counted; updated.

    """
    seen = set() if seen is None else seen
    total = 0
    for tensor in tensors:
        if tensor.device.type != device.type or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage_identity(tensor) in seen:
            continue
        seen.add(storage_identity(tensor))
        size = storage.nbytes()
        total += -(-size // CUDA_ALLOCATION_BYTES) * CUDA_ALLOCATION_BYTES if device.type == "cuda" else size
    return total


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device: the driver's free memory plus the allocator's unused cache."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Tensors in modules, optimizers and containers, gradients included."""
    if isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, nn.Module):
        for tensor in itertools.chain(value.parameters(), value.buffers()):
            yield from _tensors_in(tensor)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors_in(list(value.state.values()))
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            yield from _tensors_in(item)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """All tensors in modules, optimizers and containers (see :func:`measure_peak`), gradients included."""
    return list(_tensors_in(values))
