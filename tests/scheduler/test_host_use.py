"""What plans show of copies to the host: times and stalls by hand, in figures, text, picture and trace."""

from __future__ import annotations

import dataclasses

import pytest

from graphs.links import Link
from scheduler.cli.figures import plan_figures
from scheduler.decisions import Action
from scheduler.explain import explain
from scheduler.export.perfetto import to_trace
from scheduler.plan import Plan
from scheduler.report.host import Copy, Stall
from scheduler.report.html import page_data
from scheduler.report.text import module_rows
from solvers.simulate import simulate
from solvers.solution import Compute, Free, Offload, Prefetch
from solvers.validate import validate
from tests.scheduler.toy import MB, make_plan

LINK = Link(10e9, 2.5e9, latency_ns=0, name="toy link")  # 10 MB take 1 ms to the host and 4 ms back
MS = 1_000_000


def hosted_plan(*, back_before: str = "dgelu_0", budget: int = 215 * MB) -> Plan:
    """The toy step, with what ``mm_0`` makes on the host after its use; ``dgelu_0`` reads it again."""
    plan = make_plan(budget=budget)
    op = {op.name: op.index for op in plan.graph.ops}
    (moved,) = plan.problem.outputs[op["mm_0"]]
    steps = []
    for step in plan.steps:
        if step == Compute(op[back_before]):
            steps.append(Prefetch(moved))
        steps.append(step)
        if step == Compute(op["mm_0"]):
            steps.append(Offload(moved))
        if step == Compute(op["gelu_0"]):
            steps.append(Free(moved))
    plan = dataclasses.replace(plan, link=LINK, host_bytes=20 * MB)
    replay = simulate(plan.problem, steps)
    solution = dataclasses.replace(
        plan.solution, steps=tuple(steps), step_time_ns=replay.step_time_ns, peak_bytes=replay.peak_bytes
    )
    validate(plan.problem, solution)
    return dataclasses.replace(plan, solution=solution)


def test_copies_and_stalls_by_hand():
    plan = hosted_plan()
    moved = next(s.index for s in plan.graph.storages if s.name == "mm_0")
    use = plan.host_use
    start = 26 * MS  # of dgelu_0, the 27th op, were there no stall
    assert use.copies == (Copy(moved, True, 2 * MS, 3 * MS), Copy(moved, False, start, start + 4 * MS))
    assert use.stalls == (Stall(start, start + 4 * MS),)
    assert (use.host_bytes, use.out_bytes, use.back_bytes) == (10 * MB, 10 * MB, 10 * MB)
    assert (use.out_ns, use.back_ns, use.stall_ns) == (MS, 4 * MS, 4 * MS)
    assert not plan.is_noop


def test_samples_have_the_clock_of_the_replay():
    plan = hosted_plan()
    late = next(s for s in plan.samples if plan.graph.ops[s.op].name == "dgelu_0")
    assert (late.start_ns, late.end_ns) == (30 * MS, 31 * MS)
    assert plan.samples[-1].end_ns == plan.step_time_ns == 33 * MS
    assert [s.total_bytes for s in plan.samples] == [
        live for live, step in zip(plan.replay.live_bytes, plan.steps, strict=True) if isinstance(step, Compute)
    ]


def test_a_plan_without_copies_uses_no_host():
    use = make_plan((1,)).host_use
    assert (use.copies, use.stalls, use.stall_ns, use.host_bytes) == ((), (), 0, 0)
    assert "link" not in make_plan((1,)).summary(width=200)


def test_the_summary_states_host_and_link():
    plan = hosted_plan()
    text = plan.summary(width=200)
    assert "host            10.00 MB of 1 tensors, 20.00 MB allowed" in text
    assert "toy link, busy 3% of the step to the host and 12% back; stalls 4.00 ms (12.12%)" in text
    assert "offloaded" in text
    rows = {row.label: row for row in module_rows(plan)}
    assert {label: row.offloaded_bytes for label, row in rows.items() if row.offloaded_bytes} == {"h.0": 10 * MB}
    unused = dataclasses.replace(make_plan(budget=300 * MB), link=LINK, host_bytes=MB)
    assert "nothing is copied: with toy link no copy makes this step faster" in unused.summary(width=200)


def test_explain_says_when_and_what_waits():
    plan = hosted_plan()
    found = explain(plan, "h.0", price=False)
    (moved,) = [t for t in found.tensors if t.decision.action is Action.OFFLOADED]
    assert moved.decision.name == "mm_0"
    assert moved.copies == (
        "On the link to the host from 2.00 ms to 3.00 ms; back from 26.00 ms to 30.00 ms of the step; "
        "computation waits 4.00 ms for it."
    )
    assert moved.headroom_bytes == plan.budget_bytes - plan.peak_bytes
    assert "The budget binds" in moved.binding
    assert all(not t.copies for t in found.tensors if t is not moved)
    assert moved.copies in str(found)

    early = hosted_plan(back_before="dgelu_2")
    assert early.host_use.stalls == ()
    assert "computation does not wait for it" in str(explain(early, "h.0", price=False))
    assert "no stall" in early.summary(width=200)


def test_the_picture_shows_host_link_and_stalls(tmp_path):
    axes = hosted_plan().plot()
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"bytes on the host", "link, out", "link, back", "stalls", "offloaded activations"} <= set(labels)
    axes.figure.savefig(tmp_path / "plan.png")
    assert not {"bytes on the host", "stalls"} & {t.get_text() for t in make_plan().plot().get_legend().get_texts()}


def test_trace_page_and_figures_have_the_copies():
    plan = hosted_plan()
    copies = [e for e in to_trace(plan)["traceEvents"] if e.get("cat") in ("offload", "prefetch")]
    assert [(e["ts"], e["dur"], e["tid"]) for e in copies] == [(2000.0, 1000.0, 3), (26000.0, 4000.0, 4)]
    assert [row for row in page_data(plan)["headline"] if row[0] == "link"]
    figures = plan_figures(plan)
    assert figures["host"]["stall_ns"] == 4 * MS
    assert figures["host"]["budget_bytes"] == 20 * MB
    assert figures["link"]["name"] == "toy link"
    assert plan_figures(make_plan())["link"] is None


@pytest.mark.parametrize("width", [60, 100])
def test_the_summary_keeps_to_its_width(width):
    assert max(map(len, hosted_plan().summary(width).splitlines())) <= width
