"""One half of a step, forward or backward, as the fx graph of a plan's steps.

An op may be computed several times: each execution becomes a node of its own, and readers are bound to the copy that is
resident when they run. A view is rebuilt from its storage where a reader needs it, unless the forward has made it and
still holds the storage: then the view itself crosses to the backward, which saves rebuilding it and takes no memory.
What is copied to the host is waited for where it is dropped, replaced or read.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from graphs.ir import StorageKind
from graphs.joint import Capture
from graphs.kernels import as_executed, device_of, first_tensor
from scheduler.runtime import rng
from scheduler.runtime.host_pool import Slot
from scheduler.runtime.transfers import ARRIVE, FETCH, LEAVE, OFFLOAD, Transfers


@dataclasses.dataclass(frozen=True, slots=True)
class HostCopy:
    """Key of the host buffer of a storage."""

    storage: int


Key = fx.Node | int | HostCopy


def name_of(key: Key) -> str:
    """What a value that crosses from the forward to the backward is called."""
    if isinstance(key, fx.Node):
        return key.name
    return f"host_copy_{key.storage}" if isinstance(key, HostCopy) else f"rng_state_{key}"


def slot_of(capture: Capture, storage: int) -> Slot:
    """The host buffer of a storage, with its name for messages."""
    described = capture.graph.storages[storage]
    return Slot(described.bytes, f"{described.name} of {described.module_path or 'the model'}")


@dataclasses.dataclass
class Host:
    """What both halves know of copies to the host.

    Attributes:
        transfers: what moves them.
        slots: the storages that are copied out, in the order of their buffers.
        leaving: storages whose copy out nothing has waited for yet.
        arriving: storages whose copy back nothing has waited for yet.

    """

    transfers: Transfers | None
    slots: tuple[int, ...]
    leaving: set[int] = dataclasses.field(default_factory=set)
    arriving: set[int] = dataclasses.field(default_factory=set)

    @property
    def number(self) -> int:
        """By which the operators of a graph know the transfers."""
        assert self.transfers is not None
        return self.transfers.number


class Half:
    """Builds the graph of one phase.

    ``values`` maps a joint node, or the storage of a generator's state, to its current copy.
    """

    def __init__(
        self,
        capture: Capture,
        executions: Sequence[int],
        forward: Half | None,
        late_readers: frozenset[int],
        host: Host,
    ) -> None:
        self.capture = capture
        self.host = host
        self.executions = executions
        self.forward = forward
        self.late_readers = late_readers
        self.graph = fx.Graph()
        self.values: dict[Key, fx.Node] = {}
        self.saved: list[Key] = []
        self.comments: dict[str, str] = {}
        self.seen: set[int] = set() if forward is None else set(forward.seen)
        self.renewed: set[int] = set()  # storages freed or computed in this half
        self.first_tangent: fx.Node | None = None
        for node in capture.joint.graph.nodes:
            if node.op != "placeholder":
                continue
            is_tangent = node.name.startswith("tangents_")
            if is_tangent == (forward is not None):
                copy = self.graph.placeholder(node.name)
                copy.meta = dict(node.meta)
                self.values[node] = copy
                self.first_tangent = self.first_tangent or copy

    def compute(self, op: int) -> None:
        """Emit one execution of an op."""
        node = self.capture.nodes[op]
        again = op in self.seen
        self.seen.add(op)
        self.renewed.update(self.capture.graph.ops[op].outputs)
        if self.host.slots:
            self._settle(self.capture.graph.ops[op].inputs, (self.host.arriving,))
            self._settle(self.capture.graph.ops[op].outputs, (self.host.leaving, self.host.arriving))
        if node is None:
            self._record_rng_state(op)
            return
        if op in self.capture.snapshots and op not in self.late_readers:
            self.values[node] = self.value_of(self.capture.snapshots[op])
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value_of)
        if again and op in self.capture.rng_state_ops:
            state = self.capture.graph.ops[self.capture.rng_state_ops[op]].outputs[0]
            given: Any = (self.value_of(state), str(device_of(node)), node.target, *args)
            target: Callable[..., Any] = rng.replay
        else:
            target, given = as_executed(node, args)
        copy = self._call(target, given, kwargs, f"{node.name}_again" if again else node.name)
        copy.meta = dict(node.meta)
        if again:
            path = self.capture.graph.ops[op].module_path
            self.comments[copy.name] = f"recomputed: {node.name} of {path or 'the model'}"
        for result in self.capture.produced_nodes(op):
            if result is node:
                self.values[node] = copy
            elif result not in self.values:
                item = self._call(operator.getitem, (copy, result.args[1]), {}, result.name)
                item.meta = dict(result.meta)
                self.values[result] = item

    def offload(self, storage: int) -> None:
        """Start copying a storage to the host."""
        node = self._bases(storage)[0]
        value = self.value_of(node)
        slot = self.host.slots.index(storage)
        name = f"host_{node.name}"
        copy = self._call(OFFLOAD, (value, self.host.number, slot), {}, name)
        with _fake_mode_of(node):
            copy.meta["val"] = torch.empty(self.capture.graph.storages[storage].bytes, dtype=torch.uint8)
        self.values[HostCopy(storage)] = copy
        self.host.leaving.add(storage)
        self.comments[copy.name] = f"to the host: {slot_of(self.capture, storage).label}"

    def fetch(self, storage: int) -> None:
        """Start copying a storage back; what was made in it becomes views of the new copy."""
        bases = self._bases(storage)
        size = self.capture.graph.storages[storage].bytes
        device = bases[0].meta["val"].device
        args = (self.value_of(HostCopy(storage)), self.host.number, size, device)
        flat = self._call(FETCH, args, {}, f"fetched_{bases[0].name}")
        with _fake_mode_of(bases[0]):
            flat.meta["val"] = torch.empty(size, dtype=torch.uint8, device=device)
        self.comments[flat.name] = f"from the host: {slot_of(self.capture, storage).label}"
        for base in bases:
            val = base.meta["val"]
            typed = self._call(torch.ops.aten.view.dtype, (flat, val.dtype), {}, f"{base.name}_typed")
            layout = (typed, list(val.shape), list(val.stride()), val.storage_offset())
            with _fake_mode_of(base):
                typed.meta["val"] = torch.empty(size // val.itemsize, dtype=val.dtype, device=device)
            self.values[base] = self._call(torch.ops.aten.as_strided.default, layout, {}, f"{base.name}_back")
            self.values[base].meta = dict(base.meta)
        self.renewed.add(storage)
        self.host.arriving.add(storage)

    def _settle(self, storages: Sequence[int], ways: Sequence[set[int]]) -> None:
        """Wait for the copies of storages that are under way in these directions."""
        for way in ways:
            for storage in storages:
                if storage in way:
                    way.discard(storage)
                    target = LEAVE if way is self.host.leaving else ARRIVE
                    args = (self.value_of(HostCopy(storage)), self.host.number)
                    self._call(target, args, {}, "leave" if way is self.host.leaving else "arrive").meta["val"] = None

    def _bases(self, storage: int) -> list[fx.Node]:
        """The joint nodes that a kernel makes in a storage."""
        producer = self.capture.graph.storages[storage].producer
        assert producer is not None
        return [n for n in self.capture.produced_nodes(producer) if self.capture.storage_of.get(n) == storage]

    def free(self, storage: int) -> None:
        """Forget a storage's current copy and the views of it."""
        self.renewed.add(storage)
        self._settle((storage,), (self.host.leaving, self.host.arriving))
        stale = [k for k in self.values if self._storage_behind(k) == storage]
        for key in stale:
            if not isinstance(key, fx.Node) or key.op != "placeholder":
                del self.values[key]

    def _storage_behind(self, key: Key) -> int | None:
        """Storage of a value; of several views at once (``split``, ``unbind``), the one that all of them look at."""
        if isinstance(key, HostCopy):
            return None
        if isinstance(key, int):
            return key
        storage_of = self.capture.storage_of
        views = [user for user in key.users if user.target is operator.getitem and user in storage_of]
        return storage_of.get(key, storage_of[views[0]] if views else None)

    def value_of(self, key: Key) -> fx.Node:
        """The current copy of a joint node's value, rebuilding views and fetching what the forward saved."""
        if key in self.values:
            return self.values[key]
        if isinstance(key, fx.Node) and key.op == "get_attr":
            value = self.graph.get_attr(str(key.target))
        elif self.forward is not None and (not isinstance(key, fx.Node) or self._is_base(key) or self._crosses(key)):
            value = self._fetch_saved(key)
        elif isinstance(key, fx.Node) and not self._is_base(key):
            assert callable(key.target), key
            args, kwargs = fx.node.map_arg((key.args, key.kwargs), self.value_of)
            value = self._call(key.target, args, kwargs, key.name)
        else:
            raise AssertionError(f"the plan reads {key} when it is not resident")
        if isinstance(key, fx.Node):
            value.meta = dict(key.meta)
        self.values[key] = value
        return value

    def finish(self, outputs: Sequence[Any]) -> fx.Graph:
        """Close the graph with these results (keys of values, or constants)."""
        results = [self.value_of(o) if isinstance(o, Key) and not isinstance(o, bool) else o for o in outputs]
        self.graph.output(tuple(results)).meta = dict(self.capture.joint.graph.output_node().meta)
        for node in reversed(self.graph.nodes):
            if node.target is operator.getitem and not node.users:
                self.graph.erase_node(node)
        self.graph.lint()
        return self.graph

    def _call(self, target: Callable[..., Any], args: Any, kwargs: Any, name: str) -> fx.Node:
        """Add a call, under the name of the joint graph's node where that is free."""
        return self.graph.create_node("call_function", target, args, kwargs, name)

    def _is_base(self, node: fx.Node) -> bool:
        """Whether a node's value is a static tensor or made by a kernel, rather than a view that can be rebuilt."""
        if node.op == "placeholder":
            return True
        storage = self.capture.storage_of.get(node)
        if storage is None:
            return False
        producer = self.capture.graph.storages[storage].producer
        return producer is not None and node in self.capture.produced_nodes(producer)

    def _crosses(self, view: fx.Node) -> bool:
        """Whether the forward holds a tensor view whose storage is still the forward's copy."""
        assert self.forward is not None
        storage = self.capture.storage_of.get(view)
        is_tensor = isinstance(view.meta.get("val"), torch.Tensor)
        return is_tensor and storage is not None and storage not in self.renewed and view in self.forward.values

    def _fetch_saved(self, key: Key) -> fx.Node:
        """Add an input to the backward for a value that the forward still holds when it ends."""
        assert self.forward is not None
        held = key in self.forward.values
        assert held, f"the plan reads {key} in the backward, where it is neither resident nor recomputed"
        name = key.name if isinstance(key, fx.Node) else self.forward.values[key].name
        with self.graph.inserting_before(self.first_tangent):
            value = self.graph.placeholder(name)
        value.target = value.name  # fx renames it where the name is taken, and would bind the old name to it as well
        value.meta = dict(self.forward.values[key].meta)
        self.saved.append(key)
        return value

    def _record_rng_state(self, op: int) -> None:
        """Emit the recording of the generator's state, where a later execution replays from it."""
        random_op = op + 1
        if self.executions[random_op] < 2:
            return
        random_node = self.capture.nodes[random_op]
        assert random_node is not None
        state = self.graph.call_function(rng.record_state, (str(device_of(random_node)),))
        size = rng.record_state("cpu").numel()
        with _fake_mode_of(random_node):
            state.meta["val"] = torch.empty(size, dtype=torch.uint8)
        storage = self.capture.graph.ops[op].outputs[0]
        assert self.capture.graph.storages[storage].kind is StorageKind.RNG_STATE
        self.values[storage] = state


def _fake_mode_of(node: fx.Node) -> Any:
    return first_tensor(node).fake_mode  # type: ignore[attr-defined]
