"""``compare``: two saved plans side by side."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from scheduler.cli import options
from scheduler.cli.console import output, print_json, table
from scheduler.cli.figures import plan_figures
from scheduler.plan import Plan
from scheduler.report.text import block_of, fold_blocks
from scheduler.units import format_bytes, format_time

NAME = "compare"

_MOST_ROWS: Final = 20
_FIGURES: Final[tuple[tuple[str, str, Callable[[Any], str]], ...]] = (
    ("budget_bytes", "budget", format_bytes),
    ("peak_bytes", "predicted peak", format_bytes),
    ("measured_peak_bytes", "measured peak", format_bytes),
    ("keep_all_peak_bytes", "keep-all peak", format_bytes),
    ("step_time_ns", "step time", format_time),
    ("keep_all_time_ns", "keep-all time", format_time),
    ("overhead", "overhead", "{:.2%}".format),
    ("gap", "gap", "{:.2%}".format),
)


def run(
    first: Annotated[pathlib.Path, typer.Argument(metavar="A.json", help="A saved plan.")],
    second: Annotated[pathlib.Path, typer.Argument(metavar="B.json", help="Another.")],
    *,
    as_json: options.Json = False,
) -> None:
    """Compare two saved plans: figures side by side, and the tensors with which they do different things."""
    a, b = options.load_plan(first), options.load_plan(second)
    same = a.graph.captured.fingerprint == b.graph.captured.fingerprint
    changes = differing(a, b) if same else {}
    if as_json:
        print_json(
            "compare",
            {"same_step": same, "a": plan_figures(a), "b": plan_figures(b), "changes": _change_figures(changes)},
        )
        return
    _print_figures(str(first), plan_figures(a), str(second), plan_figures(b))
    console = output()
    if not same:
        console.print("The plans are of different steps, so that their tensors cannot be compared.", highlight=False)
    elif not changes:
        console.print("Both plans do the same with every tensor.", highlight=False)
    else:
        _print_changes(changes)


def differing(a: Plan, b: Plan) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(block, action in a, action in b) → tensors and bytes, for tensors of the same step that are treated unlike."""
    changes: dict[tuple[str, str, str], tuple[int, int]] = {}
    for x, y in zip(a.decisions, b.decisions, strict=True):
        if x.action is not y.action:
            key = (block_of(x.module_path), x.action.value, y.action.value)
            count, size = changes.get(key, (0, 0))
            changes[key] = (count + 1, size + x.bytes)
    return changes


def _print_figures(first: str, a: dict[str, Any], second: str, b: dict[str, Any]) -> None:
    made = table("", first, second, "b − a")
    for key, label, text in _FIGURES:
        x, y = a[key], b[key]
        if x is None and y is None:
            continue
        both = x is not None and y is not None
        made.add_row(
            label, "none" if x is None else text(x), "none" if y is None else text(y), text(y - x) if both else ""
        )
    made.add_row("device", a["device"], b["device"], "")
    output().print(made, highlight=False)


def folded(changes: dict[tuple[str, str, str], tuple[int, int]]) -> list[tuple[str, str, str, int, int]]:
    """Blocks (repeated ones that change alike in one row), actions, tensors and bytes, the most bytes first."""
    rows = []
    for pair in dict.fromkeys((x, y) for _, x, y in changes):
        of_pair = {block: figures for (block, *actions), figures in changes.items() if tuple(actions) == pair}
        rows += [(label, *pair, n * count, n * size) for label, n, (count, size) in fold_blocks(of_pair)]
    return sorted(rows, key=lambda row: -row[-1])


def _print_changes(changes: dict[tuple[str, str, str], tuple[int, int]]) -> None:
    made = table("treated differently", "in a", "in b", "tensors", "bytes")
    rows = folded(changes)
    for label, x, y, count, size in rows[:_MOST_ROWS]:
        made.add_row(label, x, y, str(count), format_bytes(size))
    left = len(rows) - _MOST_ROWS
    output().print(made, highlight=False)
    if left > 0:
        output().print(f"and {left} more rows, all of them with --json", highlight=False)


def _change_figures(changes: dict[tuple[str, str, str], tuple[int, int]]) -> list[dict[str, object]]:
    return [
        {"module": block, "a": x, "b": y, "tensors": count, "bytes": size}
        for (block, x, y), (count, size) in changes.items()
    ]
