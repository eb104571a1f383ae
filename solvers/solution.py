"""What a solver returns: steps, a status with a sentence and a remedy, and the figures that prove how good it is."""

from __future__ import annotations

import dataclasses
import enum


@dataclasses.dataclass(frozen=True, slots=True)
class Compute:
    """Execute an op. Its outputs become resident; an output that already was is replaced by the new copy."""

    op: int


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """Drop a resident storage, once a copy of it that is under way has ended."""

    storage: int


@dataclasses.dataclass(frozen=True, slots=True)
class Offload:
    """Start copying a resident storage to the host, beside computation; it stays resident until it is freed.

    The copy on the host stays until the step ends, so that one is enough.
    """

    storage: int


@dataclasses.dataclass(frozen=True, slots=True)
class Prefetch:
    """Start copying a storage back from the host. It takes its bytes from here on; what reads it waits for it."""

    storage: int


Step = Compute | Free | Offload | Prefetch


class Status(enum.StrEnum):
    """How a solve ended. :attr:`sentence` says what it means, :attr:`remedy` what to do about it."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time_limit"

    @property
    def has_plan(self) -> bool:
        """Whether a solution of this status carries steps."""
        return self in (Status.OPTIMAL, Status.FEASIBLE)

    @property
    def sentence(self) -> str:
        """One sentence for a person."""
        return _SENTENCES[self][0]

    @property
    def remedy(self) -> str:
        """What a person can do about it; empty where nothing needs doing."""
        return _SENTENCES[self][1]


_SENTENCES = {
    Status.OPTIMAL: ("The plan is within the requested gap of the least possible step time.", ""),
    Status.FEASIBLE: (
        "The plan fits the budget, and its gap to the lower bound is larger than requested.",
        "Give the solver more time, or accept the gap that the plan states.",
    ),
    Status.INFEASIBLE: (
        "No schedule that this solver can express fits the budget.",
        "Raise the budget to the floor that the solution states, or use a smaller batch.",
    ),
    Status.TIME_LIMIT: (
        "The solver ran out of time before it found a plan or proved that there is none.",
        "Give the solver more time, or raise the budget.",
    ),
}


@dataclasses.dataclass(frozen=True)
class Solution:
    """Outcome of one solve.

    Attributes:
        status: how the solve ended.
        steps: the schedule, in execution order; empty unless ``status.has_plan``.
        step_time_ns: time of the schedule; 0 without a plan.
        peak_bytes: most bytes live at once, static ones included; 0 without a plan.
        lower_bound_ns: no schedule of this problem (first executions in the given order, any number of recomputations)
            is faster; the keep-all time where the solver proves nothing better.
        solver: name of the solver that found the steps.
        solve_seconds: wall time of the solve.
        message: what happened, in words; names the op that binds where infeasible.
        floor_bytes: least budget for which a plan was found while looking (static included), or ``None``.
        floor_lower_bound_bytes: no schedule fits in less than this (static included), or ``None`` where not computed.
        floor_without_copies_bytes: ``floor_bytes`` for plans that copy nothing, where the problem has a host tier.

    """

    status: Status
    steps: tuple[Step, ...]
    step_time_ns: int
    peak_bytes: int
    lower_bound_ns: int
    solver: str
    solve_seconds: float = 0.0
    message: str = ""
    floor_bytes: int | None = None
    floor_lower_bound_bytes: int | None = None
    floor_without_copies_bytes: int | None = None

    @property
    def gap(self) -> float:
        """(step time − lower bound) / lower bound: how far from the least possible the plan can be at most."""
        if not self.status.has_plan:
            return float("inf")
        if self.lower_bound_ns == 0:
            return 0.0 if self.step_time_ns == 0 else float("inf")
        return max(0.0, (self.step_time_ns - self.lower_bound_ns) / self.lower_bound_ns)
