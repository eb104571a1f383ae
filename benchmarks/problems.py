"""The problems of ``python -m benchmarks.solvers``: captured models, and random layered graphs.

Models are captured on fake tensors with their weights on ``meta``, and timed by the roofline of an 80 GB H100: nothing
is allocated, and the numbers are the same on every machine.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.llama8b_offline import make_llama
from scheduler import Plan, plan
from solvers import Problem
from tests.models import make_resnet50, make_unet

Step = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.empty(batch, length, dtype=torch.long)


def gpt2() -> Step:
    """GPT-2 of 124 M parameters, batch 4 of 1,024 tokens, fp32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = _tokens(4, 1024)
    return GPT2LMHeadModel(GPT2Config(use_cache=False)), (), {"input_ids": ids, "labels": ids}


def llama(layers: int) -> Step:
    """Llama-3-8B, or deeper, 8,192 tokens, bf16."""
    model, batch = make_llama(8192, layers)
    return model, (), batch


def vit_large() -> Step:
    """ViT-L/16, batch 32 of 224 × 224, fp32."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    batch = {"pixel_values": torch.empty(32, 3, 224, 224), "labels": torch.empty(32, dtype=torch.long)}
    return ViTForImageClassification(config), (), batch


def t5() -> Step:
    """T5-small: 6 encoder and 6 decoder layers, batch 8 of 512 tokens, fp32."""
    from transformers import T5Config, T5ForConditionalGeneration

    ids = _tokens(8, 512)
    config = T5Config(use_cache=False, pad_token_id=0, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config), (), {"input_ids": ids, "labels": ids}


class _MixtureOfExperts(nn.Module):
    """Feed-forward layer of ``experts`` experts, each token weighted by the router over all of them."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict(
                {
                    "gate": nn.Linear(width, hidden, bias=False),
                    "up": nn.Linear(width, hidden, bias=False),
                    "down": nn.Linear(hidden, width, bias=False),
                }
            )
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            share = (weights * (chosen == index)).sum(-1, keepdim=True)
            y = y + share * expert["down"](nn.functional.silu(expert["gate"](x)) * expert["up"](x))
        return y


class _MixtralLike(nn.Module):
    """Decoder whose feed-forward layers are mixtures of experts, as in Mixtral, computed densely."""

    def __init__(self, *, layers: int, width: int, heads: int, hidden: int, experts: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.attention_norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.projections = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.outputs = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.mixtures = nn.ModuleList(_MixtureOfExperts(width, hidden, experts) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.heads = heads

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for normed, project, output, norm, mixture in zip(
            self.attention_norms, self.projections, self.outputs, self.norms, self.mixtures, strict=True
        ):
            parts = project(normed(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
            q, k, v = parts.unbind(2)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + output(mixed.transpose(1, 2).flatten(2))
            x = x + mixture(norm(x))
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def mixtral_like() -> Step:
    """8 layers of width 1,024 with 8 experts each, 4,096 tokens, bf16."""
    model = _MixtralLike(layers=8, width=1024, heads=16, hidden=3584, experts=8, vocabulary=32000)
    return model.to(torch.bfloat16), (_tokens(1, 4096),), {}


def resnet50() -> Step:
    """ResNet-50, batch 32 of 224 × 224, fp32."""
    case = make_resnet50(batch=32, resolution=224, width=64)
    return case.model, *case.make_batch(0)


def unet() -> Step:
    """U-Net of four levels, batch 8 of 192 × 192, fp32."""
    case = make_unet(batch=8, resolution=192, width=64)
    return case.model, *case.make_batch(0)


class _DenseNet(nn.Module):
    """DenseNet-BC with growth 32: each layer reads what all earlier ones of its block made."""

    def __init__(self, blocks: tuple[int, ...]) -> None:
        super().__init__()
        width, growth = 64, 32
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for index, count in enumerate(blocks):
            layers = []
            for _ in range(count):
                layers.append(_bottleneck(width, growth))
                width += growth
            self.blocks.append(nn.ModuleList(layers))
            if index + 1 < len(blocks):
                self.transitions.append(
                    nn.Sequential(
                        nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)
                    )
                )
                width //= 2
        self.head = nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for index, block in enumerate(self.blocks):
            for layer in block:
                x = torch.cat([x, layer(x)], 1)
            if index < len(self.transitions):
                x = self.transitions[index](x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def _bottleneck(width: int, growth: int) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 4 * growth, 1, bias=False),
        nn.BatchNorm2d(4 * growth),
        nn.ReLU(),
        nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
    )


def densenet121() -> Step:
    """DenseNet-121, batch 32 of 224 × 224, fp32."""
    images, labels = torch.empty(32, 3, 224, 224), torch.empty(32, dtype=torch.long)
    return _DenseNet((6, 12, 24, 16)), (images, labels), {}


class _Lstm(nn.Module):
    """An LSTM cell unrolled over a sequence, step by step, with a read-out of the last state."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, 10)
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.new_zeros(x.shape[0], x.shape[2])
        cell = x.new_zeros(x.shape[0], x.shape[2])
        for step in range(self.steps):
            hidden, cell = self.cell(x[:, step], (hidden, cell))
        return self.head(hidden).square().mean()


def lstm() -> Step:
    """LSTM cell of width 512 over 128 steps, batch 64, fp32."""
    return _Lstm(512, 128), (torch.empty(64, 128, 512),), {}


MODELS: Mapping[str, Callable[[], Step]] = {
    "GPT-2": gpt2,
    "Llama-3-8B": functools.partial(llama, 32),
    "Llama, 96 layers": functools.partial(llama, 96),
    "ViT-L": vit_large,
    "T5": t5,
    "Mixtral-like": mixtral_like,
    "ResNet-50": resnet50,
    "U-Net": unet,
    "DenseNet-121": densenet121,
    "LSTM, 128 steps": lstm,
}

#: The transformers among them, for which the gap is held to half a per cent of the step.
TRANSFORMERS = ("GPT-2", "Llama-3-8B", "Llama, 96 layers", "ViT-L", "T5", "Mixtral-like")


def captured(make: Callable[[], Step], *, device: str = "h100-sxm") -> Problem:
    """The problem of a model's training step, without a limit on memory."""
    return captured_plan(make, device=device).problem


def captured_plan(make: Callable[[], Step], *, device: str = "h100-sxm") -> Plan:
    """The keep-all plan of a model's training step."""
    with torch.device("meta"):
        model, args, kwargs = make()
    return plan(model.train(), None, args, kwargs, device=device)


def random_layered(ops: int, seed: int = 0) -> Problem:
    """A random layered training graph.

    Forward ops lie in layers of random width from 1 to 8. Each reads 1 to 3 outputs of earlier layers, of the layer
    ``d`` before its own with a probability that halves with each ``d``. Times are drawn evenly on a logarithmic scale
    over two decades, sizes over one. The backward mirrors the forward: the gradient op of each forward op reads the
    gradients of what reads it, its inputs and its output, takes twice its time, and makes as many bytes as its inputs.

    Args:
        ops: number of ops, forward and backward together; an odd one is rounded down.
        seed: of the generator.

    """
    draw = random.Random(seed)
    forward = ops // 2
    layers: list[list[int]] = []
    made = 0
    while made < forward:
        width = min(draw.randint(1, 8), forward - made)
        layers.append(list(range(made, made + width)))
        made += width
    inputs: list[list[int]] = []
    for level, layer in enumerate(layers):
        for _ in layer:
            reads = set()
            for _ in range(draw.randint(1, 3)):
                distance = 1
                while distance < level and draw.random() < 0.5:
                    distance += 1
                if level:
                    reads.add(draw.choice(layers[level - distance]))
            inputs.append(sorted(reads))
    times = [round(10 ** draw.uniform(4, 6)) for _ in range(forward)]
    sizes = [round(10 ** draw.uniform(6, 7)) for _ in range(forward)]
    readers: list[list[int]] = [[] for _ in range(forward)]
    for op, reads in enumerate(inputs):
        for source in reads:
            readers[source].append(op)
    gradient_of = [2 * forward - 1 - op for op in range(forward)]
    for op in reversed(range(forward)):
        inputs.append(sorted({*inputs[op], op, *(gradient_of[reader] for reader in readers[op])}))
        times.append(2 * times[op])
        sizes.append(max(sum(sizes[source] for source in inputs[op]), 10**6))
    return dataclasses.replace(Problem.from_single_outputs(times, sizes, inputs, 0), forward_ops=forward)
