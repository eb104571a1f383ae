"""Saved tensors of eager code on the host: what helps a module that cannot be captured, and so cannot be planned.

Autograd lets a pair of functions stand between it and the tensors that it saves for the backward. While the module's
forward runs, each of these is copied to a pooled host buffer beside computation and dropped once the copy has ended;
the backward copies it back, those that it needs next ahead of time. This goes by size alone: nothing is timed, no
budget is kept, and where :func:`scheduler.schedule` can plan the step it does better.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import weakref
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import nn

from graphs._torch import storage_identity
from graphs.costs.link import measured_link
from graphs.links import Link, parse_link
from scheduler._torch import StorageWeakRef, VersionOf, is_gone, storage_behind, version_of
from scheduler.attach import attachment_of
from scheduler.errors import parse_budget
from scheduler.memory import free_bytes, tensors_in
from scheduler.planner import HOST_SHARE
from scheduler.runtime.host_pool import HostMemoryError, Slot
from scheduler.runtime.transfers import CudaTransfers, ThreadTransfers, Transfers

logger = logging.getLogger(__name__)

HANDLE: Final = "_checkpoint_scheduler_offload"

COPIES_UNDER_WAY: Final = 4
"""Copies in each direction that may be under way: computation waits for the oldest one out before there are more, since
each holds its tensor on the device, and so many are fetched ahead in the backward."""


def offload_activations(
    module: nn.Module,
    *,
    least_bytes: int | str | None = None,
    link: str | Link | None = None,
    host_budget_gb: float | str | None = None,
) -> OffloadHandle:
    """Copy what a module's forward saves for the backward to the host, and back when the backward needs it.

    For modules that :func:`scheduler.schedule` refuses since they cannot be captured. Gradients are those of plain
    training bit for bit, and what raises there raises here: a saved tensor that was changed in place is refused in the
    backward. (Writes through ``.data`` are unseen, as autograd does not see them either.)

    Left on the device: parameters and buffers, the module's inputs, tensors that are on the host already, storages
    below ``least_bytes``, tensor subclasses, and what the host has no room for. A storage that several ops save, whole
    or as views, is copied once.

    Args:
        module: any module, its parameters on one device.
        least_bytes: smaller storages stay; ``None``: what the link moves during the fixed time of one copy.
        link: on the CPU, where the host is the device and copies serve for trying out, the bandwidth to copy at, as
            for :func:`scheduler.schedule`. On CUDA nothing: the device has its own.
        host_budget_gb: most bytes on the host; ``None``: half of its free memory.

    Returns:
        A handle whose ``remove()`` ends it. It is a context manager that removes itself as well.

    Raises:
        TypeError: not a module.
        ValueError: the module is scheduled, or offloads already; its parameters lie on several devices; no link is
            stated on the CPU, or one is on CUDA; ``least_bytes`` is not a size.
        BudgetError: ``host_budget_gb`` is not a positive amount of memory.

    The forward or backward raises :class:`~scheduler.runtime.transfers.TransferError` where a copy fails, with the path
    of the module that saved the tensor. Host memory that cannot be had is no error: the tensor stays on the device.

    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"offload_activations() takes a torch.nn.Module, and got {type(module).__name__}")
    name = type(module).__name__
    if attachment_of(module) is not None:
        raise ValueError(f"{name} is scheduled: give schedule() offload='auto', or unschedule() it first")
    if HANDLE in module.__dict__:
        raise ValueError(f"{name} offloads already: remove() the handle that the first call returned")
    device = _device_of(module)
    limit = (
        int(HOST_SHARE * free_bytes(torch.device("cpu"))) if host_budget_gb is None else parse_budget(host_budget_gb)
    )
    transfers: Transfers
    if device.type == "cuda":
        if link is not None:
            raise ValueError(f"link={link!r}: that of a CUDA device is not for the caller to state")
        known = measured_link(device)
        transfers = CudaTransfers((), device)
    else:
        if link is None:
            raise ValueError(f"offload_activations() on {device}: state the link, such as link='25GB/s'")
        known = parse_link(link)
        transfers = ThreadTransfers((), known)
    least = known.least_bytes if least_bytes is None else _size(least_bytes)
    return OffloadHandle(module, transfers, device, least_bytes=max(least, 1), limit_bytes=limit)


def _device_of(module: nn.Module) -> torch.device:
    devices = {p.device for p in module.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the parameters of {type(module).__name__} lie on several devices ({names}): offload a part")
    return devices.pop() if devices else torch.device("cpu")


def _size(value: int | str) -> int:
    if isinstance(value, str):
        return parse_budget(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"least_bytes={value!r}: give a number of bytes, or a text such as '1MB'")
    return value


@dataclasses.dataclass(eq=False, slots=True, weakref_slot=True)
class _Moved:
    """A storage on the host, as long as a saved tensor refers to it.

    Attributes:
        host: its buffer.
        slot: its bytes, and its name in messages.
        device: where it came from.
        there: the storage on the device: the original, or the last copy back.
        before: the storages that the same forward moved right before this one, in order.
        ahead: the copy back that was started ahead of its use, as bytes.

    """

    host: torch.Tensor
    slot: Slot
    device: torch.device
    there: StorageWeakRef
    before: tuple[weakref.ref[_Moved], ...]
    ahead: torch.Tensor | None = None

    def fetch(self, transfers: Transfers) -> None:
        """Start copying back, unless the storage is on the device or on its way."""
        if self.ahead is None and is_gone(self.there):
            self.ahead = transfers.fetch(self.host, self.slot.bytes, self.device)
            self.there = StorageWeakRef(self.ahead.untyped_storage())  # type: ignore[no-untyped-call]

    def storage(self, transfers: Transfers) -> torch.UntypedStorage:
        """The storage on the device, which may be read: as long as something holds it, it need not come again."""
        if self.ahead is None:
            storage = storage_behind(self.there)
            if storage is not None:
                return storage
            self.fetch(transfers)
        assert self.ahead is not None
        transfers.arrive(self.host)
        storage, self.ahead = self.ahead.untyped_storage(), None
        return storage


@dataclasses.dataclass(frozen=True, slots=True)
class _Packed:
    """What autograd holds instead of a tensor that was moved."""

    moved: _Moved
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: VersionOf

    def tensor(self, storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
        """The view of a storage that the tensor was."""
        return torch.empty(0, dtype=self.dtype, device=device).set_(storage, self.offset, self.shape, self.stride)


@dataclasses.dataclass(frozen=True, slots=True)
class _Stayed:
    """What autograd holds of a tensor that was not moved."""

    tensor: torch.Tensor
    version: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """A storage that the forward has moved: its copy, the storage itself, and the version of what was copied."""

    moved: weakref.ref[_Moved]
    origin: StorageWeakRef
    version: int


class OffloadHandle:
    """One module whose saved tensors go to the host; see :func:`offload_activations`."""

    def __init__(
        self, module: nn.Module, transfers: Transfers, device: torch.device, *, least_bytes: int, limit_bytes: int
    ) -> None:
        self.transfers = transfers
        self.device = device
        self.least_bytes = least_bytes
        self.limit_bytes = limit_bytes
        self._module = weakref.ref(module)
        self._inside: list[str] = []  # paths of the modules whose forward runs, outermost first
        self._contexts: list[contextlib.ExitStack] = []
        self._fixed: set[int] = set()
        self._known: dict[int, _Known] = {}  # by identity of the storage
        self._before: collections.deque[weakref.ref[_Moved]] = collections.deque(maxlen=COPIES_UNDER_WAY)
        self._leaving: collections.deque[_Moved] = collections.deque()
        self._hooks: list[Any] = []
        for path, part in module.named_modules():
            if part is not module:
                self._hooks += self._around(part, functools.partial(self._enter, path), self._leave)
        self._hooks += self._around(module, self._begin, self._end)
        module.__dict__[HANDLE] = self

    @staticmethod
    def _around(part: nn.Module, before: Any, after: Any) -> list[Any]:
        return [
            part.register_forward_pre_hook(before, with_kwargs=True),
            part.register_forward_hook(after, always_call=True),
        ]

    def remove(self) -> None:
        """Copy nothing more. Backwards of forwards that have run still find what they need."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        module = self._module()
        if module is not None:
            module.__dict__.pop(HANDLE, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the module copies to the host through the same pool."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _enter(self, path: str, *_: Any) -> None:
        self._inside.append(path)

    def _leave(self, *_: Any) -> None:
        if self._inside:
            self._inside.pop()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The module's forward begins: its saved tensors come here. A call from inside of it changes nothing."""
        self._inside.append("")
        context = contextlib.ExitStack()
        if not self._contexts:
            self._let_go(0)
            self._fixed = {storage_identity(t) for t in tensors_in(module, args, kwargs) if _is_plain(t)}
            self._before.clear()
            context.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
        self._contexts.append(context)

    def _end(self, *_: Any) -> None:
        """The module's forward has ended, well or not; what is leaving then is at hand for the backward."""
        self._leave()
        if self._contexts:
            self._contexts.pop().close()
        if not self._contexts:
            self._known.clear()
            self._fixed.clear()

    def _pack(self, tensor: torch.Tensor) -> _Packed | _Stayed:
        tensor = tensor.detach()  # its node would hold itself otherwise
        if not self._may_move(tensor):
            return _Stayed(tensor, version_of(tensor))
        moved = self._moved(tensor)
        if moved is None:
            return _Stayed(tensor, version_of(tensor))
        shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _Packed(moved, tensor.dtype, shape, stride, offset, VersionOf(tensor))

    def _may_move(self, tensor: torch.Tensor) -> bool:
        return (
            _is_plain(tensor)
            and tensor.device == self.device
            and not tensor.is_inference()
            and tensor.untyped_storage().nbytes() >= self.least_bytes
            and storage_identity(tensor) not in self._fixed
        )

    def _moved(self, tensor: torch.Tensor) -> _Moved | None:
        """The storage's copy on the host, which is under way; ``None`` where the host has no room."""
        identity = storage_identity(tensor)
        known = self._known.get(identity)
        if known is not None and known.version == version_of(tensor) and not is_gone(known.origin):
            moved = known.moved()
            if moved is not None:
                return moved
        size = tensor.untyped_storage().nbytes()
        if not self.transfers.has_room(size, self.limit_bytes):
            return None
        slot = Slot(size, f"a saved tensor of {self._inside[-1] or 'the model'}")
        try:
            host = self.transfers.offload(tensor, slot)
        except HostMemoryError as error:
            logger.warning("%s; what does not fit stays on the device", error)
            self.limit_bytes = self.transfers.allocated_bytes
            return None
        origin = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        moved = _Moved(host, slot, self.device, origin, tuple(self._before))
        self._known[identity] = _Known(weakref.ref(moved), origin, version_of(tensor))
        self._before.append(weakref.ref(moved))
        self._leaving.append(moved)
        self._let_go(COPIES_UNDER_WAY)
        return moved

    def _let_go(self, most: int) -> None:
        """Drop what has left, and wait until at most so many are leaving."""
        while self._leaving and (len(self._leaving) > most or self.transfers.has_left(self._leaving[0].host)):
            self.transfers.leave(self._leaving.popleft().host)

    def _unpack(self, packed: _Packed | _Stayed) -> torch.Tensor:
        if isinstance(packed, _Stayed):
            if version_of(packed.tensor) != packed.version:
                raise _changed(packed.tensor.dtype, packed.tensor.shape)
            return packed.tensor
        if not packed.version.is_current:
            raise _changed(packed.dtype, packed.shape)
        storage = packed.moved.storage(self.transfers)
        self._let_go(COPIES_UNDER_WAY)
        for reference in reversed(packed.moved.before):
            earlier = reference()
            if earlier is not None:
                earlier.fetch(self.transfers)
        return packed.tensor(storage, self.device)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a view of its storage's bytes."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _changed(dtype: torch.dtype, shape: torch.Size) -> RuntimeError:
    """What autograd raises of a saved tensor that is not as it was."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"{dtype} and shape {list(shape)}"
    )
