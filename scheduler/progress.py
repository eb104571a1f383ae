"""Bars on a terminal, and only there, for what takes longer than a moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_BETWEEN_DRAWINGS_S: Final = 0.1


@contextlib.contextmanager
def progress(message: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar of ``total`` steps on standard error, gone when the block ends. Call what is yielded after each step."""
    with _bar(auto_refresh=True) as bar:
        task = bar.add_task(message, total=total)
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def quiet_progress(message: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is drawn only when what is yielded is called, with the steps done and their total.

    Between the calls no thread draws, so that it does not disturb what is being timed.
    """
    drawn_at = 0.0
    with _bar(auto_refresh=False) as bar:
        task = bar.add_task(message, visible=False)

        def show(done: int, total: int) -> None:
            nonlocal drawn_at
            bar.update(task, completed=done, total=total, visible=True)
            if time.monotonic() >= drawn_at + _BETWEEN_DRAWINGS_S:
                bar.refresh()
                drawn_at = time.monotonic()

        yield show


def _bar(*, auto_refresh: bool) -> Progress:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        auto_refresh=auto_refresh,
        transient=True,
        disable=not console.is_terminal,
    )
