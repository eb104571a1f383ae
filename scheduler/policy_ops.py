"""The op-level plan of a transformer layer beside the two levels that people choose from.

A stack of layers of the paper's shape (pre-norm, GELU, dropout, attention as separate kernels) is captured without its
weights and planned at exactly the memory that selective and full recomputation take, and at a fraction of what keeping
everything takes. With tensor and sequence parallelism every term of a layer shrinks alike, so that the shares found for
one device hold there too. Gradients of weights are taken to have buffers of their own, as in Megatron, and count in no
row: at these widths they would outweigh the activations of a few layers.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
from torch import nn

from graphs.costs.devices import DeviceSpec
from graphs.ir import StorageKind
from scheduler.api import plan as plan_step
from scheduler.errors import Infeasible
from scheduler.plan import Plan
from scheduler.policy import Transformer
from scheduler.replan import replan
from solvers.simulate import compute_order
from solvers.strategies import BlockCheckpoint, SelectiveAttention

CAPTURED_LAYERS: Final = 4
_FLOPS_ONLY: Final = DeviceSpec(
    name="matrix products alone",
    flops={"float32": 1e15, "bfloat16": 1e15},
    bandwidth_bytes_per_s=1e30,
    memory_bytes=0,
    launch_ns=0,
    source="a device on which only arithmetic takes time, to count it",
    compute_efficiency=1.0,
    bandwidth_efficiency=1.0,
)


@dataclasses.dataclass(frozen=True, slots=True)
class OpLevelRow:
    """A strategy and the op-level plan for the same activation memory.

    Attributes:
        name: of the strategy.
        share: activation bytes at the peak / those of the step that keeps everything.
        strategy_flops: operations that the strategy adds / operations of the step; ``None`` for no strategy.
        strategy_time: time that it adds / time of the step.
        plan_flops: the same of the op-level plan; ``None`` where none was found.
        plan_time: likewise.
        gap: of the op-level plan.

    """

    name: str
    share: float
    strategy_flops: float | None
    strategy_time: float | None
    plan_flops: float | None
    plan_time: float | None
    gap: float | None


class Layer(nn.Module):
    """A layer of the paper's figure 2; (batch, tokens, width) in and out."""

    def __init__(self, model: Transformer, dropout: float = 0.1) -> None:
        super().__init__()
        width = model.hidden
        self.heads, self.flash, self.dropout_rate = model.heads, model.flash, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        x = x + self.dropout(self.projection(self._attention(self.norm1(x))))
        changed: torch.Tensor = self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))
        return x + changed

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        split = self.query_key_value(x).view(batch, tokens, self.heads, 3, width // self.heads)
        query, key, value = (
            split[:, :, :, i].transpose(1, 2).reshape(-1, tokens, width // self.heads) for i in range(3)
        )
        if self.flash:
            query, key, value = (t.view(batch, self.heads, tokens, -1) for t in (query, key, value))
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return mixed.transpose(1, 2).reshape(batch, tokens, width)
        bias = torch.empty((), dtype=x.dtype, device=x.device)
        scores = torch.baddbmm(bias, query, key.transpose(1, 2), beta=0.0, alpha=(width // self.heads) ** -0.5)
        shares = self.dropout(scores.softmax(dim=-1))
        return (
            torch.bmm(shares, value).view(batch, self.heads, tokens, -1).transpose(1, 2).reshape(batch, tokens, width)
        )


class Stack(nn.Module):
    """Layers in a row, and a scalar to differentiate."""

    def __init__(self, model: Transformer, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the last layer's output."""
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def op_level_rows(
    model: Transformer, device: str, *, layers: int = CAPTURED_LAYERS, shrink: float = 5.0
) -> tuple[OpLevelRow, ...]:
    """Compare at the memory of selective and of full recomputation, and at 1/``shrink`` of keeping everything.

    Args:
        model: the shape; its parallelism is left out (see the module's docstring).
        device: of the roofline.
        layers: how many are captured.
        shrink: how many times less activation memory the last row has.

    """
    timed, counted = (_captured(model, layers, spec) for spec in (device, _FLOPS_ONLY))
    problem = timed.problem
    fixed = timed.static_bytes
    whole = timed.keep_all_peak_bytes - fixed
    rows = []
    strategies = [("selective", SelectiveAttention()), ("full", BlockCheckpoint())]
    for name, strategy in strategies[1 if model.flash else 0 :]:
        solution = strategy.solve(problem.with_budget(2**62))
        added = _added(counted, compute_order(solution.steps))
        time = solution.step_time_ns / problem.keep_all_time_ns - 1
        rows.append(_row(name, (timed, counted), solution.peak_bytes, (fixed, whole), (added, time)))
    fifth = fixed + int(whole / shrink)
    rows.append(_row(f"{shrink:g}× less", (timed, counted), fifth, (fixed, whole), (None, None)))
    return tuple(rows)


def _captured(model: Transformer, layers: int, device: str | DeviceSpec) -> Plan:
    with torch.device("meta"):
        stack = Stack(model, layers).to(torch.bfloat16).train()
        x = torch.empty(model.batch, model.seq, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    made = plan_step(stack, None, (x,), device=device)
    storages = tuple(
        dataclasses.replace(s, bytes=0) if s.kind is StorageKind.GRADIENT else s for s in made.graph.storages
    )
    return dataclasses.replace(made, graph=dataclasses.replace(made.graph, storages=storages))


def _row(
    name: str,
    plans: tuple[Plan, Plan],
    budget: int,
    memory: tuple[int, int],
    strategy: tuple[float | None, float | None],
) -> OpLevelRow:
    timed, counted = plans
    fixed, whole = memory
    try:
        ours = replan(timed, budget)
    except Infeasible:
        return OpLevelRow(name, (budget - fixed) / whole, *strategy, None, None, None)
    added = _added(counted, compute_order(ours.steps), ours.graph.order)
    return OpLevelRow(name, (budget - fixed) / whole, *strategy, added, ours.overhead, ours.gap)


def _added(counted: Plan, order: tuple[int, ...], of_ops: tuple[int, ...] = ()) -> float:
    """Operations of an order of executions beyond the first of each op, as a share of the step's.

    ``of_ops``: the order of the ops by which the executions number them.
    """
    flops = counted.costs.in_order(of_ops).time_ns
    return sum(flops[op] for op in order) / sum(flops) - 1
