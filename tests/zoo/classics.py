"""Hand-written classics: recurrent, convolutional, graph, coordinate and mixing networks, and shared weights."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import Tensor, nn

from tests.models import Block, Case
from tests.zoo.common import Batch, classes_loss, integers, loss_inside, normal

# --- recurrent ------------------------------------------------------------------------------------------------------


class RecurrentClassifier(nn.Module):
    """Embedding, two recurrent layers with dropout between them, mean over time, linear head."""

    def __init__(self, kind: type[nn.RNNBase], vocabulary: int, width: int, classes: int, *, both_ways: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.body = kind(width, width, num_layers=2, batch_first=True, dropout=0.2, bidirectional=both_ways)
        self.head = nn.Linear(width * (2 if both_ways else 1), classes)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.body(self.tokens(ids))
        return self.head(states.mean(dim=1))


def _make_recurrent(kind: type[nn.RNNBase], *, both_ways: bool) -> Case:
    torch.manual_seed(0)
    model = RecurrentClassifier(kind, 64, 24, 5, both_ways=both_ways)

    def make_batch(seed: int) -> Batch:
        return (integers(64, 8, 20, seed=seed),), {}

    return Case(model, make_batch, classes_loss)


def make_lstm() -> Case:
    """LSTM classifier of token sequences."""
    return _make_recurrent(nn.LSTM, both_ways=False)


def make_gru() -> Case:
    """GRU that reads both ways."""
    return _make_recurrent(nn.GRU, both_ways=True)


class CellLoop(nn.Module):
    """An LSTM cell stepped in Python: as many ops as steps, one weight for all."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(features, width), nn.Linear(width, features)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(x.shape[0], self.cell.hidden_size, dtype=x.dtype, device=x.device)
        state = (hidden, hidden)
        predictions = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            predictions.append(self.head(state[0]))
        return torch.stack(predictions, dim=1)


def make_lstm_cell_loop() -> Case:
    """Next-step prediction by an LSTM cell in a Python loop."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (normal(8, 16, 12, seed=seed),), {}

    return loss_inside(CellLoop(12, 24), make_batch, lambda y: y.pow(2).mean())


# --- convolutional --------------------------------------------------------------------------------------------------


class DenseLayer(nn.Module):
    """BatchNorm → ReLU → 3×3 convolution; the input is concatenated to the output."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm, self.convolution = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.convolution(F.relu(self.norm(x)))], dim=1)


class DenseNet(nn.Module):
    """Two dense blocks and a transition: every concatenation copies all features before it."""

    def __init__(self, growth: int, layers: int, classes: int) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        blocks: list[nn.Module] = []
        for block in range(2):
            for _ in range(layers):
                blocks.append(DenseLayer(channels, growth))
                channels += growth
            if block == 0:
                blocks += [nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)]
                channels //= 2
        self.body, self.head = nn.Sequential(*blocks), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(self.stem(x))).mean(dim=(2, 3)))


def make_densenet() -> Case:
    """DenseNet of two blocks."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (normal(4, 3, 16, 16, seed=seed),), {}

    return Case(DenseNet(8, 4, 10), make_batch, classes_loss)


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates; skips of all layers are summed."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, channels, 1)
        self.gates = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 2, dilation=2**i) for i in range(layers))
        self.mixes = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(layers))
        self.head = nn.Conv1d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = torch.zeros_like(x)
        for gate, mix in zip(self.gates, self.mixes, strict=True):
            filtered, opened = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, dim=1)
            y = mix(filtered.tanh() * opened.sigmoid())
            skips += y  # in place, as the originals do
            x = x + y
        return self.head(F.relu(skips))


def make_wavenet() -> Case:
    """WaveNet-style stack on one channel of audio."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (normal(4, 1, 128, seed=seed),), {}

    return loss_inside(WaveNet(16, 5), make_batch, lambda y: y.pow(2).mean())


# --- graphs and point clouds ----------------------------------------------------------------------------------------


class GraphAttention(nn.Module):
    """Attention over incoming edges: softmax by scatter, messages by ``index_add``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project, self.score = nn.Linear(width, width), nn.Linear(2 * width, 1)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.project(x)
        score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], dim=-1))).squeeze(-1)
        top = torch.full_like(x[:, 0], -math.inf).scatter_reduce(0, target, score, "amax")
        weight = (score - top[target]).exp()
        total = torch.zeros_like(top).scatter_add_(0, target, weight)
        messages = h[source] * (weight / total[target]).unsqueeze(-1)
        return self.norm(x + torch.zeros_like(h).index_add_(0, target, messages).relu())


class GraphNetwork(nn.Module):
    """Three graph layers; edges come with the batch, and the loss is over nodes."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.layers = nn.ModuleList(GraphAttention(width) for _ in range(3))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, *, edges: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x)


def make_graph_network() -> Case:
    """Graph attention network on a random graph."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        nodes = 40
        loops = torch.arange(nodes).expand(2, nodes)
        edges = torch.cat([integers(nodes, 2, 160, seed=seed), loops], dim=1)
        return (normal(nodes, 8, seed=seed),), {"edges": edges}

    return Case(GraphNetwork(8, 24, 4), make_batch, classes_loss)


class PointNet(nn.Module):
    """Per-point MLP, maximum over points, and a learnt alignment of the input."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.align = nn.Sequential(nn.Conv1d(3, width, 1), nn.BatchNorm1d(width), nn.ReLU())
        self.to_matrix = nn.Linear(width, 9)
        self.body = nn.Sequential(
            *[nn.Conv1d(3, width, 1), nn.BatchNorm1d(width), nn.ReLU(), nn.Conv1d(width, 2 * width, 1), nn.ReLU()]
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, points: Tensor) -> Tensor:
        matrix = self.to_matrix(self.align(points).amax(dim=2)).view(-1, 3, 3)
        matrix = matrix + torch.eye(3, device=points.device)
        features, _ = self.body(torch.bmm(matrix, points)).max(dim=2)
        return self.head(features)


def make_pointnet() -> Case:
    """PointNet classifier."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (normal(4, 3, 64, seed=seed),), {}

    return Case(PointNet(16, 6), make_batch, classes_loss)


# --- coordinates ----------------------------------------------------------------------------------------------------


class RadianceField(nn.Module):
    """NeRF-style: jittered samples along rays, encoded positions, an MLP with a skip, and alpha compositing."""

    def __init__(self, width: int, layers: int, octaves: int, samples: int) -> None:
        super().__init__()
        self.octaves, self.samples = octaves, samples
        encoded = 3 + 6 * octaves
        self.first = nn.ModuleList(nn.Linear(encoded if i == 0 else width, width) for i in range(layers))
        self.second = nn.ModuleList(nn.Linear(encoded + width if i == 0 else width, width) for i in range(layers))
        self.density, self.color = nn.Linear(width, 1), nn.Linear(width + 3, 3)

    def encode(self, x: Tensor) -> Tensor:
        scaled = [x * (2.0**i * math.pi) for i in range(self.octaves)]
        return torch.cat([x, *(s.sin() for s in scaled), *(s.cos() for s in scaled)], dim=-1)

    def forward(self, origins: Tensor, directions: Tensor) -> Tensor:
        rays = origins.shape[0]
        bins = torch.linspace(0.1, 2.0, self.samples, device=origins.device).expand(rays, self.samples)
        depth = bins + torch.rand_like(bins) * (1.9 / self.samples)  # stratified sampling, as in training
        points = origins[:, None] + directions[:, None] * depth[..., None]
        encoded = self.encode(points)
        h = encoded
        for layer in self.first:
            h = F.relu(layer(h))
        h = torch.cat([encoded, h], dim=-1)
        for layer in self.second:
            h = F.relu(layer(h))
        gaps = torch.cat([depth[:, 1:] - depth[:, :-1], torch.full_like(depth[:, :1], 0.1)], dim=1)
        alpha = 1 - torch.exp(-F.softplus(self.density(h).squeeze(-1)) * gaps)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-6], dim=1), dim=1)[:, :-1]
        color = self.color(torch.cat([h, directions[:, None].expand_as(points)], dim=-1)).sigmoid()
        return ((alpha * through)[..., None] * color).sum(dim=1)


def make_nerf() -> Case:
    """NeRF-style MLP rendering a batch of rays."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (normal(24, 3, seed=seed), F.normalize(normal(24, 3, seed=seed + 1000), dim=-1)), {}

    return Case(RadianceField(32, 3, 4, 12), make_batch, lambda color: (color - 0.5).pow(2).mean())


# --- fixed points, mixing, shared weights ---------------------------------------------------------------------------


class FixedPoint(nn.Module):
    """DEQ-like: the same cell iterated a fixed number of times towards its equilibrium, gradients through all of it."""

    def __init__(self, features: int, width: int, iterations: int, classes: int) -> None:
        super().__init__()
        self.iterations = iterations
        self.inject, self.recur = nn.Linear(features, width), nn.Linear(width, width, bias=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        injected = self.inject(x)
        z = torch.zeros_like(injected)
        for _ in range(self.iterations):
            z = 0.5 * z + 0.5 * torch.tanh(self.norm(self.recur(z) + injected))
        return self.head(z)


def make_fixed_point() -> Case:
    """Fixed-iteration equilibrium model."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (normal(64, 16, seed=seed),), {}

    return Case(FixedPoint(16, 32, 12, 5), make_batch, classes_loss)


class MixerBlock(nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_2(x))


class Mixer(nn.Module):
    """MLP-Mixer on patches."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(MixerBlock(16, width) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(dim=1))


def make_mixer() -> Case:
    """MLP-Mixer of four blocks."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (normal(8, 3, 16, 16, seed=seed),), {}

    return Case(Mixer(32, 4, 10), make_batch, classes_loss)


class SharedBlocks(nn.Module):
    """ALBERT-like: one transformer block applied again and again, dropout drawn anew each time."""

    def __init__(self, vocabulary: int, width: int, times: int) -> None:
        super().__init__()
        self.times = times
        self.tokens, self.block = nn.Embedding(vocabulary, width), Block(width, 4, 0.1, 0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for _ in range(self.times):
            x = self.block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def make_shared_blocks() -> Case:
    """One block six times."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (integers(64, 4, 24, seed=seed),), {}

    return Case(SharedBlocks(64, 32, 6), make_batch, lambda loss: loss)


class Siamese(nn.Module):
    """One encoder, with batch normalisation, called on both images of a pair; contrastive loss inside."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(3):
            inputs = 3 if i == 0 else channels
            layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        self.encoder = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 16))

    def forward(self, first: Tensor, second: Tensor, same: Tensor) -> Tensor:
        a, b = F.normalize(self.encoder(first), dim=1), F.normalize(self.encoder(second), dim=1)
        distance = (a - b).pow(2).sum(dim=1).add(1e-6).sqrt()
        return torch.where(same, distance.pow(2), F.relu(1 - distance).pow(2)).mean()


def make_siamese() -> Case:
    """Siamese network: the same block called twice."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        pair = normal(4, 3, 16, 16, seed=seed), normal(4, 3, 16, 16, seed=seed + 1000)
        return pair, {"same": torch.arange(4) % 2 == 0}

    return Case(Siamese(12), make_batch, lambda loss: loss)
