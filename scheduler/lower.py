"""From a plan to fx: a forward and a backward graph that run the plan's steps in the plan's order.

fx's code generation drops a value after its last use, which is what frees memory at run time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import fx

from graphs._torch import OpOverload, schema_of
from graphs.joint import Capture
from scheduler.half import Half, Host, name_of, slot_of
from scheduler.runtime.host_pool import Slot
from scheduler.runtime.transfers import Transfers
from scheduler.scheduled_graph import graph_module
from solvers.problem import Problem
from solvers.solution import Compute, Free, Offload, Prefetch, Step


@dataclasses.dataclass(frozen=True)
class Lowered:
    """The two halves of a scheduled step.

    Attributes:
        forward: takes the primals; returns the forward's outputs, then what it saves for the backward.
        backward: takes what was saved, then the tangents; returns the gradients.
        saved_names: names of the saved values, in order.
        transfers: what moves storages to the host and back; ``None`` where the plan copies none.

    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved_names: tuple[str, ...]
    transfers: Transfers | None = None


def lower(
    capture: Capture, steps: Sequence[Step], make_transfers: Callable[[Sequence[Slot]], Transfers] | None = None
) -> Lowered:
    """Compile a plan's steps into a forward and a backward fx graph.

    Args:
        capture: the captured step.
        steps: a validated schedule of its problem (storage indices as in :meth:`Problem.graph_storages`).
        make_transfers: makes what moves the given storages; needed where the steps copy any.

    """
    storages = Problem.graph_storages(capture.graph)
    executions = [0] * len(capture.graph.ops)
    for step in steps:
        if isinstance(step, Compute):
            executions[step.op] += 1
    moved = tuple(storages[step.storage] for step in steps if isinstance(step, Offload))
    transfers = None
    if moved:
        assert make_transfers is not None, "the plan copies to the host, and nothing was given to copy with"
        transfers = make_transfers([slot_of(capture, storage) for storage in moved])
    host = Host(transfers, moved)
    forward = Half(capture, executions, None, _late_readers(capture, steps), host)
    half = forward
    for step in steps:
        if isinstance(step, Free):
            half.free(storages[step.storage])
        elif isinstance(step, Offload):
            half.offload(storages[step.storage])
        elif isinstance(step, Prefetch):
            half.fetch(storages[step.storage])
        elif step.op == capture.tangents_op:
            half = Half(capture, executions, forward, forward.late_readers, host)
        else:
            half.compute(step.op)
    assert half is not forward, "the plan never starts the backward"
    backward_graph = half.finish(capture.backward_outputs)
    saved = half.saved
    forward_graph = forward.finish((*capture.forward_outputs, *saved))
    return Lowered(
        forward=graph_module(capture.joint, forward_graph, forward.comments, "ScheduledForward"),
        backward=graph_module(capture.joint, backward_graph, half.comments, "ScheduledBackward"),
        saved_names=tuple(name_of(key) for key in saved),
        transfers=transfers,
    )


def _late_readers(capture: Capture, steps: Sequence[Step]) -> frozenset[int]:
    """Snapshot ops that are read after the static tensor that they copy may have been overwritten."""
    results = [n for n in (*capture.forward_outputs, *capture.backward_outputs) if isinstance(n, fx.Node)]
    returned = {capture.storage_of[n] for n in results if n in capture.storage_of}
    late = {op for op in capture.snapshots if capture.graph.ops[op].outputs[0] in returned}
    written: set[fx.Node] = set()
    snapshot_of = {capture.graph.ops[op].outputs[0]: op for op in capture.snapshots}
    in_backward = False
    for step in steps:
        if not isinstance(step, Compute):
            continue
        in_backward = in_backward or step.op == capture.tangents_op
        for storage in capture.graph.ops[step.op].inputs:
            snapshot = snapshot_of.get(storage)
            if snapshot is not None and (in_backward or capture.snapshots[snapshot] in written):
                late.add(snapshot)
        node = capture.nodes[step.op]
        if node is not None and isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable:
            written.update(node.all_input_nodes)
    return frozenset(late)
