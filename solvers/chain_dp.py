"""Optimal persistent schedules of a chain of regions, by dynamic programming over what is stored.

For regions s..t, with the input of s stored and m bytes free beside it, the least time added is (Beaumont,
Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal checkpointing for heterogeneous chains", 2019, with options per region)

    C(s,s,m) = min over turns k of s that fit m of                                            time_k
    C(s,t,m) = min( min over s < q ≤ t of   sweep_s + … + sweep_(q-1) + C(q,t, m - a_q) + C(s,q-1,m),   store input of q
                    min over passes k of s  time_k + C(s+1,t, m - kept_k) )                             keep option k

where sweeps and the two halves of an option must fit m at their peaks, with the weight of what is resident at that time
(:class:`solvers.chain.Chain`). Several levels of recomputation come out by themselves. Intervals that end with the last
region are met in the first forward only, in which running forward adds no time, and all others after it.

Bytes are counted in whole *units*, sizes rounded up, so that what the table thinks fits does.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from solvers.region_options import Option, Sweep

_CELLS = 6_000_000  # of one table: regions² · levels
_LEAST_LEVELS = 500
_MOST_LEVELS = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One region as the program sees it.

    Attributes:
        input_bytes: what enters it.
        input_gradient_bytes: what is incoming to its backward, which options count themselves.
        weight_bytes: see :attr:`solvers.chain.Chain.weight_bytes`.
        sweep: how to run it forward; ``None`` for the last region.
        sweep_ns: time of that after the first forward.
        turns: ways to run it forward and backward.
        passes: ways to run it forward, and backward later; none for the last region.

    """

    input_bytes: int
    input_gradient_bytes: int
    weight_bytes: int
    sweep: Sweep | None
    sweep_ns: int
    turns: tuple[Option, ...]
    passes: tuple[Option, ...]


@dataclasses.dataclass(frozen=True)
class Turn:
    """Run region ``stage`` forward and backward."""

    stage: int
    option: Option
    first: bool


@dataclasses.dataclass(frozen=True)
class SweepForward:
    """Run regions ``start`` to ``stop`` - 1 forward and store the input of ``stop``."""

    start: int
    stop: int
    first: bool


@dataclasses.dataclass(frozen=True)
class PassForward:
    """Run region ``stage`` forward and keep what the option keeps."""

    stage: int
    option: Option
    first: bool


@dataclasses.dataclass(frozen=True)
class PassBackward:
    """Run the backward of region ``stage``, with what the option kept."""

    stage: int
    option: Option


Action = Turn | SweepForward | PassForward | PassBackward


class ChainTable:
    """C(s,t,m) for all s ≤ t and m up to a capacity.

    Args:
        stages: the chain.
        capacity_bytes: largest m.
        deadline: the table is left without any schedule where it is not full by then (``time.perf_counter``).

    """

    def __init__(self, stages: Sequence[Stage], capacity_bytes: int, *, deadline: float = math.inf) -> None:
        """Fill the table."""
        self.stages = stages
        count = len(stages)
        self.unit = _unit(stages, capacity_bytes, min(_MOST_LEVELS, max(_LEAST_LEVELS, _CELLS // count**2)))
        self.levels = capacity_bytes // self.unit
        self._arange = np.arange(self.levels + 1)
        shape = (count, count, self.levels + 1)
        self._cost = np.full(shape, np.inf)  # [s, t]
        self._stored = np.full(shape, np.inf)  # [t, q]: C(q,t,·) with the input of q stored out of the same bytes
        self._choice = np.full(shape, -1, dtype=np.int16)  # q, or `count` + option
        for length in range(count):
            if time.perf_counter() > deadline:
                return
            for s in range(count - length):
                self._fill(s, s + length)

    def _units(self, size: int) -> int:
        return max(0, -(-size // self.unit))

    def least_level(self) -> int | None:
        """The lowest m, in units, with a schedule."""
        feasible = np.flatnonzero(np.isfinite(self._cost[0, len(self.stages) - 1]))
        return int(feasible[0]) if len(feasible) else None

    def cost(self, level: int) -> float:
        """Least time added with so many units, infinite where nothing fits."""
        return float(self._cost[0, len(self.stages) - 1, level])

    def _fill(self, s: int, t: int) -> None:
        count = len(self.stages)
        first = t == count - 1
        best = self._cost[s, t]
        choice = self._choice[s, t]
        if s == t:
            backward_weight = self.stages[s].weight_bytes - self.stages[s].input_gradient_bytes
            for k, option in enumerate(self.stages[s].turns):
                need = self._units(option.forward_peak_bytes + backward_weight)
                time = option.first_ns if first else option.again_ns
                better = (self._arange >= need) & (best > time)
                best[better] = time
                choice[better] = count + k
        else:
            self._store_an_input(s, t, first=first)
            self._keep_an_option(s, t, first=first)
        shift = self._units(self.stages[s].input_bytes)
        if shift <= self.levels:
            self._stored[t, s, shift:] = best[: self.levels + 1 - shift]

    def _store_an_input(self, s: int, t: int, *, first: bool) -> None:
        """Sweep from s to q, for every q."""
        sweeps = [stage.sweep for stage in self.stages[s:t]]
        peaks = []
        peak = 0
        for j, sweep in enumerate(sweeps):
            assert sweep is not None
            if first:
                peak = max(peak, sweep.first_moves_bytes if j else sweep.first_stays_bytes)
            else:
                peak = max(peak, sweep.again_moves_bytes if j else sweep.again_stays_bytes)
            peaks.append(self._units(peak + self.stages[t].weight_bytes))
        times = np.cumsum([0 if first else stage.sweep_ns for stage in self.stages[s:t]])
        costs = self._stored[t, s + 1 : t + 1] + self._cost[s, s:t] + times[:, None]
        costs[self._arange[None, :] < np.array(peaks)[:, None]] = np.inf
        at = costs.argmin(axis=0)
        self._cost[s, t] = costs[at, self._arange]
        self._choice[s, t] = np.where(np.isfinite(self._cost[s, t]), s + 1 + at, -1)

    def _keep_an_option(self, s: int, t: int, *, first: bool) -> None:
        """Run s keeping option k, for every k."""
        best, choice, rest = self._cost[s, t], self._choice[s, t], self._cost[s + 1, t]
        stage = self.stages[s]
        for k, option in enumerate(stage.passes):
            kept = self._units(option.kept_bytes)
            need = max(
                kept,
                self._units(option.forward_peak_bytes + self.stages[t].weight_bytes),
                self._units(option.backward_peak_bytes + stage.weight_bytes - stage.input_gradient_bytes),
            )
            if need > self.levels:
                continue
            costs = rest[need - kept : self.levels + 1 - kept] + (option.first_ns if first else option.again_ns)
            better = costs < best[need:]
            best[need:][better] = costs[better]
            choice[need:][better] = len(self.stages) + k

    def schedule(self, level: int) -> list[Action]:
        """What to do with so many units. There must be a schedule."""
        actions: list[Action] = []
        count = len(self.stages)
        last = count - 1
        todo: list[tuple[int, int, int] | PassBackward] = [(0, last, level)]
        while todo:
            item = todo.pop()
            if isinstance(item, PassBackward):
                actions.append(item)
                continue
            s, t, m = item
            chosen = int(self._choice[s, t, m])
            assert chosen >= 0
            if s == t:
                actions.append(Turn(s, self.stages[s].turns[chosen - count], t == last))
            elif chosen < count:
                actions.append(SweepForward(s, chosen, t == last))
                todo.append((s, chosen - 1, m))
                todo.append((chosen, t, m - self._units(self.stages[chosen].input_bytes)))
            else:
                option = self.stages[s].passes[chosen - count]
                actions.append(PassForward(s, option, t == last))
                todo.append(PassBackward(s, option))
                todo.append((s + 1, t, m - self._units(option.kept_bytes)))
        return actions


def _unit(stages: Sequence[Stage], capacity: int, levels: int) -> int:
    """Bytes of a unit: about capacity / levels, such that the most frequent sizes are few more than whole units."""
    least = max(1, math.ceil(capacity / levels))
    sizes = sorted(stage.input_bytes for stage in stages[1:])
    typical = sizes[len(sizes) // 2] if sizes else 0
    return max(1, math.ceil(typical / (typical // least))) if typical >= least else least
