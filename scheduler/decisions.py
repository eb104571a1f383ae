"""What a schedule does with each activation: keeps it, produces it again, or neither.

Read off the steps alone, by replaying when each storage becomes resident, is read and is freed::

    steps      F F F F F F F | B B B B B B B          F, B: computing forward and backward ops, | the boundary
    kept         =========== | =====                  resident across the boundary, never produced again
    recomputed   =====       |     =====              a later copy is read, so the op ran again
    temporary    ==          |                        gone before the boundary, or made after it

"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Final

from graphs.ir import Costs, Op, Phase, Storage, StorageKind, TrainingGraph
from scheduler.units import format_bytes, format_time
from solvers.solution import Compute, Free, Offload, Prefetch, Step

_DECIDED_KINDS: Final = frozenset({StorageKind.ACTIVATION, StorageKind.RNG_STATE})


class Action(enum.StrEnum):
    """What a plan does with one activation storage."""

    KEPT = "kept"  # resident from its first production across the boundary, never produced again
    RECOMPUTED = "recomputed"  # produced more than once, and a later copy is read
    OFFLOADED = "offloaded"  # copied to the host, and back where it is used again
    TEMPORARY = "temporary"  # dies in the forward, or lives only in the backward


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What a plan does with one activation storage, and why.

    Attributes:
        storage: its index in the graph.
        name: name of the fx node that allocates it.
        bytes: its size.
        module_path: dotted path of the module that allocates it.
        action: kept, recomputed, offloaded or temporary.
        times: how often it is produced again; 0 unless recomputed (or offloaded, and recomputed as well).
        added_ns: time of the executions of its op beyond the first that are made for its sake.
        reason: why, in words.

    """

    storage: int
    name: str
    bytes: int
    module_path: str
    action: Action
    times: int
    added_ns: int
    reason: str


@dataclasses.dataclass(slots=True)
class _Life:
    """One stay of a storage in memory, as positions in the steps; ``end`` is ``None`` while resident."""

    start: int
    end: int | None = None
    read: bool = False
    fetched: bool = False

    def spans(self, boundary: int) -> bool:
        """Whether it begins in the forward and lasts into the backward."""
        return self.start <= boundary and (self.end is None or self.end > boundary)


def boundary_of(graph: TrainingGraph, steps: Sequence[Step]) -> int:
    """Position of the last step of the forward: the first execution of the last forward op and the frees after it.

    −1 where the graph has no forward op.
    """
    last = graph.forward_ops - 1
    if last < 0:
        return -1
    position = next((i for i, step in enumerate(steps) if step == Compute(last)), len(steps) - 1)
    while position + 1 < len(steps) and isinstance(steps[position + 1], Free):
        position += 1
    return position


def decide(graph: TrainingGraph, costs: Costs, steps: Sequence[Step]) -> tuple[Decision, ...]:
    """One decision for each activation storage of the graph, in the order of storages.

    Args:
        graph: the training step.
        costs: times of its ops.
        steps: a valid schedule; its storage indices are the graph's.

    """
    lives = _replay(graph, steps)
    added = _added_time(graph, costs, steps, lives)
    boundary = boundary_of(graph, steps)
    fetched = {step.storage for step in steps if isinstance(step, Prefetch)}
    decisions = []
    for storage in graph.storages:
        if storage.kind not in _DECIDED_KINDS or storage.producer is None:
            continue
        stays = lives[storage.index]
        times = sum(life.read and not life.fetched for life in stays[1:])
        if storage.index in fetched:
            action = Action.OFFLOADED
        elif times:
            action = Action.RECOMPUTED
        elif any(life.spans(boundary) and life.read for life in stays) and graph.forward_ops < len(graph.ops):
            action = Action.KEPT
        else:
            action = Action.TEMPORARY
        op = graph.ops[storage.producer]
        decisions.append(
            Decision(
                storage=storage.index,
                name=storage.name,
                bytes=storage.bytes,
                module_path=storage.module_path,
                action=action,
                times=times,
                added_ns=added[storage.index],
                reason=_reason(
                    action, storage, op, times=times, added_ns=added[storage.index], time_ns=costs.time_ns[op.index]
                ),
            )
        )
    return tuple(decisions)


def _replay(graph: TrainingGraph, steps: Sequence[Step]) -> list[list[_Life]]:
    """The stays in memory of each storage. A copy made while one is resident prolongs that stay."""
    lives: list[list[_Life]] = [[] for _ in graph.storages]
    for position, step in enumerate(steps):
        if isinstance(step, Free):
            lives[step.storage][-1].end = position
            continue
        if isinstance(step, Prefetch):
            lives[step.storage].append(_Life(position, fetched=True))
            continue
        if isinstance(step, Offload):
            continue
        op = graph.ops[step.op]
        for i in op.inputs:
            if lives[i]:
                lives[i][-1].read = True
        for o in op.outputs:
            if not lives[o] or lives[o][-1].end is not None:
                lives[o].append(_Life(position))
    return lives


def _added_time(graph: TrainingGraph, costs: Costs, steps: Sequence[Step], lives: list[list[_Life]]) -> list[int]:
    """For each storage the time of later executions of its op, charged to the first output that is then read."""
    added = [0] * len(graph.storages)
    wanted = {(s, life.start) for s, stays in enumerate(lives) for life in stays[1:] if life.read}
    seen: set[int] = set()
    for position, step in enumerate(steps):
        if not isinstance(step, Compute):
            continue
        if step.op in seen:
            outputs = graph.ops[step.op].outputs
            payer = next((o for o in outputs if (o, position) in wanted), outputs[0] if outputs else None)
            if payer is not None:
                added[payer] += costs.time_ns[step.op]
        seen.add(step.op)
    return added


def _reason(action: Action, storage: Storage, op: Op, *, times: int, added_ns: int, time_ns: int) -> str:
    size = format_bytes(storage.bytes)
    if action is Action.RECOMPUTED:
        again = "once" if times == 1 else f"{times} times"
        return f"running {op.target} again ({again}, {format_time(added_ns)}) frees {size} between its uses"
    if action is Action.OFFLOADED:
        return f"copying it to the host and back, beside computation, frees {size} between its uses"
    if action is Action.KEPT and not op.recomputable:
        return f"{op.target} may not run again: {op.reason}"
    if action is Action.KEPT:
        return f"the budget has room for its {size}, which saves at least the {format_time(time_ns)} of {op.target}"
    if op.phase is Phase.FORWARD:
        return "nothing in the backward reads it"
    return "it lives in the backward only"
