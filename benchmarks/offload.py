"""Added time of Llama-3-8B's step with copies to the host, by memory and bandwidth of the link.

The step is captured offline and timed by the roofline of an H100; the times are those of the simulator for plans that
the validator has passed. Fractions are of the keep-all peak without the parameters. Passes where a plan is within the
stated overhead at 50 GB/s, its gap at most 0.5 %, and each solve at most 15 s.
"""

from __future__ import annotations

import time

from benchmarks.common import Table, arguments, finish, write_results
from benchmarks.problems import captured, llama
from graphs.links import parse_link
from solvers import AutoSolver, Status, simulate, validate

FRACTIONS = (0.5, 0.4, 0.3, 0.25, 0.22)
LINKS = (None, "25GB/s", "50GB/s", "450GB/s")
AT_MOST = {0.5: 1.7, 0.4: 2.6, 0.3: 4.0, 0.22: 8.0}  # per cent, at 50 GB/s
GAP, SECONDS = 0.005, 15.0


def main() -> None:
    options = arguments(__doc__, layers=32)
    whole = captured(lambda: llama(options.layers))
    problem = whole.with_static(0)
    peak = whole.budget_bytes - whole.static_bytes
    keep_all = problem.keep_all_time_ns
    table = Table(
        f"Llama-3-8B, {options.layers} layers, 8,192 tokens, bf16, H100 roofline; "
        f"keep-all peak {peak / 1e9:.1f} GB without the weights",
        (
            "of the peak",
            "link",
            "added %",
            "bound %",
            "gap %",
            "stall %",
            "host GB",
            "peak / budget",
            "solve s",
            "status",
        ),
    )
    failures: list[str] = []
    for fraction in FRACTIONS:
        for name in LINKS:
            link = None if name is None else parse_link(name)
            row = problem.with_budget(int(fraction * peak)).with_link(link, 10**12)
            begin = time.perf_counter()
            solution = AutoSolver(time_limit_s=SECONDS, gap=GAP).solve(row)
            seconds = time.perf_counter() - begin
            label = f"{fraction:g}, {name or 'no link'}"
            bound = f"{100 * (solution.lower_bound_ns / keep_all - 1):.3f}"
            if not solution.status.has_plan:
                rest = ("-", "-", "-", "-", f"{seconds:.1f}", solution.status)
                table.add(f"{fraction:g}", name or "none", "-", bound, *rest)
                if not solution.message.startswith("no schedule fits"):
                    failures.append(f"{label}: {solution.message}")
                continue
            validate(row, solution)
            figures = simulate(row, solution.steps)
            added = 100 * (solution.step_time_ns / keep_all - 1)
            table.add(
                f"{fraction:g}",
                name or "none",
                f"{added:.3f}",
                bound,
                f"{100 * solution.gap:.3f}",
                f"{100 * figures.stall_ns / keep_all:.3f}",
                f"{figures.host_bytes / 1e9:.1f}",
                f"{figures.peak_bytes / row.budget_bytes:.4f}",
                f"{seconds:.1f}",
                solution.status,
            )
            if name is not None and (solution.status is not Status.OPTIMAL or seconds > SECONDS):
                failures.append(f"{label}: {solution.status}, gap {solution.gap:.2%}, {seconds:.1f} s")
            if name == "50GB/s" and added > AT_MOST.get(fraction, 100.0):
                failures.append(f"{label}: {added:.2f} % added")
    table.show()
    note = (
        "Gradients of all weights and the logits live at the end of the step: 18.2 GB, which is 0.242 of the peak. "
        "Below that no schedule fits, with or without a link."
    )
    if not options.no_write:
        print(write_results("offload", "Keep, recompute or move to the host", [table], [note]))
    finish(failures)


if __name__ == "__main__":
    main()
