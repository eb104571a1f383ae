"""The application: one command per file of this package."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from graphs.errors import CheckpointSchedulerError
from scheduler.cli import compare, explain, export, fit, plan, policy, show, sweep
from scheduler.cli.console import error
from scheduler.errors import Infeasible

app = typer.Typer(
    name="checkpoint-scheduler",
    help="Plan a PyTorch training step under a memory budget before running it, and look at plans.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer's signature of a callback
    if asked:
        typer.echo(importlib.metadata.version("checkpoint-scheduler"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # noqa: FBT002 - typer's signature of a flag
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command; each is handled by its callback."""


for command in (plan, show, explain, compare, sweep, fit, policy, export):
    app.command(command.NAME)(command.run)


def main() -> None:
    """Run the command line. What a user can mend ends in a line on standard error and status 1, not in a traceback."""
    try:
        app()
    except Infeasible as problem:
        error(problem.message("--budget "))
        sys.exit(1)
    except (CheckpointSchedulerError, OSError) as problem:
        error(str(problem))
        sys.exit(1)
