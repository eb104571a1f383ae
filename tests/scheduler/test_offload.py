"""Steps that copy to the host: equal to plain training whatever the copies' delays, in budget, and without a leak."""

import copy
import gc
import random
import threading
import time

import pytest
import torch
from torch import nn

from graphs.ir import StorageKind
from graphs.links import Link
from scheduler import Infeasible, Plan, graphs_of, measure_peak, minimum_budget, plan, schedule, unschedule
from scheduler.runtime.host_pool import HostMemoryError, HostPool
from scheduler.runtime.transfers import OFFLOAD, CudaTransfers, TransferError
from solvers.paging import least_paged_bytes, paged
from solvers.solution import Offload, Prefetch
from tests.scheduler.copies import delay, fail_copies, refuse_memory, simulate_cuda, transfers_behind
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


def test_the_step_that_makes_the_plan_is_within_the_budget():
    """The pool of host buffers is made within it, and is not the device's memory."""
    x = batch()
    planned = offloaded(make(), x, costs="profiled").plan
    model = schedule(make(), f"{planned.budget_bytes}B", plan=planned)
    peak = measure_peak(lambda: model(x).backward(), resident=(model, x)).peak_bytes
    assert model.plan.host_use.host_bytes > 0.1 * peak
    assert peak == pytest.approx(planned.peak_bytes, rel=0.01)


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
def test_below_what_any_recomputation_can_do_with(device):
    """Everything may run again; what the backward makes leaves too."""
    x = batch(device=device)
    plain = make(device, depth=2)
    options = {"costs": "profiled", "time_limit_s": 4}
    alone = minimum_budget(plain, (x,), **options)
    found = minimum_budget(plain, (x,), offload=True, link=FAST, **options)
    assert found.lower_bound_bytes <= found.bytes < 0.97 * alone.bytes
    model = schedule(copy.deepcopy(plain), f"{found.bytes}B", sample_args=(x,), offload=True, link=FAST, **options)
    for seed in range(2):
        assert same(step(plain, x, seed), step(model, x, seed))
    model.zero_grad()
    peak = measure_peak(lambda: model(x).backward(), resident=(model, x)).peak_bytes
    assert peak <= found.bytes
    assert peak == pytest.approx(model.plan.peak_bytes, rel=0.01)
    backward = graphs_of(model)[1].graph
    assert any(n.target is OFFLOAD for n in backward.nodes)


def test_a_budget_that_is_too_small_names_the_floors_with_copies_and_without():
    x = batch(64)
    once = {"never_recompute": ("aten.addmm", "aten.mm"), "time_limit_s": 1}
    with pytest.raises(Infeasible, match=r"with copies to the host, and .* without") as caught:
        offloaded(make(depth=1), x, share=0.0, **once)
    error = copy.copy(caught.value)  # by way of its pickle
    assert error.static_bytes < error.floor_lower_bound_bytes <= error.floor_bytes <= error.floor_without_copies_bytes


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


DELAYS = [range(20), pytest.param(range(1000, 1200), marks=pytest.mark.slow)]


@pytest.mark.parametrize("seeds", DELAYS, ids=len)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_random_delays_change_nothing(device, seeds):
    x = batch(64, device)
    plain = make(device, depth=2)
    model = offloaded(copy.deepcopy(plain), x)
    for seed in seeds:
        draw = random.Random(seed)
        delay(transfers_behind(model), lambda draw=draw: draw.choice((0.0, 0.0, 0.001, 0.003)) * draw.random())
        assert same(step(plain, x, seed), step(model, x, seed)), seed


@pytest.mark.parametrize("forgotten", ["arrive", "leave"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_wait_that_is_forgotten_is_found(device, forgotten, monkeypatch):
    """The test above would fail: without the wait, other bytes are read, or memory is over the plan's."""
    x = batch(64, device)
    plain = make(device, depth=2)
    model = offloaded(copy.deepcopy(plain), x)
    delay(transfers_behind(model), lambda: 0.02)
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
        {memory.data_ptr() for free in moving.pool.free.values() for memory in free} | set(moving._busy)
        for moving in (transfers_behind(model), transfers_behind(other))
    ]
    assert all(len(found) >= len([s for s in kept.steps if isinstance(s, Offload)]) for found in buffers)
    assert not buffers[0] & buffers[1]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_buffer_that_cannot_be_pinned_within_a_step_is_pageable(device, monkeypatch, caplog):
    """A second forward before the backward of the first needs buffers that no plan has foreseen."""
    x = batch(64, device)
    plain = make(device, depth=2, dropout=0.0)
    model = offloaded(copy.deepcopy(plain), x)
    monkeypatch.setattr(HostPool, "_memory", refuse_memory)
    for m in (plain, model):
        (m(x) + m(x)).backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    assert "pageable memory" in caplog.text


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_copy_that_fails_surfaces_with_the_tensor(device):
    x = batch(64, device)
    model = offloaded(make(device, depth=2), x)
    fail_copies(transfers_behind(model), "the cable is out")
    with pytest.raises(TransferError, match=r"(layers|norms|the model).*the cable is out"):
        step(model, x)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_refused_host_memory_plans_again_without(device, monkeypatch, caplog):
    x = batch(64, device)
    model = make(device, depth=2)
    plain = copy.deepcopy(model)
    monkeypatch.setattr(HostPool, "_memory", refuse_memory)
    offloaded(model, x, share=0.95, offload="auto")
    assert "planning again without a host tier" in caplog.text
    assert not any(isinstance(s, Offload) for s in model.plan.steps)
    assert same(step(plain, x), step(model, x))


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_refused_host_memory_ends_before_training_where_nothing_else_serves(device, monkeypatch):
    x = batch(64, device)
    plain = make(device, depth=2)
    saved = offloaded(copy.deepcopy(plain), x).plan
    monkeypatch.setattr(HostPool, "_memory", refuse_memory)
    with pytest.raises(HostMemoryError, match=r"bytes of host memory for .* of (layers|norms|the model).*refused"):
        schedule(copy.deepcopy(plain), plan=saved, sample_args=(x,))


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_backward_outlives_the_schedule_of_its_forward(device):
    x = batch(64, device)
    plain = make(device, depth=2, dropout=0.0)
    model = offloaded(copy.deepcopy(plain), x)
    loss = model(x)
    unschedule(model)
    gc.collect()
    loss.backward()
    plain(x).backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("forgotten", [None, "arrive", "_wait"])
def test_on_streams_that_do_nothing_before_they_must(forgotten, monkeypatch):
    """The CUDA side on simulated streams, as late as they may be: a wait that is forgotten is found."""
    simulate_cuda(monkeypatch)
    x = batch(64)
    plain = make(depth=2)
    model = offloaded(copy.deepcopy(plain), x)
    moving = transfers_behind(model)
    assert isinstance(moving, CudaTransfers)
    expected = step(plain, x)
    if forgotten is not None:
        monkeypatch.setattr(CudaTransfers, forgotten, lambda self, *_: None)
    if forgotten == "_wait":
        with pytest.raises(AssertionError, match="dropped while"):
            step(model, x)
        return
    assert same(step(model, x), expected) == (forgotten is None)
    if forgotten is None:
        for _ in range(2):  # without a backward
            loss = model(x)
            del loss
        assert same(step(plain, x, 2), step(model, x, 2)) is False  # running statistics have moved on
        assert moving.allocated_bytes == model.plan.host_use.host_bytes
        streams = moving._out, moving._back
        unschedule(model)
        del model, moving
        gc.collect()
        assert not any(stream.queued for stream in streams)


@pytest.mark.parametrize("streams", [False, True])
def test_host_buffers_end_with_the_schedule(streams, monkeypatch):
    """Dynamo keeps what it has compiled; the buffers of a module that is no longer scheduled it keeps not."""
    if streams:
        simulate_cuda(monkeypatch)
    x = batch(64)
    plain = make(depth=2)
    threads = threading.active_count()
    model = offloaded(copy.deepcopy(plain), x)
    moving = transfers_behind(model)
    before = [step(plain, x, seed) for seed in range(2)]
    assert same(step(model, x, 0), before[0])
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(x)  # its backward is still to come
    assert moving.allocated_bytes == model.plan.host_use.host_bytes > 0
    unschedule(model)
    gc.collect()
    assert moving.pool.free == {}
    loss.backward()
    assert torch.equal(loss.detach(), before[1][0])
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    del loss, model
    gc.collect()
    moving.retire()  # once more does no harm, and looks at what the backward has left
    assert moving.allocated_bytes == 0
    wait_until(lambda: threading.active_count() <= threads)


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


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


def test_auto_without_a_link_copies_nothing_and_says_so(caplog):
    model = schedule(make(depth=1), 1, sample_args=(batch(8),), costs="roofline", offload="auto")
    assert model.plan.link is None
    assert "state one, such as link='25GB/s'" in caplog.text


class Sums(nn.Module):
    """Values that several ops read: their gradients are summed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))

    def forward(self, x):
        a, b, c = self.layers
        y = a(x)
        y = y + b(y).tanh() + c(y).sigmoid() * y
        return (y + y.exp().clamp(max=3)).square().mean()


class Paging:
    """Executes every op once within the least memory that copies allow."""

    def solve(self, problem):
        order = range(len(problem.time_ns))
        return paged(problem.with_budget(least_paged_bytes(problem, order)), order)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_what_is_added_to_in_place_is_never_copied(device):
    """Its copy would hold the bytes from before the addition; all else that the backward makes may leave."""
    x = batch(64, device)
    torch.manual_seed(0)
    plain = Sums().to(device)
    options = {"costs": "roofline", "offload": True, "link": FAST, "solver": Paging()}
    model = schedule(copy.deepcopy(plain), 1, sample_args=(x,), **options)
    graph, steps = model.plan.graph, model.plan.graph_steps
    copied = [graph.storages[s.storage] for s in steps if isinstance(s, Offload)]
    written = [
        s for s in graph.storages if s.pinned.startswith("written to again") and s.kind is StorageKind.ACTIVATION
    ]
    assert written
    assert not any(storage.pinned for storage in copied)
    assert any(storage.producer >= graph.forward_ops for storage in copied)
    for seed in range(2):
        assert same(step(plain, x, seed), step(model, x, seed))
