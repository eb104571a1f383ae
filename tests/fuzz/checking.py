"""Trains one random program plain and scheduled, and says whether the two agree and the budget held."""

from __future__ import annotations

import dataclasses
import random
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphs.errors import CheckpointSchedulerError
from scheduler import measure_peak, schedule
from solvers.solution import Compute
from tests.fuzz.budgets import Between
from tests.fuzz.programs import make_program
from tests.models import Case
from tests.training import TrainingOptions, differences, train

OUTCOMES = ("ok", "ok to rounding", "wrong", "over budget", "crashed", "refused", "not trainable")
FAILURES = ("wrong", "over budget", "crashed")
STEPS = 2


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program fared.

    Attributes:
        seed: of the program.
        size: operations that were drawn.
        kind: one of :data:`OUTCOMES`; "not trainable": eager itself refuses the program; "ok to rounding": gradients
            that several uses of a tensor add up to were summed in another order, which is that of torch's tracing of
            writes through views.
        detail: what differs, by how much the budget was exceeded, or the error.
        recomputed: how many ops the plan runs again.
        budget_bytes: the budget.
        peak_bytes: most that was measured.

    """

    seed: int
    size: int
    kind: str
    detail: str = ""
    recomputed: int = 0
    budget_bytes: int = 0
    peak_bytes: int = 0


def size_of(seed: int) -> int:
    """Operations of the program of a seed, unless told otherwise."""
    return random.Random(f"{seed} size").randint(3, 20)


def fraction_of(seed: int) -> float:
    """Share of the way from the floor to the keep-all peak: the floor in half of the programs."""
    draw = random.Random(f"{seed} budget")
    return 0.0 if draw.random() < 0.5 else draw.random()


def check(seed: int, size: int | None = None) -> Outcome:
    """Train the program of a seed for two steps plain and two under a feasible budget drawn from the seed.

    Compared bit for bit: outputs, losses, gradients and which are ``None``, gradients of inputs, inputs that
    the program writes to, buffers, parameters after each step, position of the random stream. Each scheduled step is
    measured.
    """
    size = size_of(seed) if size is None else size
    torch._dynamo.reset()
    try:
        plain, inputs = _train(seed, size, None, lambda step, _: step())
    except RuntimeError as error:
        return Outcome(seed, size, "not trainable", str(error))
    solver = Between(fraction=fraction_of(seed))
    models: list[nn.Module] = []
    peaks: list[int] = []

    def wrap(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
        models.append(schedule(model, "100TB", solver=solver, costs="profiled"))
        return models[0]

    def measured(step: Callable[[], None], resident: tuple[Any, ...]) -> None:
        peaks.append(measure_peak(step, resident=resident).peak_bytes)

    try:
        wrapped, wrapped_inputs = _train(seed, size, wrap, measured)
    except CheckpointSchedulerError as error:
        kind = "crashed" if "AssertionError" in str(error) else "refused"  # an invariant of ours is no reason
        return Outcome(seed, size, kind, str(error))
    except Exception:  # noqa: BLE001  # whatever happens is an outcome
        return Outcome(seed, size, "crashed", traceback.format_exc(limit=-8))
    found = differences(plain, wrapped)
    pairs = zip(inputs, wrapped_inputs, strict=True)
    written = [f"input {i} after the steps" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    budget = solver.chosen[0] if solver.chosen else 0
    figures = {"peak_bytes": max(peaks), "budget_bytes": budget}
    if budget:
        plan = models[0].plan
        figures["recomputed"] = sum(isinstance(s, Compute) for s in plan.steps) - len(plan.graph.ops)
    kind = "ok to rounding" if found else "ok"
    detail = "; ".join((found + written)[:4])
    if written or differences(plain, wrapped, rtol=1e-4, atol=1e-5):
        kind = "wrong"
    elif budget and max(peaks) > budget:
        kind = "over budget"
        detail = f"{max(peaks) - budget:,} B over {budget:,} B (predicted {plan.peak_bytes:,} B; steps {peaks})"
    return Outcome(seed, size, kind, detail, **figures)


def shrink(outcome: Outcome) -> Outcome:
    """The least program of the same seed that fails in the same way."""
    for size in range(1, outcome.size):
        smaller = check(outcome.seed, size)
        if smaller.kind == outcome.kind:
            return smaller
    return outcome


def _train(
    seed: int, size: int, wrap: Any, run_step: Callable[[Callable[[], None], tuple[Any, ...]], None]
) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Records of a training of the program of a seed, and its inputs as it left them."""
    program = make_program(seed, size)
    batches = [program.batch(i) for i in range(STEPS)]
    twin = make_program(seed, size)
    outputs = twin.module(*(x.detach().clone().requires_grad_(x.requires_grad) for x in batches[0]))
    weights = [torch.linspace(0.5, 1.5, max(x.numel(), 1)).view(x.shape) for x in outputs]
    case = Case(program.module, lambda i: (batches[i], {}), lambda outputs: program.loss(outputs, weights))
    records = train(lambda: case, wrap, TrainingOptions(steps=STEPS), run_step=run_step)
    return records, [x.detach() for batch in batches for x in batch]
