"""Options that several commands share, and the reading of what a user types."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import typer

from graphs.costs.devices import device_spec
from graphs.links import Link as HostLink
from graphs.links import parse_link
from scheduler.errors import BudgetError, PlanFormatError, parse_budget
from scheduler.plan import Plan

Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODULE:FACTORY]",
        help="Function that returns (model, args, kwargs) of a training step, as package.module:function or "
        "file.py:function. Leave it out with --hf.",
    ),
]
Hf = Annotated[
    str | None,
    typer.Option(help="Hugging Face model instead: a config.json, or the name of a config class (GPT2Config)."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the --hf config. May be repeated."),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Sequences per batch (--hf: 1 if not given).")]
Seq = Annotated[int | None, typer.Option(min=1, help="Tokens per sequence (--hf: the config's longest, at most 1024).")]
Dtype = Annotated[
    str | None,
    typer.Option(help="Dtype of the --hf model's parameters, e.g. bfloat16 (else the config's, or float32)."),
]
Optimizer = Annotated[
    str | None,
    typer.Option(help="Class of torch.optim whose state counts in the budget, e.g. AdamW; none if not given."),
]
Budget = Annotated[
    str, typer.Option(help="Most bytes live at once: GB (10^9 bytes) as a number, or with a unit: 16GB, 7.5GiB, 800MB.")
]
Device = Annotated[str, typer.Option(help="Device of the cost model: h100-sxm, a100, l4, rtx-4090, cpu, …")]
TimeLimit = Annotated[float, typer.Option(min=0.1, help="Bound on each solve, in seconds.")]
Gap = Annotated[float, typer.Option(min=0.0, help="Relative gap to the lower bound at which solving may stop.")]
Keep = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Op name or module path whose results stay on the device. May be repeated."),
]
NeverRecompute = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Op name or module path that runs once. May be repeated."),
]
NeverOffload = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Op name or module path whose results are not copied to the host."),
]
Link = Annotated[
    str | None,
    typer.Option(help="Also copy activations to the host over this link: a name (pcie4-x16) or a bandwidth (25GB/s)."),
]
HostBudget = Annotated[
    str | None, typer.Option(help="With --link: most bytes of copies on the host (half of what is free if not given).")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def budget_bytes(text: str, option: str = "--budget") -> int:
    """Bytes of a budget as typed: a bare number is in GB.

    Raises:
        typer.BadParameter: it is not a positive amount of memory.

    """
    try:
        value: float | str = float(text)
    except ValueError:
        value = text
    try:
        return parse_budget(value)
    except BudgetError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def planning(
    keep: list[str] | None,
    never_recompute: list[str] | None,
    never_offload: list[str] | None,
    link: str | None,
    host_budget: str | None,
) -> dict[str, Any]:
    """What a user wants of the plan, as arguments of :func:`scheduler.plan`.

    Raises:
        typer.BadParameter: no such link, or a host budget without one.

    """
    chosen: dict[str, Any] = {
        "keep": keep or (),
        "never_recompute": never_recompute or (),
        "never_offload": never_offload or (),
    }
    if link is None:
        if host_budget is not None:
            raise typer.BadParameter("it is the memory behind a link: give --link with it", param_hint="--host-budget")
        return chosen
    chosen |= {"offload": "auto", "link": link_of(link)}
    if host_budget is not None:
        chosen["host_budget_gb"] = f"{budget_bytes(host_budget, '--host-budget')}B"
    return chosen


def link_of(text: str) -> HostLink:
    """A link as typed.

    Raises:
        typer.BadParameter: it is neither a name nor a bandwidth.

    """
    try:
        return parse_link(text)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error), param_hint="--link") from error


def device_name(text: str) -> str:
    """The full name of a device as typed.

    Raises:
        typer.BadParameter: no such device.

    """
    try:
        return device_spec(text).name
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error


def load_plan(path: pathlib.Path) -> Plan:
    """A saved plan.

    Raises:
        typer.BadParameter: the file is missing or not a plan.

    """
    try:
        return Plan.load(path)
    except FileNotFoundError as error:
        raise typer.BadParameter(
            f"there is no file {path}: 'checkpoint-scheduler plan ... -o FILE' saves a plan"
        ) from error
    except (OSError, PlanFormatError) as error:
        raise typer.BadParameter(str(error)) from error
