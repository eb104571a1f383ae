"""The checkpointing strategies that people apply by hand, as plans of the same type as everything else.

Each fixes by a rule which stretches of the forward (*segments*) are recomputed, and does with a segment what
``torch.utils.checkpoint`` does: the forward keeps what enters it and what other forward ops read of it; right before
the first backward op that reads anything else from it, its ops execute once more, in order, up to the last one that
backward needs. Ops that must not be recomputed keep their outputs. Memory is what the simulator finds when each storage
is freed after its last use, so that a strategy is seen at its best.

No strategy looks at the budget. It is only checked in the end: a plan that does not fit is ``INFEASIBLE``, with its
peak as ``floor_bytes``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar, Final

from solvers.problem import Problem
from solvers.simulate import simulate, with_frees
from solvers.solution import Solution, Status

Segment = tuple[int, ...]  # forward ops, ascending

# Names of ops, as they stand in "aten.bmm.default".
_BATCHED_PRODUCTS = frozenset({"bmm", "baddbmm", "matmul", "einsum"})
_PRODUCTS = _BATCHED_PRODUCTS | {"mm", "addmm", "convolution"}
_SOFTMAX = frozenset({"_softmax", "_safe_softmax", "softmax"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Strategy:
    """A rule that names the segments to recompute."""

    name: ClassVar[str]

    def segments(self, problem: Problem) -> tuple[Segment, ...]:
        """The stretches of forward ops that are recomputed, each as a whole; no op is in two of them."""
        raise NotImplementedError

    def solve(self, problem: Problem) -> Solution:
        """Evaluate the strategy.

        ``INFEASIBLE`` where its peak exceeds the budget; ``OPTIMAL`` where it fits and recomputes nothing.
        """
        started = time.perf_counter()
        segments = self.segments(problem)
        steps = with_frees(problem, checkpointed_order(problem, segments))
        figures = simulate(problem, steps)
        fits = figures.peak_bytes <= problem.budget_bytes
        keep_all = problem.keep_all_time_ns
        if not fits:
            status = Status.INFEASIBLE
        else:
            status = Status.OPTIMAL if figures.step_time_ns == keep_all else Status.FEASIBLE
        return Solution(
            status=status,
            steps=steps if fits else (),
            step_time_ns=figures.step_time_ns if fits else 0,
            peak_bytes=figures.peak_bytes if fits else 0,
            lower_bound_ns=keep_all,
            solver=self.name,
            solve_seconds=time.perf_counter() - started,
            message=f"{len(segments)} segments recomputed: peak {figures.peak_bytes:,} bytes, "
            f"step {figures.step_time_ns:,} ns" + ("" if fits else f"; the budget is {problem.budget_bytes:,} bytes"),
            floor_bytes=figures.peak_bytes,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCheckpoint(_Strategy):
    """``torch.utils.checkpoint`` around each block: its input stays, all else of it is recomputed."""

    name: ClassVar[str] = "block-checkpoint"

    def segments(self, problem: Problem) -> tuple[Segment, ...]:
        """One segment for each block (see :func:`blocks`)."""
        return tuple(blocks(problem).values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryKthBlock(_Strategy):
    """``torch.utils.checkpoint`` around every ``k``-th block, beginning with the first; the others keep everything.

    Attributes:
        k: 1 recomputes every block, 2 every other one.

    """

    name: ClassVar[str] = "every-kth-block"
    k: int = 2

    def __post_init__(self) -> None:
        """Refuse a ``k`` below 1."""
        _check_k(self.k)

    def segments(self, problem: Problem) -> tuple[Segment, ...]:
        """One segment for each ``k``-th block."""
        return tuple(blocks(problem).values())[:: self.k]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSegments(_Strategy):
    """``torch.utils.checkpoint`` around each ``k`` consecutive blocks: only the input of the first of them stays.

    Attributes:
        k: blocks that are recomputed together.

    """

    name: ClassVar[str] = "block-segments"
    k: int = 2

    def __post_init__(self) -> None:
        """Refuse a ``k`` below 1."""
        _check_k(self.k)

    def segments(self, problem: Problem) -> tuple[Segment, ...]:
        """One segment for each ``k`` blocks."""
        return joined(tuple(blocks(problem).values()), self.k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SqrtSegments(_Strategy):
    """About √L segments of √L consecutive blocks each, for L blocks.

    Chen, Xu, Zhang, Guestrin: "Training Deep Nets with Sublinear Memory Cost", 2016, section 3: with equal layers this
    keeps O(√L) activations at the price of one more forward.
    """

    name: ClassVar[str] = "sqrt-segments"

    def segments(self, problem: Problem) -> tuple[Segment, ...]:
        """Consecutive blocks, as many together as there are segments."""
        found = tuple(blocks(problem).values())
        return joined(found, max(1, math.isqrt(len(found))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectiveAttention(_Strategy):
    """Recompute the core of attention alone: scores, softmax, dropout and the product with the values.

    Korthikanti et al.: "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, section 5: these
    hold most bytes for their FLOPs. A fused attention kernel keeps no such tensors, so that nothing is recomputed where
    one is in use. Goes by the targets of the ops; without them nothing is recomputed either.
    """

    name: ClassVar[str] = "selective-attention"

    def segments(self, problem: Problem) -> tuple[Segment, ...]:
        """One segment for each softmax that lies between two batched matrix products (see :func:`attention_cores`)."""
        return attention_cores(problem)


def checkpointed_order(problem: Problem, segments: Iterable[Segment]) -> list[int]:
    """The order of executions in which each of ``segments`` is recomputed as a whole, right before backward needs it.

    Raises:
        ValueError: a segment holds an op that is not in the forward, or two hold the same.

    """
    segment_of: dict[int, int] = {}
    again: list[Segment] = []
    for index, segment in enumerate(segments):
        for op in segment:
            if op in segment_of or not 0 <= op < problem.forward_ops:
                raise ValueError(f"{problem.describe_op(op)} (op {op}) is in two segments, or not in the forward")
            segment_of[op] = index
        again.append(_recomputed(problem, segment))
    lost: dict[int, int] = {}  # storage that backward reads and its segment rebuilds
    for index, ops in enumerate(again):
        lost.update((s, index) for op in ops for s in problem.outputs[op] if _is_lost(problem, s, segment_of))
    order = list(range(problem.forward_ops))
    rebuilt: set[int] = set()
    for op in range(problem.forward_ops, len(problem.time_ns)):
        for index in sorted({lost[s] for s in problem.inputs[op] if s in lost} - rebuilt):
            order.extend(again[index])
            rebuilt.add(index)
        order.append(op)
    return order


def _recomputed(problem: Problem, segment: Segment) -> Segment:
    """The ops of a segment that execute again: up to the last that makes something of its own that backward reads."""
    inside = dict.fromkeys(segment, 0)
    for last in sorted(segment, reverse=True):
        if problem.recomputable[last] and any(_is_lost(problem, s, inside) for s in problem.outputs[last]):
            return tuple(op for op in segment if op <= last and problem.recomputable[op])
    return ()


def _is_lost(problem: Problem, storage: int, segment_of: Mapping[int, int]) -> bool:
    """Whether backward reads a storage, no forward op outside of its segment does, and it need not live to the end."""
    readers = problem.readers[storage]
    if not readers or readers[-1] < problem.forward_ops or storage in problem.live_at_end:
        return False
    home = segment_of[problem.producer[storage]]
    return all(segment_of.get(op) == home for op in readers if op < problem.forward_ops)


def blocks(problem: Problem) -> dict[str, Segment]:
    """The blocks of a network and their forward ops, in the order in which they first execute.

    A block is a numbered child (``transformer.h.3`` of ``transformer.h``) of a container whose children repeat: two of
    them share at least half of their ops by target. Of nested ones the outermost counts, unless its children are stages
    that hold nothing but numbered blocks themselves. Children that are single layers (of an ``nn.Sequential``) count
    only where there are no others; ops outside of blocks stay outside. Where nothing repeats, every forward op is a
    block of its own.
    """
    paths = problem.op_modules or ("",) * len(problem.time_ns)
    children: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))  # container -> child -> ops
    for op in range(problem.forward_ops):
        for container, child in _numbered(paths[op]):
            children[container][child].append(op)
    repeating = {container for container, found in children.items() if _repeats(problem, found.values())}
    deep = {c for c in repeating if any(paths[op] != child for child, ops in children[c].items() for op in ops)}
    sizes = {child: len(ops) for found in children.values() for child, ops in found.items()}
    stages = {c for c in deep if c in sizes and sizes[c] == sum(len(ops) for ops in children[c].values())}
    for containers in (deep, repeating):
        found: dict[str, list[int]] = defaultdict(list)
        for op in range(problem.forward_ops):
            inside = [child for container, child in _numbered(paths[op]) if container in containers]
            block = next((child for child in inside if child not in stages), None)
            if block is not None:
                found[block].append(op)
        if found:
            return {child: tuple(ops) for child, ops in found.items()}
    return {problem.describe_op(op): (op,) for op in range(problem.forward_ops)}


def _numbered(path: str) -> list[tuple[str, str]]:
    """(container, child) for each number in a module path, outermost first."""
    parts = path.split(".")
    return [
        (".".join(parts[:i]), ".".join(parts[: i + 1]))
        for i, part in enumerate(parts)
        if part.isascii() and part.isdigit()
    ]


def _repeats(problem: Problem, children: Collection[Sequence[int]]) -> bool:
    """Whether two children have at least half of their targets in common. Ops without known target are all alike."""
    targets = problem.op_targets or ("",) * len(problem.time_ns)
    counts = [Counter(targets[op] for op in ops) for ops in children]
    return any(2 * (a & b).total() >= (a | b).total() for a, b in itertools.combinations(counts, 2))


def attention_cores(problem: Problem) -> tuple[Segment, ...]:
    """For each attention the ops from the product of queries and keys to the product with the values, both included.

    They are found by dataflow: from a softmax back to the batched products that feed it and on to the products that it
    feeds, through whatever lies between (scaling, masking, dropout).
    """
    if not problem.op_targets:
        return ()
    kinds = [target.split(".")[1] if target.count(".") else target for target in problem.op_targets]
    cores: list[Segment] = []
    taken: set[int] = set()
    for softmax in range(problem.forward_ops):
        if kinds[softmax] not in _SOFTMAX:
            continue
        before = _reached(problem, kinds, softmax, forward=False)
        after = _reached(problem, kinds, softmax, forward=True)
        scores = {op for op in before if kinds[op] in _BATCHED_PRODUCTS}
        values = {op for op in after if kinds[op] in _BATCHED_PRODUCTS}
        if not scores or not values:
            continue
        fed = set(scores)
        for op in sorted(before):
            if any(problem.producer[s] in fed for s in problem.inputs[op]):
                fed.add(op)
        feeding = set(values)
        for op in sorted(after, reverse=True):
            if any(reader in feeding for s in problem.outputs[op] for reader in problem.readers[s]):
                feeding.add(op)
        core = ((fed & before) | (feeding & after) | {softmax}) - taken
        taken |= core
        cores.append(tuple(sorted(core)))
    return tuple(cores)


def _reached(problem: Problem, kinds: Sequence[str], start: int, *, forward: bool) -> set[int]:
    """Forward ops that ``start`` feeds, or that feed it, up to and with the first product on each path."""
    found: set[int] = set()
    stack = [start]
    while stack:
        op = stack.pop()
        if op != start and kinds[op] in _PRODUCTS:
            continue
        if forward:
            near = [reader for s in problem.outputs[op] for reader in problem.readers[s]]
        else:
            near = [problem.producer[s] for s in problem.inputs[op]]
        fresh = {n for n in near if n < problem.forward_ops} - found
        found |= fresh
        stack.extend(fresh)
    return found


def joined(found: Sequence[Segment], k: int) -> tuple[Segment, ...]:
    """Each ``k`` consecutive segments as one."""
    groups = (found[i : i + k] for i in range(0, len(found), k))
    return tuple(tuple(sorted(op for segment in group for op in segment)) for group in groups)


def _check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k={k}: give a whole number of blocks, at least 1")


#: What people apply by hand, each in its usual form, by the name under which reports show it.
BY_HAND: Final[Mapping[str, _Strategy]] = {
    "checkpoint every block": BlockCheckpoint(),
    "checkpoint every 2nd block": EveryKthBlock(k=2),
    "checkpoint 2 blocks at a time": BlockSegments(k=2),
    "√n segments": SqrtSegments(),
    "recompute attention only": SelectiveAttention(),
}
