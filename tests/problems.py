"""Scheduling problems for tests: random ones, the chain of the literature, and the known cases with proven optima."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st

from graphs.ir import Costs, Op, Phase, Storage, StorageKind, TrainingGraph
from solvers.problem import Problem
from solvers.solution import Compute, Free, Step

KNOWN_CASES = Path(__file__).parent / "data" / "known_cases.json"


class KnownCase(NamedTuple):
    """A tiny graph under a budget with its least times (``None``: infeasible); see shared/graphs/README.md."""

    name: str
    problem: Problem
    order: int | None
    staged: int | None


def known_cases() -> Iterator[KnownCase]:
    """Every known case under every budget that is stated for it."""
    for name, case in json.loads(KNOWN_CASES.read_text()).items():
        inputs: list[list[int]] = [[] for _ in case["w"]]
        for source, reader in case["edges"]:
            inputs[reader].append(source)
        for row in case["optimum"]:
            problem = Problem.from_single_outputs(case["w"], case["m"], inputs, row["B"])
            yield KnownCase(f"{name}@{row['B']}", problem, row["order"], row["staged"])


def least_demand(problem: Problem) -> int:
    """No schedule fits in less: the most that one op needs live by itself (inputs, outputs, workspace, static)."""

    def demand(op: int) -> int:
        storages = (*problem.inputs[op], *problem.outputs[op])
        return sum(problem.storage_bytes[s] for s in storages) + problem.workspace_bytes[op]

    return problem.static_bytes + max((demand(op) for op in range(len(problem.time_ns))), default=0)


def keep_all_peak(problem: Problem) -> int:
    """Peak of the step that executes every op once and drops each storage after its last read. Shares no code with
    the simulator."""
    peak = 0
    for op in range(len(problem.time_ns)):
        live = problem.workspace_bytes[op]
        for storage, size in enumerate(problem.storage_bytes):
            last = max((problem.producer[storage], *problem.readers[storage]))
            if problem.producer[storage] <= op and (op <= last or storage in problem.live_at_end):
                live += size
        peak = max(peak, live)
    return problem.static_bytes + peak


def random_problem(
    seed: int,
    *,
    ops: int | None = None,
    max_ops: int = 9,
    plain: bool = False,
    budget: float | None = None,
) -> Problem:
    """A random DAG of ``ops`` ops (by default 3 to ``max_ops``), the same for the same arguments.

    Unless ``plain``, ops may make up to three storages or none, have workspaces, and refuse to be recomputed; storages
    may be read by nobody, or have to live to the end; there may be static bytes, free ops and storages of no bytes.
    ``budget`` places the budget between the most that one op needs (0.0) and the keep-all peak (1.0); by default it is
    drawn from that range. A DAG for which the two are one figure is drawn again, since it has nothing to decide.
    """
    rng = random.Random(seed)
    for _ in range(50):
        problem = _random_dag(rng, ops, max_ops, plain=plain)
        if least_demand(problem) < keep_all_peak(problem):
            break
    return _within_range(problem, rng.random() if budget is None else budget)


def _random_dag(rng: random.Random, ops: int | None, max_ops: int, *, plain: bool) -> Problem:
    count = rng.randint(3, max_ops) if ops is None else ops
    density = rng.choice((0.3, 0.5, 0.8))
    inputs: list[tuple[int, ...]] = []
    outputs: list[tuple[int, ...]] = []
    storages = 0
    for _ in range(count):
        reach = rng.choice((2, 4, storages))  # mostly near neighbours, as in a network; sometimes anything before
        near = range(max(0, storages - reach), storages)
        chosen = {s for s in near if rng.random() < density}
        if storages and not chosen and rng.random() < 0.8:
            chosen.add(rng.randrange(storages))
        inputs.append(tuple(sorted(chosen)[:4]))
        made = 1 if plain else rng.choices((0, 1, 2, 3), (1, 12, 5, 1))[0]
        outputs.append(tuple(range(storages, storages + made)))
        storages += made
    lowest = 1 if plain else 0
    return Problem(
        time_ns=tuple(rng.randint(lowest, 10) for _ in range(count)),
        workspace_bytes=tuple(0 if plain or rng.random() < 0.7 else rng.randint(1, 6) for _ in range(count)),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        recomputable=tuple(plain or rng.random() < 0.85 for _ in range(count)),
        storage_bytes=tuple(rng.randint(lowest, 10) for _ in range(storages)),
        live_at_end=frozenset(s for s in range(storages) if not plain and rng.random() < 0.1),
        forward_ops=rng.randint(0, count),
        budget_bytes=0,
        static_bytes=0 if plain else rng.choice((0, 0, 7)),
    )


def graph_of(problem: Problem) -> TrainingGraph:
    """A training graph that has a problem; ops that must not run twice count as ops with an effect."""
    storages = tuple(
        Storage(
            s, f"s{s}", size, StorageKind.GRADIENT if s in problem.live_at_end else StorageKind.ACTIVATION, producer
        )
        for s, (size, producer) in enumerate(zip(problem.storage_bytes, problem.producer, strict=True))
    )
    ops = tuple(
        Op(
            *(op, f"op{op}", "aten.any.default"),
            Phase.FORWARD if op < problem.forward_ops else Phase.BACKWARD,
            problem.inputs[op],
            problem.outputs[op],
            recomputable=problem.recomputable[op],
            reason="" if problem.recomputable[op] else "runs once",
        )
        for op in range(len(problem.time_ns))
    )
    return TrainingGraph(ops, storages, problem.forward_ops)


def costs_of(problem: Problem) -> Costs:
    """The costs of a problem's ops."""
    return Costs(problem.time_ns, problem.workspace_bytes, "cpu", "roofline")


def training_chain(
    length: int,
    *,
    budget_bytes: int = 0,
    time_ns: Sequence[int] = (),
    activation_bytes: Sequence[int] = (),
    gradient_bytes: int = 1,
    backward_time_ns: int = 1,
) -> Problem:
    """Forward and backward of ``length`` layers in a row: ``2 * length`` ops, unit times and sizes unless given.

    ::

        f0 → f1 → … → fL-1 → bL-1 → … → b1 → b0         bi reads the output of f(i-1) (the input of layer i; the input
                                                        of layer 0 is static), and the gradient that b(i+1) made

    bL-1 reads the last activation too, as a loss does.
    """
    times = list(time_ns) or [1] * length
    sizes = list(activation_bytes) or [1] * length
    inputs: list[list[int]] = [[i - 1] if i else [] for i in range(length)]
    for i in reversed(range(length)):
        gradient_in = 2 * length - 2 - i  # output of b(i+1); of f(L-1) for the last layer
        inputs.append(sorted({gradient_in, *([i - 1] if i else [])}))
    problem = Problem.from_single_outputs(
        [*times, *([backward_time_ns] * length)],
        [*sizes, *([gradient_bytes] * length)],
        inputs,
        budget_bytes,
        live_at_end=[2 * length - 1],
    )
    return _with_forward(problem, length)


def random_chain(seed: int, *, length: int | None = None, budget: float | None = None) -> Problem:
    """A training chain with random times and sizes, and some skips: the shape that real training steps have."""
    rng = random.Random(seed)
    for _ in range(50):
        problem = _random_chain(rng, rng.randint(2, 4) if length is None else length)
        if least_demand(problem) < keep_all_peak(problem):
            break
    return _within_range(problem, rng.random() if budget is None else budget)


def _random_chain(rng: random.Random, layers: int) -> Problem:
    chain = training_chain(
        layers,
        time_ns=[rng.randint(1, 10) for _ in range(layers)],
        activation_bytes=[rng.randint(1, 10) for _ in range(layers)],
        gradient_bytes=rng.randint(0, 4),
        backward_time_ns=rng.randint(1, 10),
    )
    inputs = [set(i) for i in chain.inputs]
    for op in range(layers, 2 * layers):
        if rng.random() < 0.5:  # many kernels' backward reads their output as well: softmax, layer norm, dropout
            inputs[op].add(2 * layers - 1 - op)
        if rng.random() < 0.2:
            inputs[op].add(rng.randrange(layers))
    if rng.random() < 0.5 and layers > 2:
        inputs[layers - 1].add(rng.randrange(layers - 1))
    problem = Problem.from_single_outputs(
        chain.time_ns, chain.storage_bytes, [sorted(i) for i in inputs], 0, live_at_end=sorted(chain.live_at_end)
    )
    return _with_forward(problem, layers)


@functools.cache
def reversal_time(length: int, checkpoints: int) -> float:
    """Least number of forward steps that reverse a chain of ``length`` layers with its input stored and
    ``checkpoints`` further units of memory, of which a sweep over several layers needs two (Griewank and Walther).
    """
    if length == 1:
        return 0
    return min(
        (
            first + reversal_time(length - first, checkpoints - 1) + reversal_time(first, checkpoints)
            for first in range(1, length)
            if checkpoints >= (1 if first == 1 else 2)
        ),
        default=float("inf"),
    )


def reversal(length: int, budget: int) -> Problem:
    """Reversal of a chain: states 0 to ``length`` - 1, then backward steps that read one state each, last first."""
    states = [[], *([i] for i in range(length - 1))]
    backward = [sorted({state, 2 * length - 2 - state} - {length - 1} | {state}) for state in reversed(range(length))]
    return dataclasses.replace(
        Problem.from_single_outputs(
            [0, *[1] * (length - 1), *[0] * length], [1] * length + [0] * length, states + backward, budget
        ),
        recomputable=(False, *[True] * (2 * length - 1)),
    )


#: Shapes of random graphs small enough for exhaustive search, each with the maker of its problems from a seed.
GRAPH_SHAPES: Mapping[str, Callable[[int], Problem]] = {
    "general": random_problem,
    "single outputs": lambda seed: random_problem(seed, plain=True),
    "nine ops, low budget": lambda seed: random_problem(seed, ops=9, budget=seed % 3 / 10),
    "training chain": random_chain,
}


def random_steps(problem: Problem, rng: random.Random, *, errors: int = 0) -> tuple[Step, ...]:
    """A random schedule: legal (budget aside) and complete unless ``errors`` random edits spoil it, which they need
    not do."""
    resident: set[int] = set()
    steps: list[Step] = []
    position = 0
    count = len(problem.time_ns)
    while position < count:
        ready = [
            op
            for op in range(position + 1)
            if resident.issuperset(problem.inputs[op]) and (op == position or problem.recomputable[op])
        ]
        idle = [s for s in resident if s not in problem.live_at_end and _can_return(problem, s)]
        if idle and rng.random() < 0.4:
            storage = rng.choice(sorted(idle))
            steps.append(Free(storage))
            resident.discard(storage)
            continue
        op = position if position in ready and rng.random() < 0.6 else (rng.choice(ready) if ready else -1)
        if op < 0 or len(steps) > 6 * count:  # stuck: rebuild everything that may be rebuilt, in order
            for lost in range(position):
                if problem.recomputable[lost] and resident.issuperset(problem.inputs[lost]):
                    steps.append(Compute(lost))
                    resident.update(problem.outputs[lost])
            op = position
        steps.append(Compute(op))
        resident.update(problem.outputs[op])
        position = max(position, op + 1)
    for _ in range(errors):
        where = rng.randrange(len(steps) + 1)
        random_step = rng.choice(
            (Compute(rng.randrange(-1, count + 1)), Free(rng.randrange(len(problem.storage_bytes) + 1)))
        )
        match rng.randrange(3):
            case 0:
                steps.insert(where, random_step)
            case 1:
                del steps[where : where + 1]
            case _:
                steps[where : where + 1] = [random_step]
    return tuple(steps)


def _can_return(problem: Problem, storage: int) -> bool:
    """Whether a freed storage can always be made again: its producer and all that it needs may be recomputed."""
    op = problem.producer[storage]
    return problem.recomputable[op] and all(_can_return(problem, s) for s in problem.inputs[op])


def _within_range(problem: Problem, fraction: float) -> Problem:
    low, high = least_demand(problem), keep_all_peak(problem)
    return problem.with_budget(low + round(fraction * (high - low)))


def _with_forward(problem: Problem, forward_ops: int) -> Problem:
    return dataclasses.replace(problem, forward_ops=forward_ops)


def problems(*, max_ops: int = 9) -> st.SearchStrategy[Problem]:
    """Hypothesis strategy of random problems of every kind."""
    seeds = st.integers(0, 2**32 - 1)
    return st.one_of(
        st.builds(random_problem, seeds, max_ops=st.just(max_ops)),
        st.builds(random_problem, seeds, max_ops=st.just(max_ops), plain=st.just(True)),
        st.builds(random_chain, seeds),
    )


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Problem, tuple[Step, ...]]:
    """Hypothesis strategy of problems with a schedule, legal for about half of them; budgets are not looked at."""
    problem = draw(problems())
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    return problem, random_steps(problem, rng, errors=draw(st.sampled_from((0, 0, 1, 2))))
