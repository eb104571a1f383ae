"""Plans that recompute nothing: so much is copied to the host, the longest away first, that the rest fits.

What lies between a low budget and the relaxation of the moments model is often only that memory is short away from its
moments. Here every storage that waits while the keep-all peak passes may leave, and
:mod:`solvers.extract_offload` has each copy out end, and each copy back begin, where memory allows. A slow link makes
such plans stall; they always know a way, from which on the model of :mod:`solvers.offload_model` saves time.
"""

from __future__ import annotations

from collections.abc import Iterator

from solvers.extract_offload import overlapped_steps
from solvers.moments_model import Decisions
from solvers.problem import Problem
from solvers.simulate import simulate
from solvers.solution import Step
from solvers.store_all import keep_all_peak_op


def copies_alone(problem: Problem) -> Iterator[tuple[Step, ...]]:
    """Steps that fit the budget, each with fewer copies than the last: a bisection over how many storages leave."""
    peak = keep_all_peak_op(problem)
    waiting = _waiting(problem, peak)
    movable = sorted(
        (s for s in waiting if problem.may_offload(s) and s not in problem.inputs[peak]),
        key=lambda s: -_weight(problem, s, peak),
    )
    fewest, most = 0, len(movable)
    count = most  # first, whether any number will do
    while fewest <= most:
        moved = frozenset(movable[:count])
        steps = overlapped_steps(problem, Decisions((peak,), (waiting - moved,), (frozenset(),), (moved,)))
        figures = simulate(problem, steps)
        if figures.peak_bytes <= problem.budget_bytes and figures.host_bytes <= problem.host_bytes:
            yield steps
            most = count - 1
        elif count == len(movable):
            return
        else:
            fewest = count + 1
        count = (fewest + most) // 2


def _waiting(problem: Problem, peak: int) -> frozenset[int]:
    """Storages that are made before an op and read after it, or live to the end."""
    return frozenset(
        s
        for s, made in enumerate(problem.producer)
        if made < peak and (s in problem.live_at_end or any(reader > peak for reader in problem.readers[s]))
    )


def _weight(problem: Problem, storage: int, peak: int) -> int:
    """Bytes times the ops between the last use before the peak and the first after it."""
    uses = (problem.producer[storage], *problem.readers[storage])
    before = max(use for use in uses if use < peak)
    after = min((use for use in uses if use > peak), default=len(problem.time_ns))
    return problem.storage_bytes[storage] * (after - before)
