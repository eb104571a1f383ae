"""The scheduling problem: what to run, what it costs, and how many bytes may be live at once.

Units: times are int nanoseconds, sizes int bytes. Ops and storages are indexed from 0; ops are in the order of their
first executions, which every schedule keeps. Static storages (parameters, buffers, inputs) do not appear: they are
always resident and are counted once in :attr:`Problem.static_bytes`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from graphs.ir import Costs, StorageKind, TrainingGraph
from graphs.links import Link


@dataclasses.dataclass(frozen=True)
class Problem:
    """Least-time schedule of a training step under a peak-memory budget (DESIGN: rematerialisation).

    A schedule executes every op at least once, first executions in index order, any recomputable op again whenever its
    inputs are resident, and frees storages in between. While an op runs, live bytes are the resident storages, all of
    the op's outputs (a second copy of an output that is already resident counts too) and the op's workspace.

    Attributes:
        time_ns: execution time of each op.
        workspace_bytes: scratch bytes of each op while it runs.
        inputs: for each op the storages it reads, ascending.
        outputs: for each op the storages it produces; each storage is produced by exactly one op.
        recomputable: for each op whether it may execute more than once.
        storage_bytes: size of each storage.
        live_at_end: storages that must be resident when the last op has ended.
        forward_ops: number of leading ops that belong to the forward phase (0 where the split does not matter).
        budget_bytes: the most bytes that may be live, static ones included.
        static_bytes: bytes that are resident throughout and take part in no decision.
        op_names: for messages; same length as ``time_ns``.
        op_modules: dotted module path of each op, for messages and for strategies that go by modules; may be empty.
        op_targets: what each op calls (``aten.bmm.default``), for strategies that go by kinds of ops; may be empty.
        link: what copies storages to the host and back; ``None`` where there is no host tier.
        host_bytes: the most bytes of copies on the host; each lasts until the step ends.
        movable: storages that may be copied to the host; ``None``: all.

    """

    time_ns: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    recomputable: tuple[bool, ...]
    storage_bytes: tuple[int, ...]
    live_at_end: frozenset[int]
    forward_ops: int
    budget_bytes: int
    static_bytes: int = 0
    op_names: tuple[str, ...] = ()
    op_modules: tuple[str, ...] = ()
    op_targets: tuple[str, ...] = ()
    link: Link | None = None
    host_bytes: int = 0
    movable: frozenset[int] | None = None

    def __post_init__(self) -> None:
        """Refuse inconsistent lengths, negative figures, reads before production, storages made twice or never."""
        n = len(self.time_ns)
        for field in ("workspace_bytes", "inputs", "outputs", "recomputable"):
            if len(getattr(self, field)) != n:
                raise ValueError(f"{field} has {len(getattr(self, field))} entries for {n} ops")
        if any(figure < 0 for figure in (*self.time_ns, *self.workspace_bytes, *self.storage_bytes)):
            raise ValueError("times and sizes must not be negative")
        made: set[int] = set()
        for op in range(n):
            if not made.issuperset(self.inputs[op]):
                missing = sorted(set(self.inputs[op]) - made)
                raise ValueError(f"op {op} reads storages {missing} before they are produced")
            if made.intersection(self.outputs[op]):
                raise ValueError(f"op {op} produces storages that an earlier op produces")
            made.update(self.outputs[op])
        if made != set(range(len(self.storage_bytes))):
            odd = sorted(set(range(len(self.storage_bytes))) ^ made)
            raise ValueError(f"storages {odd} are produced by no op or unknown")
        if not made.issuperset(self.live_at_end):
            raise ValueError("live_at_end names an unknown storage")
        if not 0 <= self.forward_ops <= n:
            raise ValueError(f"forward_ops is {self.forward_ops} of {n} ops")

    @classmethod
    def from_graph(cls, graph: TrainingGraph, costs: Costs, budget_bytes: int, *, static_bytes: int) -> Problem:
        """Build the problem of a captured graph.

        Static storages are dropped; ``static_bytes`` says what is resident throughout (parameters, buffers, inputs,
        existing gradients, optimizer state). Storage indices of the problem are those of
        :meth:`graph_storages`, in order.
        """
        dynamic = cls.graph_storages(graph)
        index = {storage: i for i, storage in enumerate(dynamic)}
        return cls(
            time_ns=costs.time_ns,
            workspace_bytes=costs.workspace_bytes,
            inputs=tuple(tuple(index[s] for s in op.inputs if s in index) for op in graph.ops),
            outputs=tuple(tuple(index[s] for s in op.outputs) for op in graph.ops),
            recomputable=tuple(op.recomputable for op in graph.ops),
            storage_bytes=tuple(graph.storages[s].bytes for s in dynamic),
            live_at_end=frozenset(index[s] for s in dynamic if graph.storages[s].kind.lives_to_end),
            forward_ops=graph.forward_ops,
            budget_bytes=budget_bytes,
            static_bytes=static_bytes,
            op_names=tuple(op.name for op in graph.ops),
            op_modules=tuple(op.module_path for op in graph.ops),
            op_targets=tuple(op.target for op in graph.ops),
        )

    @staticmethod
    def graph_storages(graph: TrainingGraph) -> tuple[int, ...]:
        """The graph's storage index of each problem storage."""
        return tuple(s.index for s in graph.storages if not s.kind.is_static)

    @classmethod
    def movable_of(cls, graph: TrainingGraph) -> frozenset[int]:
        """The storages of a graph's problem that may be copied to the host: activations that are not pinned.

        What is written to again after it is made is pinned, since the copy would not have what is written.
        """
        return frozenset(
            i
            for i, s in enumerate(cls.graph_storages(graph))
            if graph.storages[s].kind is StorageKind.ACTIVATION and not graph.storages[s].pinned
        )

    @classmethod
    def from_single_outputs(
        cls,
        time_ns: Sequence[int],
        output_bytes: Sequence[int],
        inputs: Sequence[Sequence[int]],
        budget_bytes: int,
        *,
        live_at_end: Sequence[int] = (),
    ) -> Problem:
        """Build a problem in which op ``v`` makes exactly storage ``v`` and may always be recomputed.

        The form of the literature's graphs: ``inputs[v]`` lists the ops whose outputs op ``v`` reads.
        """
        n = len(time_ns)
        return cls(
            time_ns=tuple(time_ns),
            workspace_bytes=(0,) * n,
            inputs=tuple(tuple(sorted(set(i))) for i in inputs),
            outputs=tuple((v,) for v in range(n)),
            recomputable=(True,) * n,
            storage_bytes=tuple(output_bytes),
            live_at_end=frozenset(live_at_end),
            forward_ops=0,
            budget_bytes=budget_bytes,
        )

    def with_budget(self, budget_bytes: int) -> Problem:
        """The same problem under another budget."""
        return dataclasses.replace(self, budget_bytes=budget_bytes)

    def with_static(self, static_bytes: int) -> Problem:
        """The same problem with so many bytes resident throughout."""
        return dataclasses.replace(self, static_bytes=static_bytes)

    def with_link(self, link: Link | None, host_bytes: int) -> Problem:
        """The same problem with so many bytes of host memory behind a link; ``None``: without a host tier."""
        return dataclasses.replace(self, link=link, host_bytes=host_bytes if link is not None else 0)

    @property
    def has_host_tier(self) -> bool:
        """Whether any storage may be copied to the host."""
        return self.link is not None and self.host_bytes > 0

    def may_offload(self, storage: int) -> bool:
        """Whether a storage may be copied to the host: it has bytes, and no fewer than the link's least."""
        size = self.storage_bytes[storage]
        if self.link is None or (self.movable is not None and storage not in self.movable):
            return False
        return 0 < size <= self.host_bytes and size >= self.link.least_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes left for the step's own storages and workspaces: budget less what is static."""
        return self.budget_bytes - self.static_bytes

    @property
    def keep_all_time_ns(self) -> int:
        """Time of the step that computes every op once."""
        return sum(self.time_ns)

    @functools.cached_property
    def producer(self) -> tuple[int, ...]:
        """The op that produces each storage."""
        producer = [-1] * len(self.storage_bytes)
        for op, outputs in enumerate(self.outputs):
            for storage in outputs:
                producer[storage] = op
        return tuple(producer)

    @functools.cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each storage the ops that read it, ascending."""
        readers: list[list[int]] = [[] for _ in self.storage_bytes]
        for op, inputs in enumerate(self.inputs):
            for storage in inputs:
                readers[storage].append(op)
        return tuple(tuple(r) for r in readers)

    def describe_op(self, op: int) -> str:
        """Name and module of an op, for messages."""
        name = self.op_names[op] if self.op_names else f"op {op}"
        module = self.op_modules[op] if self.op_modules else ""
        return f"{name} in {module}" if module else name
