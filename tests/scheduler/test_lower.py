"""Lowered graphs: order, several executions, replay, snapshots, comments, and what crosses to the backward."""

import copy

import pytest
import torch
from torch import fx, nn

from scheduler import Infeasible, graphs_of, schedule
from scheduler.lower import lower
from solvers.problem import Problem
from solvers.solution import Compute
from solvers.store_all import store_all_steps
from tests.capturing import capture_of


def chain(depth=6, dropout=0.0, norm=False):
    torch.manual_seed(0)
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(32, 32), *([nn.BatchNorm1d(32)] if norm else []), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(32, 1))


def batch(rows=256):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(0))


def at_the_floor(model, x):
    with pytest.raises(Infeasible) as raised:
        schedule(model, 1e-9, sample_args=(x,), costs="roofline", time_limit_s=1)
    budget = f"{int(raised.value.floor_bytes * 1.01)}B"
    return schedule(model, budget, sample_args=(x,), costs="roofline", time_limit_s=1)


def step(model, x):
    torch.manual_seed(1)
    model(x).pow(2).mean().backward()
    return [p.grad for p in model.parameters()], [b.clone() for b in model.buffers()], torch.rand(3)


@pytest.mark.parametrize(("dropout", "norm"), [(0.0, False), (0.3, False), (0.3, True)])
def test_recomputing_gives_the_bits_of_the_plain_step(dropout, norm):
    plain = chain(dropout=dropout, norm=norm)
    scheduled = at_the_floor(copy.deepcopy(plain), batch())
    assert not scheduled.plan.is_noop
    for expected, found in zip(step(plain, batch()), step(scheduled, batch()), strict=True):
        pairs = [(expected, found)] if isinstance(expected, torch.Tensor) else zip(expected, found, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_recomputed_ops_are_commented_and_named():
    scheduled = at_the_floor(chain(dropout=0.3), batch())
    forward, backward = graphs_of(scheduled)
    assert isinstance(forward, fx.GraphModule)
    code = backward.code
    assert "# recomputed: " in code
    assert "_again" in code
    assert "# recomputed: " not in forward.code
    executions = [s.op for s in scheduled.plan.steps if isinstance(s, Compute)]
    assert code.count("# recomputed: ") == len(executions) - len(set(executions))
    assert scheduled.backward_graph is backward


def test_recomputed_dropout_is_replayed_from_a_recorded_state():
    scheduled = at_the_floor(chain(dropout=0.3), batch())
    plan = scheduled.plan
    executions = [s.op for s in plan.steps if isinstance(s, Compute)]
    drawn_again = {o.name for o in plan.graph.ops if "dropout" in o.target and executions.count(o.index) > 1}
    replays = [n for n in scheduled.backward_graph.graph.nodes if "replay" in str(n.target)]
    records = [n for n in scheduled.forward_graph.graph.nodes if "record_state" in str(n.target)]
    assert len(replays) >= len(drawn_again)
    assert len(records) == len(drawn_again)


def test_keeping_all_records_no_state_and_copies_no_buffer():
    capture = capture_of(chain(dropout=0.3, norm=True), batch())
    lowered = lower(capture, store_all_steps(Problem.from_graph(capture.graph, _no_costs(capture), 0, static_bytes=0)))
    targets = [str(n.target) for n in lowered.forward.graph.nodes]
    assert not any("record_state" in t for t in targets)
    assert not any("clone" in t for t in targets)
    assert "# recomputed" not in lowered.backward.code


def _no_costs(capture):
    from graphs.ir import Costs

    ops = len(capture.graph.ops)
    return Costs((0,) * ops, (0,) * ops, "cpu", "roofline")


def test_saved_values_are_storages_once_each():
    capture = capture_of(chain(), batch())
    lowered = lower(capture, store_all_steps(Problem.from_graph(capture.graph, _no_costs(capture), 0, static_bytes=0)))
    placeholders = [n for n in lowered.backward.graph.nodes if n.op == "placeholder"]
    saved = placeholders[: len(lowered.saved_names)]
    identities = [n.meta["val"].untyped_storage()._cdata for n in saved]
    assert len(set(identities)) == len(identities)
    assert all(n.target == n.name for n in placeholders)
    assert [n.name for n in placeholders[len(saved) :]] == ["tangents_1"]


def test_a_plan_that_never_starts_the_backward_is_refused():
    capture = capture_of(chain(depth=1), batch())
    with pytest.raises(AssertionError, match="never starts the backward"):
        lower(capture, [Compute(op) for op in range(capture.graph.forward_ops)])


def test_a_plan_that_reads_what_was_dropped_is_refused():
    capture = capture_of(chain(depth=2), batch())
    steps = store_all_steps(Problem.from_graph(capture.graph, _no_costs(capture), 0, static_bytes=0))
    with pytest.raises(AssertionError, match="resident"):
        lower(capture, [s for s in steps if s != Compute(0)])
