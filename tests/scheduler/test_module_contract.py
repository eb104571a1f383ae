"""A scheduled module is the module it was: same object, names, copies, optimizers, averages; and it can be restored."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
from torch import nn

from scheduler import Plan, plan_of, schedule, unschedule
from scheduler.errors import PlanMismatch
from tests.models import make_gpt, make_mlp
from tests.planning import TIME_LIMIT_S, UNLIMITED, range_of
from tests.training import same_tensor

small_mlp = functools.partial(make_mlp, batch=64, features=8, width=16, layers=3)


@functools.cache
def half_budget() -> str:
    """A budget at which the small MLP recomputes."""
    return range_of(small_mlp()).at(0.5)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def case():
    return small_mlp()


def scheduled(case, budget=None, **options):
    args, kwargs = case.make_batch(0)
    options = {"time_limit_s": TIME_LIMIT_S, **options}
    return schedule(case.model, budget or half_budget(), sample_args=args, sample_kwargs=kwargs, **options)


def backward(model, case, seed=0):
    args, kwargs = case.make_batch(seed)
    torch.manual_seed(100 + seed)
    loss = case.loss_of(model(*args, **kwargs))
    loss.backward()
    return loss.detach()


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not same_tensor(a[name], b[name])] == []


def state_of(model: nn.Module):
    """All that schedule() could have changed on a module, by identity where that is what matters."""
    return {
        path: {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for path, module in model.named_modules()
    }


def test_returns_the_same_object_with_its_class_and_names(case):
    model = case.model
    before = (type(model), list(model.state_dict()), [n for n, _ in model.named_modules()])
    parameters = dict(model.named_parameters())
    assert scheduled(case) is model
    assert (type(model), list(model.state_dict()), [n for n, _ in model.named_modules()]) == before
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    backward(model, case)
    assert (type(model), list(model.state_dict()), [n for n, _ in model.named_modules()]) == before


def test_methods_and_attributes_still_work(case):
    model = scheduled(case)
    assert model.body[0].in_features == 8
    model.eval()
    assert not model.body[3].training
    model.train()
    assert repr(model) == repr(small_mlp().model)
    model.requires_grad_(requires_grad=True)


def test_plan_and_graphs_are_attributes(case):
    model = scheduled(case)
    assert isinstance(model.plan, Plan)
    assert plan_of(model) is model.plan
    for graph in (model.forward_graph, model.backward_graph):
        assert isinstance(graph, torch.fx.GraphModule)
        graph.graph.lint()
    assert not model.plan.is_noop
    assert "recompute" in model.backward_graph.print_readable(print_output=False).lower()


def test_plan_of_a_class_that_has_a_plan_of_its_own():
    class Planner(nn.Module):
        plan = "the class's own"

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).tanh().sum()

    model = schedule(Planner(), UNLIMITED, sample_args=(torch.ones(2, 4),))
    assert model.plan == "the class's own"
    assert isinstance(plan_of(model), Plan)


def test_no_plan_before_the_first_call(case):
    model = schedule(case.model, half_budget(), time_limit_s=TIME_LIMIT_S)
    assert plan_of(model) is None
    backward(model, case)
    assert isinstance(plan_of(model), Plan)


def test_unschedule_restores_the_module(case):
    before = state_of(case.model)
    model = scheduled(case)
    backward(model, case)
    model.zero_grad(set_to_none=True)
    assert unschedule(model) is model
    after = state_of(model)
    assert after.keys() == before.keys()
    for path, attributes in before.items():
        assert after[path].keys() == attributes.keys()
    assert not hasattr(model, "forward_graph")
    assert model._compiled_call_impl is None
    twin = small_mlp()
    twin.model.load_state_dict(model.state_dict())
    assert torch.equal(backward(model, case, 1), backward(twin.model, twin, 1))
    assert_same(gradients(model), gradients(twin.model))


def test_schedule_again_replaces_the_plan(case):
    model = scheduled(case)
    recomputing = model.plan
    args, kwargs = case.make_batch(0)
    assert schedule(model, UNLIMITED, sample_args=args, sample_kwargs=kwargs) is model
    assert model.plan.is_noop
    assert not recomputing.is_noop
    unschedule(model)
    assert model._compiled_call_impl is None


def test_load_state_dict_is_seen(case):
    model = scheduled(case)
    backward(model, case)
    other = small_mlp()
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(0.1)
    model.load_state_dict(other.model.state_dict())
    model.zero_grad(set_to_none=True)
    assert torch.equal(backward(model, case, 1), backward(other.model, other, 1))
    assert_same(gradients(model), gradients(other.model))


def test_state_dict_round_trip_through_a_file(case):
    model = scheduled(case)
    backward(model, case)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = small_mlp().model
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("after_a_step", [False, True])
def test_deepcopy_is_independent_and_gives_the_same_numbers(case, after_a_step):
    model = scheduled(case)
    if after_a_step:
        backward(model, case)
        model.zero_grad(set_to_none=True)
    twin = copy.deepcopy(model)
    assert next(twin.parameters()) is not next(model.parameters())
    assert torch.equal(backward(model, case, 1), backward(twin, case, 1))
    assert_same(gradients(model), gradients(twin))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    twin.zero_grad(set_to_none=True)
    reference = small_mlp()
    assert all(not p.eq(0).all() for name, p in twin.named_parameters() if name.endswith("0.weight"))
    reference.model.load_state_dict(twin.state_dict())
    assert torch.equal(backward(twin, case, 2), backward(reference.model, reference, 2))


def test_deepcopy_stays_bounded(case):
    model = scheduled(case)
    twin = copy.deepcopy(model)
    backward(twin, case)
    assert isinstance(plan_of(twin), Plan)
    assert not plan_of(twin).is_noop


def test_averaged_model_follows(case):
    """The usual exponential moving average copies the model and is then called without gradients."""
    model = scheduled(case)
    plain = small_mlp()
    averages = []
    for network in (model, plain.model):
        average = torch.optim.swa_utils.AveragedModel(
            network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            backward(network, case, step)
            optimizer.step()
            average.update_parameters(network)
        average.eval()
        with torch.no_grad():
            averages.append((dict(average.state_dict()), average(*case.make_batch(5)[0])))
    assert_same(averages[0][0], averages[1][0])
    assert torch.equal(averages[0][1], averages[1][1])


@pytest.mark.parametrize(
    "make_optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
        functools.partial(torch.optim.Adafactor, lr=1e-2),
        functools.partial(torch.optim.RMSprop, lr=1e-3),
    ],
    ids=["SGD", "AdamW", "Adafactor", "RMSprop"],
)
def test_optimizers_step_as_on_the_plain_module(case, make_optimizer):
    plain = small_mlp()
    models = [plain.model, case.model]
    optimizers = [make_optimizer(model.parameters()) for model in models]
    scheduled(case, UNLIMITED, optimizer=optimizers[1])
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, case, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert_same(plain.model.state_dict(), case.model.state_dict())


def test_optimizer_with_a_closure(case):
    plain = small_mlp(dropout=0.0)
    case = small_mlp(dropout=0.0)
    scheduled(case)
    for model in (plain.model, case.model):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            args, _ = case.make_batch(0)
            loss = case.loss_of(model(*args))
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same(plain.model.state_dict(), case.model.state_dict())


def test_user_hooks_fire_once_per_call(case):
    calls = []
    handle = case.model.register_forward_hook(lambda *_: calls.append("root"))
    model = scheduled(case)
    assert calls == []  # planning calls no hook of the user's for its side effects
    backward(model, case)
    assert calls == ["root"]
    model.body[0].register_forward_hook(lambda *_: calls.append("inner"))
    backward(model, case)
    assert sorted(calls) == ["inner", "root", "root"]
    handle.remove()
    backward(model, case)
    assert sorted(calls) == ["inner", "inner", "root", "root"]


def test_parameter_hooks_fire(case):
    model = scheduled(case)
    seen = []
    model.head.weight.register_hook(lambda grad: seen.append(grad.shape))
    model.head.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    backward(model, case)
    assert sorted(seen, key=len) == [torch.Size([10]), torch.Size([10, 16])]


def test_another_batch_size_is_planned_again(case):
    plain = small_mlp()
    model = scheduled(case, UNLIMITED)
    backward(model, case)
    backward(plain.model, plain)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    for network in (model, plain.model):
        network.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        network(x).square().sum().backward()
    assert_same(gradients(model), gradients(plain.model))


def test_freezing_a_layer_is_seen(case):
    plain = small_mlp()
    model = scheduled(case)
    backward(model, case)
    backward(plain.model, plain)
    for network in (model, plain.model):
        network.zero_grad(set_to_none=True)
        network.body[0].requires_grad_(requires_grad=False)
        backward(network, case, 1)
    assert gradients(model)["body.0.weight"] is None
    assert_same(gradients(model), gradients(plain.model))


def test_moving_to_another_dtype_is_seen(case):
    plain = small_mlp()
    model = scheduled(case, UNLIMITED)
    backward(model, case)
    backward(plain.model, plain)
    x = case.make_batch(0)[0][0].double()
    for network in (model, plain.model):
        network.double()
        network.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        network(x).square().sum().backward()
    assert_same(gradients(model), gradients(plain.model))


def test_scheduling_moves_no_random_state_parameter_or_buffer(case):
    torch.manual_seed(5)
    state, tensors = torch.get_rng_state(), {k: v.clone() for k, v in case.model.state_dict().items()}
    scheduled(case)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(tensors, dict(case.model.state_dict()))
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_saved_plan_runs_again(case, tmp_path):
    path = tmp_path / "plan.json"
    scheduled(case).plan.save(path)
    other = small_mlp()
    loaded = Plan.load(path)
    model = scheduled(other, plan=loaded)
    assert model.plan.steps == case.model.plan.steps
    assert model.plan.fingerprint == loaded.fingerprint if hasattr(loaded, "fingerprint") else True
    assert torch.equal(backward(model, other), backward(case.model, case))
    assert_same(gradients(model), gradients(case.model))


def test_saved_plan_of_another_batch_is_refused(case, tmp_path):
    path = tmp_path / "plan.json"
    scheduled(case).plan.save(path)
    other = small_mlp(batch=32)
    with pytest.raises(PlanMismatch):
        scheduled(other, plan=Plan.load(path))
    assert other.model._compiled_call_impl is None


def test_same_problem_same_plan(case):
    first = scheduled(case).plan
    second = scheduled(small_mlp(), plan=None).plan
    assert first.graph.fingerprint == second.graph.fingerprint
    if first.costs == second.costs:  # profiled times come from one cache
        assert first.steps == second.steps


def test_a_sequential_can_be_scheduled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    plain = copy.deepcopy(model)
    schedule(model, UNLIMITED)
    x = torch.randn(3, 8)
    for network in (model, plain):
        network(x).square().mean().backward()
    assert_same(gradients(model), gradients(plain))
    assert isinstance(plan_of(model), Plan)


def test_never_recompute_is_kept_to(case):
    model = scheduled(case, never_recompute=("aten.gelu",))
    assert not model.plan.is_noop
    recomputed = {d.name for d in model.plan.decisions if d.action == "recomputed"}
    assert not any("gelu" in name for name in recomputed)
    targets = [op.target for op in model.plan.graph.ops if not op.recomputable]
    assert any("gelu" in target for target in targets)


def test_tied_weights_stay_one_parameter():
    case = make_gpt(layers=1, context=16, width=16, vocabulary=32)
    model = scheduled(case, UNLIMITED)
    backward(model, case)
    assert model.head.weight is model.tokens.weight
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.tokens.weight
