"""The trace: every execution once, in time order, with the counters of the timeline."""

from __future__ import annotations

import json

from scheduler.export.perfetto import save_trace, to_trace
from scheduler.report.timeline import Category
from tests.scheduler.toy import MB, make_plan


def test_executions_and_counters():
    plan = make_plan({1, 2}, budget=205 * MB)
    events = to_trace(plan)["traceEvents"]
    runs = [e for e in events if e["ph"] == "X"]
    assert [e["args"]["op"] for e in runs] == [plan.graph.ops[s.op].name for s in plan.samples]
    assert sum(e["dur"] for e in runs) * 1000 == plan.step_time_ns
    ends = 0.0
    for event in runs:
        assert event["ts"] == ends
        ends = event["ts"] + event["dur"]
    again = [e["args"]["op"] for e in runs if e["cat"] == "recompute"]
    assert again == ["mm_2", "mm_1"]
    assert (
        len({e["tid"] for e in runs if e["cat"] == "recompute"} & {e["tid"] for e in runs if e["cat"] == "forward"})
        == 0
    )
    counters = [e for e in events if e["ph"] == "C"]
    assert max(sum(e["args"].values()) for e in counters) == plan.peak_bytes
    assert set(counters[0]["args"]) == {c.value for c in Category}


def test_file(tmp_path):
    plan = make_plan({1})
    path = tmp_path / "trace.json"
    path.write_text("old")
    save_trace(plan, path)
    assert json.loads(path.read_text()) == to_trace(plan)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
