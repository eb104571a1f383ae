"""Inputs and outputs: whatever a forward takes and returns arrives as in plain training, aliases included."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import nn

from graphs.errors import UnsupportedModelError
from scheduler import measure_peak
from tests.scheduler.kinds.comparing import (
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


class Inner(nn.Module):
    """What the modules below share: a linear layer and pointwise ops."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def body(self, x):
        return self.inner(x).sin().exp().tanh()


class Keywords(Inner):
    def forward(self, x, *, scale=1.0, mask=None, mode="plain", flags=(), extra=None):
        h = self.body(x) * scale
        if mask is not None:
            h = h.masked_fill(mask, 0.5)
        if mode == "double":
            h = 2 * h
        if "add" in flags:
            h = h + extra["deep"][0]
        return h.exp()


def test_keywords_scalars_strings_none_and_nested_containers():
    def step(model):
        mask = data(12, 16, seed=3) > 0
        calls = [
            {},
            {"scale": 0.5, "mask": mask},
            {"scale": 2, "mode": "double"},
            {"flags": ("add",), "extra": {"deep": [data(12, 16, seed=4)], "unused": None}},
            {"mask": None, "mode": "plain", "scale": True},
        ]
        outputs = []
        for call in calls:
            outputs.append(model(X, **call))
            outputs[-1].square().sum().backward()
        return outputs

    compare(Keywords, step, fraction=UNLIMITED, recomputes=False)


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    hidden: tuple
    note: str = "fine"
    nothing: None = None


class ReturnsDataclass(Inner):
    def forward(self, x):
        h = self.body(x)
        return Result(h.exp(), (h, {"raw": x * 2}), nothing=None)


def test_dataclass_output():
    def step(model):
        result = model(X)
        assert isinstance(result, Result)
        assert result.note == "fine"
        assert result.nothing is None
        (result.logits.sum() + result.hidden[0].square().sum()).backward()
        return result.logits, result.hidden

    compare(ReturnsDataclass, step, recomputes=False)


def test_hugging_face_output():
    transformers = pytest.importorskip("transformers")
    outputs = transformers.modeling_outputs

    class Returns(Inner):
        def forward(self, x):
            h = self.body(x)
            return outputs.SequenceClassifierOutput(loss=h.square().mean(), logits=h.exp(), hidden_states=(h,))

    def step(model):
        result = model(X)
        assert isinstance(result, outputs.SequenceClassifierOutput)
        assert result["logits"] is result.logits
        assert result.attentions is None
        result.loss.backward()
        return result.loss, result.logits, result.hidden_states

    compare(Returns, step)


def test_loss_and_what_it_comes_from_both_backpropagated():
    """The user adds a penalty on the logits to the loss that the module returned."""

    class Returns(Inner):
        def forward(self, x):
            h = self.body(x).exp()
            return h.square().mean(), h

    def step(model):
        results = []
        for i in range(3):  # the first is replayed, and the others planned for what the first has shown
            loss, logits = model(X + i)
            loss /= 2  # as in an accumulation
            (loss + 0.1 * logits.sin().mean()).backward()
            results += [loss, logits, *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
        return results

    compare(Returns, step)


def test_second_derivatives_of_what_the_loss_comes_from_are_refused():
    class Returns(Inner):
        def forward(self, x):
            h = self.body(x).exp()
            return h.square().mean(), h

    x = X.clone().requires_grad_()
    _, logits = bounded(Returns())(x)
    with pytest.raises(UnsupportedModelError, match="second derivatives"):
        torch.autograd.grad(logits.sum(), x, create_graph=True)


@pytest.mark.parametrize("watch", [lambda h: h.retain_grad(), lambda h: h.register_hook(lambda g: 2 * g)])
def test_watching_the_gradient_of_what_the_loss_comes_from_is_refused(watch):
    """Its gradient is inside of the module: a hook would see ``None``, or change nothing."""

    class Returns(Inner):
        def forward(self, x):
            h = self.body(x).exp()
            return h.square().mean(), h

    model = bounded(Returns())
    for _ in range(2):
        loss, logits = model(X)
        watch(logits)
        with pytest.raises(UnsupportedModelError, match="on an output of shape"):
            loss.backward()
    loss, _ = model(X)  # unwatched, it trains on
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


Point = collections.namedtuple("Point", ["first", "second"])  # noqa: PYI024  # as users write them


def with_views(h):
    return h, h[:3], h.t()


OUTPUTS = {
    "named tuple": lambda m, x: Point(m.body(x), m.body(x).exp()),
    "dictionary": lambda m, x: {"b": m.body(x), "a": [m.body(x).exp(), None, 3, 2.5, "text", True]},
    "ordered dictionary": lambda m, x: collections.OrderedDict(z=m.body(x), a=x.sin()),
    "scalar": lambda m, x: m.body(x).mean(),
    "the input itself": lambda m, x: (m.body(x), x),
    "a view of the input": lambda m, x: (m.body(x), x[2:5], x.t()),
    "the same tensor twice": lambda m, x: 2 * (m.body(x),),
    "views of each other": lambda m, x: with_views(m.body(x).exp()),
    "expanded": lambda m, x: m.body(x).mean(0).expand(5, 16),
    "a parameter": lambda m, x: (m.body(x), m.inner.weight),
    "zero-size": lambda m, x: (m.body(x), m.body(x)[:0]),
    "integers": lambda m, x: (m.body(x), m.body(x).argmax(-1), m.body(x) > 0.5),
    "detached": lambda m, x: (m.body(x), m.body(x).detach()),
}


def total(tree):
    leaves = [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum(t.square().sum() for t in leaves)


@pytest.mark.parametrize("name", OUTPUTS)
def test_output(name):
    class Returns(Inner):
        def forward(self, x):
            return OUTPUTS[name](self, x)

    compare(Returns, trained(X, loss=total), recomputes=False)


def test_outputs_that_alias_still_do():
    class Returns(Inner):
        def forward(self, x):
            h = self.body(x).exp()
            return h, h[:3], x, x.view(-1)

    for make in (Returns, lambda: bounded(Returns())):
        x = X.clone()
        h, part, same, flat = make()(x)
        assert part.untyped_storage().data_ptr() == h.untyped_storage().data_ptr()
        assert same is x
        assert flat.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def strange(kind):
    storage = data(4, 400)
    return {
        "a view": lambda: storage[0, 3 : 3 + 192].view(12, 16),
        "transposed": lambda: data(16, 12).t(),
        "strided": lambda: data(24, 32)[::2, ::2],
        "expanded": lambda: data(1, 16).expand(12, 16),
        "overlapping": lambda: storage[0].as_strided((12, 16), (4, 1)),
        "zero-size": lambda: data(0, 16),
        "one element": lambda: data(1, 16),
    }[kind]()


@pytest.mark.parametrize(
    "kind", ["a view", "transposed", "strided", "expanded", "overlapping", "zero-size", "one element"]
)
def test_input(kind):
    def step(model):
        x = strange(kind)
        output = model(x)
        output.square().sum().backward()
        return output

    compare(layers, step, recomputes=False)


def test_the_same_tensor_as_two_arguments():
    class Two(Inner):
        def forward(self, a, b):
            return self.body(a) * b.exp()

    x = data(12, 16, requires_grad=True)

    def step(model):
        leaf = x.detach().clone().requires_grad_()
        one = model(leaf, leaf)
        two = model(leaf, leaf.detach().clone())
        (one.sum() + two.sum()).backward()
        return one, two, leaf.grad

    compare(Two, step, recomputes=False)


def test_views_of_one_tensor_as_arguments_of_which_one_is_written():
    class Writes(Inner):
        def forward(self, a, b):
            h = self.body(a.clone())
            b.mul_(2.0)
            return h * a + b.sin()

    def step(model):
        x = data(12, 32)
        output = model(x[:, :16], x[:, :16])
        output.sum().backward()
        return output, x

    compare(Writes, step, recomputes=False)


def test_input_that_the_module_writes_to():
    class Writes(Inner):
        def forward(self, x):
            h = self.body(x.clone())
            x.add_(1.0)
            return h.exp() * x

    def step(model):
        x = X.clone()
        output = model(x)
        output.sum().backward()
        return output, x

    compare(Writes, step, recomputes=False)


def test_channels_last():
    def make():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Wave(), nn.Conv2d(8, 4, 3), Wave())
        return model.to(memory_format=torch.channels_last)

    def step(model):
        output = model(data(2, 3, 12, 12).to(memory_format=torch.channels_last))
        output.square().sum().backward()
        strides = [p.grad.stride() for p in model.parameters()]
        return output, output.stride(), strides

    compare(make, step)


def test_tensors_on_another_device():
    class Shaped(Inner):
        def forward(self, x, template):
            return self.body(x)[: template.shape[0]]

    def step(model):
        output = model(X, torch.empty(5, device="meta"))
        output.square().sum().backward()
        return output

    compare(Shaped, step, recomputes=False)


def test_no_tensor_at_all():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(data(12, 16))

        def forward(self):
            return self.weight.sin().exp().tanh().exp()

    compare(Alone, trained())


class WithViews(nn.Module):
    """A loss, and views of an input and of a parameter that the caller backpropagates through as well."""

    def __init__(self, views):
        super().__init__()
        self.inner, self.weight, self.views = nn.Linear(32, 32), nn.Parameter(data(64, 32, seed=3)), views

    def forward(self, x):
        return (self.inner(x) * self.weight).sin().exp().tanh().mean(), *self.views(x, self.weight)


RETURNED_VIEWS = {
    "slices": lambda x, w: (x[:, :16], x[3:]),
    "transposed": lambda x, w: (x.t(),),
    "of input and parameter": lambda x, w: (x[:4], w.view(-1)),
    "of a detached input": lambda x, w: (x.detach()[:4],),
    "every column": lambda x, w: x.unbind(1),
}


@pytest.mark.parametrize("name", RETURNED_VIEWS)
def test_gradients_through_views_of_inputs_are_in_the_budget(name):
    def make():
        return WithViews(RETURNED_VIEWS[name])

    def loss(outputs):
        return sum(y.square().sum() for y in outputs)

    x = data(64, 32, requires_grad=True)
    model = compare(make, trained(x, loss=loss), recomputes=False)
    model.zero_grad()
    measured = measure_peak(lambda: loss(model(x)).backward(), resident=(model, x)).peak_bytes
    assert measured <= model.plan.peak_bytes
    assert model.plan.peak_bytes == pytest.approx(measured, rel=0.01)
