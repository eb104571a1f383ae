"""``loss_fn=``: a loss outside of the module, inside the scheduled step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import nn

from scheduler import measure_peak, plan, plan_of, schedule, unschedule
from tests.scheduler.kinds.comparing import FLOOR, MIDDLE, UNLIMITED, Wave, bounded, data, fresh, layers, unequal
from tests.training import same_tensor

__all__ = ["fresh"]

VOCABULARY = 4000


def target(n=24, classes=32, seed=1):
    return torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(seed))


def language_model():
    """A small body under a head so wide that logits and loss are most of the memory."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), Wave(), nn.Dropout(0.2), nn.Linear(16, VOCABULARY))


TOKENS = target(64, 50)
NEXT = target(64, VOCABULARY)


def state_after(model, loss_of, steps=3):
    """Everything that training can see after some optimizer steps."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        del loss
    seen = {f"loss {i}": x for i, x in enumerate(losses)}
    seen |= {f"gradient {n}": p.grad.clone() for n, p in model.named_parameters()}
    seen |= {f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()}
    return seen | {"random stream": torch.get_rng_state()}


@pytest.mark.parametrize("fraction", [FLOOR, MIDDLE, UNLIMITED])
def test_the_numbers_are_those_of_the_loss_outside(fraction):
    expected = state_after(language_model(), lambda m: F.cross_entropy(m(TOKENS), NEXT))
    model = bounded(language_model(), fraction, loss_fn=F.cross_entropy)
    actual = state_after(model, lambda m: m(TOKENS, loss_args=(NEXT,)))
    assert unequal(expected, actual) == []
    assert (fraction == UNLIMITED) == plan_of(model).is_noop


@pytest.mark.parametrize("fraction", [FLOOR, MIDDLE, UNLIMITED])
def test_the_peak_covers_the_loss(fraction):
    """As predicted, within the budget, and so low at the floor that the logits do not lie beside their gradient."""
    model = bounded(language_model(), fraction, loss_fn=F.cross_entropy)

    def step():
        model(TOKENS, loss_args=(NEXT,)).backward()

    def plain_step():
        F.cross_entropy(plain(TOKENS), NEXT).backward()

    for _ in range(2):
        model.zero_grad(set_to_none=True)
        peak = measure_peak(step, resident=(model, TOKENS, NEXT)).peak_bytes
        assert abs(plan_of(model).peak_bytes / peak - 1) <= 0.01
    assert peak <= model._compiled_call_impl.settings.solver.chosen[-1]
    plain = language_model()
    assert peak <= 1.01 * measure_peak(plain_step, resident=(plain, TOKENS, NEXT)).peak_bytes


def test_a_budget_of_bytes_is_kept():
    model = bounded(language_model(), MIDDLE, loss_fn=F.cross_entropy)
    model(TOKENS, loss_args=(NEXT,)).backward()
    budget = model._compiled_call_impl.settings.solver.chosen[-1]
    assert budget < plan_of(model).keep_all_peak_bytes
    model.zero_grad(set_to_none=True)
    schedule(model, f"{budget}B", loss_fn=F.cross_entropy, costs="roofline", time_limit_s=3)
    peak = measure_peak(lambda: model(TOKENS, loss_args=(NEXT,)).backward(), resident=(model, TOKENS, NEXT))
    assert peak.peak_bytes <= budget


class Cosine(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((32,), 3.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, goal):
        self.calls.add_(1)
        return (1 - F.cosine_similarity(output * self.scale, goal).exp()).square().mean()


def test_a_loss_with_parameters_and_buffers():
    def run(model, loss, call):
        torch.manual_seed(5)
        for seed in range(2):
            call(model, loss, data(12, 16, seed=seed), data(12, 32, seed=9)).backward()
        grads = {n: p.grad for part in (model, loss) for n, p in part.named_parameters()}
        return grads | {"calls": loss.calls.clone()}

    torch.manual_seed(0)
    plain, loss = layers(16, nn.Dropout(0.2)), Cosine()
    model, other = copy.deepcopy(plain), copy.deepcopy(loss)
    bounded(model, loss_fn=other)
    expected = run(plain, loss, lambda m, f, x, y: f(m(x), y))
    actual = run(model, other, lambda m, f, x, y: m(x, loss_args=(y,)))
    assert unequal(expected, actual) == []
    assert list(model.state_dict()) == list(plain.state_dict())
    assert plan_of(model).static["parameters"] == sum(p.nbytes for m in (plain, loss) for p in m.parameters())


def test_more_than_the_loss():
    def loss_and_hits(output, goal, *, weight=2.0):
        return weight * F.cross_entropy(output, goal), (output.argmax(-1) == goal).sum()

    plain, x = layers(), data(24, 16)
    model = bounded(copy.deepcopy(plain), loss_fn=loss_and_hits)
    loss, hits = model(x, loss_args=(target(),))
    loss.backward()
    expected_loss, expected_hits = loss_and_hits(plain(x), target())
    expected_loss.backward()
    assert torch.equal(loss, expected_loss)
    assert torch.equal(hits, expected_hits)
    assert all(same_tensor(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


def test_hooks_run_as_in_a_plain_call():
    model, seen = layers(), []
    model.register_forward_hook(lambda m, args, output: seen.append(tuple(output.shape)))
    bounded(model, loss_fn=F.cross_entropy)
    model(data(24, 16), loss_args=(target(),)).backward()
    assert seen.count((24, 32)) >= 1


def test_a_call_without_the_arguments_is_refused():
    model = bounded(layers(), loss_fn=F.cross_entropy)
    with pytest.raises(TypeError, match=r"loss_args=\(target,\)"):
        model(data(24, 16))
    with pytest.raises(TypeError, match="takes a tuple"):
        model(data(24, 16), loss_args=target())
    assert plan_of(model) is None


def test_evaluation_returns_output_or_loss():
    torch.manual_seed(0)
    plain = layers()
    model = bounded(copy.deepcopy(plain), loss_fn=F.cross_entropy)
    x = data(24, 16)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        assert torch.equal(model(x, loss_args=(target(),)), F.cross_entropy(plain(x), target()))


def test_unscheduled_it_is_the_plain_module_again():
    model = unschedule(bounded(layers(), loss_fn=F.cross_entropy))
    with pytest.raises(TypeError, match="loss_args"):
        model(data(24, 16), loss_args=(target(),))
    assert model(data(24, 16)).shape == (24, 32)


def test_what_cannot_be_a_loss_is_refused():
    class Taken(nn.Module):
        def forward(self, x, loss_args):
            return x

    with pytest.raises(TypeError, match="loss_fn"):
        schedule(layers(), 1, loss_fn="cross_entropy")
    with pytest.raises(ValueError, match="rename"):
        schedule(Taken(), 1, loss_fn=F.cross_entropy)


def test_copies_keep_the_loss():
    torch.manual_seed(0)
    model = bounded(layers(), loss_fn=Cosine())
    twin = copy.deepcopy(model)
    x, y = data(12, 16), data(12, 32, seed=4)
    for m in (model, twin):
        m(x, loss_args=(y,)).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("loss_fn", [F.mse_loss, Cosine()], ids=["function", "module"])
def test_planned_in_advance(loss_fn):
    """On the meta device, and here with samples: the same step as on the first call."""
    model = layers()
    x, y = data(12, 16), data(12, 32)
    ahead = plan(copy.deepcopy(model).to("meta"), None, (x,), {"loss_args": (y,)}, loss_fn=loss_fn)
    schedule(model, "100TB", sample_args=(x,), sample_kwargs={"loss_args": (y,)}, loss_fn=loss_fn, costs="roofline")
    assert plan_of(model).graph.fingerprint == ahead.graph.fingerprint
    model(x, loss_args=(y,)).backward()
    assert plan_of(model).static_bytes == ahead.static_bytes


def test_arguments_of_a_loss_that_was_not_given_are_refused():
    model = schedule(nn.Linear(4, 4), 1)
    with pytest.raises(TypeError, match=r"Linear was called with loss_args .* loss_fn=criterion"):
        model(torch.ones(2, 4), loss_args=(torch.zeros(2),))

    class Takes(nn.Linear):
        """Has arguments of its own by that name."""

        def forward(self, x, loss_args):
            return super().forward(x).sum() + loss_args[0]

    model = schedule(Takes(4, 4), 1)
    model(torch.ones(2, 4), loss_args=(torch.ones(()),)).backward()
    assert model.weight.grad is not None
