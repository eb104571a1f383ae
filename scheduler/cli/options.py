"""Options that several commands share, and the reading of what a user types."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from graphs.costs.devices import device_spec
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
    except (OSError, PlanFormatError) as error:
        raise typer.BadParameter(str(error)) from error
