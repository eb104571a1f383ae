"""Measured peaks against budgets and predictions: five models, five budgets from the floor to the plain peak.

Passes where every scheduled step (the very first one included) is within its budget and within 1 % of its prediction.
"""

from __future__ import annotations

from benchmarks.common import Table, arguments, finish, write_results
from benchmarks.sweep import MODELS, sweep


def main() -> None:
    options = arguments(__doc__, only="", time_limit_s=60.0)
    table = Table(
        "Peak of a scheduled step, forward and backward, everything on the device included",
        ("model", "budget MB", "share", "predicted MB", "measured MB", "error %", "overhead %", "gap %", "solve s"),
    )
    ranges = Table(
        "Range of budgets", ("model", "proven floor MB", "floor found MB", "keep-all plan MB", "plain measured MB")
    )
    failures: list[str] = []
    for name, make in MODELS.items():
        if options.only not in name:
            continue
        found = sweep(name, make, time_limit_s=options.time_limit_s)
        keep_all = found.points[-1].plan.keep_all_peak_bytes
        ranges.add(
            name,
            f"{found.floor_lower_bound_bytes / 1e6:.2f}",
            f"{found.floor_bytes / 1e6:.2f}",
            f"{keep_all / 1e6:.2f}",
            f"{found.plain_peak_bytes / 1e6:.2f}",
        )
        for point in found.points:
            plan = point.plan
            budget = plan.budget_bytes or 0
            table.add(
                name,
                f"{budget / 1e6:.2f}",
                f"{point.share:.2f}",
                f"{plan.peak_bytes / 1e6:.2f}",
                f"{point.measured_bytes / 1e6:.2f}",
                f"{100 * point.error:+.3f}",
                f"{100 * plan.overhead:.2f}",
                f"{100 * plan.gap:.3f}",
                f"{plan.solution.solve_seconds:.2f}",
            )
            where = f"{name} at {point.share:.2f}"
            if point.measured_bytes > budget:
                failures.append(f"{where}: measured {point.measured_bytes:,} B > budget {budget:,} B")
            if abs(point.error) > 0.01:
                failures.append(f"{where}: predicted {plan.peak_bytes:,} B, measured {point.measured_bytes:,} B")
    table.show()
    ranges.show()
    if not options.no_write and not options.only:
        notes = ["failures: " + ("none" if not failures else "; ".join(failures))]
        print(write_results("peaks", "Measured against predicted peaks", [table, ranges], notes))
    finish(failures)


if __name__ == "__main__":
    main()
