"""Which outputs are differentiated: secondary outputs, partial backwards, gradients that stay None."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphs.ir import StorageKind
from scheduler import schedule


class LossAndLogits(nn.Module):
    """Returns its loss together with what the loss is computed from, as language models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.2), nn.BatchNorm1d(32))
        self.head = nn.Linear(32, 500)

    def forward(self, x, labels):
        hidden = self.body(x)
        logits = self.head(hidden)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits, "hidden": hidden}


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 2), nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.trunk(x).tanh()
        return self.a(hidden), self.b(hidden)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 500, (8,), generator=generator)


def same(plain, scheduled):
    for p, q in zip(plain.parameters(), scheduled.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)
    for p, q in zip(plain.buffers(), scheduled.buffers(), strict=True):
        assert torch.equal(p, q)


def pair(make, budget=1):
    plain = make()
    scheduled = schedule(copy.deepcopy(plain), budget, costs="roofline")
    return plain, scheduled


LOSSES = {
    "loss": lambda out: out["loss"],
    "logits only": lambda out: out["logits"].pow(2).mean(),
    "hidden only": lambda out: out["hidden"].pow(3).mean(),
    "loss and logits": lambda out: out["loss"] + 0.1 * out["logits"].logsumexp(-1).mean(),
}


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES.keys())
def test_any_output_can_be_differentiated(loss_of):
    plain, scheduled = pair(LossAndLogits)
    for step in range(2):
        for model in (plain, scheduled):
            model.zero_grad()
            torch.manual_seed(step)
            loss_of(model(*batch(step))).backward()
        for p, q in zip(plain.parameters(), scheduled.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7)  # summed in another order
        for p, q in zip(plain.buffers(), scheduled.buffers(), strict=True):
            assert torch.equal(p, q)
    assert plain.body[3].num_batches_tracked == scheduled.body[3].num_batches_tracked == 2


def test_the_loss_alone_needs_no_gradient_of_the_logits():
    _, scheduled = pair(LossAndLogits)
    out = scheduled(*batch())
    tangents = [s for s in scheduled.plan.graph.storages if s.kind is StorageKind.TANGENT]
    assert [t.bytes for t in tangents] == [4]
    assert out["logits"].requires_grad
    assert out["hidden"].requires_grad


class LossAndViews(nn.Module):
    """Returns its loss, what it is computed from, and views that it is not computed from."""

    def __init__(self, views):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.views = nn.Linear(64, 64), nn.Linear(64, 64), views

    def forward(self, x):
        hidden = self.body(x).tanh()
        logits = self.head(hidden)
        return logits.square().mean(), logits, hidden, *self.views(hidden, hidden * 2)


@pytest.mark.parametrize(
    "views",
    [
        lambda _, z: (z.view(64, 32), z[:10]),
        lambda _, z: (z, z.t()),
        lambda hidden, _: (hidden[:, 0],),
        lambda _, z: z.chunk(2),
    ],
    ids=["views of what is not returned", "with their base", "of a secondary output", "chunks"],
)
def test_views_that_are_differentiated_beside_by_products_of_the_loss(views):
    plain, scheduled = pair(lambda: LossAndViews(views))
    for step in range(2):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        for model in (plain, scheduled):
            model.zero_grad()
            outputs = model(x)
            sum((o.sin() * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).sum() for o in outputs).backward()
        same(plain, scheduled)


def test_replaying_a_secondary_output_leaves_the_random_stream_alone():
    plain, scheduled = pair(LossAndLogits)
    streams = []
    for model in (plain, scheduled):
        torch.manual_seed(3)
        model(*batch())["logits"].sum().backward()
        streams.append(torch.rand(4))
    assert torch.equal(*streams)


def test_a_secondary_output_whose_input_was_overwritten_raises():
    _, scheduled = pair(LossAndLogits)
    x, labels = batch()
    logits = scheduled(x, labels)["logits"]
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()


def test_gradients_that_no_backward_reaches_stay_none():
    plain, scheduled = pair(TwoHeads)
    for model in (plain, scheduled):
        model(batch()[0])[0].sum().backward()
    assert scheduled.b.weight.grad is None
    same(plain, scheduled)


def test_outputs_differentiated_one_after_the_other():
    plain, scheduled = pair(TwoHeads)
    for model in (plain, scheduled):
        a, b = model(batch()[0])
        a.sum().backward(retain_graph=True)
        assert model.b.weight.grad is None
        b.pow(2).sum().backward()
    for p, q in zip(plain.parameters(), scheduled.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-6, atol=1e-8)


def test_a_secondary_output_that_is_used_is_differentiated_from_the_next_step_on():
    plain, scheduled = pair(LossAndLogits)
    for step in range(3):
        for model in (plain, scheduled):
            model.zero_grad()
            torch.manual_seed(step)
            LOSSES["loss and logits"](model(*batch(step))).backward()
        tangents = [s for s in scheduled.plan.graph.storages if s.kind is StorageKind.TANGENT]
        assert len(tangents) == (1 if step == 0 else 3)
        if step:
            same(plain, scheduled)


def test_two_backwards_with_retain_graph():
    plain, scheduled = pair(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)))
    for model in (plain, scheduled):
        torch.manual_seed(0)
        loss = model(batch()[0]).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    same(plain, scheduled)
