"""Replay of a schedule: the only place of the solvers that computes peaks and times.

Memory model, for one step of a schedule::

    Compute(op)   live = static + resident storages + all outputs of op + workspace of op
                  afterwards the outputs are resident; a copy that was resident before is replaced by the new one
    Free(s)       live = static + resident storages without s
    Offload(s)    live as before; s takes its bytes on the host from here to the end of the step
    Prefetch(s)   live = static + resident storages with s

A second copy of an output that is already resident therefore counts on top of the first while the op runs. Live bytes
depend on the order of the steps alone, and on no clock: a copy that takes longer than predicted costs time, not memory.

Time model. Computation, copies out and copies back each follow one another in the order of the steps; on a link that is
not duplex all copies do. A copy starts no earlier than computation reaches its step, and takes what the link says. What
needs the end of a copy waits for it, and computation with it: the *stalls*::

    Compute(op)   for the arrival of its inputs, and for copies of storages that it replaces
    Free(s)       for a copy of s in either direction
    Prefetch(s)   itself, on the link, for the departure of s
    the end       for all copies
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from solvers.problem import Problem
from solvers.solution import Compute, Free, Offload, Prefetch, Step


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a schedule does to memory and time.

    Attributes:
        peak_bytes: most bytes live at once, static ones included.
        peak_step: index in the steps of the first one at which the peak is reached; 0 for an empty schedule.
        step_time_ns: times of all executions, and the stalls.
        live_bytes: for each step the bytes live while it happens (``Compute``) or after it (others), static included.
        stall_ns: time for which computation waits for copies.
        host_bytes: bytes of the copies on the host.
        start_ns: for each step the time at which it starts: a copy on the link, anything else where computation is.

    """

    peak_bytes: int
    peak_step: int
    step_time_ns: int
    live_bytes: tuple[int, ...]
    stall_ns: int = 0
    host_bytes: int = 0
    start_ns: tuple[int, ...] = ()


def simulate(problem: Problem, steps: Sequence[Step]) -> Simulation:
    """Replay ``steps`` and return their peak, time and live bytes. Linear in the number of steps and edges.

    The budgets are not enforced here: compare ``peak_bytes`` and ``host_bytes`` with them.

    Raises:
        ValueError: a step is illegal (an input is not resident, a first execution is out of order, an op that may not
            be recomputed executes again, a storage that is not resident is freed or copied out, one that is not on the
            host is fetched, or one that is resident), an op never executes, or a storage that must be live at the end
            is not. The message names the step and the op.

    """
    resident = [False] * len(problem.storage_bytes)
    clock = _Clock(problem)
    live = problem.static_bytes
    executed = 0
    live_bytes: list[int] = []
    start_ns: list[int] = []
    for position, step in enumerate(steps):
        match step:
            case Compute(op=op):
                _check_compute(problem, position, op, executed, resident)
                executed = max(executed, op + 1)
                grown = sum(problem.storage_bytes[s] for s in problem.outputs[op])
                live_bytes.append(live + grown + problem.workspace_bytes[op])
                start_ns.append(clock.compute(op))
                for s in problem.outputs[op]:
                    if not resident[s]:
                        resident[s] = True
                        live += problem.storage_bytes[s]
            case Free(storage=s):
                _check_resident(problem, position, s, resident, "frees")
                resident[s] = False
                live -= problem.storage_bytes[s]
                live_bytes.append(live)
                start_ns.append(clock.wait_for(s))
            case Offload(storage=s):
                _check_resident(problem, position, s, resident, "copies out")
                _check_offload(problem, position, s, clock)
                live_bytes.append(live)
                start_ns.append(clock.copy_out(s))
            case Prefetch(storage=s):
                _check_prefetch(problem, position, s, resident, clock)
                resident[s] = True
                live += problem.storage_bytes[s]
                live_bytes.append(live)
                start_ns.append(clock.copy_back(s))
    _check_end(problem, executed, resident)
    clock.finish()
    peak = max(live_bytes, default=live)
    return Simulation(
        peak_bytes=peak,
        peak_step=live_bytes.index(peak) if live_bytes else 0,
        step_time_ns=clock.now,
        live_bytes=tuple(live_bytes),
        stall_ns=clock.stalled,
        host_bytes=sum(problem.storage_bytes[s] for s in clock.departure),
        start_ns=tuple(start_ns),
    )


class _Clock:
    """Computation and the two directions of the link, each with the time at which it is free."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.now = 0
        self.stalled = 0
        self.out_free = 0
        self.back_free = 0
        self.departure: dict[int, int] = {}  # storage -> when its copy on the host is whole
        self.arrival: dict[int, int] = {}  # storage -> when its present copy on the device is whole

    def compute(self, op: int) -> int:
        """Execute an op; return when it starts."""
        problem = self.problem
        for s in problem.inputs[op]:
            self._wait_until(self.arrival.get(s, 0))
        for s in problem.outputs[op]:
            self.wait_for(s)
        start = self.now
        self.now += problem.time_ns[op]
        return start

    def wait_for(self, s: int) -> int:
        """Wait until no copy of ``s`` is under way; return the time then."""
        self._wait_until(self.departure.get(s, 0))
        self._wait_until(self.arrival.pop(s, 0))
        return self.now

    def copy_out(self, s: int) -> int:
        """Start copying out; return when it does."""
        assert self.problem.link is not None
        start = max(self.now, self.out_free)
        end = start + self.problem.link.to_host_ns(self.problem.storage_bytes[s])
        self.departure[s] = self.out_free = end
        if not self.problem.link.duplex:
            self.back_free = end
        return start

    def copy_back(self, s: int) -> int:
        """Start copying back; return when it does."""
        assert self.problem.link is not None
        start = max(self.now, self.back_free, self.departure[s])
        end = start + self.problem.link.to_device_ns(self.problem.storage_bytes[s])
        self.arrival[s] = self.back_free = end
        if not self.problem.link.duplex:
            self.out_free = end
        return start

    def finish(self) -> None:
        """Wait for all copies."""
        for end in (*self.departure.values(), *self.arrival.values()):
            self._wait_until(end)

    def _wait_until(self, moment: int) -> None:
        self.stalled += max(0, moment - self.now)
        self.now = max(self.now, moment)


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


def _check_resident(problem: Problem, position: int, storage: int, resident: list[bool], verb: str) -> None:
    """Refuse to free or copy out what is not resident."""
    if not 0 <= storage < len(resident):
        raise ValueError(f"step {position} {verb} storage {storage}, which does not exist")
    if not resident[storage]:
        maker = problem.describe_op(problem.producer[storage])
        raise ValueError(f"step {position} {verb} storage {storage} (made by {maker}), which is not resident")


def _check_offload(problem: Problem, position: int, storage: int, clock: _Clock) -> None:
    """Refuse a copy out of what is on the host already, or may not be copied at all."""
    if storage in clock.departure:
        raise ValueError(f"step {position} copies out storage {storage}, which is on the host already")
    if not problem.may_offload(storage):
        raise ValueError(f"step {position} copies out storage {storage}, which this problem does not allow")


def _check_prefetch(problem: Problem, position: int, storage: int, resident: list[bool], clock: _Clock) -> None:
    """Refuse to fetch what is resident already, or not on the host."""
    if storage not in clock.departure:
        raise ValueError(f"step {position} fetches storage {storage}, which is not on the host")
    if resident[storage]:
        maker = problem.describe_op(problem.producer[storage])
        raise ValueError(f"step {position} fetches storage {storage} (made by {maker}), which is resident")


def _check_end(problem: Problem, executed: int, resident: list[bool]) -> None:
    """Refuse an end before every op has executed, or without what must be live then."""
    if executed < len(problem.time_ns):
        raise ValueError(f"{problem.describe_op(executed)} (op {executed}) never executes")
    for s in sorted(problem.live_at_end):
        if not resident[s]:
            maker = problem.describe_op(problem.producer[s])
            raise ValueError(f"storage {s} (made by {maker}) must be live at the end, and is not resident then")


def with_frees(problem: Problem, compute_order: Iterable[int]) -> tuple[Compute | Free, ...]:
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
    steps: list[Compute | Free] = []
    for op, storages in zip(order, freed_after, strict=True):
        steps.append(Compute(op))
        steps.extend(Free(s) for s in sorted(storages))
    return tuple(steps)


def compute_order(steps: Iterable[Step]) -> tuple[int, ...]:
    """The ops that the steps execute, in order: what :func:`with_frees` turns back into steps."""
    return tuple(step.op for step in steps if isinstance(step, Compute))
