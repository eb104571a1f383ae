"""Autograd's surface: every way to run, repeat, split, hook and forbid a backward that plain training knows."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from scheduler import CheckpointSchedulerError, measure_peak
from tests.scheduler.kinds.comparing import (
    FLOOR,
    MIDDLE,
    UNLIMITED,
    Wave,
    bounded,
    compare,
    data,
    fresh,
    layers,
    trained,
)

__all__ = ["fresh"]

X = data(12, 16)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x):
        h = self.body(x).sin().exp().tanh()
        return self.a(h).exp(), self.b(h).sin()


def pair(make=layers, fraction=FLOOR):
    """A plain module and a scheduled one from the same seed."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    return plain, bounded(make(), fraction)


@pytest.mark.parametrize("fraction", [FLOOR, MIDDLE, UNLIMITED])
def test_retained_graph_and_two_backwards(fraction):
    def step(model):
        loss = model(X).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match=r"second time|freed"):
            loss.backward()
        return loss

    compare(lambda: layers(16, nn.Dropout(0.3)), step, fraction=fraction, recomputes=fraction == FLOOR)


def test_outputs_backpropagated_separately():
    def step(model):
        a, b = model(X)
        a.sum().backward(retain_graph=True)
        first = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
        b.square().sum().backward()
        return first

    compare(Two, step, recomputes=False)


def test_gradients_of_a_subset():
    def step(model):
        parameters = list(model.parameters())
        one = torch.autograd.grad(model(X).sum(), [parameters[0]])
        two = torch.autograd.grad(model(X).sum(), parameters[2:], retain_graph=True)
        model(X).sum().backward(inputs=[parameters[1]])
        return one, two

    compare(layers, step)


def test_gradients_of_a_subset_that_may_be_unused():
    def step(model):
        a, _ = model(X)
        return torch.autograd.grad(a.sum(), list(model.parameters()), allow_unused=True)

    compare(Two, step, recomputes=False)


def test_many_forwards_before_one_backward():
    def step(model):
        outputs = [model(data(12, 16, seed=i)) for i in range(5)]
        torch.stack(outputs).tanh().mean().backward()
        return outputs

    compare(lambda: layers(16, nn.Dropout(0.3)), step)


def test_backwards_in_another_order():
    def step(model):
        losses = [model(data(12, 16, seed=i)).square().sum() for i in range(3)]
        for i in (1, 2, 0):
            losses[i].backward()
        return losses

    compare(lambda: layers(16, nn.Dropout(0.3)), step)


def live_tensors():
    gc.collect()
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


def test_forward_without_backward_leaks_nothing():
    model = bounded(layers(16, nn.Dropout(0.1)))
    for _ in range(3):
        model(X)
    before = live_tensors()
    for _ in range(10):
        model(X)
    assert live_tensors() <= before
    plain, again = pair(lambda: layers(16))
    again(X)
    trained(X)(again)
    trained(X)(plain)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), again.parameters(), strict=True))


def test_an_error_in_the_forward_leaves_the_module_usable():
    def step(model):
        with pytest.raises(Exception, match=r"shape|size|mat"):
            model(data(3, 5))
        return trained(X)(model)

    compare(layers, step)


def test_accumulation():
    def step(model):
        return [trained(data(12, 16, seed=i))(model) for i in range(3)]

    compare(layers, step)


@pytest.mark.slow
def test_memory_of_accumulated_gradients_is_in_the_plan():
    model = layers(64)
    trained(data(12, 64))(model)  # the gradients exist before planning
    solver_choice = bounded(model)
    peak = measure_peak(lambda: trained(data(12, 64))(model), resident=(model,)).peak_bytes
    assert peak <= solver_choice.plan.peak_bytes * 1.02 + 12 * 64 * 4
    assert solver_choice.plan.static["gradients"] == sum(p.numel() * 4 for p in model.parameters())


def test_double_backward_is_right_or_refused_when_it_is_asked_for():
    plain, model = pair()
    x = data(12, 16, requires_grad=True)

    def penalty(m):
        (gradient,) = torch.autograd.grad(m(x).square().sum(), [x], create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), list(m.parameters()))

    expected = penalty(plain)
    try:
        actual = penalty(model)
    except (RuntimeError, CheckpointSchedulerError) as error:
        assert any(word in str(error) for word in ("double", "create_graph", "twice")), error  # noqa: PT017
    else:
        for a, b in zip(expected, actual, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("after_planning", [False, True])
def test_tensor_and_module_hooks(after_planning):
    def step(model):
        calls = []
        if after_planning:
            trained(X)(model)
            model.zero_grad(set_to_none=True)
        handles = [
            model.register_forward_pre_hook(lambda *_: calls.append("pre")),
            model.register_forward_hook(lambda _m, _i, out: calls.append("root") or out * 2),
            model[0].register_forward_hook(lambda *_: calls.append("inner")),
            model[0].weight.register_hook(lambda grad: calls.append("weight") or grad * 0.5),
            model[0].bias.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated")),
        ]
        output = model(X)
        output.register_hook(lambda grad: calls.append("output") or grad * 3)
        output.square().sum().backward()
        for handle in handles:
            handle.remove()
        return sorted(calls), trained(X)(model), len(calls)

    compare(layers, step, recomputes=False)


def test_full_backward_hook_is_called_or_refused():
    plain, model = pair()
    counts = []
    for m in (plain, model):
        calls = []
        try:
            m.register_full_backward_hook(lambda *_, calls=calls: calls.append(1))
            m[0].register_full_backward_hook(lambda *_, calls=calls: calls.append(1))
            trained(X)(m)
        except CheckpointSchedulerError:
            return
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_optimizer_in_backward():
    def step(model):
        optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

        def update(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
        results = [trained(data(12, 16, seed=i))(model) for i in range(3)]
        for handle in handles:
            handle.remove()
        return results, [p.detach() for p in model.parameters()]

    compare(layers, step)


@pytest.mark.parametrize("what", ["input", "parameter"])
@pytest.mark.parametrize("fraction", [FLOOR, UNLIMITED])
def test_overwritten_before_backward_raises_as_eager_does(what, fraction):
    def step(model):
        x = X.clone()
        loss = model(x).square().sum()
        with torch.no_grad():
            (x if what == "input" else model[2].weight).mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.zero_grad(set_to_none=True)

    class Used(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * x.sum()

    compare(lambda: Used(*layers()), step, fraction=fraction, recomputes=False)


def test_saved_tensor_hooks_around_the_step():
    def step(model):
        with torch.autograd.graph.save_on_cpu():
            first = trained(X)(model)
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t.clone(), lambda t: t):
            second = trained(X)(model)
        return first, second, bool(packed)

    compare(lambda: layers(16, nn.Dropout(0.3)), step)


@pytest.mark.parametrize("how", ["grad", "vmap", "jvp"])
def test_functional_transforms_are_right_or_refused(how):
    plain, model = pair()

    def run(m):
        if how == "grad":
            parameters = {n: p.detach() for n, p in m.named_parameters()}
            return torch.func.grad(lambda p: torch.func.functional_call(m, p, (X,)).square().sum())(parameters)
        if how == "vmap":
            return torch.vmap(m)(data(3, 12, 16))
        return torch.func.jvp(m, (X,), (torch.ones_like(X),))

    expected = run(plain)
    try:
        actual = run(model)
    except (CheckpointSchedulerError, RuntimeError):
        return
    torch.testing.assert_close(torch.utils._pytree.tree_leaves(actual), torch.utils._pytree.tree_leaves(expected))


def test_no_grad_inference_mode_and_eval_with_grad():
    def step(model):
        results = []
        with torch.no_grad():
            results.append(model(X))
        with torch.inference_mode():
            results.append(model(X) + 0)
        assert not any(r.requires_grad for r in results)
        model.eval()
        results.append(trained(X)(model))
        with torch.no_grad():
            results.append(model(X))
        model.train()
        return [r.clone() if isinstance(r, torch.Tensor) else r for r in results], trained(X)(model)

    compare(lambda: layers(16, nn.BatchNorm1d(32), nn.Dropout(0.3), Wave()), step)


def test_no_grad_inside_the_module():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.target = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            with torch.no_grad():
                target = self.target(x).sin().exp()
            return (self.inner(x).sin().exp() - target).square().tanh().exp()

    compare(Partly, trained(X))


def test_custom_autograd_function():
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(-1, 1)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (x.abs() < 2) * 0.5

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            return Clipped.apply(self.inner(x).sin() * 3).exp().tanh().exp()

    compare(Uses, trained(X))
