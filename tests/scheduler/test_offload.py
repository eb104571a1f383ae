"""Steps that copy to the host: equal to plain training whatever the copies' delays, in budget, and without a leak."""

import copy
import random

import pytest
import torch
from torch import nn

from graphs.links import Link
from scheduler import Plan, graphs_of, measure_peak, minimum_budget, plan, schedule
from scheduler.runtime import transfers
from scheduler.runtime.transfers import CudaTransfers, HostMemoryError, Slot, ThreadTransfers, TransferError
from solvers.solution import Offload, Prefetch
from tests.scheduler.stepping import same, step

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
FAST = Link(1e12, 1e12, latency_ns=0, least_bytes=1024)


class Net(nn.Module):
    """Views, normalisation with running statistics, dropout, and a layout that is not contiguous."""

    def __init__(self, depth=4, width=48, dropout=0.2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))
        self.dropout = dropout

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = norm(layer(x).tanh())
            y = nn.functional.dropout(y, self.dropout, self.training)
            x = x + y.t().exp().t().chunk(2, dim=1)[0].repeat(1, 2)
        return x.square().mean()


def batch(rows=512, device="cpu"):
    return torch.randn(rows, 48, generator=torch.Generator().manual_seed(0)).to(device)


def make(device="cpu", **options):
    torch.manual_seed(0)
    return Net(**options).to(device)


_peaks = {}


def peak_of(model, x):
    """Static bytes and keep-all peak of a step; traced once for each size."""
    key = (len(model.layers), len(x), model.dropout, x.device)
    if key not in _peaks:
        whole = plan(copy.deepcopy(model), None, (x,))
        _peaks[key] = (whole.static_bytes, whole.keep_all_peak_bytes)
    return _peaks[key]


def offloaded(model, x, share=0.75, link=FAST, **options):
    """The model under less than it takes to keep all, with a link so fast that nothing is recomputed instead."""
    static, peak = peak_of(model, x)
    budget = f"{int(static + share * (peak - static))}B"
    options = {"costs": "roofline", "offload": True, "link": link} | options
    return schedule(model, budget, sample_args=(x,), **options)


def transfers_behind(model):
    """What moves the storages of the step that was scheduled last."""
    number = next(n.args[1] for n in graphs_of(model)[0].graph.nodes if n.target is transfers.OFFLOAD)
    return transfers._known[number]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_equal_to_plain_training_and_within_the_budget(device):
    x = batch(device=device)
    plain = make(device)
    model = offloaded(copy.deepcopy(plain), x, costs="profiled")
    assert any(isinstance(s, Offload) for s in model.plan.steps)
    assert any(isinstance(s, Prefetch) for s in model.plan.steps)
    for seed in range(3):
        assert same(step(plain, x, seed), step(model, x, seed))
    model.zero_grad()

    def once():
        model(x).backward()

    peak = measure_peak(once, resident=(model, x)).peak_bytes
    assert peak <= model.plan.budget_bytes
    assert peak == pytest.approx(model.plan.peak_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_fifth_below_what_recomputation_alone_can_do_with(device):
    x = batch(device=device)
    plain = make(device, depth=3)
    once = {"never_recompute": ("aten.addmm", "aten.mm"), "costs": "roofline"}
    alone = minimum_budget(plain, (x,), time_limit_s=5, **once)
    budget = int(0.8 * alone.bytes)
    assert minimum_budget(plain, (x,), time_limit_s=5, offload=True, link=FAST, **once).bytes <= budget
    model = schedule(copy.deepcopy(plain), f"{budget}B", sample_args=(x,), offload=True, link=FAST, **once)
    for seed in range(2):
        assert same(step(plain, x, seed), step(model, x, seed))
    model.zero_grad()
    assert measure_peak(lambda: model(x).backward(), resident=(model, x)).peak_bytes <= budget


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_accumulated_gradients_are_equal(device):
    x = batch(64, device)
    plain = make(device, depth=2)
    model = offloaded(copy.deepcopy(plain), x)
    for m in (plain, model):
        torch.manual_seed(3)
        for _ in range(3):
            m(x).backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


def delay(model, draw):
    """Have each copy of a model's steps begin late by what ``draw`` returns, in seconds."""
    moving = transfers_behind(model)
    if isinstance(moving, ThreadTransfers):
        moving.delay = draw
        return
    start = CudaTransfers._start

    def late(target, source, after, *, outward):
        with torch.cuda.stream(moving._out if outward else moving._back):
            torch.cuda._sleep(int(1e9 * draw()))  # cycles
        return start(moving, target, source, after, outward=outward)

    moving._start = late


DELAYS = [range(20), pytest.param(range(1000, 1200), marks=pytest.mark.slow)]


@pytest.mark.parametrize("seeds", DELAYS, ids=len)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_random_delays_change_nothing(device, seeds):
    x = batch(64, device)
    plain = make(device, depth=2)
    model = offloaded(copy.deepcopy(plain), x)
    for seed in seeds:
        draw = random.Random(seed)
        delay(model, lambda draw=draw: draw.choice((0.0, 0.0, 0.001, 0.003)) * draw.random())
        assert same(step(plain, x, seed), step(model, x, seed)), seed


@pytest.mark.parametrize("forgotten", ["arrive", "leave"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_wait_that_is_forgotten_is_found(device, forgotten, monkeypatch):
    """The test above would fail: without the wait, other bytes are read, or memory is over the plan's."""
    x = batch(64, device)
    plain = make(device, depth=2)
    model = offloaded(copy.deepcopy(plain), x)
    delay(model, lambda: 0.02)
    expected = step(plain, x)
    assert same(step(model, x), expected)
    model.zero_grad()  # existing gradients count, and have the step planned anew
    monkeypatch.setattr(type(transfers_behind(model)), forgotten, lambda self, host: None)
    if forgotten == "arrive":
        assert not same(step(model, x), expected)
    else:
        peak = measure_peak(lambda: model(x).backward(), resident=(model, x)).peak_bytes
        assert peak > model.plan.peak_bytes


@pytest.mark.parametrize("steps", [10, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_buffers_are_reused_and_do_not_grow(device, steps):
    x = batch(64, device)
    model = offloaded(make(device, depth=2), x)
    moving = transfers_behind(model)
    assert moving.allocated_bytes == model.plan.host_use.host_bytes > 0
    for seed in range(steps):
        step(model, x, seed)
    for _ in range(5):  # without a backward
        loss = model(x)
        del loss
    step(model, x)
    assert moving.allocated_bytes == model.plan.host_use.host_bytes


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_two_forwards_before_their_backwards_and_two_models_share_no_buffers(device):
    x, z = batch(64, device), batch(64, device) * 2
    plain = make(device, depth=2, dropout=0.0)
    model, other = (offloaded(copy.deepcopy(plain), x) for _ in range(2))
    kept = model.plan
    for m in (plain, model):
        first, second = m(x), m(z)
        first.backward()
        second.backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    loss = other(x)
    assert same(step(plain, x), step(model, x))
    loss.backward()
    buffers = [
        {memory.data_ptr() for free in moving._free.values() for memory in free} | set(moving._busy)
        for moving in (transfers_behind(model), transfers_behind(other))
    ]
    assert all(len(found) >= len([s for s in kept.steps if isinstance(s, Offload)]) for found in buffers)
    assert not buffers[0] & buffers[1]


def test_a_buffer_that_cannot_be_pinned_within_a_step_is_pageable(monkeypatch, caplog):
    """A second forward before the backward of the first needs buffers that no plan has foreseen."""
    x = batch(64)
    plain = make(depth=2, dropout=0.0)
    model = offloaded(copy.deepcopy(plain), x)
    monkeypatch.setattr(ThreadTransfers, "_host_memory", lambda self, size: torch.empty(-size))
    for m in (plain, model):
        (m(x) + m(x)).backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    assert "pageable memory" in caplog.text


def test_an_exception_in_the_worker_surfaces_with_the_tensor():
    x = batch(64)
    model = offloaded(make(depth=2), x)

    def fail():
        raise OSError("the cable is out")

    transfers_behind(model).delay = fail
    with pytest.raises(TransferError, match=r"(layers|norms|the model).*the cable is out"):
        step(model, x)


def refuse(self, size):
    raise RuntimeError(f"no {size} bytes of pinned memory")


def test_refused_host_memory_plans_again_without(monkeypatch, caplog):
    x = batch(64)
    model = make(depth=2)
    plain = copy.deepcopy(model)
    monkeypatch.setattr(ThreadTransfers, "_host_memory", refuse)
    offloaded(model, x, share=0.95, offload="auto")
    assert "planning again without a host tier" in caplog.text
    assert not any(isinstance(s, Offload) for s in model.plan.steps)
    assert same(step(plain, x), step(model, x))


def test_refused_host_memory_ends_before_training_where_nothing_else_serves(monkeypatch, tmp_path):
    x = batch(64)
    plain = make(depth=2)
    saved = offloaded(copy.deepcopy(plain), x).plan
    monkeypatch.setattr(ThreadTransfers, "_host_memory", refuse)
    with pytest.raises(HostMemoryError, match=r"bytes of host memory for .* of (layers|norms|the model).*refused"):
        schedule(copy.deepcopy(plain), plan=saved, sample_args=(x,))


def test_refused_host_memory_is_an_error_that_says_for_what(monkeypatch):
    monkeypatch.setattr(ThreadTransfers, "_host_memory", lambda self, size: torch.empty(-size))
    with pytest.raises(HostMemoryError, match=r"77 bytes of host memory for relu of h\.3"):
        ThreadTransfers([Slot(77, "relu of h.3")], FAST)


def test_a_plan_with_copies_survives_saving(tmp_path):
    x = batch(64)
    plain = make(depth=2)
    model = offloaded(copy.deepcopy(plain), x, host_budget_gb="1MB")
    model.plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == model.plan
    assert loaded.link == FAST
    assert loaded.problem.host_bytes == 10**6
    again = schedule(copy.deepcopy(plain), plan=loaded, sample_args=(x,))
    assert same(step(plain, x), step(again, x))
    assert "offloaded" in {d.action.value for d in loaded.decisions}
    assert loaded.summary()
    assert max(s.total_bytes for s in loaded.samples) == loaded.peak_bytes


def test_the_graphs_are_readable():
    model = offloaded(make(depth=2), batch(64))
    forward, backward = graphs_of(model)
    forward.graph.lint()
    backward.graph.lint()
    assert "# to the host: " in forward.code
    assert "checkpoint_scheduler.offload" in forward.code
    assert "# from the host: " in backward.code
    before = len(backward.graph.nodes)
    backward.graph.eliminate_dead_code()
    assert len(backward.graph.nodes) == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"offload": "sometimes"}, "offload='sometimes'"),
        ({"link": "25GB/s"}, "offload='auto' with them"),
        ({"offload": True, "dynamic": "bucket"}, "neither with"),
        ({"offload": "auto", "link": "25"}, "link='25'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        schedule(make(), 1, **options)


def test_offload_on_the_cpu_needs_a_stated_link():
    with pytest.raises(ValueError, match="state the link"):
        schedule(make(depth=1), 1, sample_args=(batch(8),), costs="roofline", offload=True)


def test_what_is_added_to_in_place_is_never_copied():
    """Its copy would hold the bytes from before the addition."""
    x = batch(64)
    model = offloaded(make(depth=2), x)
    plan = model.plan
    storages = [plan.graph.storages[s.storage] for s in plan.graph_steps if isinstance(s, Offload)]
    assert storages
    assert all(storage.producer < plan.graph.forward_ops for storage in storages)
