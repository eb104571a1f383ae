"""What every benchmark needs: where it ran, tables on the terminal and in Markdown, timings taken side by side."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib.metadata
import os
import pathlib
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table as RichTable

RESULTS = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass
class Table:
    """Columns and rows of text; ``title`` says what is measured."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = dataclasses.field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Append a row, and show it at once on standard error: benchmarks run for minutes."""
        row = [str(cell) for cell in cells]
        if len(row) != len(self.columns):
            raise ValueError(f"{len(row)} cells for {len(self.columns)} columns")
        self.rows.append(row)
        print("  ".join(f"{c} {v}" for c, v in zip(self.columns, row, strict=True)), file=sys.stderr, flush=True)

    def show(self) -> None:
        """Print the table to standard output."""
        table = RichTable(title=self.title)
        for column in self.columns:
            table.add_column(column, justify="left" if column == self.columns[0] else "right")
        for row in self.rows:
            table.add_row(*row)
        Console(width=160).print(table)

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [f"### {self.title}", "", "| " + " | ".join(self.columns) + " |"]
        lines.append("|---|" + "---:|" * (len(self.columns) - 1))
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows]
        return "\n".join(lines)


def environment() -> dict[str, str]:
    """Versions, hardware and date, as every results file states them."""
    packages = ("torch", "ortools", "networkx", "numpy", "transformers")
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} absent")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "packages": ", ".join(versions),
        "processor": f"{_processor()}, {os.cpu_count()} cores, {memory / 1e9:.0f} GB of memory",
        "torch threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "command": " ".join(["python -m", _module_name(), *sys.argv[1:]]),
    }


def _module_name() -> str:
    return f"benchmarks.{pathlib.Path(sys.argv[0]).stem}"


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_results(name: str, title: str, tables: Sequence[Table], notes: Sequence[str] = ()) -> pathlib.Path:
    """Write ``benchmarks/results/<name>.md`` with the environment, the tables and the notes; return its path."""
    RESULTS.mkdir(exist_ok=True)
    lines = [f"# {title}", ""]
    lines += [f"- {key}: {value}" for key, value in environment().items()]
    for table in tables:
        lines += ["", table.markdown()]
    if notes:
        lines += ["", *[f"- {note}" for note in notes]]
    path = RESULTS / f"{name}.md"
    partial = path.with_suffix(".md.partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def interleave(
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 2,
    seconds: float = 600.0,
    processor_time: bool = False,
) -> dict[str, list[float]]:
    """Seconds of each step, taken in turns so that a busy machine slows all of them alike.

    The order within a round is reversed every other round. Stops after ``rounds``, or when ``seconds`` have passed and
    each step was timed at least three times. ``processor_time`` counts the time of this process's threads on the
    processor instead of wall time: what can be measured on a CPU that others use.
    """
    names = list(steps)
    for _ in range(warm_up):
        for name in names:
            steps[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    clock = time.process_time if processor_time else time.perf_counter
    start = time.perf_counter()
    for round_ in range(rounds):
        for name in names if round_ % 2 == 0 else reversed(names):
            _synchronize()
            begin = clock()
            steps[name]()
            _synchronize()
            times[name].append(clock() - begin)
        if round_ >= 2 and time.perf_counter() - start > seconds:
            break
    return times


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_ratio(times: Mapping[str, Sequence[float]], of: str, to: str) -> float:
    """Median over the rounds of one step's time divided by another's in the same round."""
    return statistics.median(a / b for a, b in zip(times[of], times[to], strict=True))


def ratio_interval(times: Mapping[str, Sequence[float]], of: str, to: str) -> tuple[float, float]:
    """95 % bootstrap interval of :func:`median_ratio`: what the rounds taken can tell apart."""
    ratios = [a / b for a, b in zip(times[of], times[to], strict=True)]
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def arguments(description: str | None, **defaults: object) -> argparse.Namespace:
    """Command-line options, one ``--name VALUE`` for each default, plus ``--threads`` and ``--no-write``."""
    parser = argparse.ArgumentParser(description=(description or "").strip().split("\n", maxsplit=1)[0])
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch's kernels")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    return chosen


def finish(failures: Sequence[str]) -> None:
    """End the process: 0 where nothing failed, else 1 with each failure on a line."""
    for failure in failures:
        print(f"FAILED {failure}", flush=True)
    sys.exit(1 if failures else 0)
