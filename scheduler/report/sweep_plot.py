"""The trade-off between memory and time as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.report.plots import new_axes
from scheduler.units import format_bytes, scale_of_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from scheduler.replan import Sweep


def plot_sweep(sweep: Sweep, ax: Axes | None = None) -> Axes:
    """Draw added time over budget, the proven lower bound below it, the knee, and each baseline at its peak.

    Every budget that was solved is a dot of the curve, the baselines' peaks too, so that each stands above a dot.

    Nothing is shown on screen: the caller shows or saves the figure.

    Args:
        sweep: from :func:`scheduler.replan.sweep`.
        ax: where to draw; ``None`` makes a figure of its own.

    Raises:
        ImportError: matplotlib is not installed.

    """
    axes = new_axes() if ax is None else ax
    keep_all = sweep.plan.keep_all_time_ns or 1
    scale, unit = scale_of_bytes(max((p.budget_bytes for p in sweep.points), default=0))
    memory = [p.budget_bytes / scale for p in sweep.solved]
    added = [100 * p.overhead for p in sweep.solved]
    bound = [100 * (p.lower_bound_ns / keep_all - 1) for p in sweep.solved]
    axes.fill_between(memory, 0, bound, color="#b0b7bf", alpha=0.35, linewidth=0, label="proven impossible")
    axes.plot(memory, added, color="#2f6fa7", marker="o", markersize=4, label="this plan")
    if sweep.knee is not None:
        knee = sweep.points[sweep.knee]
        label = f"knee: {format_bytes(knee.budget_bytes)}, {knee.overhead:.1%}"
        x, y = knee.budget_bytes / scale, 100 * knee.overhead
        axes.plot([x], [y], "o", markersize=11, markerfacecolor="none", markeredgecolor="#b3261e", label=label)
    markers = "sD^vP"
    for marker, baseline in zip(markers, sweep.baselines, strict=False):
        x, y = baseline.peak_bytes / scale, 100 * baseline.overhead
        axes.plot([x], [y], marker, color="#e08a2e", markeredgecolor="black", markersize=7, label=baseline.name)
    axes.axvline(sweep.plan.static_bytes / scale, color="black", linewidth=0.8, linestyle=":", label="static")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"memory budget ({unit})")
    axes.set_ylabel("added time (% of the keep-all step)")
    axes.set_title(
        f"{sweep.plan.graph.name or 'step'}: time for memory, {sweep.plan.costs.source} for {sweep.plan.device}"
    )
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small", frameon=False)
    return axes
