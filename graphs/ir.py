"""What one training step computes: ops, the storages they read and write, and the graph between them.

A :class:`TrainingGraph` is the joint (forward + backward) graph of one training step with views merged away: an
:class:`Op` is a kernel that runs, a :class:`Storage` is the bytes behind one or more tensors. It is immutable, holds no
tensor and imports no torch, so that it can be solved, saved and compared anywhere.

Memory model (the one every solver, simulator and validator shares)::

    op        o0      o1      o2      o3
    storage a |=======|=======|               allocated when o0 starts, last read by o1, freed when o1 has ended
    storage b         |=======|=======|=====  produced by o1, kept to the end of the step

While an op runs, the storages that are resident, all of its outputs and its workspace are live at once. Storages of
kind ``parameter``, ``buffer`` and ``input`` exist before the step and after it: they are *static*, take part in no
decision and are counted once, outside the graph's own bytes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

import networkx as nx

from graphs.errors import GraphFormatError

SCHEMA_VERSION: Final = 1


class Phase(enum.StrEnum):
    """The half of the step in which an op first executes."""

    FORWARD = "forward"
    BACKWARD = "backward"


class StorageKind(enum.StrEnum):
    """What the bytes are for. ``PARAMETER``, ``BUFFER`` and ``INPUT`` are static: there before and after the step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    ACTIVATION = "activation"
    OUTPUT = "output"  # returned by the forward: resident until the step ends
    TANGENT = "tangent"  # gradient of an output, handed in when backward starts
    GRADIENT = "gradient"  # returned by the backward: resident until the step ends
    RNG_STATE = "rng_state"  # generator state recorded before a random op, so that it can be replayed

    @property
    def is_static(self) -> bool:
        """Whether storages of this kind exist before the step starts and after it ends."""
        return self in (StorageKind.PARAMETER, StorageKind.BUFFER, StorageKind.INPUT)

    @property
    def lives_to_end(self) -> bool:
        """Whether storages of this kind must be resident when the step ends."""
        return self in (StorageKind.OUTPUT, StorageKind.GRADIENT)


def positions_of(order: Sequence[int]) -> list[int]:
    """Where each op runs, given for each position the op that runs there."""
    position = [0] * len(order)
    for i, op in enumerate(order):
        position[op] = i
    return position


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """The bytes behind one tensor and all of its views.

    Attributes:
        index: position in :attr:`TrainingGraph.storages`.
        name: name of the fx node that allocates it (``native_layer_norm_3[0]`` for one output of several).
        bytes: size in bytes as the device's allocator counts it.
        kind: what it is for; decides whether it is static and whether it lives to the end of the step.
        producer: index of the op that writes it, or ``None`` for a static storage.
        module_path: dotted path of the module that allocates it, ``""`` for the root or where unknown.
        pinned: why a plan may not copy it to the host, empty where it may; not part of the fingerprint.

    """

    index: int
    name: str
    bytes: int
    kind: StorageKind
    producer: int | None
    module_path: str = ""
    pinned: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One kernel of the step. Ops are listed in the order in which they first execute.

    Attributes:
        index: position in :attr:`TrainingGraph.ops`.
        name: name of its fx node.
        target: what is called, for example ``aten.mm.default``.
        phase: forward or backward.
        inputs: indices of the storages it reads (static ones included), each once, ascending.
        outputs: indices of the storages it allocates, in the op's order of results.
        module_path: dotted path of the module it belongs to (backward ops: of the forward op they differentiate).
        recomputable: whether a plan may execute it more than once.
        reason: why not, where ``recomputable`` is false; empty otherwise.
        source: ``file:line`` of the user's code, where known.

    """

    index: int
    name: str
    target: str
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    module_path: str = ""
    recomputable: bool = True
    reason: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True)
class TrainingGraph:
    """The ops of one training step in execution order, and the storages between them.

    Attributes:
        ops: every op that runs in the keep-all step, in order: forward ops first, then backward ops.
        storages: every storage, static ones included.
        forward_ops: number of forward ops; ``ops[:forward_ops]`` run before the user's ``backward()`` call.
        name: what was captured, for messages only; not part of the fingerprint.
        order: for each op its position in the order in which the step was captured; empty where that is the graph's.
            The fingerprint is of the ops in the graph's order, however it came about.

    Raises:
        GraphFormatError: an index is out of range, an op reads a storage before it is produced, or phases interleave.

    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    forward_ops: int
    name: str = ""
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a graph whose indices, order or phases are inconsistent."""
        if self.order and sorted(self.order) != list(range(len(self.ops))):
            raise GraphFormatError(f"the order of {len(self.order)} ops is no permutation of {len(self.ops)} ops")
        for position, storage in enumerate(self.storages):
            if storage.index != position or storage.bytes < 0:
                raise GraphFormatError(
                    f"storage {position} ({storage.name}) has index {storage.index} and {storage.bytes} bytes"
                )
            if storage.kind.is_static != (storage.producer is None):
                raise GraphFormatError(f"storage {storage.name} of kind {storage.kind} has producer {storage.producer}")
        produced = {s.index for s in self.storages if s.kind.is_static}
        for position, op in enumerate(self.ops):
            if op.index != position:
                raise GraphFormatError(f"op {op.name} stands at {position} but has index {op.index}")
            if (op.phase is Phase.FORWARD) != (position < self.forward_ops):
                raise GraphFormatError(f"op {op.name} is {op.phase} at {position}, with {self.forward_ops} forward ops")
            missing = [self.storages[i].name for i in op.inputs if i not in produced]
            if missing:
                raise GraphFormatError(f"op {op.name} ({op.target}) reads {missing} before they are produced")
            wrong = [self.storages[o].name for o in op.outputs if self.storages[o].producer != position]
            if wrong:
                raise GraphFormatError(f"op {op.name} ({op.target}) lists {wrong} as outputs, made by another op")
            produced.update(op.outputs)

    @functools.cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each storage the indices of the ops that read it, ascending."""
        readers: list[list[int]] = [[] for _ in self.storages]
        for op in self.ops:
            for i in op.inputs:
                readers[i].append(op.index)
        return tuple(tuple(r) for r in readers)

    @functools.cached_property
    def digraph(self) -> nx.DiGraph[tuple[str, int]]:
        """Bipartite graph of ``("op", i)`` and ``("storage", j)``: storage → op that reads it, op → what it makes.

        Op nodes carry the :class:`Op` as attribute ``op``, storage nodes the :class:`Storage` as ``storage``. Treat it
        as read-only: it is built once and shared.
        """
        graph: nx.DiGraph[tuple[str, int]] = nx.DiGraph()
        for storage in self.storages:
            graph.add_node(("storage", storage.index), storage=storage)
        for op in self.ops:
            graph.add_node(("op", op.index), op=op)
            graph.add_edges_from((("storage", i), ("op", op.index)) for i in op.inputs)
            graph.add_edges_from((("op", op.index), ("storage", o)) for o in op.outputs)
        return graph

    @functools.cached_property
    def captured(self) -> TrainingGraph:
        """The same step with its ops in the order in which they were captured. Storages have the same numbers."""
        if not self.order:
            return self
        return self._permuted(positions_of(self.order), ())

    def in_order(self, order: Sequence[int]) -> TrainingGraph:
        """The same step with its ops in another order. Storages keep their numbers.

        Args:
            order: for each position the op of :attr:`captured` that runs there; empty for the captured order.

        Raises:
            GraphFormatError: it is no permutation, reads a storage before it is produced, or mixes the phases.

        """
        captured = self.captured
        if not order:
            return captured
        if sorted(order) != list(range(len(self.ops))):
            raise GraphFormatError(f"the order of {len(order)} ops is no permutation of {len(self.ops)} ops")
        return captured._permuted(order, tuple(order))  # noqa: SLF001 - the same class

    def _permuted(self, order: Sequence[int], kept: tuple[int, ...]) -> TrainingGraph:
        position = positions_of(order)
        return dataclasses.replace(
            self,
            ops=tuple(dataclasses.replace(self.ops[op], index=i) for i, op in enumerate(order)),
            storages=tuple(
                s if s.producer is None else dataclasses.replace(s, producer=position[s.producer])
                for s in self.storages
            ),
            order=kept,
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides whether a plan applies: targets, phases, edges, sizes, recomputability.

        Names of nodes and files are left out: they differ between torch versions and checkouts.
        """
        digest = hashlib.sha256()
        for storage in self.storages:
            digest.update(f"s {storage.bytes} {storage.kind} {storage.producer}\n".encode())
        for op in self.ops:
            digest.update(f"o {op.target} {op.phase} {op.inputs} {op.outputs} {op.recomputable}\n".encode())
        return digest.hexdigest()

    def static_bytes(self) -> int:
        """Bytes of parameters, buffers and inputs together."""
        return sum(s.bytes for s in self.storages if s.kind.is_static)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready form, with ``schema_version``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "forward_ops": self.forward_ops,
            "storages": [[s.name, s.bytes, s.kind.value, s.producer, s.module_path] for s in self.storages],
            "order": list(self.order),
            "pinned": [[s.index, s.pinned] for s in self.storages if s.pinned],
            "ops": [
                [
                    o.name,
                    o.target,
                    o.phase.value,
                    list(o.inputs),
                    list(o.outputs),
                    o.module_path,
                    o.recomputable,
                    o.reason,
                    o.source,
                ]
                for o in self.ops
            ],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainingGraph:
        """Inverse of :meth:`to_dict`.

        Raises:
            GraphFormatError: another schema version, a missing field, or an inconsistent graph.

        """
        if data.get("schema_version") != SCHEMA_VERSION:
            raise GraphFormatError(
                f"graph has schema_version {data.get('schema_version')!r}; this version reads {SCHEMA_VERSION}"
            )
        try:
            pinned = dict(data.get("pinned", ()))  # absent in graphs of versions without
            storages = tuple(
                Storage(i, name, size, StorageKind(kind), producer, module_path, pinned.get(i, ""))
                for i, (name, size, kind, producer, module_path) in enumerate(data["storages"])
            )
            ops = tuple(
                Op(
                    i,
                    name,
                    target,
                    Phase(phase),
                    tuple(inputs),
                    tuple(outputs),
                    module_path,
                    recomputable,
                    reason,
                    source,
                )
                for i, (
                    name,
                    target,
                    phase,
                    inputs,
                    outputs,
                    module_path,
                    recomputable,
                    reason,
                    source,
                ) in enumerate(data["ops"])
            )
            order = tuple(data.get("order", ()))  # absent in graphs of versions without
            return cls(ops, storages, data["forward_ops"], data.get("name", ""), order)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, GraphFormatError):
                raise
            raise GraphFormatError(f"not a training graph: {error!r}") from error

    def to_json(self) -> str:
        """JSON text of :meth:`to_dict`, without white space."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> TrainingGraph:
        """Inverse of :meth:`to_json`. Raises :class:`GraphFormatError` like :meth:`from_dict`."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise GraphFormatError(f"not JSON: {error}") from error
        return cls.from_dict(data)


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """What each op of a graph costs on one device.

    Attributes:
        time_ns: execution time of each op, in op order, in nanoseconds.
        workspace_bytes: bytes an op allocates and frees again while it runs, beyond its outputs.
        device: name of the device the figures are for.
        source: ``"profiled"`` or ``"roofline"``.
        notes: sentences on what the figures rest on, which plans made with them repeat.
        order: as :attr:`TrainingGraph.order` of the graph whose op order this is.

    """

    time_ns: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    device: str
    source: str
    notes: tuple[str, ...] = ()
    order: tuple[int, ...] = ()

    def in_order(self, order: Sequence[int]) -> Costs:
        """The same figures for the ops in another order, as :meth:`TrainingGraph.in_order`."""
        if tuple(order) == self.order:
            return self
        time_ns, workspace_bytes = list(self.time_ns), list(self.workspace_bytes)
        for i, op in enumerate(self.order):
            time_ns[op], workspace_bytes[op] = self.time_ns[i], self.workspace_bytes[i]
        chosen = order or range(len(time_ns))
        return dataclasses.replace(
            self,
            time_ns=tuple(time_ns[op] for op in chosen),
            workspace_bytes=tuple(workspace_bytes[op] for op in chosen),
            order=tuple(order),
        )
