"""``explain``: what happens to the tensors of one module, and why."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated

import typer

from scheduler.cli import options
from scheduler.cli.console import print_indented, print_json, working
from scheduler.explain import explain

NAME = "explain"


def run(
    path: Annotated[pathlib.Path, typer.Argument(metavar="PLAN.json", help="A saved plan.")],
    module: Annotated[str, typer.Argument(metavar="MODULE", help="Module path or pattern; quote patterns.")],
    *,
    price: Annotated[bool, typer.Option(help="Solve again with a little more and a little less memory.")] = True,
    as_json: options.Json = False,
) -> None:
    """Say of each tensor of a module what the plan does with it, which constraint binds, and what a GB would buy."""
    plan = options.load_plan(path)
    with working("solving with a little more and a little less memory"):
        try:
            found = explain(plan, module, price=price)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json("explain", dataclasses.asdict(found))
    else:
        print_indented(str(found))
