"""A plan as a memory snapshot of PyTorch, which pytorch.org/memory_viz opens.

The format is that of ``torch.cuda.memory._dump_snapshot``: a pickled dictionary of plain Python objects, with the
allocator's events (``device_traces``) and the blocks of its segments at the end. Addresses are assigned first-fit in
one segment. What is static is there before the first event.
"""

from __future__ import annotations

import bisect
import os
import pickle
from typing import TYPE_CHECKING, Any, Final

from scheduler.export.files import write_whole
from solvers.solution import Compute, Free, Prefetch

if TYPE_CHECKING:
    from graphs.ir import Op
    from scheduler.plan import Plan

_BASE: Final = 0x7F0000000000  # where addresses start: any multiple of 512 does
_ALIGNMENT: Final = 512


def to_memory_snapshot(plan: Plan) -> dict[str, Any]:
    """The plan as ``{"segments": [...], "device_traces": [[...]]}``; sizes are bytes, ``time_us`` counts from 0."""
    return _Recorder(plan).run()


def save_memory_snapshot(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write :func:`to_memory_snapshot` as the pickle that memory_viz reads; an earlier file is replaced."""
    write_whole(path, pickle.dumps(to_memory_snapshot(plan), protocol=4))


class _Recorder:
    """Replays the steps into allocator events."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.heap = _Heap()
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, tuple[int, int, list[dict[str, Any]]]] = {}  # address -> requested, size, frames
        self.address_of: dict[int, int] = {}  # storage -> address of its current copy
        self.time_us = 0

    def run(self) -> dict[str, Any]:
        for name, size in self.plan.static.items():
            if size:
                self._place(size, [_frame(name, "static", 0)])
        clock_ns = 0
        for step in self.plan.graph_steps:
            if isinstance(step, Compute):
                self.time_us = clock_ns // 1000
                self._execute(self.plan.graph.ops[step.op])
                clock_ns += self.plan.costs.time_ns[step.op]
            elif isinstance(step, Prefetch):
                self.time_us = clock_ns // 1000
                storage = self.plan.graph.storages[step.storage]
                frames = [_frame(storage.name, "fetched from the host", 0)]
                self.address_of[step.storage] = self._allocate(storage.bytes, frames)
            elif isinstance(step, Free):
                self.time_us = clock_ns // 1000
                self._free(self.address_of.pop(step.storage))
        return {"segments": [self._segment()], "device_traces": [self.events], "allocator_settings": {}}

    def _execute(self, op: Op) -> None:
        storages = self.plan.graph.storages
        made = {s: self._allocate(storages[s].bytes, _frames(op, storages[s].name)) for s in op.outputs}
        scratch = self.plan.costs.workspace_bytes[op.index]
        if scratch:
            self._free(self._allocate(scratch, _frames(op, f"workspace of {op.name}")))
        for storage, address in made.items():
            if storage in self.address_of:
                self._free(self.address_of[storage])
            self.address_of[storage] = address

    def _place(self, size: int, frames: list[dict[str, Any]]) -> int:
        address = self.heap.allocate(size)
        self.live[address] = (size, _rounded(size), frames)
        return address

    def _allocate(self, size: int, frames: list[dict[str, Any]]) -> int:
        address = self._place(size, frames)
        self._event("alloc", address, size, frames)
        return address

    def _free(self, address: int) -> None:
        size, _, frames = self.live.pop(address)
        self.heap.free(address)
        self._event("free_requested", address, size, frames)
        self._event("free_completed", address, size, frames)

    def _event(self, action: str, address: int, size: int, frames: list[dict[str, Any]]) -> None:
        self.events.append(
            {"action": action, "addr": address, "size": size, "stream": 0, "time_us": self.time_us, "frames": frames}
        )

    def _segment(self) -> dict[str, Any]:
        blocks = []
        position = _BASE
        for address, (requested, size, frames) in sorted(self.live.items()):
            if address > position:
                blocks.append(_block(position, address - position, 0, "inactive", []))
            blocks.append(_block(address, size, requested, "active_allocated", frames))
            position = address + size
        if self.heap.end > position:
            blocks.append(_block(position, self.heap.end - position, 0, "inactive", []))
        active = sum(size for _, size, _ in self.live.values())
        return {
            "device": 0,
            "address": _BASE,
            "total_size": self.heap.end - _BASE,
            "allocated_size": active,
            "active_size": active,
            "requested_size": sum(requested for requested, _, _ in self.live.values()),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }


class _Heap:
    """First-fit addresses: the lowest gap that is wide enough."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []  # (start, end), ascending
        self.end = _BASE

    def allocate(self, size: int) -> int:
        need = _rounded(size)
        position = _BASE
        for index, (start, end) in enumerate(self.taken):
            if start - position >= need:
                self.taken.insert(index, (position, position + need))
                return position
            position = end
        self.taken.append((position, position + need))
        self.end = max(self.end, position + need)
        return position

    def free(self, address: int) -> None:
        del self.taken[bisect.bisect_left(self.taken, (address, 0))]


def _rounded(size: int) -> int:
    return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT


def _frames(op: Op, label: str) -> list[dict[str, Any]]:
    frames = [_frame(f"{label} ({op.target})", op.module_path or "(model)", 0)]
    if op.source:
        file, _, line = op.source.rpartition(":")
        frames.append(_frame(op.name, file, int(line) if line.isdigit() else 0))
    return frames


def _frame(name: str, filename: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


def _block(address: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}
