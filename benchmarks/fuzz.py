"""Random programs trained plain and scheduled at random feasible budgets: how many agree bit for bit and stay within.

Passes where none is wrong, over its budget or crashed. Each failure is shrunk to the least program of its seed.
"""

from __future__ import annotations

import collections
import time

from benchmarks.common import Table, arguments, finish, write_results
from tests.fuzz.checking import FAILURES, OUTCOMES, Outcome, check, shrink
from tests.fuzz.programs import make_program


def main() -> None:
    options = arguments(__doc__, programs=500, first=0)
    start = time.perf_counter()
    outcomes: list[Outcome] = []
    failures: list[str] = []
    for seed in range(options.first, options.first + options.programs):
        outcome = check(seed)
        outcomes.append(outcome)
        if outcome.kind in FAILURES:
            outcome = shrink(outcome)
            print(outcome, make_program(outcome.seed, outcome.size).module.code, flush=True)
            failures.append(f"seed {outcome.seed}, size {outcome.size}: {outcome.kind}: {outcome.detail}")
        elif outcome.kind == "refused":
            print(f"seed {outcome.seed} refused: {outcome.detail}", flush=True)
    counts = collections.Counter(o.kind for o in outcomes)
    table = Table("Random programs", ("outcome", "programs"))
    for kind in OUTCOMES:
        table.add(kind, counts[kind])
    scheduled = [o for o in outcomes if o.budget_bytes]
    table.add("of these with a plan that recomputes", sum(o.recomputed > 0 for o in scheduled))
    table.add("ops run again, in all", sum(o.recomputed for o in scheduled))
    table.add("minutes", f"{(time.perf_counter() - start) / 60:.1f}")
    table.show()
    if not options.no_write:
        notes = [f"programs: seeds {options.first} to {options.first + options.programs - 1}", *failures]
        print(write_results("fuzz", "Random programs, plain against scheduled", [table], notes))
    finish(failures)


if __name__ == "__main__":
    main()
