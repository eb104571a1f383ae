"""From AOTAutograd's joint fx graph to a :class:`~graphs.ir.TrainingGraph`, and the map back.

What happens on the way: views and ``getitem`` are merged into the storage they look at; outputs of an op become one
storage each; buffers that the step updates get a snapshot op, so that nothing ever reads a value written after the
first execution; every random op gets an op that records the generator's state; the arrival of the output gradients
becomes an op of its own, the first of the backward phase.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx

from graphs import recomputability
from graphs._torch import OpOverload, schema_of, storage_identity
from graphs.accumulation import add_gradients_in_place
from graphs.constraints import Constraints, is_from_user
from graphs.draws import draw_in_memory_order
from graphs.errors import UnsupportedModelError
from graphs.fakes import correct_fake_results
from graphs.ir import Op, Phase, Storage, StorageKind, TrainingGraph
from graphs.marks import take_marks
from graphs.modules import module_path_of, source_of
from graphs.mutations import insert_snapshots
from graphs.phases import has_effect, is_tangent, split_phases
from graphs.pins import apply_marks, pin_what_changes

#: The caching allocator of CUDA hands out multiples of this many bytes.
CUDA_ALLOCATION_BYTES: Final = 512

TANGENTS_TARGET: Final = "scheduler.tangents"
RNG_STATE_TARGET: Final = "scheduler.rng_state"


@dataclasses.dataclass(frozen=True)
class Capture:
    """A captured training step: the torch-free graph and what ties it to the joint fx graph.

    Attributes:
        graph: ops and storages.
        joint: the joint fx graph that the ops come from (with snapshots of updated buffers inserted).
        nodes: for each op its kernel's fx node, or ``None`` for arrival of tangents and recording of generator state.
        storage_of: storage index of every tensor-valued fx node, views included.
        forward_outputs: what the forward returns, in order (nodes or constants).
        backward_outputs: what the backward returns, in order (nodes or ``None``).
        rng_state_ops: for each random op the op that records the generator's state before it.
        snapshots: for each snapshot op the placeholder of the static tensor that it copies.
        overwritten_inputs: positions of the primals that the step writes to.
        device: the device whose memory is scheduled.
        unused_constraints: the user's patterns that match no op.
        summed_bytes: what autograd allocates for sums of gradients, and frees, while the tangents arrive.

    """

    graph: TrainingGraph
    joint: fx.GraphModule
    nodes: tuple[fx.Node | None, ...]
    storage_of: Mapping[fx.Node, int]
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    rng_state_ops: Mapping[int, int]
    snapshots: Mapping[int, fx.Node]
    overwritten_inputs: tuple[int, ...]
    device: torch.device
    unused_constraints: tuple[str, ...] = ()
    summed_bytes: int = 0

    @property
    def tangents_op(self) -> int:
        """Index of the op at which backward starts."""
        return self.graph.forward_ops

    def produced_nodes(self, op: int) -> tuple[fx.Node, ...]:
        """Nodes whose values an execution of ``op`` makes: the kernel's own, or ``getitem`` of each of its results."""
        node = self.nodes[op]
        if node is None:
            return ()
        if isinstance(node.meta.get("val"), torch.Tensor):
            return (node,)
        return tuple(user for user in node.users if user.target is operator.getitem)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in a node's ``meta["val"]``: a tensor, or a flat or nested sequence of tensors and others."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


#: Losses whose kernels reduce where the values of all elements lie: the one number that is left keeps their storage.
_REDUCED_IN_PLACE: Final = frozenset({"mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"})


def storage_bytes(tensor: torch.Tensor, device: torch.device, *, elements: int = 0) -> int:
    """Bytes that the storage behind a tensor takes on ``device``: 0 if it lies elsewhere, CUDA's rounding applied.

    ``elements``: how many the storage holds at least, where it holds more than the tensor shows.
    """
    if tensor.device.type != device.type:
        return 0
    size = max(tensor.untyped_storage().nbytes(), elements * tensor.element_size())
    if device.type == "cuda":
        size = -(-size // CUDA_ALLOCATION_BYTES) * CUDA_ALLOCATION_BYTES
    return int(size)


def reduced_elements(node: fx.Node) -> int:
    """Elements that the result of a loss keeps beside the one it shows; 0 for other ops."""
    if not isinstance(node.target, OpOverload) or schema_of(node.target).name.split("::")[-1] not in _REDUCED_IN_PLACE:
        return 0
    values = [i.meta.get("val") for i in node.all_input_nodes[:2]]
    return max((value.numel() for value in values if isinstance(value, torch.Tensor)), default=0)


def capture_from_joint(
    joint: fx.GraphModule,
    *,
    num_forward_outputs: int,
    input_kinds: Sequence[StorageKind],
    device: torch.device,
    module_names: Iterable[str] = (),
    constraints: Constraints = Constraints(),  # noqa: B008 - frozen
    held_gradients: Mapping[str, int] = MappingProxyType({}),
    name: str = "",
) -> Capture:
    """Build the training graph of a joint graph.

    Args:
        joint: AOTAutograd's joint graph, as handed to a partition function; it is edited (snapshots are inserted).
        num_forward_outputs: how many of its outputs are the forward's.
        input_kinds: for each primal, in order, whether it is a parameter, a buffer or an input.
        device: whose memory is scheduled; storages elsewhere count 0 bytes.
        module_names: names from ``named_modules()``, to read module paths by.
        constraints: what a plan must not do with some tensors; the marks in the graph say it of others.
        held_gradients: bytes of gradients that autograd holds beside the backward, by name.
        name: for messages.

    Raises:
        UnsupportedModelError: an op's result decides what the program does next, or a shape is symbolic.

    """
    correct_fake_results(joint)
    draw_in_memory_order(joint)
    builder = _Builder(
        joint,
        num_forward_outputs,
        device,
        frozenset(module_names),
        constraints,
        held_gradients=held_gradients,
    )
    return builder.build(input_kinds, name)


class _Builder:
    """One pass over a joint graph. State lives only as long as the pass."""

    def __init__(
        self,
        joint: fx.GraphModule,
        num_forward_outputs: int,
        device: torch.device,
        module_names: frozenset[str],
        constraints: Constraints,
        *,
        held_gradients: Mapping[str, int],
    ) -> None:
        self.joint = joint
        self.device = device
        self.module_names = module_names
        self.constraints = constraints
        self.unused = set(constraints.labels())
        self.held_gradients = held_gradients
        outputs = joint.graph.output_node().args[0]
        assert isinstance(outputs, list | tuple)
        self.forward_outputs = tuple(outputs[:num_forward_outputs])
        self.backward_outputs = tuple(outputs[num_forward_outputs:])
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.nodes: list[fx.Node | None] = []
        self.by_identity: dict[int, int] = {}
        self.storage_of: dict[fx.Node, int] = {}
        self.rng_state_ops: dict[int, int] = {}
        self.snapshots: dict[int, fx.Node] = {}
        self.added_to: frozenset[fx.Node] = frozenset()

    def build(self, input_kinds: Sequence[StorageKind], name: str) -> Capture:
        """Run the pass."""
        marks = take_marks(self.joint)
        snapshot_nodes, overwritten = insert_snapshots(self.joint, self.forward_outputs)
        self.joint.graph.eliminate_dead_code(has_effect)
        forward, backward = split_phases(self.joint.graph, self.forward_outputs)
        self.added_to = add_gradients_in_place(backward)
        primals = [n for n in self.joint.graph.nodes if n.op == "placeholder" and not is_tangent(n)]
        for node, kind in zip(primals, input_kinds, strict=True):
            self._add_static(node, kind)
        for node in self.joint.graph.nodes:
            if node.op == "get_attr":
                self._add_static(node, StorageKind.BUFFER)
        for node in forward:
            self._visit(node, Phase.FORWARD, snapshot_nodes)
        forward_ops = len(self.ops)
        self._add_tangents()
        for node in backward:
            self._visit(node, Phase.BACKWARD, snapshot_nodes)
        self._mark_results()
        apply_marks(marks, self.ops, self.storages, self.by_identity)
        pin_what_changes(self.nodes, self.snapshots, self.ops, self.storages, self.storage_of)
        graph = TrainingGraph(tuple(self.ops), tuple(self.storages), forward_ops, name)
        return Capture(
            graph=graph,
            joint=self.joint,
            nodes=tuple(self.nodes),
            storage_of=self.storage_of,
            forward_outputs=self.forward_outputs,
            backward_outputs=self.backward_outputs,
            rng_state_ops=self.rng_state_ops,
            snapshots=self.snapshots,
            overwritten_inputs=tuple(i for i, node in enumerate(primals) if node in overwritten),
            device=self.device,
            unused_constraints=tuple(label for label in self.constraints.labels() if label in self.unused),
        )

    def _visit(self, node: fx.Node, phase: Phase, snapshot_nodes: Mapping[fx.Node, fx.Node]) -> None:
        """Add the op of a call_function node, or merge it into the storage that it looks at."""
        values = list(tensors_of(node.meta.get("val")))
        self._refuse_unsupported(node)
        identities = [storage_identity(v) for v in values]
        is_view = node.target is operator.getitem or (
            bool(values) and not has_effect(node) and all(i in self.by_identity for i in identities)
        )
        if not is_view:
            self._add_op(node, phase, values, snapshot_nodes)
        if isinstance(node.meta.get("val"), torch.Tensor):
            self.storage_of[node] = self.by_identity[identities[0]]

    def _add_op(
        self,
        node: fx.Node,
        phase: Phase,
        values: Sequence[torch.Tensor],
        snapshot_nodes: Mapping[fx.Node, fx.Node],
    ) -> None:
        path = module_path_of(node, self.module_names)
        source = source_of(node)
        inputs = {self.storage_of[i] for i in node.all_input_nodes if i in self.storage_of}
        for container in node.all_input_nodes:  # an op that takes a whole list of views
            if container not in self.storage_of:
                inputs.update(self.by_identity[storage_identity(t)] for t in tensors_of(container.meta.get("val")))
        names, is_forward = recomputability.names_of(node), phase is Phase.FORWARD
        self.unused -= self.constraints.used(names, path)
        reason = recomputability.reason_not_recomputable(node) or self.constraints.why_once(
            names, path, forward=is_forward
        )
        pinned = self.constraints.why_here(names, path, forward=is_forward)
        if node in self.added_to:
            reason = "another gradient is added to its result"
        if node in snapshot_nodes:
            reason = f"reads {snapshot_nodes[node].name}, which the step overwrites"
            self.snapshots[len(self.ops)] = snapshot_nodes[node]
        random = recomputability.is_random(node)
        if random:
            state = self._new_storage(f"{node.name}.rng_state", self._rng_state_bytes(), StorageKind.RNG_STATE, path)
            self._append(
                Op(
                    len(self.ops),
                    f"{node.name}.rng_state",
                    RNG_STATE_TARGET,
                    phase,
                    (),
                    (state,),
                    path,
                    recomputable=False,
                    reason="records the generator's state",
                    source=source,
                ),
                None,
            )
            inputs.add(state)
            self.rng_state_ops[len(self.ops)] = len(self.ops) - 1
        outputs = []
        for position, value in enumerate(values):
            identity = storage_identity(value)
            if identity not in self.by_identity:
                label = node.name if isinstance(node.meta["val"], torch.Tensor) else f"{node.name}[{position}]"
                size = storage_bytes(value, self.device, elements=reduced_elements(node))
                self.by_identity[identity] = self._new_storage(label, size, StorageKind.ACTIVATION, path, pinned)
                outputs.append(self.by_identity[identity])
        self._append(
            Op(
                len(self.ops),
                node.name,
                str(node.target),
                phase,
                tuple(sorted(inputs)),
                tuple(outputs),
                path,
                recomputable=not reason,
                reason=reason,
                source=source,
            ),
            node,
        )

    def _append(self, op: Op, node: fx.Node | None) -> None:
        self.ops.append(op)
        self.nodes.append(node)

    def _new_storage(self, name: str, size: int, kind: StorageKind, path: str, pinned: str = "") -> int:
        """Add a storage that the next op produces."""
        self.storages.append(Storage(len(self.storages), name, size, kind, len(self.ops), path, pinned))
        return len(self.storages) - 1

    def _add_static(self, node: fx.Node, kind: StorageKind) -> None:
        value = node.meta.get("val")
        if value is None and node.op == "get_attr":
            value = getattr(self.joint, str(node.target), None)
            if isinstance(value, torch.Tensor):
                node.meta["val"] = value
        if not isinstance(value, torch.Tensor):
            if isinstance(value, torch.SymInt | torch.SymFloat):
                raise UnsupportedModelError(
                    f"the step takes {node.name} as a symbolic number; a plan is for fixed shapes: pass static shapes"
                )
            return
        identity = storage_identity(value)
        if identity not in self.by_identity:
            self.by_identity[identity] = len(self.storages)
            size = storage_bytes(value, self.device)
            self.storages.append(Storage(len(self.storages), node.name, size, kind, None))
        self.storage_of[node] = self.by_identity[identity]

    def _add_tangents(self) -> None:
        outputs = []
        for node in self.joint.graph.nodes:
            if not is_tangent(node) or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            identity = storage_identity(node.meta["val"])
            if identity not in self.by_identity:
                size = storage_bytes(node.meta["val"], self.device)
                self.by_identity[identity] = self._new_storage(node.name, size, StorageKind.TANGENT, "")
                outputs.append(self.by_identity[identity])
            self.storage_of[node] = self.by_identity[identity]
        for name, size in self.held_gradients.items():
            outputs.append(self._new_storage(name, size, StorageKind.GRADIENT, ""))
        self._append(
            Op(
                len(self.ops),
                "tangents",
                TANGENTS_TARGET,
                Phase.BACKWARD,
                (),
                tuple(outputs),
                recomputable=False,
                reason="handed in when backward starts",
            ),
            None,
        )

    def _mark_results(self) -> None:
        """Give storages that the forward or the backward returns the kind that keeps them to the end of the step.

        The caller holds an output from the end of the forward on, so that freeing it in between would free nothing: the
        op that makes it runs once, and it stays.
        """
        for results, kind in (
            (self.forward_outputs, StorageKind.OUTPUT),
            (self.backward_outputs, StorageKind.GRADIENT),
        ):
            for node in results:
                storage = self.storages[self.storage_of[node]] if node in self.storage_of else None
                if storage is None or storage.producer is None:
                    continue
                if storage.kind is not StorageKind.OUTPUT:
                    self.storages[storage.index] = dataclasses.replace(storage, kind=kind)
                producer = self.ops[storage.producer]
                if kind is StorageKind.OUTPUT and (producer.recomputable or is_from_user(producer.reason)):
                    self.ops[producer.index] = dataclasses.replace(
                        producer, recomputable=False, reason=f"makes {storage.name}, which the caller holds"
                    )

    def _refuse_unsupported(self, node: fx.Node) -> None:
        target = node.target
        if str(target) == "aten._local_scalar_dense.default" or any(
            isinstance(size, torch.SymInt) for value in tensors_of(node.meta.get("val")) for size in value.shape
        ):
            path = module_path_of(node, self.module_names) or "the model"
            raise UnsupportedModelError(
                f"{path}: {target} ({source_of(node) or node.name}) gives a shape or number that depends on the data, "
                "so that no plan made beforehand can hold; compute it outside the scheduled module"
            )

        if any(value.layout is not torch.strided for value in tensors_of(node.meta.get("val"))):
            path = module_path_of(node, self.module_names) or "the model"
            raise UnsupportedModelError(
                f"{path}: {target} ({source_of(node) or node.name}) makes a sparse tensor, which cannot be planned: "
                "use dense gradients (sparse=False), or schedule the modules around it"
            )

    def _rng_state_bytes(self) -> int:
        return torch.get_rng_state().numel() if self.device.type == "cpu" else 0
