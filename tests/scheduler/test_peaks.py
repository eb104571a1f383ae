"""The measured peak of a scheduled step is within the budget, and the predicted one within 1 % of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scheduler import measure_peak, schedule
from tests.models import MODELS, make_gpt, make_mlp
from tests.planning import (
    TIME_LIMIT_S,
    UNLIMITED,
    assert_peak,
    exactly,
    measured_peak,
    model_range,
    range_of,
)
from tests.training import move_batch


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "name", [name if name in ("mlp", "gpt") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_keep_all_is_no_more_than_plain(name):
    """What a schedule without recompute needs is bounded by what plain training needs; its floor is below that."""
    assert model_range(name).floor_bytes < model_range(name).keep_all_peak_bytes
    case = MODELS[name]()
    assert model_range(name).keep_all_peak_bytes <= 1.01 * measured_peak(case.model, case)


def test_first_call_plans_and_stays_within_budget():
    """Without samples the plan is made in the first step, which holds the budget as well."""
    case = make_gpt()
    budget = model_range("gpt").at(0.25)
    model = schedule(case.model, budget, time_limit_s=TIME_LIMIT_S)
    measured = measured_peak(model, case)
    assert_peak(measured, model.plan)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
@pytest.mark.parametrize("allocated", [False, True], ids=["before its first step", "after a step"])
def test_optimizer_state_is_part_of_the_budget(kind, allocated):
    """State counts before it is allocated: the budget then still holds in the steps after it is."""
    case = make_gpt()
    parameters = case.model.parameters()
    optimizer = (
        torch.optim.SGD(parameters, lr=1e-3, momentum=0.9) if kind == "momentum" else torch.optim.Adam(parameters)
    )
    if allocated:
        measured_peak(case.model, case)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    batch = case.make_batch(0)
    copies = 1 if kind == "momentum" else 2
    size = sum(p.numel() * p.element_size() for p in case.model.parameters())
    plain = model_range("gpt")
    budget = exactly((plain.floor_bytes + plain.keep_all_peak_bytes) // 2 + copies * size + 64 * 1024)
    model = schedule(
        case.model,
        budget,
        sample_args=batch[0],
        sample_kwargs=batch[1],
        optimizer=optimizer,
        time_limit_s=TIME_LIMIT_S,
    )
    assert model.plan.static_bytes >= (1 + copies) * size
    for step in range(3):
        measured = measured_peak(model, case, resident=(optimizer,))
        if step > 0 or allocated:
            assert_peak(measured, model.plan)
        else:
            assert measured <= model.plan.budget_bytes
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_planning_leaves_the_optimizer_as_it_was():
    case = make_mlp()
    optimizer = torch.optim.Adam(case.model.parameters())
    before = {name: p.detach().clone() for name, p in case.model.named_parameters()}
    args, kwargs = case.make_batch(0)
    schedule(case.model, UNLIMITED, sample_args=args, sample_kwargs=kwargs, optimizer=optimizer)
    assert not optimizer.state
    assert all(p.grad is None for p in case.model.parameters())
    assert all(torch.equal(before[name], p) for name, p in case.model.named_parameters())


def test_existing_gradients_count():
    """A micro-batch that accumulates has the gradients of the one before it on the device."""
    case = make_gpt()
    measured_peak(case.model, case)  # leaves gradients
    size = sum(p.numel() * p.element_size() for p in case.model.parameters())
    budget = exactly((model_range("gpt").floor_bytes + model_range("gpt").keep_all_peak_bytes) // 2 + size)
    args, kwargs = case.make_batch(0)
    model = schedule(case.model, budget, sample_args=args, sample_kwargs=kwargs, time_limit_s=TIME_LIMIT_S)
    assert model.plan.static_bytes >= 2 * size
    for seed in range(2):
        assert_peak(measured_peak(model, case, seed), model.plan)


def test_accumulation_planned_without_gradients_stays_within_budget():
    """The second micro-batch finds gradients that the first one left; the budget covers them all the same."""
    case = make_gpt()
    size = sum(p.numel() * p.element_size() for p in case.model.parameters())
    budget = (model_range("gpt").floor_bytes + model_range("gpt").keep_all_peak_bytes) // 2 + size
    model = schedule(case.model, exactly(budget), time_limit_s=TIME_LIMIT_S)
    for seed in range(3):
        assert measured_peak(model, case, seed) <= budget


def test_inputs_that_require_gradients():
    case = make_mlp()
    case = case._replace(make_batch=lambda seed: move_batch(make_mlp().make_batch(seed), "cpu", require_grad=True))
    range_ = range_of(case)
    args, kwargs = case.make_batch(0)
    model = schedule(case.model, range_.at(0.5), sample_args=args, sample_kwargs=kwargs, time_limit_s=TIME_LIMIT_S)
    case.model.zero_grad(set_to_none=True)
    assert_peak(measured_peak(model, case), model.plan)


class Returning(nn.Module):
    """Returns several tensors that look at one."""

    def __init__(self, outputs):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.outputs = nn.Linear(64, 64), outputs

    def forward(self, x):
        return self.outputs(self.layer(x).tanh() * 2)


@pytest.mark.parametrize(
    "outputs",
    [lambda z: (z.add_(1.0), z.add_(1.0)), lambda z: (z, z.view(64, 512), z.t())],
    ids=["written to in between", "views"],
)
def test_gradients_of_outputs_that_look_at_one_tensor(outputs):
    """Each output has a gradient of its own, and autograd sums them up as one of the tensor."""
    model = Returning(outputs)
    x = torch.randn(512, 64)
    weights = [torch.randn_like(o) for o in model(x)]
    schedule(model, "1GB")

    def step():
        held = model(x)
        sum((o * w).sum() for o, w in zip(held, weights, strict=True)).backward()

    peak = measure_peak(step, resident=(model, x, weights)).peak_bytes - sum(w.nbytes for w in weights)
    assert_peak(peak, model.plan)


def test_measure_peak_counts_what_is_resident_and_what_is_added():
    resident = torch.zeros(250_000)  # 1 MB
    peak = measure_peak(lambda: torch.zeros(500_000).add_(1).sum(), resident=[resident])
    assert peak.baseline_bytes == 1_000_000
    assert 2_000_000 <= peak.increase_bytes <= 2_010_000
    assert peak.peak_bytes == peak.baseline_bytes + peak.increase_bytes


def test_measure_peak_sees_a_plain_step_shrink_under_checkpoint():
    """A measure that sees no difference here would pass every test above."""
    case = make_mlp(layers=8)
    args, _ = case.make_batch(0)

    def step(forward):
        case.loss_of(forward(*args)).backward()
        case.model.zero_grad(set_to_none=True)

    plain = measure_peak(lambda: step(case.model), resident=case.model).peak_bytes
    from torch.utils.checkpoint import checkpoint_sequential

    body, head = case.model.body, case.model.head
    recomputed = measure_peak(
        lambda: step(lambda x: head(checkpoint_sequential(body, 4, x, use_reentrant=False))), resident=case.model
    ).peak_bytes
    assert recomputed < 0.8 * plain


def test_the_step_that_plans_holds_nothing_of_the_tracing():
    """A number that a tensor is multiplied by in place becomes a tensor, which the traced history would keep."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x):
            return self.inner(x).mul_(0.7).mul_(0.9).sin().mean()

    model, x = Scaled(), torch.zeros(512, 64)
    schedule(model, "100TB", costs="roofline")
    peaks = []
    for _ in range(2):
        model.zero_grad()
        peaks.append(measure_peak(lambda: model(x).backward(), resident=(model, x)).peak_bytes)
    assert peaks[0] == peaks[1]
