"""Real situations from public bug reports, scheduled at the floor, the middle and unlimited, against plain training.

Needs the shared cases beside the checkout (``../shared/cases``). Passes where every cell reads ``ok``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from benchmarks.common import Table, arguments, finish, write_results
from tests.shared_cases import LEVELS, PATHS, SHARED, load, run_case, run_situation

NOTE = (
    "floor: the least budget for which a plan is found (of the hungriest batch, existing gradients counted) plus 1 %; "
    "middle: half of the way from there to the keep-all peak"
)


def result_of(check: Callable[[], str | None]) -> str:
    """``"ok"``, the differences, or the error of a check, on one line."""
    try:
        return check() or "ok"
    except Exception as error:  # noqa: BLE001 - whatever a case raises is a result to show
        first_line = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first_line}"
    finally:
        torch.compiler.reset()


def main() -> None:
    options = arguments(__doc__, only="")
    if not PATHS:
        print(f"skipped: {SHARED} is not there", file=sys.stderr)
        return
    table = Table("Scheduled against plain training", ("case", *LEVELS))
    failures: list[str] = []
    checks: dict[str, Callable[[str, str], str | None]] = dict.fromkeys(PATHS, run_case)
    checks |= dict.fromkeys(load("situations").CHECKS, run_situation)
    for name, run in checks.items():
        if options.only not in name:
            continue
        results = [result_of(lambda run=run, name=name, level=level: run(name, level)) for level in LEVELS]  # type: ignore[misc]
        table.add(name, *results)
        failures += [f"{name} at {level}: {r}" for level, r in zip(LEVELS, results, strict=True) if r != "ok"]
    table.show()
    passed = len(table.rows) * len(LEVELS) - len(failures)
    notes = [NOTE, f"{passed} of {len(table.rows) * len(LEVELS)} are ok"]
    if not options.no_write and not options.only:
        print(write_results("cases", "Real situations at three budgets", [table], notes))
    finish(failures)


if __name__ == "__main__":
    main()
