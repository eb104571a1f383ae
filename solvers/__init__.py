"""What to keep and what to recompute: problem, solvers, simulator and independent validator. Loads no torch."""

from solvers.problem import Problem
from solvers.simulate import Simulation, compute_order, simulate, with_frees
from solvers.solution import Compute, Free, Solution, Status, Step
from solvers.store_all import StoreAllSolver, store_all_steps

__all__ = [
    "Compute",
    "Free",
    "Problem",
    "Simulation",
    "Solution",
    "Status",
    "Step",
    "StoreAllSolver",
    "compute_order",
    "simulate",
    "store_all_steps",
    "with_frees",
]
