import dataclasses
import itertools
import math
import random

import pytest

from solvers.chain_dp import ChainTable, PassBackward, PassForward, Stage, SweepForward, Turn
from solvers.region_options import Option, Sweep

FREE_SWEEP = Sweep((), 0, 0, 0, 0)


def option(kept=0, forward=0, backward=0, time=0):
    return Option(kept, forward, backward, time, time, (), (), ())


def uniform_chain(length):
    """Each input takes one byte, sweeping over a stage one unit of time, nothing else anything."""
    return [
        Stage(
            input_bytes=1 if i else 0,
            input_gradient_bytes=0,
            weight_bytes=0,
            sweep=FREE_SWEEP if i + 1 < length else None,
            sweep_ns=1,
            turns=(option(),),
            passes=(),
        )
        for i in range(length)
    ]


def forward_steps(length, checkpoints):
    """Griewank and Walther (2000): least forward steps that reverse a chain, its input stored apart."""
    r = next(r for r in itertools.count() if math.comb(checkpoints + r, checkpoints) >= length)
    return r * length - math.comb(checkpoints + r, r - 1) if r else 0


def test_formula_has_the_published_values():
    assert [forward_steps(10, 3), forward_steps(50, 3), forward_steps(100, 5)] == [15, 180, 316]


@pytest.mark.parametrize("length", [2, 3, 7, 10, 20, 33, 48, 60])
def test_uniform_chains_take_the_binomial_number_of_steps(length):
    table = ChainTable(uniform_chain(length), 8)
    for checkpoints in range(1, 9):
        added = forward_steps(length, checkpoints) - (length - 1)  # the first forward adds nothing
        assert table.cost(checkpoints) == added
        assert cost_of(table.schedule(checkpoints)) == added


def test_a_table_that_is_not_full_in_time_has_no_schedule():
    assert ChainTable(uniform_chain(6), 8).least_level() is not None
    assert ChainTable(uniform_chain(6), 8, deadline=0.0).least_level() is None


def cost_of(actions):
    """Time of a schedule of a uniform chain; checks that every action finds what it needs stored."""
    stored, total, turned = {0}, 0, []
    for action in actions:
        assert isinstance(action, SweepForward | Turn)
        if isinstance(action, SweepForward):
            assert action.start in stored
            stored.add(action.stop)
            total += 0 if action.first else action.stop - action.start
        else:
            assert action.stage in stored
            turned.append(action.stage)
            stored.discard(action.stage)
            stored |= {0}
    assert turned == list(range(len(turned)))[::-1]
    return total


def brute_force(stages, s, t, m):
    """The recursion, for one m in bytes."""
    last = t == len(stages) - 1
    best = math.inf
    weight = stages[t].weight_bytes
    backward_weight = stages[s].weight_bytes - stages[s].input_gradient_bytes
    if s == t:
        fits = [o for o in stages[s].turns if o.forward_peak_bytes + backward_weight <= m]
        return min((o.first_ns if last else o.again_ns for o in fits), default=math.inf)
    peak = time = 0
    for q in range(s + 1, t + 1):
        sweep = stages[q - 1].sweep
        moves = sweep.first_moves_bytes if last else sweep.again_moves_bytes
        stays = sweep.first_stays_bytes if last else sweep.again_stays_bytes
        peak = max(peak, stays if q == s + 1 else moves)
        time += 0 if last else stages[q - 1].sweep_ns
        if peak + weight <= m >= stages[q].input_bytes:
            rest = brute_force(stages, q, t, m - stages[q].input_bytes)
            if rest < math.inf:
                best = min(best, time + rest + brute_force(stages, s, q - 1, m))
    for o in stages[s].passes:
        needs = max(o.kept_bytes, o.forward_peak_bytes + weight, o.backward_peak_bytes + backward_weight)
        if needs <= m:
            rest = brute_force(stages, s + 1, t, m - o.kept_bytes)
            best = min(best, rest + (o.first_ns if last else o.again_ns))
    return best


def random_stages(rng, length):
    def one():
        return rng.randint(0, 4)

    stages = []
    for i in range(length):
        ending = i + 1 == length
        gradient = one()
        turns = tuple(option(0, rng.randint(1, 9), 0, rng.randint(1, 9)) for _ in range(2))
        kept = [rng.randint(1, 6) for _ in range(2)]
        passes = tuple(option(k, k + one(), k + one(), rng.randint(1, 9)) for k in kept)
        sweep = None if ending else Sweep((), one(), one() + 2, one(), one() + 2)
        stages.append(
            Stage(
                input_bytes=rng.randint(1, 4) if i else 0,
                input_gradient_bytes=gradient,
                weight_bytes=gradient + one(),
                sweep=sweep,
                sweep_ns=rng.randint(1, 9),
                turns=turns,
                passes=() if ending else passes,
            )
        )
    return stages


@pytest.mark.parametrize("seed", range(12))
def test_heterogeneous_chains_against_brute_force(seed):
    rng = random.Random(seed)
    stages = random_stages(rng, rng.randint(1, 8))
    table = ChainTable(stages, 40)
    assert table.unit == 1
    for m in range(0, 41, 3):
        assert table.cost(m) == brute_force(stages, 0, len(stages) - 1, m)
        if table.cost(m) < math.inf:
            passed = [a.stage for a in table.schedule(m) if isinstance(a, PassForward)]
            assert sorted(passed) == sorted(a.stage for a in table.schedule(m) if isinstance(a, PassBackward))


@pytest.mark.parametrize("seed", range(4))
def test_sizes_are_rounded_up(seed):
    rng = random.Random(100 + seed)
    stages = random_stages(rng, 6)
    million = [scaled(stage, 1_000_003) for stage in stages]
    table = ChainTable(million, 40_000_120)
    assert table.unit > 1
    for m in range(0, 41, 2):
        exact = brute_force(stages, 0, 5, m)
        assert table.cost(m * 1_000_003 // table.unit) >= exact
        assert table.cost(min((m + 1) * 1_000_003 // table.unit, table.levels)) <= exact


def scaled(stage, by):
    def times(item):
        grown = {f.name: getattr(item, f.name) * by for f in dataclasses.fields(item) if f.name.endswith("_bytes")}
        return dataclasses.replace(item, **grown)

    return dataclasses.replace(
        times(stage),
        sweep=times(stage.sweep) if stage.sweep else None,
        turns=tuple(map(times, stage.turns)),
        passes=tuple(map(times, stage.passes)),
    )
