"""Pictures of modules and of the trade-off: what is drawn is what the plan says."""

from __future__ import annotations

import dataclasses

import matplotlib.figure
import pytest

from scheduler.replan import sweep
from scheduler.report.text import module_rows
from tests.scheduler.cli.steps import keep_all_plan
from tests.scheduler.toy import MB, make_plan


def lengths(axes):
    """Right end of each row's bars, by label of the row."""
    labels = [text.get_text() for text in axes.get_yticklabels()]
    ends = dict.fromkeys(labels, 0.0)
    for container in axes.containers:
        for label, bar in zip(labels, container, strict=True):
            ends[label] = max(ends[label], bar.get_x() + bar.get_width())
    return ends


def test_modules_are_bars_of_their_bytes():
    plan = make_plan((0, 1, 2, 4), blocks=6, budget=300 * MB)
    axes = matplotlib.figure.Figure().add_subplot()
    assert plan.plot_modules(axes) is axes
    assert lengths(axes) == {
        row.label: pytest.approx((row.kept_bytes + row.recomputed_bytes) / 1e6) for row in module_rows(plan)
    }
    assert [text.get_text() for text in axes.texts] == ["+4.00 ms"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "kept activations",
        "recomputed activations",
    ]
    assert axes.yaxis_inverted()


def test_many_modules_share_a_bar():
    plan = make_plan(range(0, 60, 2), blocks=60)  # even and odd blocks fold into two rows each
    assert len(lengths(plan.plot_modules())) == len(module_rows(plan))
    costs = dataclasses.replace(plan.costs, time_ns=tuple(10**6 + i for i in range(len(plan.graph.ops))))
    uneven = dataclasses.replace(plan, costs=costs)
    rows = module_rows(uneven)
    assert len(rows) > 24
    drawn = lengths(uneven.plot_modules())
    assert len(drawn) == 24
    assert f"{len(rows) - 23} others" in drawn
    assert sum(drawn.values()) == pytest.approx(sum(r.kept_bytes + r.recomputed_bytes for r in rows) / 1e6)


def test_the_curve_goes_through_the_plans_at_the_baselines_peaks():
    plan = keep_all_plan()
    found = sweep(plan, count=3, time_limit_s=0.5)
    axes = plan.plot_sweep(sweep=found)
    curve = next(line for line in axes.lines if line.get_label() == "this plan")
    solved = dict(zip(curve.get_xdata(), curve.get_ydata(), strict=True))
    assert len(solved) == len(found.solved) > len(found.points)
    for baseline in found.baselines:
        marker = next(line for line in axes.lines if line.get_label() == baseline.name)
        (x,), (y,) = marker.get_xdata(), marker.get_ydata()
        assert solved[x] <= y + 1e-9
