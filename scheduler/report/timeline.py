"""Live bytes of a schedule over its time, split by what they are for: the data behind the tables and the plots.

The totals are those of the memory model in :mod:`graphs.ir`; :mod:`solvers.simulate` computes the same totals for the
solvers, without the split.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from graphs.ir import Costs, StorageKind, TrainingGraph
from scheduler.decisions import Action
from solvers.solution import Compute, Free, Prefetch, Step


class Category(enum.StrEnum):
    """What live bytes are for, in the order in which reports stack them."""

    STATIC = "static"
    GRADIENTS = "gradients"
    OUTPUTS = "outputs"  # and the tangents handed to the backward
    KEPT = "kept activations"
    RECOMPUTED = "recomputed activations"
    OFFLOADED = "offloaded activations"
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What is live while one op runs.

    Attributes:
        step: position in the steps.
        op: index of the op that runs.
        start_ns: when it starts, from the start of the training step.
        end_ns: when it ends.
        again: whether this is not its first execution.
        live: bytes by category.

    """

    step: int
    op: int
    start_ns: int
    end_ns: int
    again: bool
    live: Mapping[Category, int]

    @property
    def total_bytes(self) -> int:
        """All live bytes while the op runs, static ones included."""
        return sum(self.live.values())


_BY_KIND = {
    StorageKind.GRADIENT: Category.GRADIENTS,
    StorageKind.OUTPUT: Category.OUTPUTS,
    StorageKind.TANGENT: Category.OUTPUTS,
}
_BY_ACTION = {
    Action.KEPT: Category.KEPT,
    Action.RECOMPUTED: Category.RECOMPUTED,
    Action.OFFLOADED: Category.OFFLOADED,
    Action.TEMPORARY: Category.TEMPORARY,
}


def timeline(
    graph: TrainingGraph,
    costs: Costs,
    steps: Sequence[Step],
    actions: Mapping[int, Action],
    *,
    static_bytes: int,
    start_ns: Sequence[int],
) -> tuple[Sample, ...]:
    """One sample for each execution of an op, in order.

    Args:
        graph: the training step.
        costs: times and workspaces of its ops.
        steps: a valid schedule; its storage indices are the graph's.
        actions: what the schedule does with each activation storage.
        static_bytes: bytes that are resident throughout.
        start_ns: when each step starts: computation may stall for copies between two of them.

    """
    category = [
        _BY_KIND.get(storage.kind) or _BY_ACTION[actions.get(storage.index, Action.TEMPORARY)]
        for storage in graph.storages
    ]
    live = dict.fromkeys(Category, 0) | {Category.STATIC: static_bytes}
    resident: set[int] = set()
    seen: set[int] = set()
    samples = []
    for position, step in enumerate(steps):
        if isinstance(step, Free):
            resident.discard(step.storage)
            live[category[step.storage]] -= graph.storages[step.storage].bytes
            continue
        if isinstance(step, Prefetch):
            resident.add(step.storage)
            live[category[step.storage]] += graph.storages[step.storage].bytes
        if not isinstance(step, Compute):
            continue
        outputs = graph.ops[step.op].outputs
        for o in outputs:
            live[category[o]] += graph.storages[o].bytes
        start = start_ns[position]
        end = start + costs.time_ns[step.op]
        during = live | {Category.WORKSPACE: costs.workspace_bytes[step.op]}
        samples.append(Sample(position, step.op, start, end, step.op in seen, during))
        for o in resident.intersection(outputs):  # the earlier copy goes once the new one is there
            live[category[o]] -= graph.storages[o].bytes
        resident.update(outputs)
        seen.add(step.op)
    return tuple(samples)
