"""How far plans with copies are from what any schedule could do, on graphs of four kinds.

Each is captured without memory and timed by the roofline of an H100, with a link of 25 GB/s. Budgets lie between the
least one found without copies and the keep-all peak. There are four plans at each: the chain's and the portfolio's
without copies, the offload solver's, and the portfolio's with a host tier, which also copies what plans without
recompute. The gap is of the last one, to the bound for every schedule with copies. Fails where that plan is slower than
one of the others, but for the least budget: there, which search is cut off when decides.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from benchmarks.common import Table, arguments, finish, write_results
from benchmarks.problems import captured, gpt2, random_layered, resnet50, unet
from graphs.links import parse_link
from solvers import AutoSolver, Problem, find_floor, simulate, validate
from solvers.chain_solver import ChainSolver
from solvers.offload import OffloadSolver
from solvers.store_all import store_all_steps

LINK = "25GB/s"
SHARES = (0.0, 0.1, 0.25, 0.5)
GAP = 0.002


def main() -> None:
    options = arguments(__doc__, seconds=20.0)
    table = Table(
        f"Link of {LINK} each way, host memory without limit",
        (
            "graph",
            "ops",
            "f",
            "chain, added %",
            "no copies, added %",
            "offload solver, added %",
            "portfolio, added %",
            "of",
            "bound %",
            "gap %",
            "solve s",
        ),
    )
    failures: list[str] = []
    for name, make in GRAPHS.items():
        whole = make().with_static(0)
        peak = simulate(whole, store_all_steps(whole)).peak_bytes
        floor = find_floor(whole, time_limit_s=options.seconds).bytes
        for share in SHARES:
            problem = whole.with_budget(int(floor + share * (peak - floor)))
            linked = problem.with_link(parse_link(LINK), 10**12)
            chain = ChainSolver(time_limit_s=options.seconds).solve(problem)
            plain = AutoSolver(gap=GAP, time_limit_s=options.seconds).solve(problem)
            moved = OffloadSolver(gap=GAP, time_limit_s=options.seconds).solve(linked)
            begin = time.perf_counter()
            found = AutoSolver(gap=GAP, time_limit_s=options.seconds).solve(linked)
            seconds = time.perf_counter() - begin
            if found.status.has_plan:
                validate(linked, found)
            else:
                failures.append(f"{name}, f = {share:g}: {found.message}")
            others = [plan for plan in (chain, plain, moved) if plan.status.has_plan]
            if share and any((1 + GAP) * plan.step_time_ns < found.step_time_ns for plan in others):
                failures.append(f"{name}, f = {share:g}: slower than another plan")
            table.add(
                name,
                len(whole.time_ns),
                f"{share:g}",
                *(_added(problem, plan.step_time_ns) for plan in (chain, plain, moved, found)),
                found.solver,
                _added(problem, found.lower_bound_ns),
                f"{100 * found.gap:.3f}",
                f"{seconds:.1f}",
            )
    table.show()
    note = "f: share of the way from the least budget found without copies to the keep-all peak, both without weights."
    if not options.no_write:
        title = "Plans with copies against the bound for all schedules"
        print(write_results("offload_graphs", title, [table], [note]))
    finish(failures)


def _added(problem: Problem, step_time_ns: int) -> str:
    return f"{100 * (step_time_ns / problem.keep_all_time_ns - 1):.3f}" if step_time_ns else "-"


GRAPHS: dict[str, Callable[[], Problem]] = {
    "random layers": functools.partial(random_layered, 400),
    "ResNet-50": functools.partial(captured, resnet50),
    "U-Net": functools.partial(captured, unet),
    "GPT-2": functools.partial(captured, gpt2),
}


if __name__ == "__main__":
    main()
