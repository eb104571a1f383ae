"""Copies between the device and pooled host memory, beside computation: one interface, for CUDA and for the CPU.

A scheduled step that offloads owns one :class:`Transfers`: a pool of host buffers of exactly the sizes that its plan
copies out, one for each storage, and what moves bytes in each direction. The rewritten graphs call the four operators
below, which are opaque to torch and have fake kernels:

    offload(x, transfers, slot) -> host      start copying the storage of x out
    leave(host)                              wait until that copy has ended: x may be dropped or replaced
    fetch(host, transfers, bytes, device)    allocate a storage and start copying back; returns it as flat bytes
    arrive(host)                             wait until that copy has ended: it may be read

A host buffer is in use as long as the tensor that stands for it lives: a forward whose graph is dropped without a
backward gives its buffers back. A second forward before the first one's backward gets buffers of its own.

:mod:`scheduler.eager_offload` moves the saved tensors of eager code through the same pool, without a plan.
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import fx

from graphs.errors import CheckpointSchedulerError
from graphs.links import Link
from scheduler._torch import StorageWeakRef, is_gone
from scheduler.runtime.host_pool import HostPool, Slot


class TransferError(CheckpointSchedulerError, RuntimeError):
    """A copy between device and host failed; the message names the tensor."""


@dataclasses.dataclass(slots=True)
class _Copies:
    """The copies of one host buffer that may be under way, as handles of the implementation."""

    alive: StorageWeakRef
    slot: Slot
    memory: torch.Tensor
    out: Any = None
    back: Any = None


class Transfers(abc.ABC):
    """Moves storages of one scheduled step. Subclasses say how bytes are moved; this class keeps the buffers.

    Args:
        slots: what a plan copies out, in any order: each gets its buffer now.

    Raises:
        HostMemoryError: the buffers do not fit the host's memory.

    """

    pinned: ClassVar[bool]

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.number = next(_numbers)
        self.pool = HostPool(self.slots, pinned=self.pinned)
        self._busy: dict[int, _Copies] = {}  # by address of the buffer
        self._lock = threading.RLock()  # of pool and _busy: several threads may train one module
        _known[self.number] = self

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all host buffers."""
        return self.pool.allocated_bytes

    def offload(self, x: torch.Tensor, slot: Slot) -> torch.Tensor:
        """Start copying the storage behind ``x`` out; return the buffer it goes to."""
        storage = x.untyped_storage()
        if storage.nbytes() != slot.bytes:
            raise TransferError(f"{slot.label} has {storage.nbytes()} bytes, and {slot.bytes} were planned")
        with self._lock:
            if not self.pool.is_free(slot.bytes):
                self._collect()
            memory = self.pool.take(slot)
            host = torch.from_numpy(memory.numpy())  # a storage of its own over the same memory, so that its end shows
            alive = StorageWeakRef(host.untyped_storage())  # type: ignore[no-untyped-call]
            copies = _Copies(alive, slot, memory)
            self._busy[host.data_ptr()] = copies
        copies.out = self._begin(memory, _flat(storage, x.device), None, slot, outward=True)
        return host

    def leave(self, host: torch.Tensor) -> None:
        """Wait until the copy out of this buffer's storage has ended."""
        copies = self._busy[host.data_ptr()]
        if copies.out is not None:
            self._wait(copies.out, copies.slot)
            self._let_go(copies.out)

    def has_left(self, host: torch.Tensor) -> bool:
        """Whether the copy out of this buffer's storage has ended."""
        out = self._busy[host.data_ptr()].out
        return out is None or self._has_ended(out)

    def has_room(self, size: int, limit_bytes: int) -> bool:
        """Whether a buffer of this size is free, or can be had without more than the limit on the host in all.

        Free buffers of other sizes are given up for it where need be.
        """
        with self._lock:
            self._collect()
            return self.pool.has_room(size, limit_bytes)

    def fetch(self, host: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
        """Start copying back; return the new storage as bytes, which must not be read before :meth:`arrive`."""
        copies = self._busy[host.data_ptr()]
        there = torch.empty(size, dtype=torch.uint8, device=device)
        copies.back = self._begin(there, copies.memory, copies.out, copies.slot, outward=False)
        return there

    def arrive(self, host: torch.Tensor) -> None:
        """Wait until the last copy back from this buffer has ended."""
        copies = self._busy[host.data_ptr()]
        if copies.back is not None:
            self._wait(copies.back, copies.slot)
            self._let_go(copies.back)

    def retire(self) -> None:
        """Give up all host buffers that nothing refers to, now and from here on, for the module is no longer scheduled.

        Compiled code may be kept for as long as the process lives. A backward that is still to run has what it needs.
        """
        with self._lock:
            self._collect()
            self.pool.retire()

    def _collect(self) -> None:
        """Take back the buffers that nothing refers to any more, once their copies have ended."""
        for address, copies in [item for item in self._busy.items() if is_gone(item[1].alive)]:
            for handle in (copies.out, copies.back):
                if handle is not None:
                    self._settle(handle)
            self.pool.give(copies.slot.bytes, copies.memory)
            del self._busy[address]

    def _begin(self, target: torch.Tensor, source: torch.Tensor, after: Any, slot: Slot, *, outward: bool) -> Any:
        """Start a copy; what goes wrong names the storage."""
        try:
            return self._start(target, source, after, outward=outward)
        except RuntimeError as error:
            raise _failed(slot, error) from error

    @abc.abstractmethod
    def _start(self, target: torch.Tensor, source: torch.Tensor, after: Any, *, outward: bool) -> Any:
        """Start a copy, after another where that is given; return its handle, which holds the device's tensor."""

    @abc.abstractmethod
    def _wait(self, handle: Any, slot: Slot) -> None:
        """Have computation wait for the end of a copy."""

    @abc.abstractmethod
    def _has_ended(self, handle: Any) -> bool:
        """Whether a copy has ended, well or not."""

    @abc.abstractmethod
    def _let_go(self, handle: Any) -> None:
        """Drop the handle's references to tensors."""

    @abc.abstractmethod
    def _settle(self, handle: Any) -> None:
        """Wait until the copy has ended, whatever came of it."""


class _Task:
    """A copy on a worker thread."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.tensors: tuple[torch.Tensor, torch.Tensor] | None = (target, source)
        self.future: concurrent.futures.Future[None]


class ThreadTransfers(Transfers):
    """Copies on the CPU, by a worker thread for each direction at a stated bandwidth: what a device's link would do.

    For tests of the waits that a rewritten graph needs, and of predicted times, without a device.

    Args:
        slots: what is copied out.
        link: how long copies take.
        delay: seconds to wait before each copy, drawn anew for each; for tests.

    """

    pinned = False

    def __init__(self, slots: Sequence[Slot], link: Link, *, delay: Callable[[], float] = float) -> None:
        super().__init__(slots)
        self.link = link
        self.delay = delay
        self._workers: dict[str, concurrent.futures.ThreadPoolExecutor] = {}
        weakref.finalize(self, _shut_down, self._workers)

    def retire(self) -> None:
        """Let the workers end too."""
        super().retire()
        with self._lock:
            _shut_down(self._workers)

    def _submit(self, worker: str, *task: Any) -> concurrent.futures.Future[None]:
        """Have a worker copy, a new one where it has ended."""
        with self._lock:
            if worker not in self._workers:
                self._workers[worker] = concurrent.futures.ThreadPoolExecutor(1, worker)
            future = self._workers[worker].submit(_copy, *task)
            if self.pool.retired:
                _shut_down(self._workers)
            return future

    def _start(self, target: torch.Tensor, source: torch.Tensor, after: Any, *, outward: bool) -> _Task:
        task = _Task(target, source)
        size = source.numel()
        seconds = (self.link.to_host_ns(size) if outward else self.link.to_device_ns(size)) / 1e9
        worker = ("offload-out" if outward else "offload-back") if self.link.duplex else "offload"
        task.future = self._submit(worker, task, after, seconds, self.delay)
        return task

    def _wait(self, handle: _Task, slot: Slot) -> None:
        try:
            handle.future.result()
        except Exception as error:
            raise _failed(slot, error) from error

    def _has_ended(self, handle: _Task) -> bool:
        return handle.future.done()

    def _let_go(self, handle: _Task) -> None:
        handle.tensors = None

    def _settle(self, handle: _Task) -> None:
        concurrent.futures.wait([handle.future])


def _copy(task: _Task, after: _Task | None, seconds: float, delay: Callable[[], float]) -> None:
    """One copy on a worker: as long as the link would take, and the delay.

    The task holds the tensors, so that the thread that computes drops them: frees are then counted where they are.
    """
    if after is not None:
        after.future.result()
    assert task.tensors is not None
    begin = time.perf_counter()
    time.sleep(delay())
    # .data has a version of its own: what is on its way while the forward ends is saved for the backward meanwhile.
    task.tensors[0].data.copy_(task.tensors[1])
    time.sleep(max(0.0, seconds - (time.perf_counter() - begin)))


def _shut_down(workers: dict[str, concurrent.futures.ThreadPoolExecutor]) -> None:
    """Let workers end once they have done what was submitted."""
    while workers:
        workers.popitem()[1].shutdown(wait=False)


class _Queued:
    """A copy on a CUDA stream, and the event at its end."""

    def __init__(self, end: torch.cuda.Event, tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.end = end
        self.tensors: tuple[torch.Tensor, torch.Tensor] | None = tensors


class CudaTransfers(Transfers):
    """Copies of a CUDA device, on a stream for each direction, from and to pinned memory.

    Each copy starts behind what computation has queued so far: a copy out reads what that makes, and a copy back writes
    to memory that it may still read. Tensors are held until computation has been told to wait for their copy: their
    memory then goes back to the allocator of the stream that computes, behind that wait. What nobody waits for any more
    (a backward that raised) is held until its copy has ended.
    """

    pinned = True

    def __init__(self, slots: Sequence[Slot], device: torch.device) -> None:
        super().__init__(slots)
        self.device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        weakref.finalize(self, _drain, (self._out, self._back)).atexit = False

    def _start(self, target: torch.Tensor, source: torch.Tensor, after: Any, *, outward: bool) -> _Queued:
        stream = self._out if outward else self._back
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            stream.wait_event(after.end)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record(stream)
        return _Queued(end, (target, source))

    def _wait(self, handle: _Queued, slot: Slot) -> None:
        del slot
        torch.cuda.current_stream(self.device).wait_event(handle.end)

    def _has_ended(self, handle: _Queued) -> bool:
        return bool(handle.end.query())  # type: ignore[no-untyped-call]

    def _let_go(self, handle: _Queued) -> None:
        handle.tensors = None

    def _settle(self, handle: _Queued) -> None:
        handle.end.synchronize()


def _drain(streams: Sequence[torch.cuda.Stream]) -> None:
    """Wait for the copies that are under way, before their tensors and buffers go."""
    for stream in streams:
        stream.synchronize()


_numbers = itertools.count(1)
_known: weakref.WeakValueDictionary[int, Transfers] = weakref.WeakValueDictionary()
_LIBRARY: Final = "checkpoint_scheduler"


def _failed(slot: Slot, error: Exception) -> TransferError:
    return TransferError(f"copying {slot.label} between device and host failed: {error}")


def _flat(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """The bytes of a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def offload(x: torch.Tensor, transfers: int, slot: int) -> torch.Tensor:
    """Start copying the storage of ``x`` to the host; see :class:`Transfers`."""
    moving = _known[transfers]
    return moving.offload(x, moving.slots[slot])


def leave(host: torch.Tensor, transfers: int) -> None:
    """Wait until a copy to the host has ended."""
    _known[transfers].leave(host)


def fetch(host: torch.Tensor, transfers: int, size: int, device: torch.device) -> torch.Tensor:
    """Start copying a storage back from the host, and return its bytes."""
    return _known[transfers].fetch(host, size, device)


def arrive(host: torch.Tensor, transfers: int) -> None:
    """Wait until a copy from the host has ended."""
    _known[transfers].arrive(host)


def _fake_offload(x: torch.Tensor, transfers: int, slot: int) -> torch.Tensor:
    del transfers, slot
    return torch.empty(x.untyped_storage().nbytes(), dtype=torch.uint8, device="cpu")


def _fake_wait(host: torch.Tensor, transfers: int) -> None:
    del host, transfers


def _fake_fetch(host: torch.Tensor, transfers: int, size: int, device: torch.device) -> torch.Tensor:
    del host, transfers
    return torch.empty(size, dtype=torch.uint8, device=device)


# Defined without torch.library.custom_op, whose layers for autograd and Dynamo take as long as all the rest: a step
# calls these hundreds of times, behind both.
_library = torch.library.Library(_LIBRARY, "DEF")  # type: ignore[no-untyped-call]
for _schema, _kernel, _fake in (
    ("offload(Tensor x, int transfers, int slot) -> Tensor", offload, _fake_offload),
    ("leave(Tensor host, int transfers) -> ()", leave, _fake_wait),
    ("fetch(Tensor host, int transfers, SymInt size, Device device) -> Tensor", fetch, _fake_fetch),
    ("arrive(Tensor host, int transfers) -> ()", arrive, _fake_wait),
):
    _library.define(_schema)  # type: ignore[no-untyped-call]
    _library.impl(_kernel.__name__, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{_LIBRARY}::{_kernel.__name__}", _fake, lib=_library)

OFFLOAD: Final = torch.ops.checkpoint_scheduler.offload.default
LEAVE: Final = torch.ops.checkpoint_scheduler.leave.default
FETCH: Final = torch.ops.checkpoint_scheduler.fetch.default
ARRIVE: Final = torch.ops.checkpoint_scheduler.arrive.default
for _waiting in (LEAVE, ARRIVE):
    fx.node.has_side_effect(_waiting)  # nothing reads what they return: dead-code elimination would drop them
