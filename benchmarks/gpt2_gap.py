"""Gap to the proven bound and solving time on Hugging Face GPT-2 at five budgets from the floor to the plain peak.

Passes where from a quarter of the way up the gap is at most 0.5 % of the step and solving takes less than 10 s.
"""

from __future__ import annotations

from benchmarks.common import Table, arguments, finish, write_results
from benchmarks.sweep import make_hf_gpt2, sweep


def main() -> None:
    options = arguments(__doc__, time_limit_s=60.0, count=5)
    found = sweep("HF GPT-2", make_hf_gpt2, count=options.count, time_limit_s=options.time_limit_s, run=False)
    table = Table(
        "HF GPT-2, 12 layers of 768, batch 2 of 256 tokens, fp32, profiled costs",
        ("share", "budget MB", "of plain peak", "status", "overhead %", "bound %", "gap %", "solve s", "schedule s"),
    )
    failures: list[str] = []
    for point in found.points:
        plan = point.plan
        bound = plan.lower_bound_ns / plan.keep_all_time_ns - 1
        table.add(
            f"{point.share:.2f}",
            f"{(plan.budget_bytes or 0) / 1e6:.1f}",
            f"{(plan.budget_bytes or 0) / found.plain_peak_bytes:.3f}",
            plan.status.value,
            f"{100 * plan.overhead:.3f}",
            f"{100 * bound:.3f}",
            f"{100 * plan.gap:.3f}",
            f"{plan.solution.solve_seconds:.2f}",
            f"{point.schedule_seconds:.2f}",
        )
        if point.share >= 0.25:
            if plan.gap > 0.005:
                failures.append(f"at {point.share:.2f}: gap {plan.gap:.2%}")
            if plan.solution.solve_seconds > 10:
                failures.append(f"at {point.share:.2f}: solved in {plan.solution.solve_seconds:.1f} s")
    table.show()
    if not options.no_write:
        notes = [
            "share: how far up from the least budget with a plan (0) to the measured plain peak (1)",
            "failures: " + ("none" if not failures else "; ".join(failures)),
        ]
        print(write_results("gpt2_gap", "Gap and solving time on GPT-2", [table], notes))
    finish(failures)


if __name__ == "__main__":
    main()
