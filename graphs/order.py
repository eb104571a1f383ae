"""Other orders of a captured step: what must come before what, and a capture in another order.

Any order of the ops that keeps data dependencies computes the same values, so long as what has an effect beyond its own
results happens when it did. Nothing here needs to know what an op does: an op that does more than compute new tensors
from its inputs is one that a plan must not run twice, one that draws from a generator, or one that makes nothing
(:mod:`graphs.recomputability`). So in every order

- an op comes after the ops that make what it reads;
- the forward comes before the tangents arrive, and the backward after;
- ops with an effect keep their order among themselves: draws, writes, collectives, custom ops, assertions;
- whatever touches a storage that an op with an effect reads keeps its order with that op, which may write to it: in
  that way no read moves past a write, to static tensors and activations alike;
- the recording of a generator's state stays right before the draw that it belongs to.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from graphs.errors import GraphFormatError
from graphs.ir import StorageKind, TrainingGraph, positions_of

if TYPE_CHECKING:
    from graphs.joint import Capture


@dataclasses.dataclass(frozen=True)
class Precedence:
    """What an order has to keep.

    Attributes:
        units: ops that stay together, each unit and the units themselves in the graph's order.
        before: for each unit the units that must come before it, each once, ascending.

    """

    units: tuple[tuple[int, ...], ...]
    before: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each unit the units that must come after it, ascending."""
        after: list[list[int]] = [[] for _ in self.units]
        for unit, earlier in enumerate(self.before):
            for other in earlier:
                after[other].append(unit)
        return tuple(map(tuple, after))


def precedence(graph: TrainingGraph) -> Precedence:
    """The units of a graph and the edges between them. Linear in the number of ops and edges."""
    units = _units(graph)
    unit_of = [0] * len(graph.ops)
    for unit, ops in enumerate(units):
        for op in ops:
            unit_of[op] = unit
    before: list[set[int]] = [set() for _ in units]
    for first, second in _edges(graph):
        if unit_of[first] != unit_of[second]:
            before[unit_of[second]].add(unit_of[first])
    return Precedence(tuple(units), tuple(tuple(sorted(earlier)) for earlier in before))


def check_order(graph: TrainingGraph, order: Sequence[int]) -> None:
    """Refuse an order in which a graph's ops must not run.

    Args:
        graph: in the order of its capture.
        order: for each position the op that runs there.

    Raises:
        GraphFormatError: it is no permutation, or runs an op before one that must come first. Names both.

    """
    if sorted(order) != list(range(len(graph.ops))):
        raise GraphFormatError(f"the order of {len(order)} positions is no permutation of {len(graph.ops)} ops")
    position = positions_of(order)
    known = precedence(graph)
    for unit, earlier in zip(known.units, known.before, strict=True):
        parted = next((b for a, b in itertools.pairwise(unit) if position[b] != position[a] + 1), None)
        late = next((e for e in earlier if position[known.units[e][-1]] > position[unit[0]]), None)
        if parted is not None or late is not None:
            first = unit[0] if late is None else known.units[late][-1]
            second = unit[0] if parted is None else parted
            raise GraphFormatError(
                f"op {graph.ops[second].name} ({graph.ops[second].target}) does not come after "
                f"{graph.ops[first].name} ({graph.ops[first].target}), as it must"
            )


def capture_in_order(capture: Capture, order: Sequence[int]) -> Capture:
    """A capture whose ops run in another order.

    Storages keep their numbers, and the joint fx graph stays as it is: what is made from a capture follows its ops, and
    rebuilds views where they are read.

    Args:
        capture: in the order in which it was captured.
        order: for each position the op that runs there; empty for the capture itself.

    Raises:
        GraphFormatError: the ops must not run in this order.

    """
    if not order:
        return capture
    check_order(capture.graph, order)
    position = positions_of(order)
    return dataclasses.replace(
        capture,
        graph=capture.graph.in_order(order),
        nodes=tuple(capture.nodes[op] for op in order),
        rng_state_ops={position[op]: position[recording] for op, recording in capture.rng_state_ops.items()},
        snapshots={position[op]: copied for op, copied in capture.snapshots.items()},
    )


def _units(graph: TrainingGraph) -> list[tuple[int, ...]]:
    """Single ops, but for the recording of a generator's state and the draw that follows it."""
    units: list[tuple[int, ...]] = []
    for op in graph.ops:
        if units and _records_state(graph, units[-1][-1]):
            units[-1] = (*units[-1], op.index)
        else:
            units.append((op.index,))
    return units


def _records_state(graph: TrainingGraph, op: int) -> bool:
    return any(graph.storages[s].kind is StorageKind.RNG_STATE for s in graph.ops[op].outputs)


def _has_effect(graph: TrainingGraph, index: int) -> bool:
    """Whether an op may do more than make its outputs from its inputs."""
    op = graph.ops[index]
    draws = any(graph.storages[s].kind is StorageKind.RNG_STATE for s in op.inputs)
    return draws or not op.recomputable or not op.outputs


def _edges(graph: TrainingGraph) -> Iterator[tuple[int, int]]:
    """Pairs of ops of which the first must come before the second."""
    boundary = graph.forward_ops  # the op at which the tangents arrive
    for op in graph.ops:
        for s in op.inputs:
            producer = graph.storages[s].producer
            if producer is not None:
                yield producer, op.index
        if op.index != boundary < len(graph.ops):
            yield (op.index, boundary) if op.index < boundary else (boundary, op.index)
    fixed = [op.index for op in graph.ops if _has_effect(graph, op.index)]
    yield from itertools.pairwise(fixed)
    yield from _around_writes(graph, frozenset(fixed))


def _around_writes(graph: TrainingGraph, fixed: frozenset[int]) -> Iterator[tuple[int, int]]:
    """What reads a storage stays on its side of each op with an effect that reads it too."""
    for readers in graph.readers:
        last: int | None = None  # of the ops with an effect
        since: list[int] = []  # the others that came after it
        for op in () if fixed.isdisjoint(readers) else readers:
            if last is not None:
                yield last, op
            if op in fixed:
                yield from ((other, op) for other in since)
                last, since = op, []
            else:
                since.append(op)
