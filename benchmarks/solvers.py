"""Plans, bounds and baselines at budgets from the floor up: ``python -m benchmarks.solvers``.

For each graph and each share f of the way from its floor to its keep-all peak: the overhead of the plan, the
proven lower bound, the gap, seconds, the solver that won, and the least overhead of each baseline that fits: the
strategies applied by hand, and the published families (:mod:`solvers.baselines`). Every plan is replayed by the
validator. Fails where a plan is missing or invalid, slower than a baseline that fits, the floor is above a baseline's
peak, a gap is wider than promised (0.5 % of the step on transformers from f = 0.1 on, 3 % elsewhere from f = 0.25 on),
or a solve takes longer than 10 s (60 s above 5,000 ops).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.common import RESULTS, Table, arguments, finish, write_results
from benchmarks.problems import MODELS, TRANSFORMERS, captured, random_layered
from benchmarks.shared_graphs import DEFAULT_GRAPHS, load_problem
from solvers import AutoSolver, Problem, Solution, find_floor
from solvers.baselines import BASELINES
from solvers.simulate import simulate
from solvers.store_all import store_all_steps
from solvers.strategies import BY_HAND
from solvers.validate import validate

SHARES: Final = (0.9, 0.75, 0.5, 0.25, 0.1, 0.0)
MANY_OPS: Final = 5_000

_MOST_DRAWN: Final = 60.0  # per cent of added time; what is slower leaves its panel at the top

Point = tuple[int, int]  # peak in bytes, step time in ns


@dataclasses.dataclass(frozen=True)
class Row:
    """One budget of one graph; overheads are fractions of the keep-all step."""

    share: float
    budget_bytes: int
    solution: Solution
    seconds: float
    overhead: float
    bound: float
    baselines: dict[str, float]

    @property
    def gap(self) -> float:
        """Between plan and bound, as a fraction of the keep-all step."""
        return self.overhead - self.bound


@dataclasses.dataclass(frozen=True)
class Graph:
    """One graph, its range of budgets, and what was found there."""

    name: str
    ops: int
    floor_bytes: int
    floor_bound_bytes: int
    floor_seconds: float
    keep_all_bytes: int
    least_baseline_bytes: int
    rows: tuple[Row, ...]


def graphs() -> Mapping[str, Callable[[], Problem]]:
    """Every graph by name, made when it is asked for."""
    found: dict[str, Callable[[], Problem]] = {name: functools.partial(captured, make) for name, make in MODELS.items()}
    found |= {f"random, {ops:,} ops": functools.partial(random_layered, ops) for ops in (100, 1_000, 10_000)}
    if DEFAULT_GRAPHS.is_dir():
        for path in sorted(DEFAULT_GRAPHS.glob("llama*.json")):
            found[path.stem] = functools.partial(load_problem, path)
    return found


def examine(name: str, problem: Problem, time_limit_s: float) -> Graph:
    """Find the floor, then solve at each share."""
    start = time.perf_counter()
    floor = find_floor(problem, time_limit_s=time_limit_s)
    floor_seconds = time.perf_counter() - start
    keep_all = simulate(problem, store_all_steps(problem))
    baselines = baseline_points(problem)
    step = max(problem.keep_all_time_ns, 1)
    rows = []
    for share in SHARES:
        budget = floor.bytes + round(share * (keep_all.peak_bytes - floor.bytes))
        bounded = problem.with_budget(budget)
        start = time.perf_counter()
        solution = AutoSolver(time_limit_s=time_limit_s).solve(bounded)
        seconds = time.perf_counter() - start
        if solution.status.has_plan:
            validate(bounded, solution)
        fitting = {
            name: min(time_ns for peak, time_ns in points if peak <= budget) / step - 1
            for name, points in baselines.items()
            if min(points, default=(budget + 1, 0))[0] <= budget
        }
        rows.append(
            Row(
                share,
                budget,
                solution,
                seconds,
                solution.step_time_ns / step - 1,
                solution.lower_bound_ns / step - 1,
                fitting,
            )
        )
        print(f"{name} f={share}: {solution.status} {rows[-1].overhead:.4f} gap {rows[-1].gap:.4f} {seconds:.1f} s")
    return Graph(
        name,
        len(problem.time_ns),
        floor.bytes,
        floor.lower_bound.bytes,
        floor_seconds,
        keep_all.peak_bytes,
        min(peak for points in baselines.values() for peak, _ in points),
        tuple(rows),
    )


def baseline_points(problem: Problem) -> dict[str, list[Point]]:
    """Peak and time of each strategy applied by hand and of the members of each published family."""
    ample = problem.with_budget(2**62)
    solved = {name: strategy.solve(ample) for name, strategy in BY_HAND.items()}
    found = {name: [(solution.peak_bytes, solution.step_time_ns)] for name, solution in solved.items()}
    for name, family in BASELINES.items():
        found[name] = [(member.peak_bytes, member.time_ns) for member in family.members(problem)]
    return found


def failures_of(graph: Graph) -> list[str]:
    """What a graph misses of what is promised."""
    found = []
    if graph.floor_bytes > graph.least_baseline_bytes:
        found.append(
            f"{graph.name}: floor {graph.floor_bytes:,} B above the {graph.least_baseline_bytes:,} B of a baseline"
        )
    allowed, least = (0.005, 0.1) if graph.name in TRANSFORMERS or graph.name.startswith("llama") else (0.03, 0.25)
    for row in graph.rows:
        where = f"{graph.name} at f = {row.share}"
        if not row.solution.status.has_plan:
            found.append(f"{where}: no plan")
            continue
        if row.share >= least and row.gap > allowed:
            found.append(f"{where}: gap {row.gap:.2%} of the step")
        if row.baselines and min(row.baselines.values()) < row.overhead:
            found.append(f"{where}: {min(row.baselines, key=row.baselines.__getitem__)} is faster")
        if row.seconds > (60 if graph.ops > MANY_OPS else 10):
            found.append(f"{where}: {row.seconds:.1f} s")
    return found


def _median_gap(found: list[Graph], share: float) -> float:
    """Of the budgets at this share of the way that have a plan; failures say which have none."""
    gaps = [row.gap for graph in found for row in graph.rows if row.share == share and row.solution.status.has_plan]
    return statistics.median(gaps) if gaps else float("nan")


def tables(found: list[Graph]) -> list[Table]:
    """One table of the graphs, one of their budgets."""
    ends = Table(
        "Floors, static bytes included",
        ("graph", "ops", "keep-all MB", "floor MB", "proven MB", "least baseline MB", "seconds"),
    )
    budgets = Table(
        "Overheads, in per cent of the keep-all step",
        ("graph", "f", "plan", "bound", "gap", "seconds", "solver", "best baseline", *BY_HAND, *BASELINES),
    )
    for graph in found:
        ends.add(
            graph.name,
            f"{graph.ops:,}",
            f"{graph.keep_all_bytes / 1e6:.1f}",
            f"{graph.floor_bytes / 1e6:.1f}",
            f"{graph.floor_bound_bytes / 1e6:.1f}",
            f"{graph.least_baseline_bytes / 1e6:.1f}",
            f"{graph.floor_seconds:.1f}",
        )
        for row in graph.rows:
            planned = row.solution.status.has_plan
            names = (*BY_HAND, *BASELINES)
            apart = [f"{100 * row.baselines[name]:.2f}" if name in row.baselines else "-" for name in names]
            budgets.add(
                graph.name,
                f"{row.share:g}",
                f"{100 * row.overhead:.3f}" if planned else "none",
                f"{100 * row.bound:.3f}",
                f"{100 * row.gap:.3f}" if planned else "-",
                f"{row.seconds:.1f}",
                row.solution.solver,
                f"{100 * min(row.baselines.values()):.2f}" if row.baselines else "-",
                *apart,
            )
    return [ends, budgets]


def plot(found: list[Graph]) -> None:
    """Draw plan, bound and the best baseline over the budget, a panel per graph."""
    from matplotlib.figure import Figure

    columns = 4
    figure = Figure(figsize=(16, 3.2 * -(-len(found) // columns)), layout="constrained")
    for index, graph in enumerate(found):
        axes = figure.add_subplot(-(-len(found) // columns), columns, index + 1)
        rows = [row for row in graph.rows if row.solution.status.has_plan]
        budgets = [row.budget_bytes / graph.keep_all_bytes for row in rows]
        bound = [100 * row.bound for row in rows]
        axes.fill_between(budgets, 0, bound, color="#b0b7bf", alpha=0.4, linewidth=0, label="proven impossible")
        axes.plot(budgets, [100 * row.overhead for row in rows], "o-", color="#2f6fa7", markersize=3, label="plan")
        best = [(b, 100 * min(row.baselines.values())) for b, row in zip(budgets, rows, strict=True) if row.baselines]
        if best:
            axes.plot(*zip(*best, strict=True), "s--", color="#e08a2e", markersize=3, label="best baseline")
        axes.set_title(f"{graph.name}: {graph.ops:,} ops", fontsize="small")
        axes.set_xlabel("budget / keep-all peak", fontsize="small")
        axes.set_ylabel("added time (%)", fontsize="small")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, min(_MOST_DRAWN, 1.15 * max(100 * row.overhead for row in rows)))
        axes.legend(fontsize="x-small", frameon=False)
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "solvers.png", dpi=90)


def main() -> None:
    options = arguments(__doc__, only="", limit=10.0)
    chosen = {name: make for name, make in graphs().items() if options.only in name}
    found = []
    for name, make in chosen.items():
        problem = make()
        limit = options.limit if len(problem.time_ns) <= MANY_OPS else 6 * options.limit
        found.append(examine(name, problem, 0.9 * limit))
    made = tables(found)
    for table in made:
        table.show()
    failures = [failure for graph in found for failure in failures_of(graph)]
    unit = 1 if sys.platform == "darwin" else 1024
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    gaps = {str(share): round(_median_gap(found, share), 5) for share in SHARES}
    lower = sum(g.floor_bytes < g.least_baseline_bytes for g in found)
    notes = [
        "the bound holds for all schedules that first execute the ops in the given order, however often they recompute",
        f"median gap by f, as a fraction of the step: {json.dumps(gaps)}",
        f"floors strictly below the lowest peak of any baseline: {lower} of {len(found)}",
        f"peak memory of the process: {memory / 1e9:.2f} GB",
        f"failures: {'; '.join(failures) or 'none'}",
    ]
    if not options.no_write and not options.only:
        plot(found)
        print(write_results("solvers", "Plans, bounds and baselines", made, notes))
    print("\n".join(notes))
    finish(failures)


if __name__ == "__main__":
    main()
