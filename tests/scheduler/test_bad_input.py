"""What is refused, with which words, and that a refusal leaves everything as it was."""

from __future__ import annotations

import functools
import math
import re

import pytest
import torch
from torch import nn

from graphs.errors import CaptureError, CheckpointSchedulerError, UnsupportedModelError
from scheduler import Infeasible, plan, plan_of, schedule, unschedule
from tests.models import make_mlp
from tests.planning import UNLIMITED
from tests.training import same_tensor

small_mlp = functools.partial(make_mlp, batch=16, features=8, width=16, layers=2)


@pytest.fixture
def case():
    return small_mlp()


def fingerprint(model: nn.Module):
    """Everything a failed schedule() could have left behind."""
    modules = {
        path: {key: (dict(v) if isinstance(v, dict) else v) for key, v in vars(module).items()}
        for path, module in model.named_modules()
    }
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    return modules, tensors, torch.get_rng_state(), type(model)


def assert_unchanged(model: nn.Module, before) -> None:
    modules, tensors, generator, kind = before
    now, tensors_now, generator_now, kind_now = fingerprint(model)
    assert kind_now is kind
    assert torch.equal(generator, generator_now)
    assert all(same_tensor(tensors[k], tensors_now[k]) for k in tensors)
    assert now.keys() == modules.keys()
    for path, attributes in modules.items():
        assert now[path].keys() == attributes.keys(), path
        for key, value in attributes.items():
            same = now[path][key] is value or now[path][key] == value
            assert same, f"{path}.{key}"
    with pytest.raises(ValueError, match="not scheduled"):
        plan_of(model)


@pytest.mark.parametrize(
    "budget",
    [0, -1, -0.5, 1e-12, math.nan, math.inf, True, "abc", "", "7.5", "-3GB", "5 furlongs", [8], 1j, "0GB"],
    ids=repr,
)
def test_budgets_that_are_not_amounts_of_memory(case, budget):
    before = fingerprint(case.model)
    with pytest.raises(ValueError, match="GB"):  # the message says which forms are taken
        schedule(case.model, budget)
    assert_unchanged(case.model, before)
    with pytest.raises(ValueError, match="GB"):
        plan(case.model, budget, *case.make_batch(0))


def test_infeasible_says_what_can_be_done(case):
    before = fingerprint(case.model)
    args, kwargs = case.make_batch(0)
    with pytest.raises(Infeasible) as caught:
        schedule(case.model, "1B", sample_args=args, sample_kwargs=kwargs)
    assert_unchanged(case.model, before)
    error = caught.value
    static = sum(p.numel() * p.element_size() for p in case.model.parameters())
    assert error.static_bytes >= static
    assert error.floor_bytes is not None
    assert error.floor_lower_bound_bytes is not None
    assert error.static_bytes < error.floor_lower_bound_bytes <= error.floor_bytes
    assert error.binding_op
    message = str(error)
    assert error.binding_op in message
    assert "static" in message
    assert re.search(r"budget_gb=[\d.]+", message)


def test_the_floor_that_is_named_is_feasible_and_a_little_less_is_refused(case):
    args, kwargs = case.make_batch(0)
    with pytest.raises(Infeasible) as caught:
        schedule(case.model, "1B", sample_args=args, sample_kwargs=kwargs)
    floor, bound = caught.value.floor_bytes, caught.value.floor_lower_bound_bytes
    schedule(case.model, f"{floor}B", sample_args=args, sample_kwargs=kwargs)
    assert plan_of(case.model).peak_bytes <= floor
    unschedule(case.model)
    with pytest.raises(Infeasible):
        schedule(case.model, f"{bound - 1}B", sample_args=args, sample_kwargs=kwargs)


def test_infeasible_on_the_first_call_leaves_a_model_that_trains(case):
    model = schedule(case.model, "1B")
    args, kwargs = case.make_batch(0)
    with pytest.raises(Infeasible):
        model(*args, **kwargs)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(Infeasible):  # and says so each time
        model(*args, **kwargs)
    unschedule(model)
    case.loss_of(model(*args, **kwargs)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_samples_of_a_wrong_shape(case):
    before = fingerprint(case.model)
    with pytest.raises((CheckpointSchedulerError, RuntimeError)) as caught:
        schedule(case.model, UNLIMITED, sample_args=(torch.zeros(16, 9),))
    assert re.search(r"16\s*[x×,]\s*9", str(caught.value)), caught.value
    assert_unchanged(case.model, before)


def test_wrong_arguments(case):
    before = fingerprint(case.model)
    with pytest.raises((CheckpointSchedulerError, TypeError)):
        schedule(case.model, UNLIMITED, sample_args=(torch.zeros(16, 8),), sample_kwargs={"unknown": 1})
    assert_unchanged(case.model, before)


def test_a_call_of_wrong_shape_after_a_good_one(case):
    model = schedule(case.model, UNLIMITED)
    args, kwargs = case.make_batch(0)
    case.loss_of(model(*args, **kwargs)).backward()
    with pytest.raises((CheckpointSchedulerError, RuntimeError)):
        model(torch.randn(16, 9))
    case.loss_of(model(*args, **kwargs)).backward()  # still trains


def test_not_a_module():
    with pytest.raises(TypeError, match=r"Module"):
        schedule(lambda x: x, UNLIMITED)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        *(("solver", "no such solver"), ("costs", "guessed"), ("plan", "a path")),
        *(("time_limit_s", 0), ("time_limit_s", "60"), ("gap", -0.1), ("gap", None)),
    ],
)
def test_options_that_make_no_sense(case, keyword, value):
    before = fingerprint(case.model)
    with pytest.raises((ValueError, TypeError), match=keyword.replace("_s", "")):
        schedule(case.model, UNLIMITED, **{keyword: value})
    assert_unchanged(case.model, before)


@pytest.mark.parametrize(
    ("keyword", "value", "remedy"),
    [
        ("sample_args", torch.zeros(3), r"as \(batch,\)"),
        ("sample_args", 3, r"as \(batch,\)"),
        ("sample_kwargs", [1], "takes a dict"),
        ("optimizer", 3, r"torch\.optim\.Optimizer"),
    ],
)
def test_arguments_of_a_wrong_type(case, keyword, value, remedy):
    before = fingerprint(case.model)
    with pytest.raises(TypeError, match=f"{keyword} .*{remedy}"):
        schedule(case.model, 1, **{keyword: value})
    assert_unchanged(case.model, before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_samples_are_planned_for_and_not_run_where_gradients_are_off(mode):
    """``schedule(model, sample_args=...)`` moves nothing in whichever context it stands."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    x = torch.randn(16, 8)
    buffers, generator = [b.clone() for b in model.buffers()], torch.get_rng_state()
    with mode():
        planned = plan(model, None, (x,))
        schedule(model, UNLIMITED, sample_args=(x,), costs="roofline")
    assert plan_of(model).graph.fingerprint == planned.graph.fingerprint
    assert all(torch.equal(b, c) for b, c in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(generator, torch.get_rng_state())


def test_lazy_parameters_are_refused_until_they_are_made():
    """Their first call draws them where it comes to them, between the numbers of dropout: no capture does."""
    x = torch.randn(16, 8)
    model = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.5), nn.LazyLinear(8))
    for refused in (lambda: schedule(model, UNLIMITED), lambda: plan(model, None, (x,))):
        with pytest.raises(CaptureError, match=r"0\.weight.*under torch\.no_grad"):
            refused()
    late = schedule(nn.Sequential(nn.Linear(8, 8)), UNLIMITED, costs="roofline")
    late.append(nn.LazyLinear(8))
    with pytest.raises(CaptureError, match=r"1\.weight"):
        late(x)
    with torch.no_grad():
        model(x)
    schedule(model, UNLIMITED, costs="roofline")(x).sum().backward()
    assert plan_of(model) is not None


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 8))
    with pytest.raises(UnsupportedModelError, match=r"makes a sparse tensor.*sparse=False"):
        schedule(model, 1, sample_args=(torch.zeros(4, dtype=torch.long),))


def test_a_model_without_trainable_parameters_does_what_plain_does(case):
    case.model.requires_grad_(requires_grad=False).eval()
    args, kwargs = case.make_batch(0)
    expected = case.model(*args, **kwargs)
    model = schedule(case.model, UNLIMITED)
    output = model(*args, **kwargs)
    assert not output.requires_grad
    assert torch.equal(output, expected)


class Parameterless(nn.Module):
    def forward(self, x):
        return x.sin().cos()


def test_a_model_without_parameters_still_differentiates_its_input():
    model = schedule(Parameterless(), UNLIMITED)
    assert not model(torch.ones(3)).requires_grad
    x = torch.linspace(0, 1, 5, requires_grad=True)
    model(x).sum().backward()
    twin = x.detach().clone().requires_grad_()
    Parameterless()(twin).sum().backward()
    assert torch.equal(x.grad, twin.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_do_what_plain_does(case, mode):
    plain = small_mlp()
    model = schedule(case.model, UNLIMITED)
    args, kwargs = case.make_batch(0)
    for network in (plain.model, model):
        torch.manual_seed(0)
        with mode():
            output = network(*args, **kwargs)
        assert not output.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(plain.model.buffers(), model.buffers(), strict=True))
    # and training starts afterwards as if nothing had been called
    for network in (plain.model, model):
        torch.manual_seed(1)
        case.loss_of(network(*args, **kwargs)).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.model.parameters(), model.parameters(), strict=True))


class BreaksTheGraph(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        if y.sum().item() > 1e9:  # the line that breaks the graph
            y = y * 2
        return y.sum()


def test_a_graph_break_names_the_users_line():
    model = BreaksTheGraph()
    before = fingerprint(model)
    with pytest.raises(CaptureError) as caught:
        schedule(model, UNLIMITED, sample_args=(torch.zeros(2, 4),))
    message = str(caught.value)
    line = next(
        number
        for number, text in enumerate(open(__file__, encoding="utf-8"), 1)  # noqa: SIM115, PTH123
        if "# the line that breaks the graph" in text
    )
    assert "test_bad_input.py" in message
    assert str(line) in message
    assert_unchanged(model, before)


def test_a_graph_break_on_the_first_call():
    model = schedule(BreaksTheGraph(), UNLIMITED)
    with pytest.raises(CaptureError, match="test_bad_input"):
        model(torch.randn(2, 4))
    unschedule(model)
    model(torch.randn(2, 4)).backward()


class RaisesItsOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[0] == 3:
            raise KeyError("the model's own error")
        return self.linear(x).sum()


def test_the_models_own_error_reaches_the_caller():
    model = RaisesItsOwn()
    before = fingerprint(model)
    with pytest.raises(Exception, match="the model's own error"):
        schedule(model, UNLIMITED, sample_args=(torch.zeros(3, 4),))
    assert_unchanged(model, before)
    schedule(model, UNLIMITED, sample_args=(torch.zeros(2, 4),))
    model(torch.randn(2, 4)).backward()


def test_second_derivatives_are_refused_not_wrong(case):
    """Plain training can; a scheduled backward cannot be differentiated again and must say so."""
    model = schedule(case.model, UNLIMITED)
    args, kwargs = case.make_batch(0)
    loss = case.loss_of(model(*args, **kwargs))
    weights = list(model.parameters())

    def second_derivative():
        grads = torch.autograd.grad(loss, weights, create_graph=True)
        sum(g.square().sum() for g in grads).backward()

    with pytest.raises(RuntimeError, match=r"(?i)double|twice|create_graph|second"):
        second_derivative()


def test_backward_twice_raises_as_plain_does(case):
    model = schedule(case.model, UNLIMITED)
    args, kwargs = case.make_batch(0)
    loss = case.loss_of(model(*args, **kwargs))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_parameter_changed_between_forward_and_backward_raises_as_plain_does(case):
    for model in (small_mlp().model, schedule(case.model, UNLIMITED)):
        args, kwargs = case.make_batch(0)
        loss = case.loss_of(model(*args, **kwargs))
        with torch.no_grad():
            model.head.weight.add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()


def test_unschedule_of_a_plain_module_changes_nothing(case):
    before = fingerprint(case.model)
    assert unschedule(case.model) is case.model
    assert_unchanged(case.model, before)


def test_a_failed_call_does_not_poison_other_models(case):
    schedule(BreaksTheGraph(), UNLIMITED)
    broken = schedule(BreaksTheGraph(), UNLIMITED)
    with pytest.raises(CaptureError):
        broken(torch.randn(2, 4))
    model = schedule(case.model, UNLIMITED)
    args, kwargs = case.make_batch(0)
    case.loss_of(model(*args, **kwargs)).backward()
    assert all(p.grad is not None for p in model.parameters())
