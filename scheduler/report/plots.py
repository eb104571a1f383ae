"""A plan as a picture: live bytes over the time of the training step."""

from __future__ import annotations

from itertools import accumulate, chain
from typing import TYPE_CHECKING, Final

from scheduler.report.timeline import Category
from scheduler.units import scale_of_bytes, scale_of_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from scheduler.plan import Plan

COLOURS: Final = {
    Category.STATIC: "#8d96a0",
    Category.GRADIENTS: "#7f6a93",
    Category.OUTPUTS: "#4e9a8f",
    Category.KEPT: "#2f6fa7",
    Category.RECOMPUTED: "#e08a2e",
    Category.OFFLOADED: "#9fb8d9",
    Category.TEMPORARY: "#f2d28b",
    Category.WORKSPACE: "#d98cb3",
}
_HOST: Final = "#3b4a6b"
_BACK: Final = "#8a5a83"


def plot_plan(plan: Plan, ax: Axes | None = None) -> Axes:
    """Draw what :meth:`scheduler.plan.Plan.plot` describes.

    Live bytes are stacked by category over predicted time; lines mark the budget, the predicted peak, and the boundary
    between forward and backward. Where the plan copies to the host, a line shows the bytes there, two strips at the top
    when the link is busy in each direction, and hatching when computation stalls. Nothing is shown on screen: the
    caller shows or saves the figure.

    Raises:
        ImportError: matplotlib is not installed.

    """
    axes = new_axes() if ax is None else ax
    highest = max(plan.peak_bytes, plan.budget_bytes if plan.budget_bytes is not None else 0)
    byte_scale, byte_unit = scale_of_bytes(plan.peak_bytes)
    time_scale, time_unit = scale_of_time(plan.step_time_ns)
    times, layers = _steps_of(plan, time_scale, byte_scale)
    used = [category for category in Category if any(layers[category])]
    axes.stackplot(
        times,
        [layers[category] for category in used],
        labels=[category.value for category in used],
        colors=[COLOURS[category] for category in used],
        linewidth=0,
    )
    axes.axhline(plan.peak_bytes / byte_scale, color="black", linewidth=0.8, linestyle=":", label="predicted peak")
    if plan.budget_bytes is not None:
        axes.axhline(plan.budget_bytes / byte_scale, color="#b3261e", linewidth=1.2, linestyle="--", label="budget")
    if plan.host_use.copies:
        highest = max(highest, _draw_host(plan, axes, time_scale, byte_scale))
    axes.axvline(plan.backward_start_ns / time_scale, color="black", linewidth=0.8, label="forward | backward")
    axes.set_xlim(0, max(times, default=0) or 1)
    axes.set_ylim(0, highest / byte_scale * 1.05 or 1)
    axes.set_xlabel(f"time of the step, predicted ({time_unit})")
    axes.set_ylabel(f"live bytes ({byte_unit})")
    axes.set_title(f"{plan.status.value} plan: overhead {plan.overhead:.2%}, gap {plan.gap:.2%}")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small", frameon=False)
    return axes


def new_axes() -> Axes:
    """Axes of a figure of their own, outside of pyplot. Raises ``ImportError`` where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing a plan needs matplotlib: pip install 'checkpoint-scheduler[plot]' (or pip install matplotlib)"
        ) from error
    return Figure(figsize=(10, 4.5), layout="constrained").add_subplot()


def _steps_of(plan: Plan, time_scale: int, byte_scale: int) -> tuple[list[float], dict[Category, list[float]]]:
    """Corners of the stair line: each start of an execution and of the next, and the size of each category there."""
    ends = [*(s.start_ns for s in plan.samples[1:]), plan.step_time_ns]  # what is live stays so through a stall
    spans = ((s.start_ns / time_scale, end / time_scale) for s, end in zip(plan.samples, ends, strict=False))
    times = list(chain.from_iterable(spans))
    layers = {
        category: list(chain.from_iterable((s.live[category] / byte_scale,) * 2 for s in plan.samples))
        for category in Category
    }
    return times, layers


def _draw_host(plan: Plan, axes: Axes, time_scale: int, byte_scale: int) -> int:
    """Draw bytes on the host, the link's strips and the stalls; return the most bytes on the host."""
    storages = plan.graph.storages
    out = [copy for copy in plan.host_use.copies if copy.outward]
    held = list(accumulate((storages[copy.storage].bytes for copy in out), initial=0))
    times = [0.0, *(copy.start_ns / time_scale for copy in out), plan.step_time_ns / time_scale]
    sizes = [*(size / byte_scale for size in held), held[-1] / byte_scale]
    axes.plot(times, sizes, drawstyle="steps-post", color=_HOST, linewidth=1.2, label="bytes on the host")
    above = axes.get_xaxis_transform()  # x in data, y in shares of the height
    for outward, height, colour, label in ((True, 0.975, _HOST, "link, out"), (False, 0.945, _BACK, "link, back")):
        spans = [
            (copy.start_ns / time_scale, (copy.end_ns - copy.start_ns) / time_scale)
            for copy in plan.host_use.copies
            if copy.outward is outward
        ]
        axes.broken_barh(spans, (height, 0.02), transform=above, color=colour, linewidth=0, label=label)
    waits = [(s.start_ns / time_scale, (s.end_ns - s.start_ns) / time_scale) for s in plan.host_use.stalls]
    if waits:
        bars = axes.broken_barh(waits, (0, 0.93), transform=above, facecolor="none", linewidth=0, label="stalls")
        bars.set(hatch="////", edgecolor="#b3261e")
    return held[-1]
