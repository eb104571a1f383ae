"""The snapshot: replayed, it gives the plan's peak; torch's own reader of snapshots reads it."""

from __future__ import annotations

import pickle

import pytest
from torch.cuda import _memory_viz

from scheduler.export.memory_snapshot import save_memory_snapshot, to_memory_snapshot
from tests.scheduler.toy import MB, make_plan


@pytest.fixture(params=[(), (1, 2)])
def plan(request):
    return make_plan(request.param, budget=230 * MB)


def test_replay_gives_the_peak_and_no_two_blocks_overlap(plan):
    snapshot = to_memory_snapshot(plan)
    (segment,) = snapshot["segments"]
    (events,) = snapshot["device_traces"]
    made = {e["addr"] for e in events if e["action"] == "alloc"}
    blocks = [b for b in segment["blocks"] if b["state"] == "active_allocated"]
    static = {b["address"]: b["requested_size"] for b in blocks if b["address"] not in made}
    assert sum(static.values()) == plan.static_bytes
    live = dict(static)
    most = sum(live.values())
    for event in events:
        start, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert all(start + size <= a or a + s <= start for a, s in live.items())
            live[start] = size
        elif event["action"] == "free_completed":
            assert live.pop(start) == size
        most = max(most, sum(live.values()))
    assert most == plan.peak_bytes
    assert live == {b["address"]: b["requested_size"] for b in blocks}
    times = [e["time_us"] for e in events]
    assert times == sorted(times)


def test_blocks_tile_the_segment(plan):
    (segment,) = to_memory_snapshot(plan)["segments"]
    position = segment["address"]
    for block in segment["blocks"]:
        assert block["address"] == position
        position += block["size"]
    assert position == segment["address"] + segment["total_size"]


def test_torch_reads_it(plan, tmp_path):
    path = tmp_path / "snapshot.pickle"
    save_memory_snapshot(plan, path)
    snapshot = pickle.loads(path.read_bytes())  # noqa: S301 - written by ourselves above
    frees = sum(e["action"] == "free_completed" for e in snapshot["device_traces"][0])
    assert _memory_viz.trace(snapshot).count("# free completed") == frees > 0
    assert _memory_viz.segsum(snapshot)
    assert "MemoryViz" in _memory_viz.trace_plot(snapshot)
