"""Orders of the ops that lower the keep-all peak: ``python -m benchmarks.order [--only NAME] [--graphs N]``.

On the graphs of ``benchmarks.solvers``, on tiny graphs where the least peak of all orders is known, and in real
training of a model whose ops come in a bad order. Fails where an order has a higher peak than the one before, where the
pass takes a second or more, or where a measured peak is above its budget or off its prediction by more than 1 %.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from benchmarks.common import Table, arguments, finish, write_results
from benchmarks.problems import MODELS, captured_plan, random_layered
from graphs.order import precedence
from scheduler import measure_peak, schedule
from scheduler.ordering import LEAST_SHARE, OrderedStep, in_lower_order
from scheduler.replan import replan
from solvers import AutoSolver, Problem, find_floor
from solvers.live import LiveBytes
from solvers.order import least_order_bound, least_peak_order
from solvers.store_all import keep_all_peak
from tests.models import make_heads
from tests.orders import least_peak_of_all_orders
from tests.problems import GRAPH_SHAPES, costs_of, graph_of

RANDOM_OPS: Final = (100, 1000, 10000)
SHARES: Final = (1.0, 0.9, 0.75, 0.5, 0.25)
_MOST_SECONDS: Final = 1.0

make_large_heads = functools.partial(make_heads, batch=16, time=128, width=128, wide=1024, heads=8)


def of_model(name: str) -> tuple[OrderedStep, Problem]:
    """A captured step."""
    found = captured_plan(MODELS[name])
    return found.step, found.problem


def of_random(ops: int) -> tuple[OrderedStep, Problem]:
    """A random layered graph."""
    problem = random_layered(ops)
    return OrderedStep(graph_of(problem), costs_of(problem)), problem


def of_heads() -> tuple[OrderedStep, Problem]:
    """The model in a bad order."""
    case = make_large_heads()
    found = captured_plan(lambda: (case.model, *case.make_batch(0)))
    return found.step, found.problem


def pass_row(table: Table, name: str, step: OrderedStep, problem: Problem) -> list[str]:
    """Look for an order, whether or not planning would; what failed."""
    plain = keep_all_peak(problem)
    gc.collect()  # what capturing left behind
    start = time.process_time()
    used = in_lower_order(step, problem)
    seconds = time.process_time() - start
    known = precedence(step.graph)
    best = step.in_order(least_peak_order(problem, known))
    other = best.problem_like(problem)
    found = keep_all_peak(other)
    bound = max(least_order_bound(problem, known), least_order_bound(other, precedence(best.graph)))
    table.add(
        name,
        len(step.graph.ops),
        f"{plain / 1e6:,.1f}",
        f"{100 * found / plain:.2f}",
        f"{100 * bound / plain:.2f}",
        "no" if used is None else "yes",
        f"{seconds:.2f}",
    )
    failures = [f"{name}: the order found has a higher peak"] if found > plain else []
    return failures + ([f"{name}: the pass took {seconds:.2f} s"] if seconds >= _MOST_SECONDS else [])


def tiny_rows(table: Table, count: int) -> list[str]:
    """Against the least peak of all orders; what failed."""
    failures = []
    for shape, make in GRAPH_SHAPES.items():
        equal = improvable = improved = 0
        excess = []
        for seed in range(count):
            problem = make(seed)
            known = precedence(graph_of(problem))
            plain = keep_all_peak(problem)
            found = LiveBytes(problem).peak(least_peak_order(problem, known))
            least = least_peak_of_all_orders(problem, known)
            equal += found == least
            improvable += least < plain
            improved += found < plain
            excess.append(found / least - 1)
            if not least <= found <= plain:
                failures.append(f"{shape} {seed}: least {least}, found {found}, plain {plain}")
        mean = f"{100 * sum(excess) / count:.2f}"
        table.add(shape, count, improvable, improved, f"{100 * equal / count:.1f}", mean, f"{100 * max(excess):.0f}")
    return failures


def training_rows(table: Table) -> list[str]:
    """Real steps of the bad order under budgets from its plain peak down; what failed."""
    failures = []
    case = make_large_heads()
    args, kwargs = case.make_batch(0)
    keep_all = schedule(case.model, "100TB", sample_args=args, sample_kwargs=kwargs).plan
    problem = keep_all.problem
    lower = in_lower_order(keep_all.step, problem)
    assert lower is not None, "no lower order of the heads"
    low = find_floor(lower.problem_like(problem)).bytes
    for share in SHARES:
        budget = low + round(share * (keep_all.plain_peak_bytes - low)) - (share == 1.0)
        plan = replan(keep_all, budget)
        plain = AutoSolver().solve(problem.with_budget(budget))
        model = schedule(case.model, plan=plan)
        for parameter in model.parameters():
            parameter.grad = None
        measured = measure_peak(step_of(model, case.loss_of, args), resident=(model, args)).peak_bytes
        at_plain = f"{100 * (plain.step_time_ns / keep_all.keep_all_time_ns - 1):.2f}"
        table.add(
            f"{budget / 1e6:.1f}",
            f"{share:.2f}",
            at_plain if plain.status.has_plan else "no plan",
            f"{100 * plan.overhead:.2f}",
            "yes" if plan.graph.order else "no",
            f"{plan.peak_bytes / 1e6:.1f}",
            f"{measured / 1e6:.1f}",
        )
        if measured > budget or abs(plan.peak_bytes / measured - 1) > 0.01:
            failures.append(f"at {share}: budget {budget:,}, predicted {plan.peak_bytes:,}, measured {measured:,} B")
    return failures


def step_of(
    model: Callable[..., Tensor], loss_of: Callable[[Tensor], Tensor], args: Sequence[Any]
) -> Callable[[], object]:
    """Forward and backward; the output lives to the end."""

    def step() -> object:
        output = model(*args)
        loss_of(output).backward()
        return output

    return step


def main() -> None:
    options = arguments(__doc__, only="", graphs=300)
    found = Table(
        "Keep-all peak in the best order found",
        ("graph", "ops", "plain MB", "best order %", "no order below %", "considered", "seconds"),
    )
    tiny = Table(
        "Against the least peak of all orders of tiny graphs",
        ("shape", "graphs", "improvable", "improved", "least reached %", "mean excess %", "worst excess %"),
    )
    training = Table(
        "Training a model of eight heads in a bad order, on the CPU",
        ("budget MB", "share", "plain order added %", "added %", "ops moved", "predicted MB", "measured MB"),
    )
    graphs = {name: functools.partial(of_model, name) for name in MODELS}
    graphs |= {f"random, {ops:,} ops": functools.partial(of_random, ops) for ops in RANDOM_OPS}
    graphs["heads in a bad order"] = of_heads
    failures = []
    for name, make in graphs.items():
        if options.only in name:
            failures += pass_row(found, name, *make())
    if not options.only:
        failures += tiny_rows(tiny, options.graphs) + training_rows(training)
    for table in (found, tiny, training):
        table.show()
    if not options.no_write and not options.only:
        notes = [
            "best order: its peak in per cent of the plain one, static bytes included; no order below: proven",
            f"considered: whether planning uses it, that is where the peak falls by {100 * LEAST_SHARE:.0f} % at least",
            "seconds: of the processor, from the costs to the decision; hardly any where the bound says no",
            "share: of the way from the floor of the best order to the plain peak (at 1.00 one byte less)",
            "failures: " + ("none" if not failures else "; ".join(failures)),
        ]
        print(write_results("order", "Orders of the ops", [found, tiny, training], notes))
    finish(failures)


if __name__ == "__main__":
    main()
