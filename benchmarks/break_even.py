"""From which bandwidth on copies to the host pay: added time of Llama-3-8B's step against that of the link.

The step is captured offline and timed by the roofline of an H100; the times are those of the simulator for plans that
the validator has passed. Fractions are of the keep-all peak without the parameters. A plan made for a slower link, or
without one, is replayed on the next faster one, and stays where it is the better one there. Copies are said to pay
where they take at least half a per cent of the step off the plan that only recomputes. Passes where no link makes a
plan slower.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.common import RESULTS, Table, arguments, finish, write_results
from benchmarks.problems import captured, llama
from graphs.links import LINKS, parse_link
from solvers import AutoSolver, Problem, Solution, Status, simulate, validate
from solvers.solution import Offload, Prefetch

FRACTIONS = (0.5, 0.4, 0.3, 0.25)
BANDWIDTHS = (0.5, 1, 2, 4, 8, 12, 16, 25, 35, 50, 75, 100, 150, 200, 450)  # GB/s each way
LEAST_BYTES = 2**20  # the same for all links, so that a plan for one is a plan for any
PAYS, FREE = 0.5, 0.1  # per cent of the step
GAP, SECONDS = 0.002, 15.0
_PAYS_MARK: dict[str, Any] = {"marker": "D", "markersize": 8, "markerfacecolor": "white", "linestyle": ""}


@dataclasses.dataclass(frozen=True)
class Point:
    """What the best plan for one bandwidth does; times are per cent of the keep-all step, the last two of its own."""

    bandwidth: float
    added: float
    bound: float
    host_bytes: int
    stalled: float
    busy: float


def main() -> None:
    options = arguments(__doc__, layers=32)
    whole = captured(lambda: llama(options.layers))
    peak = whole.budget_bytes - whole.static_bytes
    setting = (
        f"Llama-3-8B, {options.layers} layers, 8,192 tokens, bf16, H100 roofline; "
        f"keep-all peak {peak / 1e9:.1f} GB without the weights"
    )
    rows = Table(setting, ("of the peak", "GB/s", "added %", "bound %", "saved %", "host GB", "stall %", "link busy %"))
    ends = Table(
        "Where copies stop paying",
        ("of the peak", "added % without", f"{PAYS} % saved from", "half saved from", f"below {FREE} % added from"),
    )
    curves: dict[float, tuple[float, list[Point]]] = {}
    failures: list[str] = []
    for fraction in FRACTIONS:
        problem = whole.with_static(0).with_budget(int(fraction * peak))
        without = AutoSolver(time_limit_s=SECONDS, gap=GAP).solve(problem)
        if not without.status.has_plan:
            failures.append(f"{fraction:g}: {without.message}")
            continue
        alone = _per_cent(problem, without.step_time_ns)
        points = sweep(problem, without)
        for p in points:
            times = (p.added, p.bound, alone - p.added)
            host = f"{p.host_bytes / 1e9:.1f}"
            rows.add(
                f"{fraction:g}",
                f"{p.bandwidth:g}",
                *(f"{time:.3f}" for time in times),
                host,
                f"{p.stalled:.3f}",
                f"{p.busy:.1f}",
            )
            if p.added > alone + 100 * GAP:
                failures.append(f"{fraction:g}, {p.bandwidth:g} GB/s: slower than without a link")
        curves[fraction] = (alone, points)
        ends.add(f"{fraction:g}", f"{alone:.2f}", *break_even(alone, points))
    ends.show()
    note = (
        "Saved: added time of the plan without copies less that with them. Host memory is not limited. Between the "
        "bandwidths that were tried, those of the first table are read off a line over their logarithms."
    )
    if curves and not options.no_write:
        draw(curves, setting)
        title = "From which bandwidth on copies to the host pay"
        print(write_results("break_even", title, [ends, rows], [note, "![added time by bandwidth](break_even.png)"]))
    finish(failures)


def sweep(problem: Problem, without: Solution) -> list[Point]:
    """The best plan for each bandwidth, from the slowest to the fastest, beginning with one that copies nothing."""
    points: list[Point] = []
    best = without
    for bandwidth in BANDWIDTHS:
        link = dataclasses.replace(parse_link(f"{bandwidth}GB/s"), least_bytes=LEAST_BYTES)
        linked = problem.with_link(link, 10**12)
        found = AutoSolver(time_limit_s=SECONDS, gap=GAP).solve(linked)
        replayed = simulate(linked, best.steps)
        if not found.status.has_plan or replayed.step_time_ns < found.step_time_ns:
            figures = {"step_time_ns": replayed.step_time_ns, "peak_bytes": replayed.peak_bytes}
            found = dataclasses.replace(found, status=Status.FEASIBLE, steps=best.steps, **figures)
        validate(linked, found)
        best = found
        points.append(_point(linked, found, bandwidth))
    return points


def _point(problem: Problem, solution: Solution, bandwidth: float) -> Point:
    assert problem.link is not None
    replayed = simulate(problem, solution.steps)
    copied = (step.storage for step in solution.steps if isinstance(step, Offload | Prefetch))
    on_link = sum(problem.link.to_host_ns(problem.storage_bytes[s]) for s in copied)  # the same both ways
    return Point(
        bandwidth=bandwidth,
        added=_per_cent(problem, solution.step_time_ns),
        bound=_per_cent(problem, solution.lower_bound_ns),
        host_bytes=replayed.host_bytes,
        stalled=100 * replayed.stall_ns / replayed.step_time_ns,
        busy=100 * on_link / (2 * replayed.step_time_ns),
    )


def _per_cent(problem: Problem, step_time_ns: int) -> float:
    return 100 * (step_time_ns / problem.keep_all_time_ns - 1)


def break_even(alone: float, points: Sequence[Point]) -> tuple[str, str, str]:
    """The least bandwidths from which on copies pay, halve the added time, and leave next to none."""
    return (
        _from(points, alone - PAYS),
        _from(points, alone / 2),
        _from(points, FREE),
    )


def _from(points: Sequence[Point], added: float) -> str:
    """The bandwidth at which the added time falls to a figure, in words."""
    bandwidth = bandwidth_at(points, added)
    if bandwidth is None:
        return f"above {points[-1].bandwidth:g} GB/s"
    return f"{'at most ' if bandwidth == points[0].bandwidth else ''}{bandwidth:.3g} GB/s"


def bandwidth_at(points: Sequence[Point], added: float) -> float | None:
    """The bandwidth at which the added time falls to a figure, the least tried where it is below it there already."""
    if points[0].added <= added:
        return points[0].bandwidth
    for slower, faster in itertools.pairwise(points):
        if faster.added <= added:
            share = (slower.added - added) / (slower.added - faster.added)
            return slower.bandwidth * math.pow(faster.bandwidth / slower.bandwidth, share)
    return None


def draw(curves: dict[float, tuple[float, list[Point]]], title: str) -> None:
    """Write the picture beside the table: a curve for each fraction, and what it costs without a link, dashed."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for index, (fraction, (alone, points)) in enumerate(curves.items()):
        colour = f"C{index}"
        axes.plot(
            [p.bandwidth for p in points],
            [p.added for p in points],
            marker="o",
            markersize=4,
            color=colour,
            label=f"{fraction:g} of the keep-all peak",
        )
        axes.axhline(alone, color=colour, linestyle="--", linewidth=0.9)
        pays = bandwidth_at(points, alone - PAYS)
        if pays is not None:
            axes.plot([pays], [alone - PAYS], color=colour, **_PAYS_MARK)
    axes.plot([], [], color="black", linestyle="--", linewidth=0.9, label="without copies")
    axes.plot([], [], color="black", label=f"pay from here on: {PAYS:g} % saved", **_PAYS_MARK)
    for name, link in LINKS.items():
        bandwidth = link.to_host_bytes_per_s / 1e9
        axes.axvline(bandwidth, color="#8d96a0", linewidth=0.7, linestyle=":")
        above = axes.get_xaxis_transform()
        axes.text(
            bandwidth, 1.01, name.replace("-", "\n"), transform=above, ha="center", fontsize="x-small", color="#57606a"
        )
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 5, 10, 25, 50, 100, 200, 450])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 1.05 * max(alone for alone, _ in curves.values()))
    axes.set_xlabel("bandwidth of the link each way (GB/s)")
    axes.set_ylabel("added time (% of the keep-all step)")
    figure.suptitle(title, fontsize="small")
    axes.legend(framealpha=1.0, edgecolor="white", fontsize="small", loc="upper right", bbox_to_anchor=(0.99, 0.93))
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "break_even.png", dpi=120)


if __name__ == "__main__":
    main()
