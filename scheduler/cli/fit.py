"""``fit``: the largest batch or sequence that a budget allows."""

from __future__ import annotations

import enum
import pathlib
from typing import Annotated

import typer

from scheduler.cli import options
from scheduler.cli.console import note, output, print_json, table, working
from scheduler.cli.figures import infeasible_figures
from scheduler.cli.plan import plan_step
from scheduler.cli.source import StepSource
from scheduler.errors import Infeasible
from scheduler.fit import Fit
from scheduler.fit import fit as fit_step
from scheduler.plan import Plan
from scheduler.units import format_bytes, format_time

NAME = "fit"


class Grow(enum.StrEnum):
    """What is made as large as the budget allows."""

    BATCH = "batch"
    SEQ = "seq"


def run(
    *,
    budget: options.Budget,
    target: options.Target = None,
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
    grow: Annotated[Grow, typer.Option(help="Look for the largest batch, or the longest sequence.")] = Grow.BATCH,
    multiple_of: Annotated[
        int | None, typer.Option(min=1, help="Try multiples of this only (batch: 1, seq: 128 if not given).")
    ] = None,
    most: Annotated[int, typer.Option("--max", min=1, help="Try nothing larger.")] = 65536,
    time_limit: options.TimeLimit = 20.0,
    gap: options.Gap = 0.005,
    out: Annotated[
        pathlib.Path | None, typer.Option("--output", "-o", help="Save the plan of the largest that fits.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Find the largest batch (or sequence) that fits a budget, and say whether checkpointing pays."""
    source = StepSource(
        target=target, hf=hf, overrides=overrides or (), batch=batch, seq=seq, dtype=dtype, optimizer=optimizer
    )
    if hf is not None and grow is Grow.SEQ:
        most = min(most, _longest(source))
    wanted = options.planning(keep, never_recompute, never_offload, link, host_budget)
    most_bytes, spec = options.budget_bytes(budget), options.device_name(device)

    def capture(size: int) -> Plan:
        batch_, seq_ = (size, None) if grow is Grow.BATCH else (None, size)
        return plan_step(source, None, device=spec, batch=batch_, seq=seq_, wanted=wanted)

    multiple = min(multiple_of or (1 if grow is Grow.BATCH else 128), most)
    try:
        with working(f"fitting the {grow.value} into {format_bytes(most_bytes)}"):
            found = fit_step(capture, most_bytes, multiple=multiple, most=most, time_limit_s=time_limit, gap=gap)
    except Infeasible as error:
        if not as_json:
            raise
        print_json("fit", infeasible_figures(error))
        raise typer.Exit(1) from error
    if out is not None:
        found.rows[-1].plan.save(out)
        note(f"saved {out}")
    if as_json:
        print_json("fit", {"grow": grow.value} | fit_figures(found))
    else:
        _print(found, grow, source)


def fit_figures(found: Fit) -> dict[str, object]:
    """A fit for ``--json``. Sizes are bytes, times nanoseconds."""
    return {
        "budget_bytes": found.budget_bytes,
        "largest": found.largest,
        "refused": found.refused,
        "largest_without_checkpointing": found.plain,
        "fastest": found.fastest.size,
        "worth": found.worth,
        "verdict": found.verdict,
        "rows": [
            {
                "size": row.size,
                "peak_bytes": row.plan.peak_bytes,
                "keep_all_peak_bytes": row.plan.keep_all_peak_bytes,
                "step_time_ns": row.plan.step_time_ns,
                "overhead": row.plan.overhead,
                "gap": row.plan.gap,
                "per_second": row.per_second,
                "gained_per_gb": row.gained_per_gb,
            }
            for row in found.rows
        ],
    }


def _longest(source: StepSource) -> int:
    """The most tokens that a Hugging Face config allows."""
    from scheduler.cli.source import DEFAULT_LONGEST, hf_config

    return int(getattr(hf_config(str(source.hf), source.overrides), "max_position_embeddings", DEFAULT_LONGEST))


def _print(found: Fit, grow: Grow, source: StepSource) -> None:
    unit = "samples/s" if grow is Grow.BATCH else "tokens/s"
    made = table(
        grow.value,
        "without",
        "predicted peak",
        "step time",
        "overhead",
        unit,
        f"{unit} per added GB",
    )
    for row in found.rows:
        made.add_row(
            str(row.size),
            format_bytes(row.plan.keep_all_peak_bytes),
            format_bytes(row.plan.peak_bytes),
            format_time(row.plan.step_time_ns),
            f"{row.plan.overhead:.2%}",
            f"{row.per_second:.4g}",
            f"{row.gained_per_gb:.3g}" if row.gained_per_gb else "",
        )
    console = output()
    console.print(f"{source.describe()} within {format_bytes(found.budget_bytes)}", highlight=False, markup=False)
    limit = "the most that was tried" if found.refused is None else f"no plan was found for {found.refused}"
    console.print(f"largest {grow.value}: {found.largest} ({limit})", style="bold", highlight=False)
    console.print(f"without checkpointing: {found.plain or 'none fits'}", highlight=False)
    console.print(made, highlight=False)
    console.print(found.verdict, highlight=False)
