"""What to keep and what to recompute: problem, solvers, simulator and independent validator. Loads no torch."""

from solvers.auto import AutoSolver
from solvers.bounds import Floor, FloorBound, find_floor, floor_lower_bound
from solvers.brute_force import BruteForceSolver
from solvers.brute_force_offload import OffloadBruteForceSolver
from solvers.chain_solver import ChainSolver
from solvers.exact import ExactSolver
from solvers.lns import NeighbourhoodSearch
from solvers.moments import MomentsSolver
from solvers.offload import OffloadSolver
from solvers.problem import Problem
from solvers.rematerialise import Rematerialiser
from solvers.simulate import Simulation, compute_order, simulate, with_frees
from solvers.solution import Compute, Free, Offload, Prefetch, Solution, Status, Step
from solvers.state_search import StateSearchSolver
from solvers.store_all import StoreAllSolver, store_all_steps
from solvers.strategies import BlockCheckpoint, BlockSegments, EveryKthBlock, SelectiveAttention, SqrtSegments
from solvers.validate import InvalidPlan, validate

__all__ = [
    "AutoSolver",
    "BlockCheckpoint",
    "BlockSegments",
    "BruteForceSolver",
    "ChainSolver",
    "Compute",
    "EveryKthBlock",
    "ExactSolver",
    "Floor",
    "FloorBound",
    "Free",
    "InvalidPlan",
    "MomentsSolver",
    "NeighbourhoodSearch",
    "Offload",
    "OffloadBruteForceSolver",
    "OffloadSolver",
    "Prefetch",
    "Problem",
    "Rematerialiser",
    "SelectiveAttention",
    "Simulation",
    "Solution",
    "SqrtSegments",
    "StateSearchSolver",
    "Status",
    "Step",
    "StoreAllSolver",
    "compute_order",
    "find_floor",
    "floor_lower_bound",
    "simulate",
    "store_all_steps",
    "validate",
    "with_frees",
]
