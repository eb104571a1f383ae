"""The step log: percentiles, peaks, what counts, and the conditions."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from scheduler import measure_peak, watch
from scheduler.watch import StepLog, StepRecord


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(32, 8)

    def step():
        loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return model, x, step


def test_steps_are_run_once_and_recorded():
    model, x, step = make()
    calls = []
    log = watch(model, x, peak_every=3)
    results = [log.run(lambda: calls.append(1) or step()) for _ in range(7)]
    assert len(calls) == 7
    assert all(torch.equal(r, step()) for r in results)
    steps = log.log.steps
    assert [s.peak_bytes is not None for s in steps] == [True, False, False, True, False, False, True]
    assert [s.timed for s in steps] == [False, True, True, False, True, True, False]
    assert log.log.peak_bytes == measure_peak(step, resident=(model, x)).peak_bytes
    assert log.summary().startswith("7 steps: p50 ")


def test_percentiles():
    steps = tuple(StepRecord(t, None, timed=True) for t in range(100, 0, -1))
    log = StepLog({}, (StepRecord(10**9, 5, timed=False), *steps))
    assert [log.percentile_ns(p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert log.peak_bytes == 5
    assert StepLog({}, ()).percentile_ns(50) is None
    assert "none timed" in StepLog({}, ()).summary()


def test_saved_and_compared(tmp_path):
    model, x, step = make()
    log = watch(model, x)
    log.run(step)
    path = tmp_path / "steps.json"
    log.log.save(path)
    loaded = StepLog.load(path)
    assert loaded == log.log
    assert loaded.conditions["dtypes"] == ["float32"]
    assert loaded.differences(log.log) == {}
    other = StepLog(dict(loaded.conditions) | {"threads": 999, "started": "earlier"}, loaded.steps)
    assert loaded.differences(other) == {"threads": (loaded.conditions["threads"], 999)}
    path.write_text(json.dumps({"format": "something"}))
    with pytest.raises(ValueError, match="not a step log"):
        StepLog.load(path)
    with pytest.raises(ValueError, match="peak_every"):
        watch(model, peak_every=-1)
