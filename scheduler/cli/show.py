"""``show``: a saved plan, as text or as a page."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from scheduler.cli import options
from scheduler.cli.console import note, output, print_json, table
from scheduler.cli.figures import plan_figures
from scheduler.decisions import Action, Decision
from scheduler.explain import decisions_of
from scheduler.plan import Plan
from scheduler.units import format_bytes, format_time

NAME = "show"


def run(
    path: Annotated[pathlib.Path, typer.Argument(metavar="PLAN.json", help="A saved plan.")],
    *,
    module: Annotated[
        str | None, typer.Option(help="List the tensors of this module path or pattern instead, e.g. '*.mlp'.")
    ] = None,
    html: Annotated[pathlib.Path | None, typer.Option(help="Write the report as one self-contained page.")] = None,
    as_json: options.Json = False,
) -> None:
    """Show a saved plan: headline and modules, or each tensor of a module, or the report as a page."""
    plan = options.load_plan(path)
    if html is not None:
        from scheduler.report.html import save_html

        save_html(plan, html)
        note(f"wrote {html}")
    chosen = None if module is None else _decisions(plan, module)
    if as_json:
        tensors = {} if chosen is None else {"tensors": [_figures(d) for d in chosen]}
        print_json("show", plan_figures(plan) | tensors)
    elif chosen is not None:
        _print_tensors(chosen, str(module))
    elif html is None:
        console = output()
        console.print(plan.summary(console.width), highlight=False, soft_wrap=True, markup=False)


def _decisions(plan: Plan, module: str) -> list[Decision]:
    try:
        return decisions_of(plan, module)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--module") from error


def _print_tensors(chosen: list[Decision], module: str) -> None:
    made = table("tensor", "bytes", "action", "added time", "module")
    for column in (made.columns[2], made.columns[4]):
        column.justify = "left"
    made.columns[4].no_wrap = False
    lasting = [d for d in chosen if d.action is not Action.TEMPORARY]
    for d in lasting:
        added = format_time(d.added_ns) if d.added_ns else ""
        times = f" ×{d.times}" if d.times > 1 else ""
        made.add_row(d.name, format_bytes(d.bytes), f"{d.action.value}{times}", added, d.module_path)
    console = output()
    console.print(f"Tensors made in the forward of {module}", highlight=False, markup=False)
    console.print(made, highlight=False)
    if len(lasting) < len(chosen):
        console.print(
            f"and {len(chosen) - len(lasting)} temporary ones, gone before the backward (all of them with --json)",
            highlight=False,
        )


def _figures(decision: Decision) -> dict[str, object]:
    return {
        "name": decision.name,
        "module": decision.module_path,
        "bytes": decision.bytes,
        "action": decision.action.value,
        "times": decision.times,
        "added_ns": decision.added_ns,
        "reason": decision.reason,
    }
