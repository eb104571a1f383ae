"""Replay of a schedule: the only place of the solvers that computes peaks and times.

Memory model, for one step of a schedule::

    Compute(op)   live = static + resident storages + all outputs of op + workspace of op
                  afterwards the outputs are resident; a copy that was resident before is replaced by the new one
    Free(s)       live = static + resident storages without s

A second copy of an output that is already resident therefore counts on top of the first while the op runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from solvers.problem import Problem
from solvers.solution import Compute, Free, Step


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a schedule does to memory and time.

    Attributes:
        peak_bytes: most bytes live at once, static ones included.
        peak_step: index in the steps of the first one at which the peak is reached; 0 for an empty schedule.
        step_time_ns: sum of the times of all executions.
        live_bytes: for each step the bytes live while it happens (``Compute``) or after it (``Free``), static included.

    """

    peak_bytes: int
    peak_step: int
    step_time_ns: int
    live_bytes: tuple[int, ...]


def simulate(problem: Problem, steps: Sequence[Step]) -> Simulation:
    """Replay ``steps`` and return their peak, time and live bytes. Linear in the number of steps and edges.

    The budget is not enforced here: compare ``peak_bytes`` with it.

    Raises:
        ValueError: a step is illegal (an input is not resident, a first execution is out of order, an op that may not
            be recomputed executes again, a storage that is not resident is freed), an op never executes, or a storage
            that must be live at the end is not. The message names the step and the op.

    """
    resident = [False] * len(problem.storage_bytes)
    live = problem.static_bytes
    executed = 0
    time_ns = 0
    live_bytes: list[int] = []
    for position, step in enumerate(steps):
        match step:
            case Compute(op=op):
                _check_compute(problem, position, op, executed, resident)
                executed = max(executed, op + 1)
                time_ns += problem.time_ns[op]
                grown = sum(problem.storage_bytes[s] for s in problem.outputs[op])
                live_bytes.append(live + grown + problem.workspace_bytes[op])
                for s in problem.outputs[op]:
                    if not resident[s]:
                        resident[s] = True
                        live += problem.storage_bytes[s]
            case Free(storage=s):
                _check_free(problem, position, s, resident)
                resident[s] = False
                live -= problem.storage_bytes[s]
                live_bytes.append(live)
    if executed < len(problem.time_ns):
        raise ValueError(f"{problem.describe_op(executed)} (op {executed}) never executes")
    for s in sorted(problem.live_at_end):
        if not resident[s]:
            maker = problem.describe_op(problem.producer[s])
            raise ValueError(f"storage {s} (made by {maker}) must be live at the end, and is not resident then")
    peak = max(live_bytes, default=live)
    return Simulation(peak, live_bytes.index(peak) if live_bytes else 0, time_ns, tuple(live_bytes))


def _check_compute(problem: Problem, position: int, op: int, executed: int, resident: list[bool]) -> None:
    """Refuse an execution that is not possible when ops ``0..executed-1`` have executed already."""
    if not 0 <= op < len(problem.time_ns):
        raise ValueError(f"step {position} executes op {op}, which does not exist")
    if op > executed:
        raise ValueError(
            f"step {position} executes {problem.describe_op(op)} (op {op}) before the first execution of "
            f"{problem.describe_op(executed)} (op {executed})"
        )
    if op < executed and not problem.recomputable[op]:
        raise ValueError(f"step {position} recomputes {problem.describe_op(op)} (op {op}), which is not recomputable")
    for s in problem.inputs[op]:
        if not resident[s]:
            maker = problem.describe_op(problem.producer[s])
            raise ValueError(
                f"step {position} executes {problem.describe_op(op)} (op {op}), whose input storage {s} "
                f"(made by {maker}) is not resident"
            )


def _check_free(problem: Problem, position: int, storage: int, resident: list[bool]) -> None:
    """Refuse to free what is not resident."""
    if not 0 <= storage < len(resident):
        raise ValueError(f"step {position} frees storage {storage}, which does not exist")
    if not resident[storage]:
        maker = problem.describe_op(problem.producer[storage])
        raise ValueError(f"step {position} frees storage {storage} (made by {maker}), which is not resident")


def with_frees(problem: Problem, compute_order: Iterable[int]) -> tuple[Step, ...]:
    """Turn an order of executions into steps that hold every storage no longer than needed.

    Each copy of a storage is freed right after the last execution that reads it before the storage is produced again,
    and right after its production where nothing reads it. The last copy of a storage in ``live_at_end`` stays. For the
    given order no other placing of frees has a lower live figure at any execution. Whether inputs are there when they
    are read is not checked here; :func:`simulate` does.
    """
    order = list(compute_order)
    freed_after: list[list[int]] = [[] for _ in order]
    last_use: dict[int, int] = {}  # of the storage's current copy: position of its production or last read
    for position, op in enumerate(order):
        for s in problem.inputs[op]:
            last_use[s] = position
        for s in problem.outputs[op]:
            if s in last_use:
                freed_after[last_use[s]].append(s)
            last_use[s] = position
    for s, position in last_use.items():
        if s not in problem.live_at_end:
            freed_after[position].append(s)
    steps: list[Step] = []
    for op, storages in zip(order, freed_after, strict=True):
        steps.append(Compute(op))
        steps.extend(Free(s) for s in sorted(storages))
    return tuple(steps)


def compute_order(steps: Iterable[Step]) -> tuple[int, ...]:
    """The ops that the steps execute, in order: what :func:`with_frees` turns back into steps."""
    return tuple(step.op for step in steps if isinstance(step, Compute))
