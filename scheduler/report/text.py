"""A plan as text: headline figures, then a table per module in which repeated layers are folded.

Modules are shown as blocks: a path is cut after its first number (``transformer.h.3``), or after two parts where it has
none. Blocks that differ only in that number and have the same figures share a row (``transformer.h.0–11 ×12``), however
they are spread; blocks whose figures differ get rows of their own.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphs.ir import TrainingGraph
from scheduler.decisions import Action
from scheduler.report.timeline import Category, Sample
from scheduler.units import format_bytes, format_time

if TYPE_CHECKING:
    from scheduler.plan import Plan

KeyT = TypeVar("KeyT", bound=Hashable)

_DEFAULT_WIDTH: Final = 100
_ROOT: Final = "(model)"
_BOUND_ASSUMES: Final = (
    "the lower bound holds for every schedule that first executes the ops in this order, "
    "with any number of recomputations"
)


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleRow:
    """One row of the table: one block, or several with the same figures.

    Attributes:
        label: name for a person, with ranges and count where blocks are folded.
        blocks: how many blocks the row stands for.
        kept_bytes: bytes of activations kept for the backward, of all blocks of the row together.
        recomputed_bytes: bytes of activations that plain training keeps and the plan produces again, likewise.
            Those that only help to produce them are left out, so that kept and recomputed can be added.
        executions: executions of ops beyond their first, likewise.
        added_ns: time of those executions, likewise.
        offloaded_bytes: bytes of activations that are copied to the host and back, likewise.

    """

    label: str
    blocks: int
    kept_bytes: int
    recomputed_bytes: int
    executions: int
    added_ns: int
    offloaded_bytes: int = 0


@dataclasses.dataclass(slots=True)
class _Figures:
    """Sums over one block."""

    kept_bytes: int = 0
    recomputed_bytes: int = 0
    executions: int = 0
    added_ns: int = 0
    offloaded_bytes: int = 0

    @property
    def key(self) -> tuple[int, int, int, int, int]:
        """Equal for blocks that fold."""
        return (self.kept_bytes, self.recomputed_bytes, self.executions, self.added_ns, self.offloaded_bytes)


def render_summary(plan: Plan, width: int | None = None) -> str:
    """The text that :meth:`scheduler.plan.Plan.summary` returns: no colours, no trailing blanks."""
    console = Console(
        file=io.StringIO(),
        width=width or _terminal_width(),
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(_headline(plan))
        console.print(_status(plan))
        console.print()
        console.print(_table(plan))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def peak_by_category(plan: Plan) -> dict[str, int]:
    """Bytes at the predicted peak by what they are for; the static ones by their own categories. Zeros are left out."""
    parts = dict(plan.static)
    peak = peak_sample(plan)
    if peak is not None:
        parts |= {c.value: size for c, size in peak.live.items() if c is not Category.STATIC}
    return {name: size for name, size in parts.items() if size}


def peak_sample(plan: Plan) -> Sample | None:
    """The first execution at which the most bytes are live; ``None`` for a graph without ops."""
    return max(plan.samples, key=lambda sample: sample.total_bytes, default=None)


def keep_all_peak_words(plan: Plan) -> str:
    """The keep-all peak, and where the plan runs the ops in another order than plain training, that of both."""
    peak, order = format_bytes(plan.keep_all_peak_bytes), plan.graph.order
    if not order:
        return peak
    return f"{peak} with ops in another order, {format_bytes(plan.plain_peak_bytes)} in that of plain training"


def module_rows(plan: Plan) -> tuple[ModuleRow, ...]:
    """The table's rows, in the order in which their blocks first run. Blocks without any figure are left out."""
    figures: dict[str, _Figures] = {block_of(op.module_path): _Figures() for op in plan.graph.ops}
    for decision in plan.decisions:
        block = figures.setdefault(block_of(decision.module_path), _Figures())
        if decision.action is Action.KEPT:
            block.kept_bytes += decision.bytes
        elif decision.action is Action.RECOMPUTED and kept_by_plain_training(plan.graph, decision.storage):
            block.recomputed_bytes += decision.bytes
        elif decision.action is Action.OFFLOADED:
            block.offloaded_bytes += decision.bytes
    for sample in plan.samples:
        if sample.again:
            block = figures[block_of(plan.graph.ops[sample.op].module_path)]
            block.executions += 1
            block.added_ns += sample.end_ns - sample.start_ns
    folded = fold_blocks({name: block.key for name, block in figures.items() if any(block.key)})
    return tuple(ModuleRow(label, count, *(figure * count for figure in key)) for label, count, key in folded)


def block_of(module_path: str) -> str:
    """The block a module belongs to: its path cut after the first number, or after two parts where it has none."""
    parts = module_path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), 1)
    return ".".join(parts[: number + 1])


def kept_by_plain_training(graph: TrainingGraph, storage: int) -> bool:
    """Whether the forward makes a storage that the backward reads."""
    producer, readers = graph.storages[storage].producer, graph.readers[storage]
    return producer is not None and producer < graph.forward_ops and bool(readers) and readers[-1] >= graph.forward_ops


def fold_blocks(figures: Mapping[str, KeyT]) -> list[tuple[str, int, KeyT]]:
    """Join blocks that differ only in their number and have the same figures: label, how many, figures of one."""
    groups: dict[tuple[str, KeyT], list[str]] = {}
    for name, key in figures.items():
        stem, _, last = name.rpartition(".")
        template = f"{stem}.#".lstrip(".") if last.isdigit() else name
        groups.setdefault((template, key), []).append(name)
    rows = []
    for (template, key), names in groups.items():
        label = names[0] or _ROOT
        if len(names) > 1:
            numbers = sorted(int(name.rpartition(".")[2]) for name in names)
            label = f"{template[:-1]}{_ranges(numbers)} ×{len(names)}"
        rows.append((label, len(names), key))
    return rows


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with neighbours joined: ``0–3,5,8–9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)


def _headline(plan: Plan) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in peak_by_category(plan).items())
    grid.add_row("budget", "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes))
    grid.add_row("predicted peak", f"{format_bytes(plan.peak_bytes)} = {parts}")
    if plan.measured_peak_bytes is not None:
        difference = plan.measured_peak_bytes / plan.peak_bytes - 1 if plan.peak_bytes else 0.0
        grid.add_row(
            "measured peak", f"{format_bytes(plan.measured_peak_bytes)} ({difference:+.2%} against the predicted one)"
        )
    grid.add_row("keep-all peak", keep_all_peak_words(plan))
    grid.add_row(
        "step time",
        f"{format_time(plan.step_time_ns)} = keep-all {format_time(plan.keep_all_time_ns)} + "
        f"{format_time(plan.added_time_ns)} added (overhead {plan.overhead:.2%})",
    )
    for label, sentence in plan.host_use.rows(plan):
        grid.add_row(label, Text(sentence))
    grid.add_row("gap", f"{plan.gap:.2%} above the lower bound of {format_time(plan.lower_bound_ns)}: {_BOUND_ASSUMES}")
    grid.add_row("costs", f"{plan.costs.source} for {plan.device}")
    if plan.constraints:
        grid.add_row("constraints", Text(", ".join(plan.constraints.labels())))
    for assumption in plan.assumptions:
        grid.add_row("assumes", Text(assumption))
    return grid


def _status(plan: Plan) -> Text:
    return Text(f"{plan.status.value}: {plan.status.sentence} {plan.status.remedy}".strip())


def _table(plan: Plan) -> Table:
    rows = module_rows(plan)
    table = Table(title=_title(plan), title_justify="left", title_style="", show_footer=bool(rows))
    table.add_column("module", footer="total", overflow="fold")
    table.add_column("kept", justify="right", footer=format_bytes(_total(r.kept_bytes for r in rows)), no_wrap=True)
    table.add_column(
        "recomputed", justify="right", footer=format_bytes(_total(r.recomputed_bytes for r in rows)), no_wrap=True
    )
    offloads = any(r.offloaded_bytes for r in rows)
    if offloads:
        offloaded = format_bytes(_total(r.offloaded_bytes for r in rows))
        table.add_column("offloaded", justify="right", footer=offloaded, no_wrap=True)
    table.add_column("ops run again", justify="right", footer=str(_total(r.executions for r in rows)), no_wrap=True)
    table.add_column("added time", justify="right", footer=format_time(_total(r.added_ns for r in rows)), no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row.label),
            format_bytes(row.kept_bytes),
            format_bytes(row.recomputed_bytes),
            *((format_bytes(row.offloaded_bytes),) if offloads else ()),
            str(row.executions),
            format_time(row.added_ns),
        )
    return table


def _title(plan: Plan) -> str:
    if plan.is_noop:
        return "Activations by module over the whole step: nothing is recomputed (folded rows are totals)"
    return "Activations by module over the whole step: not all are there at the peak (folded rows are totals)"


def _total(figures: Iterable[int]) -> int:
    return sum(figures)


def _terminal_width() -> int:
    """Columns of the terminal, or the default where output goes elsewhere."""
    console = Console()
    return console.width if console.is_terminal else _DEFAULT_WIDTH
