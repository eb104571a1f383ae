"""Independent replay of a plan: the last word on whether a solution is legal and whether its figures are true.

It shares no code with the solvers nor with the simulator, so that a mistake made there shows here. It is written to be
checked by eye: one pass over the steps with two dictionaries. What it holds against a plan::

    Compute(op)   op exists · first executions are in index order · an op that must not be recomputed runs once ·
                  every input is resident · static + resident + all outputs + workspace is within the budget
    Free(s)       s is resident
    Offload(s)    s is resident, may be copied, and is not on the host yet · the host's bytes are within their budget
    Prefetch(s)   s is on the host and not resident · static + resident, s included, is within the budget
    at the end    every op has run · what must live to the end is resident
    figures       peak and step time are those of the replay · the lower bound is not above the step time

The step time counts that nothing is read before it has arrived, and nothing overwritten or dropped before it has left
(:class:`_Copies`).
"""

from __future__ import annotations

from graphs.errors import CheckpointSchedulerError
from solvers.problem import Problem
from solvers.solution import Compute, Free, Offload, Prefetch, Solution


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
    copies = _Copies(problem)
    time_ns = 0
    peak_bytes = problem.static_bytes

    for position, step in enumerate(solution.steps):
        if isinstance(step, Free):
            if step.storage not in resident:
                raise InvalidPlan(f"step {position} frees storage {step.storage}, which is not resident")
            time_ns = max(time_ns, copies.settled_at(step.storage))
            del resident[step.storage]
        elif isinstance(step, Compute):
            _check_compute(problem, step.op, position, resident, executions)
            executions[step.op] = executions.get(step.op, 0) + 1
            time_ns = max(
                [
                    time_ns,
                    *map(copies.settled_at, problem.outputs[step.op]),
                    *map(copies.there_at, problem.inputs[step.op]),
                ]
            )
            time_ns += problem.time_ns[step.op]
            made = {storage: problem.storage_bytes[storage] for storage in problem.outputs[step.op]}
            scratch = problem.workspace_bytes[step.op]
            live_bytes = problem.static_bytes + sum(resident.values()) + sum(made.values()) + scratch
            _check_live(problem, live_bytes, position, problem.describe_op(step.op))
            peak_bytes = max(peak_bytes, live_bytes)
            resident.update(made)
        elif isinstance(step, Offload):
            if step.storage not in resident:
                raise InvalidPlan(f"step {position} copies out storage {step.storage}, which is not resident")
            copies.out(step.storage, position, time_ns)
        elif isinstance(step, Prefetch):
            if step.storage in resident:
                raise InvalidPlan(f"step {position} fetches storage {step.storage}, which is resident")
            copies.back(step.storage, position, time_ns)
            resident[step.storage] = problem.storage_bytes[step.storage]
            live_bytes = problem.static_bytes + sum(resident.values())
            _check_live(problem, live_bytes, position, f"the copy of storage {step.storage} from the host")
            peak_bytes = max(peak_bytes, live_bytes)
        else:
            raise InvalidPlan(f"step {position} is {step!r}, which is no step of a plan")

    _check_end(problem, resident, executions)
    _check_figures(problem, solution, peak_bytes, max(time_ns, copies.last_end()))


class _Copies:
    """Every copy of the plan as (storage, start, end), in the order of the plan, one list for each direction."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.outward: list[tuple[int, int, int]] = []
        self.homeward: list[tuple[int, int, int]] = []

    def out(self, storage: int, position: int, now: int) -> None:
        """Queue a copy out behind those before it."""
        if any(storage == copied for copied, _, _ in self.outward):
            raise InvalidPlan(f"step {position} copies out storage {storage}, which is on the host already")
        size, link = self.problem.storage_bytes[storage], self.problem.link
        fixed = self.problem.movable is not None and storage not in self.problem.movable
        if link is None or fixed or size < max(link.least_bytes, 1):
            raise InvalidPlan(f"step {position} copies out storage {storage}, which this problem does not allow")
        on_host = size + sum(self.problem.storage_bytes[copied] for copied, _, _ in self.outward)
        if on_host > self.problem.host_bytes:
            raise InvalidPlan(
                f"step {position} has {on_host} bytes on the host, "
                f"{on_host - self.problem.host_bytes} over its budget of {self.problem.host_bytes}"
            )
        ahead = self.outward if link.duplex else self.outward + self.homeward
        start = max([now, *(end for _, _, end in ahead)])
        self.outward.append((storage, start, start + link.to_host_ns(size)))

    def back(self, storage: int, position: int, now: int) -> None:
        """Queue a copy back behind those before it and behind the storage's own copy out."""
        left = [end for copied, _, end in self.outward if copied == storage]
        link = self.problem.link
        if not left or link is None:
            raise InvalidPlan(f"step {position} fetches storage {storage}, which is not on the host")
        ahead = self.homeward if link.duplex else self.outward + self.homeward
        start = max([now, *left, *(end for _, _, end in ahead)])
        self.homeward.append((storage, start, start + link.to_device_ns(self.problem.storage_bytes[storage])))

    def there_at(self, storage: int) -> int:
        """When the last copy back of a storage has arrived: nothing may read it before."""
        return max((end for copied, _, end in self.homeward if copied == storage), default=0)

    def settled_at(self, storage: int) -> int:
        """When no copy of a storage is under way: nothing may overwrite or drop it before."""
        return max((end for copied, _, end in self.outward + self.homeward if copied == storage), default=0)

    def last_end(self) -> int:
        """When all copies have ended."""
        return max((end for _, _, end in self.outward + self.homeward), default=0)


def _check_live(problem: Problem, live_bytes: int, position: int, what: str) -> None:
    """Refuse more live bytes than the budget."""
    if live_bytes > problem.budget_bytes:
        raise InvalidPlan(
            f"step {position} ({what}) has {live_bytes} bytes live, "
            f"{live_bytes - problem.budget_bytes} over the budget of {problem.budget_bytes}"
        )


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
