"""Data parallel training around a scheduled module, and sharding, which is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scheduler import CaptureError, minimum_budget, plan_of, schedule
from tests.scheduler.kinds.comparing import Wave, data, fresh

__all__ = ["fresh"]


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone: the reducer, its hooks and Dynamo's view of it are the real ones."""
    if not dist.is_available():
        pytest.skip("torch is built without distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), Wave(), nn.Linear(128, 32)) for _ in range(4)])


def wrapped(module):
    return DistributedDataParallel(module, bucket_cap_mb=0.05)  # several buckets


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(steps):
        optimizer.zero_grad()
        model(data(64, 32, seed=i)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("schedule_first", [True, False])
def test_data_parallel_around_a_scheduled_module(group, schedule_first):
    plain, model = made(), made()
    train(wrapped(plain))
    budget = minimum_budget(copy.deepcopy(model), args=(data(64, 32),)).bytes
    kwargs = {"budget_gb": f"{budget * 11 // 10}B", "costs": "roofline"}
    if schedule_first:
        parallel = wrapped(schedule(model, **kwargs))
    else:
        parallel = wrapped(model)
        schedule(model, **kwargs)
    train(parallel)
    assert not plan_of(model).is_noop
    assert len(plan_of(model).graph.ops) > 40  # the whole step: not a bucket of it
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, found)
        assert torch.equal(expected.grad, found.grad)


def test_the_wrapper_itself_is_refused(group):
    with pytest.raises(ValueError, match=r"give model\.module"):
        schedule(wrapped(made()), 1)
    with pytest.raises(ValueError, match="DataParallel"):
        schedule(nn.DataParallel(made()), 1)


def test_sharded_modules_are_refused(group):
    mesh = init_device_mesh("cpu", (1,))
    sharded = made()
    fully_shard(sharded[1], mesh=mesh)
    with pytest.raises(CaptureError, match="apply_modules"):
        schedule(sharded, 1)


@pytest.mark.parametrize("allow_graph_breaks", [True, False])
def test_sharding_a_scheduled_module_is_refused_by_its_first_call(group, allow_graph_breaks):
    model = schedule(made(), 1, costs="roofline", allow_graph_breaks=allow_graph_breaks)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(CaptureError, match="FSDP"):
        model(data(8, 32))


def test_code_of_which_nothing_can_be_captured_is_refused():
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        @torch._dynamo.disable
        def forward(self, x):
            return (x * self.weight).sum()

    model = schedule(Opaque(), 1, costs="roofline", allow_graph_breaks=True)
    with pytest.raises(CaptureError, match="no piece of Opaque"):
        model(torch.ones(4))
