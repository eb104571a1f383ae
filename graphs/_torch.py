"""Every private name of torch that this package uses, in one place. Checked on torch 2.13.0."""
# ruff: noqa: SLF001 - that is what this file is for

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = [
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "disable_thread_profiler",
    "enable_thread_profiler",
    "schema_of",
    "storage_identity",
]


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Schema of an op: its arguments and results, and which of them alias or are written."""
    return op._schema


def storage_identity(tensor: torch.Tensor) -> int:
    """A number that two live tensors share if and only if they share their storage; fake tensors too."""
    return int(tensor.untyped_storage()._cdata)


# The per-thread profiler behind torch.autograd.profiler_legacy. The public torch.profiler keeps one session per
# process: starting it inside a profile of the user takes that profile's events away. This one is bound to its thread.

_autograd: Any = torch.autograd  # its stubs leave these names out


def enable_thread_profiler() -> None:
    """Start to record memory events on the calling thread.

    Raises:
        RuntimeError: a profiler is active on this thread.

    """
    config = _autograd.ProfilerConfig(
        _autograd.ProfilerState.CPU,
        False,  # shapes
        True,  # memory
        False,  # stacks
        False,  # flops
        False,  # modules
        torch._C._profiler._ExperimentalConfig(),
    )
    _autograd._enable_profiler_legacy(config)


def disable_thread_profiler() -> list[int]:
    """End recording: signed bytes of each CPU allocation and release since then, in order."""
    return [
        record.cpu_memory_usage()
        for records_of_thread in _autograd._disable_profiler_legacy()
        for record in records_of_thread
        if record.kind() == "memory_alloc"
    ]
