"""The model zoo at the floor, the middle and an unlimited budget: three optimizer steps against plain training.

Passes where every result equals the plain one (bit for bit, unless the zoo states a tolerance and its reason), every
measured peak is within its budget and within 1 % of the prediction, and every refusal is one that the zoo expects.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import multiprocessing
from collections.abc import Iterable

import torch

from benchmarks.common import Table, arguments, finish, write_results
from graphs.errors import CheckpointSchedulerError
from scheduler import Plan
from tests.zoo.assessment import LEVELS, Outcome, assess, budgets_of
from tests.zoo.registry import ZOO


@dataclasses.dataclass
class Row:
    """What was found for one model.

    Attributes:
        name: name in the zoo.
        ops: kernels of one step; 0 where refused.
        floor_bytes: least budget with a plan.
        peak_bytes: keep-all peak.
        cells: for each level what is shown.
        failures: what is wrong, level and all.
        refusal: why the model is refused, else empty.

    """

    name: str
    ops: int = 0
    floor_bytes: int = 0
    peak_bytes: int = 0
    cells: dict[str, str] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    refusal: str = ""

    @property
    def floor_over_peak(self) -> str:
        """Floor as a share of the keep-all peak."""
        return f"{self.floor_bytes / self.peak_bytes:.2f}" if self.peak_bytes else ""


def row_of(name: str, threads: int = 1) -> Row:
    """Assess one model at every level."""
    torch.set_num_threads(threads)
    row = Row(name)
    expected = ZOO[name].refused
    try:
        budgets = budgets_of(name)
        for level in LEVELS:
            outcome = assess(name, budgets[level])
            _fill(row, level, outcome)
    except CheckpointSchedulerError as error:
        row.refusal = " ".join(str(error).split())
        if not expected or expected not in row.refusal:
            row.failures.append(f"refused: {row.refusal[:300]}")
    except Exception as error:  # noqa: BLE001 - a crash is a result to show, and the other models still run
        first_line = (str(error).strip().splitlines() or [""])[0]
        row.failures.append(f"crashed: {type(error).__name__}: {first_line[:300]}")
    else:
        if expected:
            row.failures.append("was to be refused, and is not")
    assess.cache_clear()
    gc.collect()
    return row


def _fill(row: Row, level: str, outcome: Outcome) -> None:
    plan: Plan = outcome.plan
    row.ops, row.peak_bytes = len(plan.graph.ops), plan.keep_all_peak_bytes
    if level == "floor":
        row.floor_bytes = plan.budget_bytes or 0
    found = outcome.failures()
    row.failures += [f"{level}: {failure}" for failure in found]
    error = max((plan.peak_bytes / measured - 1 for measured in outcome.peaks), key=abs)
    same = "bitwise" if not ZOO[row.name].rtol else "within tolerance"
    verdict = "WRONG" if outcome.differences else ("ok" if not found else "peak")
    row.cells[level] = f"{verdict} {error:+.2%}" if outcome.differences or found else f"{same} {error:+.2%}"


def report(rows: Iterable[Row], *, write: bool) -> list[str]:
    """Show the table of the results, write it where asked, and return the failures."""
    rows = sorted(rows, key=lambda row: list(ZOO).index(row.name))
    table = Table(
        "Three optimizer steps against plain training; (predicted - measured) / measured peak beside each",
        ("model", "family", "ops", "peak MB", "floor / peak", *LEVELS, "remark"),
    )
    failures: list[str] = []
    for row in rows:
        remark = row.refusal[:160] or ZOO[row.name].tolerance_reason
        if row.failures:
            remark = f"{len(row.failures)} failures: {row.failures[0][:160]}"
        failures += [f"{row.name}: {failure}" for failure in row.failures[:3]]
        cells = [row.cells.get(level, "refused" if row.refusal else "") for level in LEVELS]
        size = f"{row.peak_bytes / 1e6:.2f}" if row.peak_bytes else ""
        table.add(row.name, ZOO[row.name].family, row.ops or "", size, row.floor_over_peak, *cells, remark)
    passed = sum(not row.failures and not row.refusal for row in rows)
    wrong = sum("WRONG" in cell for row in rows for cell in row.cells.values())
    refused = sum(bool(row.refusal) for row in rows)
    notes = [
        f"{passed} of {len(rows)} pass at all three budgets; {refused} refused with the reason; {wrong} results differ",
        "floor: the least budget for which the portfolio finds a plan; middle: half of the way to the keep-all peak",
        "failures: " + ("none" if not failures else "; ".join(failures)),
    ]
    table.show()
    for note in notes:
        print(note)
    if write:
        print(write_results("zoo", "Model zoo", [table], notes))
    return failures


def main() -> None:
    options = arguments(__doc__, only="", jobs=1)
    names = [name for name in ZOO if options.only in name]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        rows = list(pool.map(row_of, names, [options.threads] * len(names)))
    finish(report(rows, write=not options.no_write and not options.only))


if __name__ == "__main__":
    main()
