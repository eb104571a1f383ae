"""Reports of plans: the summary's figures and folding, the plot's lines and layers, sizes and times as text."""

from __future__ import annotations

import dataclasses
import sys

import matplotlib.figure
import numpy as np
import pytest

from graphs.constraints import Constraints
from scheduler.report.plots import plot_plan
from scheduler.report.text import ModuleRow, block_of, module_rows, peak_by_category
from scheduler.units import budget_that_covers, format_bytes, format_time
from solvers.simulate import simulate, with_frees
from solvers.solution import Compute
from tests.scheduler.toy import MB, make_plan


def test_sizes_and_times():
    sizes = {
        0: "0 B",
        999: "999 B",
        1000: "1.00 kB",
        351_249_000: "351.2 MB",
        7_516_192_768: "7.52 GB",
        -MB: "-1.00 MB",
    }
    assert {size: format_bytes(size) for size in sizes} == sizes
    times = {0: "0 ns", 12: "12 ns", 1500: "1.50 µs", 351_240_000: "351.2 ms", 1_250_000_000: "1.25 s"}
    assert {time: format_time(time) for time in times} == times


@pytest.mark.parametrize(
    ("size", "text"),
    [(1, "0.000000001"), (1_432_200, "0.00144"), (350 * MB, "0.35"), (350 * MB + 1, "0.351"), (8 * 10**9, "8")],
)
def test_a_budget_that_covers_is_never_too_small(size, text):
    assert budget_that_covers(size) == text


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("", ""),
        ("lm_head", "lm_head"),
        ("transformer.wte", "transformer.wte"),
        ("encoder.stem.conv", "encoder.stem"),
        ("transformer.h.11.attn.c_proj", "transformer.h.11"),
        ("layer1.0.conv1", "layer1.0"),
        ("0", "0"),
        ("3.linear", "3"),
    ],
)
def test_blocks_of_modules(path, block):
    assert block_of(path) == block


def test_equal_blocks_fold_and_different_ones_do_not():
    plan = make_plan((0, 1, 2, 4), blocks=6)
    assert module_rows(plan) == (
        ModuleRow("wte", 1, 10 * MB, 0, 0, 0),
        ModuleRow("h.0–2,4 ×4", 4, 40 * MB, 40 * MB, 4, 4_000_000),
        ModuleRow("h.3", 1, 20 * MB, 0, 0, 0),
        ModuleRow("h.5", 1, 10 * MB, 0, 0, 0),  # its sum is read by nothing in the backward
        ModuleRow("head", 1, MB, 0, 0, 0),
    )


def test_numbers_at_the_root_fold_too():
    plan = make_plan()
    flat = dataclasses.replace(
        plan.graph,
        storages=tuple(
            dataclasses.replace(s, module_path=s.module_path.removeprefix("h.")) for s in plan.graph.storages
        ),
        ops=tuple(dataclasses.replace(o, module_path=o.module_path.removeprefix("h.")) for o in plan.graph.ops),
    )
    labels = [row.label for row in module_rows(dataclasses.replace(plan, graph=flat))]
    assert labels == ["wte", "0–2 ×3", "3", "head"]


def test_rows_add_up_to_the_plan():
    plan = make_plan((0, 2))
    rows = module_rows(plan)
    assert sum(r.added_ns for r in rows) == plan.added_time_ns
    assert sum(r.kept_bytes for r in rows) == sum(d.bytes for d in plan.decisions if d.action == "kept")
    assert sum(r.recomputed_bytes for r in rows) == 20 * MB


@pytest.mark.parametrize("recompute", [(), (0, 1, 2, 3)])
def test_categories_add_up_to_the_peak(recompute):
    plan = make_plan(recompute)
    parts = peak_by_category(plan)
    assert sum(parts.values()) == plan.peak_bytes
    assert parts["optimizer"] == 80 * MB
    assert "buffers" not in parts  # zeros are left out


def test_summary_states_the_figures():
    plan = make_plan((0, 1, 2), budget=300 * MB)
    text = plan.summary(width=400)
    for part in (
        "budget          300.0 MB",
        "predicted peak  191.0 MB = parameters 40.00 MB, optimizer 80.00 MB, inputs 1.00 MB",
        "keep-all peak   221.0 MB",
        "step time       32.00 ms = keep-all 29.00 ms + 3.00 ms added (overhead 10.34%)",
        "10.34% above the lower bound of 29.00 ms: the lower bound holds for every schedule that first executes",
        "feasible: The plan fits the budget",
        "Give the solver more time",
        "assumes         one thread",
        "│ h.0–2 ×3 │ 30.00 MB │   30.00 MB │             3 │    3.00 ms │",
        "│ total    │ 51.00 MB │   30.00 MB │             3 │    3.00 ms │",
    ):
        assert part in text
    assert "measured peak" not in text
    assert "\x1b" not in text


def test_summary_of_a_plan_that_recomputes_nothing():
    text = make_plan().summary(width=120)
    assert "nothing is recomputed" in text
    assert "budget          none" in text
    assert "optimal: The plan is within the requested gap of the least possible step time.\n" in text


def test_summary_names_the_constraints():
    assert "constraints" not in make_plan().summary(width=120)
    plan = make_plan(constraints=Constraints(keep=("h.[01]",), never_recompute=("mm",)))
    assert "constraints     keep='h.[01]', never_recompute='mm'\n" in plan.summary(width=120)


def test_summary_compares_the_measured_peak():
    plan = make_plan()
    plan.record_measured_peak(plan.peak_bytes * 101 // 100)
    assert "(+1.00% against the predicted one)" in plan.summary(width=120)


@pytest.mark.parametrize("width", [60, 100])
def test_summary_keeps_to_its_width(width):
    lines = make_plan((0, 1), budget=300 * MB).summary(width).splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)


def test_summary_shows_brackets_of_module_names_as_they_are():
    plan = make_plan(assumptions=("the [bold]batch[/bold] is as given",))
    assert "the [bold]batch[/bold] is as given" in plan.summary(width=120)


def test_plot_marks_what_it_says():
    plan = make_plan((0, 1), budget=300 * MB)
    axes = plan.plot()
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[-3:] == ["predicted peak", "budget", "forward | backward"]
    assert {"static", "kept activations", "recomputed activations"} < set(labels)
    heights = {line.get_label(): line.get_ydata()[0] for line in axes.lines[:2]}
    assert heights == {"predicted peak": plan.peak_bytes / 1e6, "budget": 300.0}
    assert axes.lines[2].get_xdata()[0] == plan.backward_start_ns / 1e6
    assert axes.get_xlim() == (0, plan.step_time_ns / 1e6)


def test_plot_reaches_the_peak_and_uses_the_axes_it_is_given():
    plan = make_plan()
    axes = matplotlib.figure.Figure().add_subplot()
    assert plot_plan(plan, axes) is axes
    top = max(np.max(c.get_paths()[0].vertices[:, 1]) for c in axes.collections)
    assert top == pytest.approx(plan.peak_bytes / 1e6)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "budget" not in labels
    assert "recomputed activations" not in labels


def test_plot_saves(tmp_path):
    make_plan((0,)).plot().figure.savefig(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'checkpoint-scheduler\[plot\]'"):
        make_plan().plot()


def test_what_only_helps_to_recompute_is_not_counted_as_recomputed():
    plan = make_plan((1,))
    order = [step.op for step in plan.steps if isinstance(step, Compute)]
    by_name = {op.name: op.index for op in plan.graph.ops}
    order.insert(order.index(by_name["dgelu_1"]), by_name["gelu_0"])  # its result is read by add_0, which follows
    order.insert(order.index(by_name["dgelu_1"]), by_name["add_0"])
    steps = with_frees(plan.problem, order)
    replay = simulate(plan.problem, steps)
    solution = dataclasses.replace(
        plan.solution, steps=steps, step_time_ns=replay.step_time_ns, peak_bytes=replay.peak_bytes
    )
    changed = dataclasses.replace(plan, solution=solution)
    assert {d.name for d in changed.decisions if d.action == "recomputed"} == {"gelu_0", "add_0", "mm_1"}
    rows = {row.label: row for row in module_rows(changed)}
    assert rows["h.0"].recomputed_bytes == 10 * MB  # add_0, which the backward reads; not gelu_0
    assert rows["h.0"].executions == 2
