"""Hand-written generative models and mixtures: noise is drawn inside, buffers move, routing picks experts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import Tensor, nn

from tests.models import Case, make_unet
from tests.zoo.common import Batch, classes_loss, integers, loss_inside, normal


class TimeBlock(nn.Module):
    """Residual block of a diffusion model: group norm, a shift and scale from the time embedding, dropout."""

    def __init__(self, inputs: int, outputs: int, time_width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv_1, self.conv_2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.dropout = nn.Linear(time_width, 2 * outputs), nn.Dropout(0.1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = self.time(time)[:, :, None, None].chunk(2, dim=1)
        h = self.norm_2(self.conv_1(F.silu(self.norm_1(x)))) * (1 + scale) + shift
        return self.shortcut(x) + self.conv_2(self.dropout(F.silu(h)))


class SpatialAttention(nn.Module):
    """Self-attention over pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, channels), nn.Conv2d(channels, 3 * channels, 1)
        self.projection = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None]).squeeze(1)
        return x + self.projection(mixed.transpose(1, 2).view_as(x))


class Denoiser(nn.Module):
    """Diffusion U-Net that draws its own time steps and noise, and returns the denoising loss."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), dim=0))
        self.embed = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down_1, self.down_2 = TimeBlock(width, width, 2 * width), TimeBlock(width, 2 * width, 2 * width)
        self.middle = TimeBlock(2 * width, 2 * width, 2 * width)
        self.attention = SpatialAttention(2 * width)
        self.up_2, self.up_1 = TimeBlock(4 * width, width, 2 * width), TimeBlock(2 * width, width, 2 * width)
        self.head = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def embed_time(self, time: Tensor) -> Tensor:
        half = self.width // 2
        frequencies = torch.exp(-math.log(10_000) * torch.arange(half, device=time.device) / half)
        angles = time[:, None].float() * frequencies
        return self.embed(torch.cat([angles.sin(), angles.cos()], dim=1))

    def forward(self, images: Tensor) -> Tensor:
        time = torch.randint(self.kept.shape[0], (images.shape[0],), device=images.device)
        noise = torch.randn_like(images)
        kept = self.kept[time][:, None, None, None]
        x = self.stem(kept.sqrt() * images + (1 - kept).sqrt() * noise)
        embedded = self.embed_time(time)
        skip_1 = self.down_1(x, embedded)
        skip_2 = self.down_2(F.avg_pool2d(skip_1, 2), embedded)
        h = self.attention(self.middle(F.avg_pool2d(skip_2, 2), embedded))
        h = self.up_2(torch.cat([F.interpolate(h, scale_factor=2.0), skip_2], dim=1), embedded)
        h = self.up_1(torch.cat([F.interpolate(h, scale_factor=2.0), skip_1], dim=1), embedded)
        return F.mse_loss(self.head(h), noise)


def make_diffusion() -> Case:
    """Diffusion U-Net with time embedding, attention and noise drawn in the forward."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (normal(2, 3, 16, 16, seed=seed),), {}

    return Case(Denoiser(16, 100), make_batch, lambda loss: loss)


def make_unet_classic() -> Case:
    """The U-Net of the numerics tests, with batch normalisation."""
    return make_unet(batch=2, resolution=32, width=8, depth=2)


class VAE(nn.Module):
    """Convolutional variational autoencoder; the noise of the reparameterisation is drawn in the forward."""

    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *[nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU()],
            *[nn.Flatten(), nn.Linear(32 * width, 2 * latent)],
        )
        self.decoder = nn.Sequential(
            *[nn.Linear(latent, 32 * width), nn.ReLU(), nn.Unflatten(1, (2 * width, 4, 4))],
            *[nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 1, 4, 2, 1)],
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(dim=1).mean()
        return self.decoder(z), divergence


def make_vae() -> Case:
    """VAE that returns the reconstruction and the divergence; of which the loss is put together."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (normal(8, 1, 16, 16, seed=seed),), {}

    return loss_inside(VAE(8, 6), make_batch, lambda output: output[0].pow(2).mean() + 0.1 * output[1])


class Generator(nn.Module):
    """DCGAN-like generator, trained against a frozen, spectrally normalised discriminator that it holds."""

    def __init__(self, latent: int, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            *[nn.ConvTranspose2d(latent, 4 * width, 4, bias=False), nn.BatchNorm2d(4 * width), nn.ReLU(inplace=True)],
            *[nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width)],
            *[nn.ReLU(inplace=True), nn.ConvTranspose2d(2 * width, 3, 4, 2, 1), nn.Tanh()],
        )
        norm = nn.utils.parametrizations.spectral_norm
        self.discriminator = nn.Sequential(
            *[norm(nn.Conv2d(3, width, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True)],
            *[norm(nn.Conv2d(width, 2 * width, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True)],
            *[nn.Flatten(), norm(nn.Linear(32 * width, 1))],
        ).requires_grad_(requires_grad=False)

    def forward(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        images = self.generator(noise[:, :, None, None])
        return F.softplus(-self.discriminator(images)).mean(), images


def make_gan() -> Case:
    """GAN generator step: gradients pass through the frozen discriminator, whose power iteration moves buffers."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (normal(8, 8, seed=seed),), {}

    return Case(Generator(8, 8), make_batch, lambda output: output[0])


class RoutedExperts(nn.Module):
    """Mixture of experts: the best two of all, a count of what was routed where, and a bias that balances it."""

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.first = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.second = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)
        self.register_buffer("load", torch.zeros(experts))
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(dim=-1)
        _, picked = torch.topk(scores + self.bias, self.chosen, dim=-1)
        weights = scores.gather(-1, picked)
        gates = torch.zeros_like(scores).scatter(-1, picked, weights / weights.sum(dim=-1, keepdim=True))
        if self.training:
            counts = (gates > 0).sum(dim=0).to(self.load.dtype)
            self.load += counts
            self.bias += 0.01 * torch.sign(counts.mean() - counts)
        balance = (scores.mean(dim=0) * (gates > 0).float().mean(dim=0)).sum() * scores.shape[-1]
        hidden = F.silu(torch.einsum("td,edh->eth", x, self.first))
        return torch.einsum("eth,ehd,te->td", hidden, self.second, gates), balance


class ExpertsModel(nn.Module):
    """Three layers of routed experts with residuals, and the auxiliary balance loss beside the logits."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RoutedExperts(width, 4, 2) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        total = x.new_zeros(())
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y, balance = layer(norm(x))
            x, total = x + y, total + balance
        return {"logits": self.head(x), "balance": total}


def make_experts() -> Case:
    """Mixture of experts with topk routing and balancing buffers."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (normal(32, 16, seed=seed),), {}

    return Case(ExpertsModel(16, 5), make_batch, lambda o: classes_loss(o["logits"]) + 0.01 * o["balance"])


class VectorQuantiser(nn.Module):
    """VQ-VAE: nearest codes, straight-through gradient, codebook moved by an exponential average of its users."""

    def __init__(self, width: int, codes: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, latent, 3, 1, 1))
        self.decoder = nn.Sequential(
            nn.Conv2d(latent, width, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1)
        )
        self.register_buffer("codebook", torch.randn(codes, latent))
        self.register_buffer("usage", torch.ones(codes))
        self.register_buffer("total", self.codebook.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
        picked = torch.cdist(flat, self.codebook).argmin(dim=1)
        quantised = F.embedding(picked, self.codebook).view(z.shape[0], *z.shape[2:], -1).permute(0, 3, 1, 2)
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(picked, self.codebook.shape[0]).to(flat.dtype)
                self.usage.mul_(0.9).add_(one_hot.sum(dim=0), alpha=0.1)
                self.total.mul_(0.9).add_(one_hot.t() @ flat, alpha=0.1)
                self.codebook.copy_(self.total / self.usage.clamp(min=1e-3)[:, None])
        commitment = F.mse_loss(z, quantised.detach())
        return F.mse_loss(self.decoder(z + (quantised - z).detach()), x) + 0.25 * commitment


def make_vq_vae() -> Case:
    """Vector-quantised autoencoder with an EMA codebook."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (normal(2, 3, 16, 16, seed=seed),), {}

    return Case(VectorQuantiser(16, 12, 8), make_batch, lambda loss: loss)


class Translator(nn.Module):
    """``nn.Transformer`` as it comes, dropout on, with causal and padding masks."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.body = nn.Transformer(width, 4, 2, 2, 2 * width, 0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
        padding = source == 0
        y = self.body(
            self.tokens(source),
            self.tokens(target[:, :-1]),
            tgt_mask=causal,
            src_key_padding_mask=torch.zeros(padding.shape).masked_fill(padding, -math.inf),
            tgt_is_causal=True,
        )
        return F.cross_entropy(self.head(y).flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)


def make_transformer() -> Case:
    """Encoder and decoder of torch's own transformer."""
    torch.manual_seed(0)

    def make_batch(seed: int) -> Batch:
        return (integers(64, 4, 16, seed=seed), integers(64, 4, 13, seed=seed + 1000)), {}

    return Case(Translator(64, 32), make_batch, lambda loss: loss)
