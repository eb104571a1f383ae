"""``plan``: what a budget costs, before training."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import typer

from scheduler.cli import options
from scheduler.cli.console import note, output, print_json, working
from scheduler.cli.figures import infeasible_figures, plan_figures
from scheduler.cli.source import StepSource
from scheduler.errors import Infeasible
from scheduler.plan import Plan

NAME = "plan"


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
    time_limit: options.TimeLimit = 60.0,
    gap: options.Gap = 0.005,
    out: Annotated[pathlib.Path | None, typer.Option("--output", "-o", help="Save the plan as JSON.")] = None,
    as_json: options.Json = False,
) -> None:
    """Plan a training step for a budget and a device, without running it and without its weights."""
    source = StepSource(
        target=target, hf=hf, overrides=overrides or (), batch=batch, seq=seq, dtype=dtype, optimizer=optimizer
    )
    most = options.budget_bytes(budget)
    try:
        made = plan_step(
            source,
            most,
            device=options.device_name(device),
            wanted=options.planning(keep, never_recompute, never_offload, link, host_budget),
            time_limit_s=time_limit,
            gap=gap,
        )
    except Infeasible as error:
        if not as_json:
            raise
        print_json("plan", infeasible_figures(error))
        raise typer.Exit(1) from error
    if out is not None:
        made.save(out)
        note(f"saved {out}")
    if as_json:
        print_json("plan", plan_figures(made))
        return
    console = output()
    console.print(source.describe(), highlight=False, style="bold")
    console.print(made.summary(console.width), highlight=False, soft_wrap=True, markup=False)


def plan_step(
    source: StepSource,
    budget_bytes: int | None,
    *,
    device: str,
    batch: int | None = None,
    seq: int | None = None,
    wanted: Mapping[str, Any] = MappingProxyType({}),
    time_limit_s: float = 60.0,
    gap: float = 0.005,
) -> Plan:
    """Build, capture and solve a step; ``budget_bytes=None`` keeps everything, ``wanted`` is for :func:`plan`.

    Raises:
        Infeasible, CaptureError: as :func:`scheduler.plan`.

    """
    from scheduler.api import plan

    with working(f"capturing and planning {source.describe(batch, seq)}"):
        step = source.build(batch=batch, seq=seq)
        return plan(
            step.model,
            None if budget_bytes is None else f"{budget_bytes}B",
            step.args,
            step.kwargs,
            device=device,
            optimizer=step.optimizer,
            time_limit_s=time_limit_s,
            gap=gap,
            **wanted,
        )
