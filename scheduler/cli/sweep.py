"""``sweep``: the whole trade-off between memory and time."""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
from typing import Annotated

import typer

from scheduler.cli import options
from scheduler.cli.console import note, output, print_json, table, working
from scheduler.cli.plan import plan_step
from scheduler.cli.source import StepSource
from scheduler.progress import progress
from scheduler.replan import DEFAULT_POINTS, Sweep, in_lower_order_of, spread_budgets
from scheduler.replan import sweep as sweep_plan
from scheduler.units import format_bytes, format_time
from solvers.bounds import find_floor
from solvers.strategies import BY_HAND

NAME = "sweep"


def run(
    *,
    target: Annotated[
        str | None,
        typer.Argument(metavar="[MODULE:FACTORY | PLAN.json]", help="As for plan, or a saved plan of the step."),
    ] = None,
    hf: options.Hf = None,
    overrides: options.Set = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.Device = "cpu",
    keep: options.Keep = None,
    never_recompute: options.NeverRecompute = None,
    never_offload: options.NeverOffload = None,
    link: options.Link = None,
    host_budget: options.HostBudget = None,
    budgets: Annotated[
        int, typer.Option(min=2, help="How many, spread from the least feasible to the keep-all peak.")
    ] = DEFAULT_POINTS,
    time_limit: options.TimeLimit = 10.0,
    gap: options.Gap = 0.005,
    png: Annotated[pathlib.Path | None, typer.Option(help="Draw the curve (needs matplotlib).")] = None,
    csv_file: Annotated[pathlib.Path | None, typer.Option("--csv", help="Write the points as CSV.")] = None,
    as_json: options.Json = False,
) -> None:
    """Trade memory for time at many budgets, solved from one capture, beside the strategies applied by hand."""
    wanted = options.planning(keep, never_recompute, never_offload, link, host_budget)
    if target is not None and target.endswith(".json") and hf is None:
        if any(wanted.values()):
            raise typer.BadParameter("a saved plan keeps the constraints and the link that it was made with")
        plan = options.load_plan(pathlib.Path(target))
    else:
        source = StepSource(
            target=target, hf=hf, overrides=overrides or (), batch=batch, seq=seq, dtype=dtype, optimizer=optimizer
        )
        plan = plan_step(source, None, device=options.device_name(device), wanted=wanted)
    with working("looking for the least budget"):
        plan = in_lower_order_of(plan)
        floor = find_floor(plan.problem)
        chosen = spread_budgets(plan.problem, budgets, floor=floor)
    with progress("solving", len(chosen) + len(BY_HAND)) as advance:
        found = sweep_plan(plan, chosen, time_limit_s=time_limit, gap=gap, floor=floor, on_point=advance)
    if csv_file is not None:
        csv_file.write_text(to_csv(found), encoding="utf-8")
        note(f"wrote {csv_file}")
    if png is not None:
        _draw(found, png)
        note(f"wrote {png}")
    if as_json:
        print_json("sweep", sweep_figures(found))
    else:
        _print(found)


def sweep_figures(sweep: Sweep) -> dict[str, object]:
    """A sweep for ``--json``. Sizes are bytes, times nanoseconds; ``knee`` is an index in ``points``."""
    return {
        "keep_all_peak_bytes": sweep.plan.keep_all_peak_bytes,
        "keep_all_time_ns": sweep.plan.keep_all_time_ns,
        "static_bytes": sweep.plan.static_bytes,
        "device": sweep.plan.device,
        "knee": sweep.knee,
        "points": [dataclasses.asdict(p) | {"gap": p.gap} for p in sweep.points],
        "baselines": [dataclasses.asdict(b) | {"plan_overhead": b.plan_overhead} for b in sweep.baselines],
    }


def to_csv(sweep: Sweep) -> str:
    """Plans and baselines as CSV, one a line; a baseline's budget is its peak, at which there is a plan too."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("name", "budget_bytes", "peak_bytes", "step_time_ns", "overhead", "lower_bound_ns", "knee"))
    knee = None if sweep.knee is None else sweep.points[sweep.knee]
    for p in sweep.solved:
        row = ("plan", p.budget_bytes, p.peak_bytes, p.step_time_ns, f"{p.overhead:.6f}", p.lower_bound_ns)
        writer.writerow((*row, int(p is knee)))
    for b in sweep.baselines:
        writer.writerow((b.name, b.peak_bytes, b.peak_bytes, b.step_time_ns, f"{b.overhead:.6f}", "", 0))
    return text.getvalue()


def _draw(sweep: Sweep, path: pathlib.Path) -> None:
    from scheduler.report.sweep_plot import plot_sweep

    try:
        figure = plot_sweep(sweep).get_figure(root=True)
    except ImportError as error:
        raise typer.BadParameter(str(error), param_hint="--png") from error
    assert figure is not None
    figure.savefig(path, dpi=120)


def _print(sweep: Sweep) -> None:
    made = table("budget", "peak", "step time", "overhead", "gap", "")
    for i, p in enumerate(sweep.points):
        mark = "← knee" if i == sweep.knee else ""
        made.add_row(
            format_bytes(p.budget_bytes),
            format_bytes(p.peak_bytes),
            format_time(p.step_time_ns),
            f"{p.overhead:.2%}",
            f"{p.gap:.2%}",
            mark,
        )
    beside = table("by hand", "peak", "step time", "overhead", "plan at that peak")
    for b in sweep.baselines:
        ours = "none found" if b.plan_overhead is None else f"{b.plan_overhead:.2%}"
        beside.add_row(b.name, format_bytes(b.peak_bytes), format_time(b.step_time_ns), f"{b.overhead:.2%}", ours)
    console = output()
    console.print(_title(sweep), highlight=False, soft_wrap=True)
    console.print(made, highlight=False)
    console.print(beside, highlight=False)


def _title(sweep: Sweep) -> str:
    plan = sweep.plan
    return (
        f"{plan.graph.name}: keep-all peak {format_bytes(plan.keep_all_peak_bytes)}, of which "
        f"{format_bytes(plan.static_bytes)} static; {plan.costs.source} for {plan.device}"
    )
