"""Independent replay of a plan: the last word on whether a solution is legal and whether its figures are true.

It shares no code with the solvers nor with the simulator, so that a mistake made there shows here. It is written to be
checked by eye: one pass over the steps with two dictionaries. What it holds against a plan::

    Compute(op)   op exists · first executions are in index order · an op that must not be recomputed runs once ·
                  every input is resident · static + resident + all outputs + workspace is within the budget
    Free(s)       s is resident
    at the end    every op has run · what must live to the end is resident
    figures       peak and step time are those of the replay · the lower bound is not above the step time
"""

from __future__ import annotations

from graphs.errors import CheckpointSchedulerError
from solvers.problem import Problem
from solvers.solution import Compute, Free, Solution


class InvalidPlan(CheckpointSchedulerError, ValueError):  # noqa: N818 (reads as what it is; a caller catches few)
    """A solution is not a legal plan of its problem, or states figures that a replay does not find."""


def validate(problem: Problem, solution: Solution) -> None:
    """Replay ``solution`` on ``problem`` and return quietly if everything it claims is so.

    Raises:
        InvalidPlan: with the first reason found, the position of the step and the name of the op.

    """
    if not solution.status.has_plan:
        raise InvalidPlan(f"a solution of status {solution.status} carries no plan to validate")
    resident: dict[int, int] = {}  # storage -> its bytes
    executions: dict[int, int] = {}  # op -> how often it has run
    time_ns = 0
    peak_bytes = problem.static_bytes

    for position, step in enumerate(solution.steps):
        if isinstance(step, Free):
            if step.storage not in resident:
                raise InvalidPlan(f"step {position} frees storage {step.storage}, which is not resident")
            del resident[step.storage]
        elif isinstance(step, Compute):
            _check_compute(problem, step.op, position, resident, executions)
            executions[step.op] = executions.get(step.op, 0) + 1
            time_ns += problem.time_ns[step.op]
            made = {storage: problem.storage_bytes[storage] for storage in problem.outputs[step.op]}
            scratch = problem.workspace_bytes[step.op]
            live_bytes = problem.static_bytes + sum(resident.values()) + sum(made.values()) + scratch
            if live_bytes > problem.budget_bytes:
                raise InvalidPlan(
                    f"step {position} ({problem.describe_op(step.op)}) has {live_bytes} bytes live, "
                    f"{live_bytes - problem.budget_bytes} over the budget of {problem.budget_bytes}"
                )
            peak_bytes = max(peak_bytes, live_bytes)
            resident.update(made)
        else:
            raise InvalidPlan(f"step {position} is {step!r}, which is no step of a plan")

    _check_end(problem, resident, executions)
    _check_figures(problem, solution, peak_bytes, time_ns)


def _check_compute(
    problem: Problem, op: int, position: int, resident: dict[int, int], executions: dict[int, int]
) -> None:
    """Refuse an unknown op, a first execution out of order, a forbidden recompute, or an input that is not there."""
    if not 0 <= op < len(problem.time_ns):
        raise InvalidPlan(f"step {position} executes op {op}; the problem has ops 0 to {len(problem.time_ns) - 1}")
    name = problem.describe_op(op)
    if op in executions and not problem.recomputable[op]:
        raise InvalidPlan(f"step {position} executes {name} again, which must not be recomputed")
    if op not in executions and op != len(executions):
        expected = problem.describe_op(len(executions))
        raise InvalidPlan(f"step {position} executes {name} for the first time before {expected}")
    missing = [storage for storage in problem.inputs[op] if storage not in resident]
    if missing:
        raise InvalidPlan(f"step {position} ({name}) reads storages {missing}, which are not resident")


def _check_end(problem: Problem, resident: dict[int, int], executions: dict[int, int]) -> None:
    """Refuse a plan that has not run every op, or has lost what must live to the end."""
    if len(executions) < len(problem.time_ns):
        raise InvalidPlan(f"the plan ends before {problem.describe_op(len(executions))} has run")
    dropped = sorted(problem.live_at_end - resident.keys())
    if dropped:
        raise InvalidPlan(f"storages {dropped} must live to the end of the step and are not resident there")


def _check_figures(problem: Problem, solution: Solution, peak_bytes: int, time_ns: int) -> None:
    """Refuse figures that the replay does not find. ``peak_bytes`` and ``time_ns`` are the replay's."""
    if peak_bytes > problem.budget_bytes:
        raise InvalidPlan(f"static storages alone take {peak_bytes} bytes, over the budget of {problem.budget_bytes}")
    if solution.peak_bytes != peak_bytes:
        raise InvalidPlan(f"the plan states a peak of {solution.peak_bytes} bytes; the replay has {peak_bytes}")
    if solution.step_time_ns != time_ns:
        raise InvalidPlan(f"the plan states a step time of {solution.step_time_ns} ns; the replay takes {time_ns}")
    if solution.lower_bound_ns > time_ns:
        raise InvalidPlan(f"the lower bound of {solution.lower_bound_ns} ns is above the step time of {time_ns} ns")
