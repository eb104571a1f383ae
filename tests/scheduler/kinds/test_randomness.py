"""Randomness: what is recomputed sees the noise of the first execution, and the stream ends where plain leaves it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import nn

from graphs.errors import UnsupportedModelError
from scheduler import schedule
from tests.scheduler.kinds.comparing import FLOOR, MIDDLE, UNLIMITED, compare, data, fresh, layers, trained

__all__ = ["fresh"]


class Noisy(nn.Module):
    """Two linear layers with noise in between, and pointwise ops that are worth recomputing."""

    def __init__(self, noise):
        super().__init__()
        self.first, self.second, self.noise = nn.Linear(16, 32), nn.Linear(32, 32), noise

    def forward(self, x):
        h = self.first(x).sin().exp()
        h = self.noise(h).tanh()
        return self.noise(self.second(h).sin().exp()).cos()


NOISES = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout that drops nothing": lambda h: F.dropout(h, 0.0) + h,
    "dropout of everything": lambda h: F.dropout(h, 1.0) + h,
    "dropout of everything, in place": lambda h: F.dropout(h.clone(), 1.0, inplace=True) + h,
    "fused dropout that drops nothing": lambda h: torch.native_dropout(h, 0.0, train=True)[0],
    "fused dropout of everything": lambda h: torch.native_dropout(h, 1.0, train=True)[0] + h,
    "alpha dropout of everything": lambda h: F.alpha_dropout(h, 1.0, training=True) + h,
    "feature dropout of everything": lambda h: F.dropout1d(h.unsqueeze(0), 1.0).squeeze(0) + h,
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.2, training=True),
    "feature dropout": lambda h: F.dropout1d(h.unsqueeze(0), 0.4).squeeze(0),
    "in place": lambda h: F.dropout(h.clone(), 0.3, inplace=True),
    "rand, which backward needs": lambda h: h * torch.rand_like(h),
    "randn, which backward does not need": lambda h: h + torch.randn(h.shape),
    "randint": lambda h: h * torch.randint(1, 4, h.shape),
    "randperm": lambda h: h[torch.randperm(h.shape[0])],
    "bernoulli of probabilities": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "bernoulli in place": lambda h: h * torch.empty_like(h).bernoulli_(0.5),
    "normal": lambda h: h * torch.normal(torch.zeros_like(h), torch.ones_like(h)),
    "uniform and exponential in place": lambda h: (
        h * torch.empty_like(h).uniform_() + torch.empty_like(h).exponential_()
    ),
    "multinomial": lambda h: h[torch.multinomial(torch.ones(h.shape[0]), h.shape[0])],
    "rrelu": lambda h: F.rrelu(h, training=True),
    "gumbel softmax": lambda h: F.gumbel_softmax(h, tau=0.7),
    "read by nobody": lambda h: (torch.rand_like(h), F.dropout(h, 0.5), h)[2],
}


@pytest.mark.parametrize("name", NOISES)
def test_noise_at_the_floor(name):
    compare(lambda: Noisy(NOISES[name]), trained(data(12, 16)))


@pytest.mark.parametrize("fraction", [MIDDLE, UNLIMITED])
def test_noise_at_other_budgets(fraction):
    compare(lambda: Noisy(NOISES["dropout"]), trained(data(12, 16)), fraction=fraction, recomputes=False)


class Attention(nn.Module):
    """Attention with dropout, by the function or (``heads``) by the module that is built on it."""

    def __init__(self, p, *, heads=False):
        super().__init__()
        self.qkv, self.p = nn.Linear(16, 48), p
        self.heads = nn.MultiheadAttention(16, 2, dropout=p, batch_first=True) if heads else None

    def forward(self, x):
        q, k, v = self.qkv(x).sin().chunk(3, -1)
        if self.heads is not None:
            return self.heads(q, k, v)[0].tanh().exp()
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.p).tanh().exp()


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("heads", [False, True])
def test_attention_dropout(p, heads):
    compare(lambda: Attention(p, heads=heads), trained(data(2, 12, 16)), recomputes=False)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_in_eval(p):
    compare(
        lambda: layers(16, nn.Dropout(p), nn.AlphaDropout(p), nn.FeatureAlphaDropout(p)).eval(), trained(data(12, 16))
    )


def test_noise_of_a_generator_of_its_own():
    generator = torch.Generator()

    def step(model):
        generator.manual_seed(3)
        return trained(data(12, 16))(model), generator.get_state()

    try:
        compare(lambda: Noisy(lambda h: h * torch.rand(h.shape, generator=generator)), step)
    except Exception as error:  # noqa: BLE001  # a refusal is right as well, so long as it says why
        assert "generator" in str(error).lower() or "graph" in str(error).lower(), error  # noqa: PT017


def test_probability_changed_between_steps():
    def step(model):
        results = []
        for p in (0.1, 0.6, 0.1):
            model[2].p = p
            results.append(trained(data(12, 16))(model))
        return results

    compare(lambda: layers(16, nn.Dropout(0.1)), step)


def test_stream_continues_over_steps_and_into_other_code():
    def step(model):
        first = trained(data(12, 16))(model)
        between = torch.rand(3)
        return first, between, trained(data(12, 16, seed=1))(model), torch.rand(3)

    compare(lambda: layers(16, nn.Dropout(0.4), nn.Dropout(0.2)), step)


def test_noise_drawn_between_forward_and_backward():
    def step(model):
        output = model(data(12, 16))
        noise = torch.rand_like(output)
        (output * noise).sum().backward()
        return output, torch.rand(2)

    compare(lambda: layers(16, nn.Dropout(0.4)), step)


class InPlaces(nn.Module):
    """Random numbers drawn into tensors whose memory has another order than their dimensions."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        h = self.inner(x).t()
        drawn = torch.empty_like(h).bernoulli_(0.5) + torch.bernoulli(torch.full_like(h, 0.5), 0.4)
        drawn = drawn + torch.zeros(24, 16)[::2].t().bernoulli_(0.6) + torch.empty_like(h).normal_()
        parts = torch.zeros_like(h)
        parts[:, :4].uniform_()
        parts[:, 4:].bernoulli_(0.3)
        parts[::2].t().bernoulli_(0.3)
        return (h * drawn * parts).sin().exp()


@pytest.mark.parametrize("fraction", [FLOOR, UNLIMITED])
def test_numbers_lie_where_eager_mode_draws_them(fraction):
    compare(InPlaces, trained(data(12, 16)), fraction=fraction, recomputes=False)


class PartlyNormal(InPlaces):
    def forward(self, x):
        h = self.inner(x)
        noise = torch.zeros_like(h)
        noise[:, ::2].normal_()
        return h * noise


def test_normal_numbers_drawn_into_a_part_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"normal_\(\) at .*randn_like"):
        schedule(PartlyNormal(), "1MB", sample_args=(data(12, 16),))


def test_dropout_behind_attention_in_low_precision():
    def step(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(data(2, 6, 16))
        y.square().sum().backward()
        return y

    compare(lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True), step, recomputes=False)
