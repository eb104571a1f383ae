"""Least overheads of the shared Llama graphs against their proven values: ``python -m benchmarks.shared_graphs``.

Reads ``../shared/graphs`` beside the repository (or ``--graphs DIR``), prints a table, and exits with 1 if an overhead
is off by more than 0.02 percentage points, a budget known to be infeasible is not reported so, or a solve takes longer
than 5 seconds; with 2 where the graphs are not there.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import ortools
from rich.console import Console
from rich.table import Table

from solvers import AutoSolver, Problem, Solution, Status, StoreAllSolver
from solvers.validate import validate

DEFAULT_GRAPHS = Path(__file__).resolve().parents[1] / ".." / "shared" / "graphs"

# Overheads in per cent of the step per fraction of the store-all peak; None: infeasible.
EXPECTED: dict[str, dict[float, float | None]] = {
    "llama3_2layer_8k": {0.9: 1.281, 0.8: 10.26, 0.7: 22.05, 0.6: None},
    "llama3_8layer_8k": {0.9: 0.681, 0.8: 1.624, 0.7: 3.24, 0.6: 10.33, 0.5: 18.69},
}
TOLERANCE_POINTS = 0.02
SOLVE_LIMIT_S = 5.0


def load_problem(path: Path) -> Problem:
    """Read one of the shared graphs; its budget is the store-all peak."""
    ops = json.loads(path.read_text())["ops"]
    problem = Problem.from_single_outputs(
        [op["time_ns"] for op in ops], [op["output_bytes"] for op in ops], [op["inputs"] for op in ops], 0
    )
    keep_all = StoreAllSolver().solve(problem)
    assert keep_all.floor_bytes is not None
    return problem.with_budget(keep_all.floor_bytes)


def is_right(problem: Problem, solution: Solution, expected: float | None, seconds: float) -> bool:
    """Whether the answer is the proven one, found in time, and its plan valid."""
    if seconds > SOLVE_LIMIT_S:
        return False
    if expected is None:
        return solution.status is Status.INFEASIBLE
    if not solution.status.has_plan:
        return False
    validate(problem, solution)
    return abs(overhead_percent(problem, solution) - expected) <= TOLERANCE_POINTS


def overhead_percent(problem: Problem, solution: Solution) -> float:
    return 100.0 * (solution.step_time_ns / problem.keep_all_time_ns - 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, default=DEFAULT_GRAPHS, help="directory of the graphs")
    directory = parser.parse_args().graphs
    console = Console(width=None if sys.stdout.isatty() else 120)
    if not directory.is_dir():
        console.print(f"no graphs in {directory}: nothing to compare with")
        return 2
    table = Table(title="Overhead of the plan against the proven optimum, per cent of the step")
    for column in ("graph", "budget / peak", "overhead %", "expected %", "bound %", "gap %", "solve s", "status", ""):
        table.add_column(column, justify="left" if column in {"graph", "status"} else "right")
    failures = 0
    for name, rows in EXPECTED.items():
        whole = load_problem(directory / f"{name}.json")
        for fraction, expected in rows.items():
            problem = whole.with_budget(int(fraction * whole.budget_bytes))
            start = time.perf_counter()
            solution = AutoSolver(gap=1e-4).solve(problem)
            seconds = time.perf_counter() - start
            right = is_right(problem, solution, expected, seconds)
            failures += not right
            planned = solution.status.has_plan
            table.add_row(
                name,
                f"{fraction:.1f}",
                f"{overhead_percent(problem, solution):.3f}" if planned else "-",
                "infeasible" if expected is None else f"{expected:.3f}",
                f"{100.0 * (solution.lower_bound_ns / problem.keep_all_time_ns - 1.0):.3f}" if planned else "-",
                f"{100.0 * solution.gap:.4f}" if planned else "-",
                f"{seconds:.2f}",
                solution.status.value,
                "ok" if right else "OFF",
            )
    console.print(table)
    console.print(f"Python {platform.python_version()}, OR-Tools {ortools.__version__}, {platform.machine()}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
