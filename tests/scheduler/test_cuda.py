"""Numerics and peaks on a CUDA device; skipped where there is none."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from scheduler import Infeasible, measure_peak, schedule, unschedule
from tests.models import MODELS, Case
from tests.planning import Range
from tests.training import compare_training, move_batch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Large enough that the allocator's 512-byte blocks and cuBLAS's workspace are small against the activations.
SIZES = {
    "mlp": {"batch": 8192, "width": 512},
    "gpt": {"batch": 8, "context": 256, "width": 256, "vocabulary": 1024},
    "resnet50": {"batch": 16, "resolution": 96, "width": 32},
    "unet": {"batch": 4, "resolution": 128, "width": 16},
}
FRACTIONS = (0.0, 0.5, 1.0)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Kernels that add in a fixed order, so that two runs of the same ops agree to the bit."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    previous = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    yield
    torch.backends.cudnn.benchmark = previous
    torch.use_deterministic_algorithms(False)


def make_of(name: str):
    return functools.partial(MODELS[name], **SIZES[name])


@functools.cache
def cuda_range(name: str) -> Range:
    case = make_of(name)()
    case.model.cuda()
    args, kwargs = move_batch(case.make_batch(0), "cuda")
    with pytest.raises(Infeasible) as caught:
        schedule(case.model, "1B", sample_args=args, sample_kwargs=kwargs)
    schedule(case.model, "100TB", sample_args=args, sample_kwargs=kwargs)
    peak = case.model.plan.keep_all_peak_bytes
    unschedule(case.model)
    return Range(caught.value.floor_bytes, peak)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_training_on_cuda_is_bitwise_the_plain_one(name, fraction):
    budget = cuda_range(name).at(fraction)
    wrap = lambda model, args, kwargs: schedule(model, budget)  # noqa: E731
    assert compare_training(make_of(name), wrap, device="cuda") == []


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_peak_on_cuda_is_within_budget_and_as_predicted(name, fraction):
    case: Case = make_of(name)()
    model = case.model.cuda()
    batch = move_batch(case.make_batch(0), "cuda")
    schedule(model, cuda_range(name).at(fraction), sample_args=batch[0], sample_kwargs=batch[1])

    def step() -> Any:
        output = model(*batch[0], **batch[1])
        case.loss_of(output).backward()
        return output

    for _ in range(2):  # the first scheduled step included
        model.zero_grad(set_to_none=True)
        measured = measure_peak(step, resident=(model, batch)).peak_bytes
        assert measured <= model.plan.budget_bytes
        assert model.plan.peak_bytes == pytest.approx(measured, rel=0.01)


def test_budget_none_is_the_free_memory_of_the_device():
    case = make_of("mlp")()
    model = case.model.cuda()
    batch = move_batch(case.make_batch(0), "cuda")
    schedule(model, sample_args=batch[0], sample_kwargs=batch[1])
    assert 0 < model.plan.budget_bytes <= torch.cuda.get_device_properties(0).total_memory


def test_autocast_on_cuda():
    losses = []
    for bounded in (False, True):
        case = make_of("gpt")()
        model = case.model.cuda()
        batch = move_batch(case.make_batch(0), "cuda")
        if bounded:
            schedule(model, cuda_range("gpt").at(0.5))
        torch.manual_seed(0)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(*batch[0], **batch[1])
        loss.backward()
        losses.append((loss.detach(), [p.grad for p in model.parameters()]))
    (plain, plain_gradients), (scheduled, gradients) = losses
    assert torch.equal(plain, scheduled)
    assert all(torch.equal(a, b) for a, b in zip(plain_gradients, gradients, strict=True))
