"""The four models that numerics and peaks are tested on: an MLP, a GPT, a ResNet-50 and a U-Net.

Every ``make_*`` returns a :class:`Case`: the model with seeded parameters, ``make_batch(seed) -> (args, kwargs)`` that
moves no global random state, and ``loss_of(output)``. Dropout and batch normalisation are on, as in training. Default
sizes are small enough for tests; the benchmarks pass larger ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import Tensor, nn


class Case(NamedTuple):
    """A model with its data and its loss."""

    model: nn.Module
    make_batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    loss_of: Callable[[Any], Tensor]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- MLP ------------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Linear → BatchNorm1d → GELU → dropout, ``layers`` times, and a linear head."""

    def __init__(self, features: int, width: int, layers: int, classes: int, dropout: float) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for i in range(layers):
            blocks += [nn.Linear(features if i == 0 else width, width), nn.BatchNorm1d(width), nn.GELU()]
            blocks += [nn.Dropout(dropout)]
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def make_mlp(
    *, batch: int = 256, features: int = 32, width: int = 64, layers: int = 6, classes: int = 10, dropout: float = 0.1
) -> Case:
    """MLP whose loss is taken outside of the model, from its logits."""
    torch.manual_seed(0)
    model = MLP(features, width, layers, classes, dropout)

    def make_batch(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, features, generator=_generator(seed)),), {}

    def loss_of(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, torch.arange(batch, device=logits.device) % classes)

    return Case(model, make_batch, loss_of)


# --- GPT ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention through ``scaled_dot_product_attention``; (batch, time, width) in and out."""

    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, attention_dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (t.view(batch, time, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
        p = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, attention_dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Decoder-only language model; returns the next-token loss. ``tied`` shares the embedding with the head."""

    def __init__(
        self,
        *,
        vocabulary: int,
        context: int,
        width: int,
        heads: int,
        layers: int,
        dropout: float,
        attention_dropout: float,
        tied: bool,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, attention_dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_gpt(
    *,
    batch: int = 4,
    context: int = 64,
    vocabulary: int = 128,
    width: int = 64,
    heads: int = 4,
    layers: int = 4,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    tied: bool = True,
) -> Case:
    """GPT that computes its own loss; the labels are given by keyword."""
    torch.manual_seed(0)
    model = GPT(
        vocabulary=vocabulary,
        context=context,
        width=width,
        heads=heads,
        layers=layers,
        dropout=dropout,
        attention_dropout=attention_dropout,
        tied=tied,
    )

    def make_batch(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = torch.randint(vocabulary, (batch, context + 1), generator=_generator(seed))
        return (tokens[:, :-1].contiguous(),), {"labels": tokens[:, 1:].contiguous()}

    return Case(model, make_batch, lambda loss: loss)


# --- ResNet-50 ------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """1×1 → 3×3 → 1×1 with batch normalisation, and a projected shortcut where the shape changes."""

    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        outputs = planes * self.expansion
        self.conv_1, self.norm_1 = nn.Conv2d(inputs, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv_2 = nn.Conv2d(planes, planes, 3, stride=stride, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(planes)
        self.conv_3, self.norm_3 = nn.Conv2d(planes, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm_1(self.conv_1(x)))
        y = self.relu(self.norm_2(self.conv_2(y)))
        return self.relu(self.norm_3(self.conv_3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network of bottleneck blocks; ``(3, 4, 6, 3)`` blocks make the 50-layer one. ``width`` is 64 there."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages: list[nn.Module] = []
        channels = width
        for i, count in enumerate(blocks):
            planes, layers = width * 2**i, []
            for j in range(count):
                layers.append(Bottleneck(channels, planes, stride=2 if i > 0 and j == 0 else 1))
                channels = planes * Bottleneck.expansion
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


def make_resnet50(
    *,
    batch: int = 4,
    resolution: int = 64,
    width: int = 16,
    classes: int = 10,
    dropout: float = 0.1,
    blocks: tuple[int, ...] = (3, 4, 6, 3),
) -> Case:
    """ResNet-50, a quarter as wide by default; the loss is taken outside of the model."""
    torch.manual_seed(0)
    model = ResNet(blocks, width, classes, dropout)

    def make_batch(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, 3, resolution, resolution, generator=_generator(seed)),), {}

    def loss_of(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, torch.arange(batch, device=logits.device) % classes)

    return Case(model, make_batch, loss_of)


# --- U-Net ----------------------------------------------------------------------------------------------------------


def _double_convolution(inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        norm(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        norm(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Encoder and decoder with skips: the first skip lives until the last decoder stage. Returns logits per pixel."""

    def __init__(self, width: int, depth: int, classes: int, dropout: float, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.encoders = nn.ModuleList(
            _double_convolution(3 if i == 0 else widths[i - 1], widths[i], norm) for i in range(depth)
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = nn.Sequential(_double_convolution(widths[-2], widths[-1], norm), nn.Dropout2d(dropout))
        self.decoders = nn.ModuleList(
            _double_convolution(widths[i + 1] + widths[i], widths[i], norm) for i in reversed(range(depth))
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for decoder, skip in zip(self.decoders, reversed(skips), strict=True):
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = decoder(torch.cat([x, skip], dim=1))
        return self.head(x)


def make_unet(
    *,
    batch: int = 2,
    resolution: int = 32,
    width: int = 8,
    depth: int = 3,
    classes: int = 3,
    dropout: float = 0.1,
    norm: str = "batch",
) -> Case:
    """U-Net with ``norm`` "batch" or "group" (four groups); the loss is taken outside of the model."""
    torch.manual_seed(0)
    norms: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": lambda c: nn.GroupNorm(4, c)}
    model = UNet(width, depth, classes, dropout, norms[norm])

    def make_batch(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, 3, resolution, resolution, generator=_generator(seed)),), {}

    def loss_of(logits: Tensor) -> Tensor:
        pixels = logits.shape[0] * logits.shape[2] * logits.shape[3]
        labels = (torch.arange(pixels, device=logits.device) % classes).view(logits.shape[0], *logits.shape[2:])
        return F.cross_entropy(logits, labels)

    return Case(model, make_batch, loss_of)


# --- Heads ----------------------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Computes a wide projection per head, of all heads first, and only then reduces each to something small.

    The projections are not needed by the backward, and the gradients of all of them are made before the first is used:
    in this order all of them live at once, twice. Random ops, buffers and in-place ops lie in between.
    """

    def __init__(self, width: int, wide: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))
        self.projections = nn.ModuleList(nn.Linear(width, wide) for _ in range(heads))
        self.norms = nn.ModuleList(nn.BatchNorm1d(wide) for _ in range(heads))
        self.outputs = nn.ModuleList(nn.Linear(wide, 4) for _ in range(heads))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mean", torch.zeros(wide))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        wide = [projection(h) for projection in self.projections]
        pooled = [w.mean(dim=1) for w in wide]
        with torch.no_grad():
            spread = torch.stack([w.amax() - w.amin() for w in wide]).sum()
            self.mean.mul_(0.9).add_(pooled[0].mean(dim=0))
        small = [self.dropout(norm(p).mul_(2).relu_()) for norm, p in zip(self.norms, pooled, strict=True)]
        scores = [output(s) for output, s in zip(self.outputs, small, strict=True)]
        return torch.cat(scores, dim=1) * spread.clamp(max=2) + self.mean.sum()


def make_heads(
    *, batch: int = 8, time: int = 32, width: int = 32, wide: int = 256, heads: int = 4, dropout: float = 0.2
) -> Case:
    """Heads in a bad order; the loss is taken outside of the model."""
    torch.manual_seed(0)
    model = Heads(width, wide, heads, dropout)

    def make_batch(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, time, width, generator=_generator(seed)),), {}

    def loss_of(scores: Tensor) -> Tensor:
        return scores.square().mean()

    return Case(model, make_batch, loss_of)


# The four of the acceptance, by the names under which tests and benchmarks report them.
MODELS: dict[str, Callable[..., Case]] = {
    "mlp": make_mlp,
    "gpt": make_gpt,
    "resnet50": make_resnet50,
    "unet": make_unet,
}
