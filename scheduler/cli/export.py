"""``export``: a saved plan in the forms that other tools read."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from scheduler.cli import options
from scheduler.cli.console import output, print_json

NAME = "export"


def run(
    path: Annotated[pathlib.Path, typer.Argument(metavar="PLAN.json", help="A saved plan.")],
    *,
    perfetto: Annotated[
        pathlib.Path | None, typer.Option(help="Trace for ui.perfetto.dev or chrome://tracing (JSON).")
    ] = None,
    memory_snapshot: Annotated[
        pathlib.Path | None, typer.Option(help="Snapshot for pytorch.org/memory_viz (pickle).")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write a saved plan as a trace of its executions, or as a snapshot of its memory."""
    from scheduler.export.memory_snapshot import save_memory_snapshot
    from scheduler.export.perfetto import save_trace

    if perfetto is None and memory_snapshot is None:
        raise typer.BadParameter("say what to write: --perfetto FILE, --memory-snapshot FILE, or both")
    plan = options.load_plan(path)
    written = {}
    if perfetto is not None:
        save_trace(plan, perfetto)
        written["perfetto"] = str(perfetto)
    if memory_snapshot is not None:
        save_memory_snapshot(plan, memory_snapshot)
        written["memory_snapshot"] = str(memory_snapshot)
    if as_json:
        print_json("export", {"written": written})
    else:
        for kind, file in written.items():
            output().print(f"{kind.replace('_', ' ')}: {file}", highlight=False)
