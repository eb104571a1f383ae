"""Saved tensors of eager code on the host: plain training's gradients and errors, less memory, nothing left behind."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scheduler import measure_peak, offload_activations, schedule
from scheduler.eager_offload import COPIES_UNDER_WAY, OffloadHandle
from scheduler.runtime.host_pool import HostPool
from scheduler.runtime.transfers import CudaTransfers, TransferError
from tests.scheduler.copies import delay, fail_copies, refuse_memory, simulate_cuda
from tests.scheduler.stepping import same, step

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
KB = 1000


class Net(nn.Module):
    """Dropout, running statistics, views, a storage saved twice, and a branch on data that no graph captures."""

    def __init__(self, depth=3, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = nn.functional.dropout(norm(layer(x).tanh()), 0.2, self.training)
            if y.detach().sum() > 0:
                y = y * y.flip(1)
            x = x + (y.t().exp() * y.t()).t().chunk(2, dim=1)[0].repeat(1, 2)
        return x.square().mean()


def make(device="cpu", **options):
    torch.manual_seed(0)
    return Net(**options).to(device)


def batch(rows=128, device="cpu"):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(0)).to(device)


def offloaded(model, **options):
    on_cpu = next(model.parameters()).device.type == "cpu"
    return offload_activations(model, **{"least_bytes": KB, "link": "20GB/s" if on_cpu else None} | options)


def copied(handle):
    """Record the labels of what is copied out."""
    labels = []
    start = handle.transfers.offload

    def offload(x, slot):
        labels.append(slot.label)
        return start(x, slot)

    handle.transfers.offload = offload
    return labels


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("rows", [128, 4])
def test_equal_to_plain_training(device, rows):
    x = batch(rows, device=device)
    plain = make(device)
    model = copy.deepcopy(plain)
    labels = copied(offloaded(model, least_bytes=1))
    for seed in range(3):
        assert same(step(plain, x, seed), step(model, x, seed))
    assert len(labels) > 3 * 10
    for m in (plain, model):  # accumulated
        torch.manual_seed(3)
        for _ in range(3):
            m(x).backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(1000, 1200), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_random_delays_change_nothing(device, seeds):
    x = batch(device=device)
    plain = make(device)
    model = copy.deepcopy(plain)
    handle = offloaded(model)
    for seed in seeds:
        draw = random.Random(seed)
        delay(handle.transfers, lambda draw=draw: draw.choice((0.0, 0.0, 0.001, 0.003)) * draw.random())
        assert same(step(plain, x, seed), step(model, x, seed)), seed


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_wait_that_is_forgotten_is_found(device, monkeypatch):
    """The tests above would fail: what is fetched would be read before it has arrived."""
    x = batch(4096, device=device)
    plain = make(device)
    model = copy.deepcopy(plain)
    handle = offloaded(model)

    def gradients(m):
        step(m, x)
        return [p.grad for p in m.parameters()]

    expected = gradients(plain)
    delay(handle.transfers, lambda: 0.005)
    for _ in range(2):
        assert same(gradients(model), expected)
    monkeypatch.setattr(type(handle.transfers), "arrive", lambda self, host: None)
    assert not same(gradients(model), expected)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_less_of_the_device_is_taken(device):
    x = batch(2048, device=device)
    plain = make(device, depth=8)
    model = copy.deepcopy(plain)
    offloaded(model)
    step(model, x)  # has the host buffers allocated
    peaks = [measure_peak(lambda m=m: m(x).backward(), resident=(m, x)).increase_bytes for m in (plain, model)]
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("steps", [10, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_buffers_are_reused_and_do_not_grow(device, steps):
    x = batch(device=device)
    model = make(device)
    handle = offloaded(model)
    step(model, x, 0)
    before = handle.transfers.allocated_bytes
    for _ in range(steps):
        step(model, x, 0)
        assert handle.transfers.allocated_bytes == before


def test_a_storage_goes_once_and_what_is_there_anyway_stays():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.inner = nn.Linear(64, 64)

        def forward(self, x, scale):
            y = self.inner(x * scale @ self.weight)
            z = y.view(-1, 4, 16)
            return (y * z.transpose(1, 2).reshape(-1, 64) * z.flatten(1)).sum()

    model, x, scale = Shared(), torch.randn(64, 64), torch.randn(64, 64)
    handle = offloaded(model)
    labels = copied(handle)
    model(x, scale=scale).backward()
    # x * scale, that times the weight, y (twice, once as a view), the transposed y, y times that; no weight, no input
    assert sorted(labels) == ["a saved tensor of inner", *["a saved tensor of the model"] * 4]
    labels.clear()
    handle.least_bytes = 64 * 64 * 4 + 1
    model(x, scale=scale).backward()
    assert labels == []


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_backward_twice_and_gradients_of_gradients(device):
    x = batch(64, device)
    plain = make(device)
    model = copy.deepcopy(plain)
    offloaded(model)
    results = []
    for m in (plain, model):
        torch.manual_seed(0)
        loss = m(x)
        first = torch.autograd.grad(loss, list(m.parameters()), retain_graph=True)
        again = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
        norm = sum(g.square().sum() for g in again)
        results.append([*first, *again, *torch.autograd.grad(norm, list(m.parameters()), allow_unused=True)])
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


class Changes(nn.Module):
    """Changes what its exponential has saved, or its weight, before the backward."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        y = (self.weight * x).exp()
        y.add_(1)
        return y.sum()


@pytest.mark.parametrize("size", [10, 1000])
def test_what_was_changed_in_place_is_refused_as_in_plain_training(size):
    model = Changes(size)
    plain = copy.deepcopy(model)
    labels = copied(offloaded(model))
    for m in (plain, model):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            m(torch.ones(size)).backward()
    assert bool(labels) == (size == 1000)
    linear = nn.Linear(20, 20)
    offloaded(linear)
    x = torch.ones(20, 20, requires_grad=True)
    loss = linear(x).sum()
    with torch.no_grad():
        linear.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_forward_without_a_backward_gives_its_buffers_back(device):
    x = batch(device=device)
    model = make(device)
    handle = offloaded(model)
    step(model, x, 0)
    before = handle.transfers.allocated_bytes
    for _ in range(3):
        torch.manual_seed(0)
        loss = model(x)
        held = len(handle.transfers._busy)
        del loss
    handle._let_go(0)
    handle.transfers._collect()
    assert held > 5
    assert not handle.transfers._busy
    assert handle.transfers.allocated_bytes <= 2 * before  # a branch on data may save more


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_two_forwards_before_their_backwards(device):
    x, z = batch(device=device), batch(device=device) * 2
    plain = make(device)
    model = copy.deepcopy(plain)
    offloaded(model)
    for m in (plain, model):
        torch.manual_seed(0)
        first, second = m(x), m(z)
        first.backward()
        second.backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_two_models_share_no_buffers(device):
    x = batch(device=device)
    plain = make(device)
    one, other = copy.deepcopy(plain), copy.deepcopy(plain)
    first, second = offloaded(one), offloaded(other)
    loss, expected = other(x), step(plain, x, 0)
    assert same(step(one, x, 0), expected)
    addresses = [set(h.transfers._busy) for h in (first, second)]
    assert all(addresses)
    assert not addresses[0] & addresses[1]
    loss.backward()


def test_what_the_host_has_no_room_for_stays(monkeypatch, caplog):
    x = batch()
    plain = make()
    model = copy.deepcopy(plain)
    handle = offloaded(model, host_budget_gb="40kB")
    assert same(step(plain, x), step(model, x))
    assert 0 < handle.transfers.allocated_bytes <= 40 * KB
    monkeypatch.setattr(HostPool, "_memory", refuse_memory)
    refused = copy.deepcopy(plain)
    handle = offloaded(refused)
    assert same(step(plain, x), step(refused, x))
    assert "pageable memory" in caplog.text
    monkeypatch.setattr("torch.empty", refuse_bytes(torch.empty))
    none = copy.deepcopy(plain)
    handle = offloaded(none)
    expected = step(plain, x)
    assert same(expected, step(none, x))
    assert handle.transfers.allocated_bytes == 0
    assert caplog.text.count("stays on the device") == 1


def refuse_bytes(empty):
    def refusing(*size, **options):
        if options.get("dtype") is torch.uint8 and size != (0,):
            raise RuntimeError("no memory")
        return empty(*size, **options)

    return refusing


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_copy_that_fails_surfaces_with_the_module(device):
    model = make(device)
    fail_copies(offloaded(model).transfers, "the cable is out")
    with pytest.raises(TransferError, match=r"saved tensor of (layers|norms|the model).*the cable is out"):
        step(model, batch(device=device))


@pytest.mark.parametrize("forgotten", [None, "arrive", "_wait"])
def test_on_streams_that_do_nothing_before_they_must(forgotten, monkeypatch):
    """The CUDA side on simulated streams, as late as they may be: a wait that is forgotten is found."""
    simulate_cuda(monkeypatch)
    x = batch()
    plain = make()
    model = copy.deepcopy(plain)
    transfers = CudaTransfers((), torch.device("cpu"))
    handle = OffloadHandle(model, transfers, transfers.device, least_bytes=KB, limit_bytes=10**9)
    labels = copied(handle)
    if forgotten is not None:
        monkeypatch.setattr(CudaTransfers, forgotten, lambda self, *_: None)
    expected = step(plain, x)
    if forgotten == "_wait":
        with pytest.raises(AssertionError, match="dropped while"):
            step(model, x)
    else:
        assert same(step(model, x), expected) == (forgotten is None)
    assert labels


def test_an_exception_in_the_forward_leaves_nothing_behind():
    plain = make()
    model = copy.deepcopy(plain)
    handle = offloaded(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.ones(4, 7))
    assert handle._inside == []
    assert handle._contexts == []
    assert same(step(plain, batch()), step(model, batch()))


def test_checkpoint_inside_and_recursion():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make()

        def forward(self, x, depth=1):
            if depth:
                return self(x, depth=depth - 1) + checkpoint(self.net, x, use_reentrant=False)
            return self.net(x)

    plain = Inside()
    model = copy.deepcopy(plain)
    assert same(step(plain, batch()), step(model, batch()))
    offloaded(model)
    assert same(step(plain, batch()), step(model, batch()))


def test_removing_and_copying():
    x = batch()
    plain = make()
    model = copy.deepcopy(plain)
    with offloaded(model) as handle:
        labels = copied(handle)
        twin = copy.deepcopy(model)
        assert same(step(plain, x), step(twin, x))
        torch.manual_seed(5)
        loss = model(x)
    assert labels
    labels.clear()
    loss.backward()  # of a forward before the end
    torch.manual_seed(5)
    plain.zero_grad()
    plain(x).backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    assert same(step(copy.deepcopy(model), x), step(model, x))
    assert labels == []
    offloaded(model).remove()


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"link": None}, ValueError, "state the link"),
        ({"link": "fast"}, ValueError, "link='fast'"),
        ({"least_bytes": -1}, ValueError, "least_bytes=-1"),
        ({"host_budget_gb": 0}, ValueError, "positive"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, error, reason):
    with pytest.raises(error, match=reason):
        offloaded(make(), **options)


def test_modules_that_cannot_be_meant_are_refused():
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, and got int"):
        offload_activations(3)
    model = nn.Linear(4, 4)
    offloaded(model)
    with pytest.raises(ValueError, match="offloads already"):
        offloaded(model)
    scheduled = schedule(nn.Linear(4, 4), 1)
    with pytest.raises(ValueError, match="is scheduled"):
        offloaded(scheduled)
    mixed = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, device="meta")])
    with pytest.raises(ValueError, match="several devices"):
        offloaded(mixed, link="1GB/s")


def test_few_copies_are_under_way():
    model = make(depth=6)
    handle = offloaded(model, link="1MB/s", least_bytes=8 * KB)
    handle.transfers.link = handle.transfers.link.__class__(1e9, 1e9)
    most = 0
    start = handle.transfers.offload

    def offload(x, slot):
        nonlocal most
        host = start(x, slot)
        most = max(most, sum(c.out.tensors is not None for c in handle.transfers._busy.values()))
        return host

    handle.transfers.offload = offload
    handle.transfers.delay = lambda: 0.002
    step(model, batch())
    assert most == COPIES_UNDER_WAY + 1
