"""What every command prints with: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

SCHEMA_VERSION = 1
_spinning: list[tuple[Status, str]] = []  # a terminal can show one at a time
_UNIT = re.compile(r"(?<=\d) (?=([kMGT]?B|[nµm]?s)\b)")  # the space between a number and its unit
_NARROWEST = 100  # columns where output goes to a file or a pipe


def output() -> Console:
    """The console of results. Made anew for each command, so that a replaced ``sys.stdout`` counts."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _NARROWEST))


def error(message: str) -> None:
    """One message on standard error."""
    Console(stderr=True).print(f"[bold red]error:[/] {_escaped(message)}", highlight=False, soft_wrap=True)


def note(message: str) -> None:
    """A remark on standard error, which neither a pipe nor ``--json`` sees."""
    Console(stderr=True).print(_escaped(message), highlight=False, soft_wrap=True, style="dim")


def print_json(kind: str, fields: Mapping[str, Any]) -> None:
    """Print a result as one JSON object with its kind and schema version."""
    typer.echo(json.dumps({"kind": kind, "schema_version": SCHEMA_VERSION} | dict(fields), indent=1))


def print_indented(text: str) -> None:
    """Print lines that are indented by spaces: where one is too long, what follows of it is indented further.

    A number stays with its unit.
    """
    console = output()
    for line in text.splitlines():
        unbroken = _UNIT.sub("\N{NO-BREAK SPACE}", line)
        indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
        wrapped = textwrap.fill(unbroken, console.width, subsequent_indent=indent, break_long_words=False)
        shown = wrapped.replace("\N{NO-BREAK SPACE}", " ")
        console.print(shown, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def working(message: str) -> Iterator[None]:
    """Show on a terminal what is going on until the block ends. Within another such block, change its text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
    elif _spinning:
        outer, before = _spinning[-1]
        outer.update(message)
        try:
            yield
        finally:
            outer.update(before)
    else:
        with console.status(message) as status:
            _spinning.append((status, message))
            try:
                yield
            finally:
                _spinning.pop()


def table(*columns: str) -> Table:
    """A table whose first column is text and whose others are figures."""
    made = Table()
    for position, column in enumerate(columns):
        made.add_column(column, justify="right" if position else "left", overflow="fold", no_wrap=position > 0)
    return made


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
