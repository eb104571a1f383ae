"""A small training step of repeated blocks, and plans of it, made by hand for tests of plans and reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from graphs.ir import Costs, Op, Phase, Storage, StorageKind, TrainingGraph
from graphs.links import Link
from scheduler.plan import Plan
from solvers.problem import Problem
from solvers.simulate import simulate, with_frees
from solvers.solution import Compute, Free, Offload, Prefetch, Solution, Status

MB = 10**6
STATIC = {"parameters": 40 * MB, "buffers": 0, "gradients": 0, "optimizer": 80 * MB, "inputs": 1 * MB, "other": 0}


class _Builder:
    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.storages: list[Storage] = []
        self.forward_ops = 0

    def static(self, name: str, size: int, kind: StorageKind) -> int:
        self.storages.append(Storage(len(self.storages), name, size, kind, None))
        return len(self.storages) - 1

    def op(self, name: str, inputs: list[int], module: str, outputs: list[tuple[int, StorageKind]], **rest: Any) -> int:
        first = len(self.storages)
        phase = Phase.BACKWARD if name.startswith("d") else Phase.FORWARD
        self.forward_ops += phase is Phase.FORWARD
        for k, (size, kind) in enumerate(outputs):
            label = name if len(outputs) == 1 else f"{name}[{k}]"
            self.storages.append(Storage(first + k, label, size, kind, len(self.ops), module))
        made = tuple(range(first, first + len(outputs)))
        target = f"aten.{name.partition('_')[0]}.default"
        self.ops.append(Op(len(self.ops), name, target, phase, tuple(sorted(inputs)), made, module, **rest))
        return first


def make_graph(blocks: int = 4, activation: int = 10 * MB) -> TrainingGraph:
    """An embedding, ``blocks`` of linear → gelu → residual add, a top-k as head, a loss, and their backward."""
    b, kind = _Builder(), StorageKind
    x = b.static("batch", 1 * MB, kind.INPUT)
    weights = [b.static(f"weight_{i}", 10 * MB, kind.PARAMETER) for i in range(blocks)]
    streams, linears = [b.op("embed", [x], "wte", [(activation, kind.ACTIVATION)])], []
    for i in range(blocks):
        a = b.op(f"mm_{i}", [streams[-1], weights[i]], f"h.{i}.linear", [(activation, kind.ACTIVATION)])
        g = b.op(f"gelu_{i}", [a], f"h.{i}.act", [(activation, kind.ACTIVATION)])
        streams.append(b.op(f"add_{i}", [g, streams[-1]], f"h.{i}", [(activation, kind.ACTIVATION)]))
        linears.append(a)
    never = {"recomputable": False, "reason": "equal values may be selected in another order"}
    top = b.op("topk", [streams[-1]], "head", [(2 * MB, kind.ACTIVATION), (1 * MB, kind.ACTIVATION)], **never)
    b.op("loss", [top], "", [(512, kind.OUTPUT)])
    d = b.op("dtangent", [], "", [(512, kind.TANGENT)])
    d = b.op("dtopk", [d, top + 1], "head", [(activation, kind.ACTIVATION)])
    for i in reversed(range(blocks)):
        da = b.op(f"dgelu_{i}", [d, linears[i]], f"h.{i}.act", [(activation, kind.ACTIVATION)])
        b.op(f"dweight_{i}", [da, streams[i]], f"h.{i}.linear", [(10 * MB, kind.GRADIENT)])
        d = b.op(f"dx_{i}", [d, da, weights[i]], f"h.{i}.linear", [(activation, kind.ACTIVATION)])
    return TrainingGraph(tuple(b.ops), tuple(b.storages), b.forward_ops, "toy")


def make_costs(graph: TrainingGraph) -> Costs:
    """1 ms for each op and 2 MB of workspace for each matrix multiplication."""
    return Costs(
        time_ns=(1_000_000,) * len(graph.ops),
        workspace_bytes=tuple(2 * MB if op.target == "aten.mm.default" else 0 for op in graph.ops),
        device="cpu",
        source="profiled",
    )


def make_plan(recompute: Collection[int] = (), *, blocks: int = 4, budget: int | None = None, **fields: Any) -> Plan:
    """A plan that runs the matrix multiplication of the given blocks again in the backward, and nothing else."""
    graph = make_graph(blocks)
    costs = make_costs(graph)
    by_name = {op.name: op.index for op in graph.ops}
    order = []
    for op in graph.ops:
        kind, _, block = op.name.partition("_")
        if kind == "dgelu" and int(block) in recompute:
            order.append(by_name[f"mm_{block}"])
        order.append(op.index)
    problem = Problem.from_graph(graph, costs, budget or 0, static_bytes=sum(STATIC.values()))
    steps = with_frees(problem, order)
    replay = simulate(problem, steps)
    solution = Solution(
        status=Status.OPTIMAL if not recompute else Status.FEASIBLE,
        steps=steps,
        step_time_ns=replay.step_time_ns,
        peak_bytes=replay.peak_bytes,
        lower_bound_ns=problem.keep_all_time_ns,
        solver="by hand",
        solve_seconds=0.25,
    )
    known = {"static": STATIC, "device": "cpu", "versions": {"torch": "2.13.0"}, "assumptions": ("one thread",)}
    return Plan(graph=graph, costs=costs, solution=solution, budget_bytes=budget, **known | fields)


def make_plan_with_copies(*, blocks: int = 4, budget: int = 300 * MB) -> Plan:
    """The plan that recomputes nothing and has the first matrix multiplication's result on the host in between."""
    plan = make_plan(blocks=blocks, budget=budget)
    by_name = {op.name: op.index for op in plan.graph.ops}
    (moved,) = plan.graph.ops[by_name["mm_0"]].outputs
    storage = Problem.graph_storages(plan.graph).index(moved)
    steps = list(plan.steps)
    steps.insert(steps.index(Compute(by_name[f"dx_{blocks - 1}"])), Prefetch(storage))
    steps.insert(steps.index(Compute(by_name["gelu_1"])), Free(storage))
    steps.insert(steps.index(Compute(by_name["gelu_0"])) + 1, Offload(storage))
    link = Link(2e10, 1e10, latency_ns=0)  # 10 MB take half a millisecond out, and one back
    moving = dataclasses.replace(plan, link=link, host_bytes=10**9)
    replay = simulate(moving.problem, steps)
    solution = dataclasses.replace(
        plan.solution, steps=tuple(steps), step_time_ns=replay.step_time_ns, peak_bytes=replay.peak_bytes
    )
    return dataclasses.replace(moving, solution=solution)
