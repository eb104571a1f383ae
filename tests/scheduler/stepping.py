"""One training step of a model that returns its loss, and whether two of them are equal bit for bit."""

from __future__ import annotations

import torch


def step(model, x, seed=1):
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in model.parameters()], *[b.clone() for b in model.buffers()]]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
