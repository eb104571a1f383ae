"""Steps that tests name on the command line, and plans made without capturing anything."""

from __future__ import annotations

import torch
from torch import nn

from scheduler.plan import Plan
from solvers.problem import Problem
from solvers.solution import Solution, Status
from solvers.store_all import StoreAllSolver
from tests.scheduler.toy import MB, STATIC, make_costs, make_graph


class Mean(nn.Module):
    """Two layers and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def make_step(batch: int = 64):
    return Mean(), (torch.randn(batch, 16),), {}


def make_nothing():
    return "a model"


def keep_all_plan(size: int = 1, blocks: int = 4) -> Plan:
    """A keep-all plan of the toy step whose activations are ``size`` times 10 MB each."""
    graph = make_graph(blocks, activation=size * 10 * MB)
    costs = make_costs(graph)
    problem = Problem.from_graph(graph, costs, 2**62, static_bytes=sum(STATIC.values()))
    solution: Solution = StoreAllSolver().solve(problem)
    assert solution.status is Status.OPTIMAL
    return Plan(
        graph=graph, costs=costs, solution=solution, budget_bytes=None, static=STATIC, device="cpu", versions={}
    )
