"""The largest batch, or sequence, that a budget allows, and what it brings.

A step of ``n`` samples is captured for a few ``n`` only. Its least feasible budget grows close to linearly in the batch
(and at most quadratically in the sequence), so that the secant through two known floors lands near the answer; the
answer itself is bracketed: a plan exists for ``n``, and none was found for the next larger one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Final

from graphs.ir import StorageKind
from scheduler.errors import Infeasible
from scheduler.ordering import Solver
from scheduler.plan import Plan
from scheduler.replan import replan
from scheduler.units import format_bytes
from solvers.auto import AutoSolver
from solvers.bounds import find_floor

_MOST_PROBES: Final = 40
_FREE_PROBES: Final = 5  # after so many the remaining stretch is halved
_SMALL_SHARE: Final = 0.10  # of the budget, below which activations are not worth a word
_SAME_SPEED: Final = 1.01  # throughput ratio below which two batches count as equally fast
_GB: Final = 10**9


@dataclasses.dataclass(frozen=True, slots=True)
class FitRow:
    """A step of one size under the budget.

    Attributes:
        size: the batch, or the tokens of a sequence.
        plan: its plan.
        per_second: sizes per second of forward and backward: samples/s, or tokens/s of one batch row.
        gained_per_gb: sizes per second that another GB of budget would add at this size; 0 where nothing is recomputed.

    """

    size: int
    plan: Plan
    per_second: float
    gained_per_gb: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """What :func:`fit` found.

    Attributes:
        budget_bytes: the budget.
        largest: the largest size for which a plan was found.
        refused: the next larger size, for which none was found; ``None`` where ``largest`` is the limit of the search.
        plain: the largest size that fits without recomputation; 0 where none does.
        rows: from ``plain`` to ``largest``, ascending.
        worth: whether checkpointing pays here.
        verdict: why, in a sentence.

    """

    budget_bytes: int
    largest: int
    refused: int | None
    plain: int
    rows: tuple[FitRow, ...]
    worth: bool
    verdict: str

    @property
    def fastest(self) -> FitRow:
        """The row with the highest throughput; of equals the smallest size."""
        return max(self.rows, key=lambda row: (row.per_second, -row.size))


def fit(
    capture: Callable[[int], Plan],
    budget_bytes: int,
    *,
    multiple: int = 1,
    most: int = 65536,
    time_limit_s: float = 20.0,
    gap: float = 0.005,
) -> Fit:
    """Find the largest size that fits a budget, and compare throughput from the plain step up to it.

    Args:
        capture: makes a keep-all plan (without a budget) of the step of a given size.
        budget_bytes: most bytes live at once, static ones included.
        multiple: sizes are multiples of this.
        most: sizes above this are not tried.
        time_limit_s: bound on each solve, in seconds.
        gap: as in :func:`scheduler.replan.replan`.

    Raises:
        Infeasible: not even the least size fits.
        ValueError: ``most`` is below ``multiple``.

    """
    if most < multiple:
        raise ValueError(f"the largest size to try, {most}, is below the least one, {multiple}")
    probe = _Prober(capture, budget_bytes, multiple, AutoSolver(time_limit_s=time_limit_s, gap=gap))
    top = most // multiple
    plain = _largest_plain(probe, top)
    if plain < top:
        probe.plan(max(1, plain))  # raises where not even the least size fits
        anchors = {n: probe.floor(n) for n in {1, max(1, plain), min(2, top)} if n in (1, plain) or plain < 2}
        largest = probe.largest(top, anchors, probe.planned, max(1, plain))
    else:
        largest = top
    sizes = sorted({n for n in (plain, (plain + largest) // 2, largest) if n})
    rows = tuple(probe.row(n) for n in sizes)
    worth, verdict = _verdict(rows, plain * multiple, largest * multiple, budget_bytes)
    refused = None if largest == top else (largest + 1) * multiple
    return Fit(budget_bytes, largest * multiple, refused, plain * multiple, rows, worth, verdict)


def _largest_plain(probe: _Prober, top: int) -> int:
    """The largest size, in multiples, that fits without recomputation; 0 where none does."""
    if not probe.fits_plainly(1):
        return 0
    needs = {n: probe.plain_peak(n) for n in {1, min(2, top)}}
    return probe.largest(top, needs, probe.plainly, 1)


class _Prober:
    """What is known of each size, in multiples; captured and solved at most once."""

    def __init__(self, capture: Callable[[int], Plan], budget: int, multiple: int, solver: Solver) -> None:
        self.budget, self.multiple = budget, multiple
        self.captured = functools.cache(lambda n: capture(n * multiple))
        self.solver = solver
        self.plans: dict[int, Plan] = {}

    def plain_peak(self, n: int) -> int:
        return self.captured(n).keep_all_peak_bytes

    def fits_plainly(self, n: int) -> bool:
        return self.plain_peak(n) <= self.budget

    def plainly(self, n: int) -> tuple[bool, int | None]:
        """Whether a size fits without recomputation, and what it needs."""
        return self.fits_plainly(n), self.plain_peak(n)

    def floor(self, n: int) -> int:
        return find_floor(self.captured(n).problem).bytes

    def plan(self, n: int) -> Plan:
        if n not in self.plans:
            self.plans[n] = replan(self.captured(n), self.budget, solver=self.solver)
        return self.plans[n]

    def planned(self, n: int) -> tuple[bool, int | None]:
        """Whether a size has a plan, and about what a size without one needs at least, where that is known."""
        try:
            self.plan(n)
        except Infeasible as error:
            return False, error.floor_bytes or error.floor_lower_bound_bytes
        return True, None

    def largest(
        self, top: int, needs: Mapping[int, int], probed: Callable[[int], tuple[bool, int | None]], low: int
    ) -> int:
        """The largest ``n`` up to ``top`` that fits, where ``low`` fits (or is 0).

        First where the line through the known needs meets the budget, then a neighbour of it; a stretch in which that
        does not help, or of whose upper end the need is not known, is halved.
        """
        needs, high, stride = dict(needs), top + 1, 1
        guess = _secant(needs, self.budget)
        for probe in range(_MOST_PROBES):
            if high - low <= 1:
                break
            if probe > _FREE_PROBES and high <= top:
                guess = (low + high) // 2
            guess = min(max(guess, low + 1), high - 1)
            fits, need = probed(guess)
            if need is not None:
                needs[guess] = need
            if fits:
                low = guess
                guess, stride = low + stride, 2 * stride
            else:
                high = guess
                guess = (low + high) // 2 if need is None else _secant(needs, self.budget)
        return low

    def row(self, n: int) -> FitRow:
        size = n * self.multiple
        plan = self.plan(n)
        speed = size * 1e9 / plan.step_time_ns
        gained = 0.0
        if not plan.is_noop:
            extra = min(_GB, max(self.budget // 10, 1))
            richer = replan(self.captured(n), self.budget + extra, solver=self.solver)
            gained = max(0.0, size * 1e9 / richer.step_time_ns - speed) * _GB / extra
        return FitRow(size, plan, speed, gained)


def _secant(needs: Mapping[int, int], budget: int) -> int:
    """Where the line through the needs on either side of the budget meets it, or else the two that are nearest."""
    within = [item for item in sorted(needs.items()) if item[1] <= budget]
    above = [item for item in sorted(needs.items()) if item[1] > budget]
    chosen = [within[-1], above[0]] if within and above else (within[-2:] or above[:2])
    if len(chosen) < 2 or chosen[1][1] <= chosen[0][1]:
        return 2 * max(needs)
    (n0, y0), (n1, y1) = chosen
    return int(n0 + (budget - y0) * (n1 - n0) / (y1 - y0))


def activation_bytes(plan: Plan) -> int:
    """Peak of plain training less what no schedule can lower: static bytes and the gradients the step makes."""
    gradients = sum(s.bytes for s in plan.graph.storages if s.kind is StorageKind.GRADIENT)
    return max(0, plan.keep_all_peak_bytes - plan.static_bytes - gradients)


def _verdict(rows: tuple[FitRow, ...], plain: int, largest: int, budget: int) -> tuple[bool, str]:
    """Whether checkpointing pays, and why."""
    first, best = rows[0], max(rows, key=lambda row: row.per_second)
    share = activation_bytes(first.plan) / budget
    if largest == plain:
        return False, f"Checkpointing is not worth it here: {plain} fits without it, and nothing larger fits with it."
    if not plain:
        return True, "Nothing fits without checkpointing."
    if best.per_second <= first.per_second * _SAME_SPEED:
        return False, (
            f"Checkpointing brings no throughput here: {plain} fits without it and is as fast per unit as anything "
            f"larger. Use it only if a larger size than {plain} is wanted for its own sake."
        )
    if plain and share < _SMALL_SHARE and largest < 2 * plain:
        return False, (
            f"Checkpointing is hardly worth it here: activations of {plain} are "
            f"{format_bytes(activation_bytes(first.plan))}, {share:.0%} of the budget; the rest cannot be recomputed."
        )
    return True, (
        f"Checkpointing pays: {best.size} is {best.per_second / first.per_second - 1:.1%} faster per unit than "
        f"{plain}, the largest that fits without it."
    )
