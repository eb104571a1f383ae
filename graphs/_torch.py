"""Every private name of torch that this package uses, in one place. Checked on torch 2.13.0."""
# ruff: noqa: SLF001 - that is what this file is for

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.profiler
import torch.autograd.profiler_legacy
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = [
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "autocast_depth",
    "disable_thread_profiler",
    "enable_thread_profiler",
    "has_kernel_for",
    "in_backward",
    "is_profiled",
    "notice_profiler_start",
    "packet_name",
    "schema_of",
    "storage_identity",
    "suggest_memory_format",
]


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Schema of an op: its arguments and results, and which of them alias or are written."""
    return op._schema


def packet_name(target: Any) -> str:
    """Name of an op without its overload, for example ``aten.mm``; empty for what is no op of the dispatcher."""
    return str(target.overloadpacket) if isinstance(target, OpOverload) else ""


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


def in_backward() -> bool:
    """Whether the calling thread runs a part of a backward."""
    return int(torch._C._current_graph_task_id()) != -1


def is_profiled() -> bool:
    """Whether a profiler is active on the calling thread."""
    return bool(_autograd._profiler_enabled())


#: Where torch's profilers start, all those that Python code can use: each looks these names up when it starts.
_PROFILER_STARTS = (
    (torch.autograd.profiler, "_prepare_profiler"),
    (torch.autograd.profiler, "_enable_profiler"),
    (torch.autograd.profiler_legacy, "_enable_profiler_legacy"),
)
_noticed: dict[int, Callable[[], None]] = {}
_originals: list[Callable[..., Any]] = []
_notice_lock = threading.Lock()


def notice_profiler_start(callback: Callable[[], None]) -> Callable[[], None]:
    """Have ``callback`` called once before the next profiler starts on the calling thread.

    Returns:
        a function that ends it; torch is as it was as soon as no thread waits any more.

    """
    thread = threading.get_ident()
    with _notice_lock:
        if not _noticed:
            _originals[:] = [getattr(module, name) for module, name in _PROFILER_STARTS]
            for (module, name), original in zip(_PROFILER_STARTS, _originals, strict=True):
                setattr(module, name, _noticing(original))
        _noticed[thread] = callback

    def end() -> None:
        with _notice_lock:
            if _noticed.pop(thread, None) is not None and not _noticed:
                for (module, name), original in zip(_PROFILER_STARTS, _originals, strict=True):
                    setattr(module, name, original)

    return end


def _noticing(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(*args: Any, **kwargs: Any) -> Any:
        callback = _noticed.get(threading.get_ident())
        if callback is not None:
            callback()
        return original(*args, **kwargs)

    return start


def autocast_depth() -> int:
    """How many autocast contexts, on or off, are open in this thread."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def has_kernel_for(op: OpOverload, dispatch_key: str) -> bool:
    """Whether an operator does something of its own at a dispatch key."""
    name: str = op.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key))
