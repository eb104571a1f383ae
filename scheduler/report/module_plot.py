"""What a plan does with the activations of each module, as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from scheduler.report.plots import COLOURS, new_axes
from scheduler.report.text import module_rows
from scheduler.report.timeline import Category
from scheduler.units import format_bytes, format_time, scale_of_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from scheduler.plan import Plan

_MOST_ROWS: Final = 24


def plot_modules(plan: Plan, ax: Axes | None = None) -> Axes:
    """Draw a bar for each row of the summary's table: bytes kept, recomputed and offloaded, and the time that adds.

    Blocks with the same figures share a bar, whose bytes are those of all of them. Where there are more than 24, the
    smallest are drawn as one. Nothing is shown on screen: the caller shows or saves the figure.

    Raises:
        ImportError: matplotlib is not installed.

    """
    axes = new_axes() if ax is None else ax
    rows = [(r.label, (r.kept_bytes, r.recomputed_bytes, r.offloaded_bytes), r.added_ns) for r in module_rows(plan)]
    small = set(
        sorted(range(len(rows)), key=lambda i: -sum(rows[i][1]))[_MOST_ROWS - 1 :] if len(rows) > _MOST_ROWS else ()
    )
    if small:
        others = [rows[i] for i in sorted(small)]
        sizes = (sum(r[1][0] for r in others), sum(r[1][1] for r in others), sum(r[1][2] for r in others))
        rows = [r for i, r in enumerate(rows) if i not in small]
        rows.append((f"{len(others)} others", sizes, sum(r[2] for r in others)))
    scale, unit = scale_of_bytes(max((sum(r[1]) for r in rows), default=0))
    positions = range(len(rows))
    left = [0.0] * len(rows)
    for i, category in enumerate((Category.KEPT, Category.RECOMPUTED, Category.OFFLOADED)):
        widths = [r[1][i] / scale for r in rows]
        if any(widths):
            axes.barh(positions, widths, left=left, color=COLOURS[category], label=category.value)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for position, (end, row) in enumerate(zip(left, rows, strict=True)):
        if row[2]:
            axes.annotate(f"+{format_time(row[2])}", (end, position), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(list(positions), [r[0] for r in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"activations of the forward ({unit}), and the time that recomputing adds")
    budget = "no budget" if plan.budget_bytes is None else f"budget {format_bytes(plan.budget_bytes)}"
    axes.set_title(f"{plan.graph.name or 'step'}, {budget}: overhead {plan.overhead:.2%}")
    if any(left):
        axes.legend(loc="best", fontsize="small", frameon=False)
    return axes
