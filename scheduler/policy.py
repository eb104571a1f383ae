"""Which layers of a transformer to recompute, from its numbers alone.

Activation memory of a layer follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022 (arXiv 2205.05198), sections 4 and 5 and table 2: 16-bit activations, one-byte dropout masks, a GELU MLP
of four times the width. With s tokens, b sequences of a micro-batch, h the width, a heads and t-way tensor parallelism,
in bytes::

    no parallelism                s·b·h·(34 + 5·a·s/h)
    tensor                        s·b·h·(10 + 24/t + 5·a·s/(h·t))
    tensor and sequence           s·b·h/t·(34 + 5·a·s/h)
    attention recomputed          the same without the term in a·s/h
    everything recomputed         2·s·b·h

A fused (flash) attention kernel never stores that term; it keeps a float32 per row and head instead, 4·a·s·b/t bytes.

Floating-point operations of a layer's forward are 24·b·s·h² + 4·b·s²·h (matrix products alone, causal masks counted in
full, as in the paper); its backward takes twice as many. Recomputing the attention core adds 4·b·s²·h and recomputing
the layer adds its forward.

Copying a layer's activations to the host adds no operations. The copies of a micro-batch must leave while its forward
runs (the backward takes twice as long, so that they come back in time): with a forward of T_f seconds per layer and a
link of w bytes/s, at most layers · T_f · w / (bytes of a layer) layers can be copied without waiting.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Final


class Level(enum.StrEnum):
    """What is recomputed of a layer."""

    NONE = "none"
    SELECTIVE = "selective"  # the attention core
    FULL = "full"  # all of it, from its input
    OFFLOAD = "offload"  # nothing: all of it is copied to the host and back


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder by numbers, as one device sees it.

    Attributes:
        layers: of the whole model.
        hidden: width.
        heads: attention heads; a multiple of ``tensor_parallel``.
        seq: tokens of a sequence.
        batch: sequences of a micro-batch.
        vocabulary: rows of the embedding.
        flash: whether attention is one fused kernel.
        tensor_parallel: devices that share each layer.
        sequence_parallel: whether these also share what lies between the attention and the MLP.
        pipeline_parallel: stages; the first one holds the activations of as many micro-batches (1F1B).

    Raises:
        ValueError: a number is below 1, or does not divide what it splits.

    """

    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int = 1
    vocabulary: int = 51200
    flash: bool = False
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pipeline_parallel: int = 1

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be split so."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and value < 1:
                raise ValueError(f"{field.name} is {value}: give a whole number of at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.hidden}")
        if self.heads % self.tensor_parallel:
            raise ValueError(f"{self.tensor_parallel} devices cannot share {self.heads} heads")
        if self.layers % self.pipeline_parallel:
            raise ValueError(f"{self.pipeline_parallel} stages cannot share {self.layers} layers")
        if self.sequence_parallel and self.tensor_parallel > 1 and self.seq % self.tensor_parallel:
            raise ValueError(f"{self.tensor_parallel} devices cannot share sequences of {self.seq} tokens")

    @property
    def stage_layers(self) -> int:
        """Layers on one device."""
        return self.layers // self.pipeline_parallel

    @property
    def levels(self) -> tuple[Level, ...]:
        """What can be chosen per layer: with a fused kernel there is no attention core to recompute."""
        return (Level.NONE, Level.FULL) if self.flash else (Level.NONE, Level.SELECTIVE, Level.FULL)

    def layer_bytes(self, level: Level) -> int:
        """Activation bytes that one layer keeps for one micro-batch on one device."""
        sbh = self.seq * self.batch * self.hidden
        if level is Level.OFFLOAD:
            return 0
        if level is Level.FULL:
            return 2 * sbh
        t = self.tensor_parallel
        linear = 34 * sbh // t if self.sequence_parallel else 10 * sbh + 24 * sbh // t
        return linear + self.attention_bytes(level)

    def attention_bytes(self, level: Level) -> int:
        """The part of :meth:`layer_bytes` that the attention core keeps."""
        rows = self.heads * self.seq * self.batch // self.tensor_parallel
        if self.flash:
            return 4 * rows
        return 5 * rows * self.seq if level is Level.NONE else 0

    def formula(self, level: Level) -> str:
        """The formula behind :meth:`layer_bytes`, with the letters of this module's docstring."""
        if level is Level.FULL:
            return "2·s·b·h"
        split = self.tensor_parallel > 1
        linear = "34·s·b·h"
        if split:
            linear = "34·s·b·h/t" if self.sequence_parallel else "s·b·h·(10 + 24/t)"
        if self.flash:
            return f"{linear} + 4·a·s·b{'/t' if split else ''}"
        return linear + (f" + 5·a·s²·b{'/t' if split else ''}" if level is Level.NONE else "")

    def layers_copied_in_time(self, flops_per_s: float, bytes_per_s: float) -> int:
        """Layers of a stage whose activations a link can take to the host while their forward computes.

        Args:
            flops_per_s: what a device sustains.
            bytes_per_s: of the link, in each direction.

        """
        forward_s = self.stage_layers * self.forward_flops() / self.tensor_parallel / flops_per_s
        return min(self.stage_layers, int(forward_s * bytes_per_s / self.layer_bytes(Level.NONE)))

    def outside_bytes(self) -> int:
        """Activations outside of the layers on the first stage (section 4.3 of the paper).

        Dropout after the embedding; without further stages the last norm, the output projection's input and float32
        logits.
        """
        sbh = self.seq * self.batch * self.hidden
        t = self.tensor_parallel
        share = t if self.sequence_parallel else 1
        total = sbh * self.pipeline_parallel // share
        if self.pipeline_parallel == 1:
            total += 4 * sbh // share + 4 * self.seq * self.batch * self.vocabulary // t
        return total

    def parameters(self) -> int:
        """Parameters on the first stage's device: the layers' and the embeddings of tokens and positions."""
        h, t = self.hidden, self.tensor_parallel
        layer = (12 * h * h + 7 * h) // t + 6 * h
        return self.stage_layers * layer + (-(-self.vocabulary // t) + self.seq) * h

    def forward_flops(self) -> int:
        """Of one layer and micro-batch, over all devices that share it."""
        b, s, h = self.batch, self.seq, self.hidden
        return 24 * b * s * h * h + 4 * b * s * s * h

    def added_flops(self, level: Level) -> int:
        """What recomputation adds to one layer and micro-batch, over all devices that share it."""
        if level is Level.FULL:
            return self.forward_flops()
        return 4 * self.batch * self.seq**2 * self.hidden if level is Level.SELECTIVE else 0

    def step_flops(self) -> int:
        """Forward and backward of the whole model for one micro-batch, the output projection included."""
        return 3 * (self.layers * self.forward_flops() + 2 * self.batch * self.seq * self.hidden * self.vocabulary)


@dataclasses.dataclass(frozen=True)
class Policy:
    """How many layers of a stage to recompute, and what it comes to on one device.

    The layers run in the order offload, full, selective, none: those that keep most are the last to run forward and the
    first to be freed, which leaves room for rebuilding the others; those that must come back have the longest time.

    Attributes:
        transformer: the model.
        full: layers of a stage that are recomputed as a whole.
        selective: layers whose attention core is recomputed.
        offload: layers whose activations are copied to the host. One layer's bytes are set aside for copies in flight.

    """

    transformer: Transformer
    full: int
    selective: int
    offload: int = 0

    @property
    def none(self) -> int:
        """Layers of a stage that keep everything."""
        return self.transformer.stage_layers - self.full - self.selective - self.offload

    @property
    def levels(self) -> tuple[Level, ...]:
        """The level of each layer of a stage."""
        return tuple(level for level, count in self._counts for _ in range(count))

    @property
    def _counts(self) -> tuple[tuple[Level, int], ...]:
        """How many layers of each level, in the order in which they run."""
        return (
            (Level.OFFLOAD, self.offload),
            (Level.FULL, self.full),
            (Level.SELECTIVE, self.selective),
            (Level.NONE, self.none),
        )

    @functools.cached_property
    def activation_bytes(self) -> int:
        """Most activation bytes at once on the first stage: what is kept, and one layer that is being rebuilt."""
        model = self.transformer
        whole = model.layer_bytes(Level.NONE)
        kept = most = model.outside_bytes() + (whole if self.offload else 0)
        for level, count in self._counts:
            if count:
                kept += count * model.pipeline_parallel * model.layer_bytes(level)
                most = max(most, kept + whole - model.layer_bytes(level))
        return most

    @property
    def added_flops(self) -> int:
        """Floating-point operations that recomputation adds to a micro-batch, over the whole model."""
        model = self.transformer
        per_stage = self.full * model.added_flops(Level.FULL) + self.selective * model.added_flops(Level.SELECTIVE)
        return per_stage * model.pipeline_parallel

    @property
    def overhead(self) -> float:
        """Added operations / operations of the step that recomputes nothing."""
        return self.added_flops / self.transformer.step_flops()


def best_policy(model: Transformer, memory_bytes: int, *, offloadable: int = 0) -> Policy | None:
    """The policy with the least added operations whose activations fit, or ``None`` where none does.

    Args:
        model: the transformer.
        memory_bytes: for activations.
        offloadable: most layers of a stage to copy to the host (:meth:`Transformer.layers_copied_in_time`). Of equal
            policies the one that copies least is taken.

    """
    without, most = _best_with(model, memory_bytes, 0), min(offloadable, model.stage_layers)
    best = _best_with(model, memory_bytes, most) if most else None
    if best is None or (without is not None and without.added_flops <= best.added_flops):
        return without
    low, high = 0, most  # the least count that does as well: more of them never need more memory
    while high - low > 1:
        middle = (low + high) // 2
        tried = _best_with(model, memory_bytes, middle)
        if tried is not None and tried.added_flops <= best.added_flops:
            high, best = middle, tried
        else:
            low = middle
    return best


def _best_with(model: Transformer, memory_bytes: int, offload: int) -> Policy | None:
    """The same with exactly so many layers copied to the host."""
    left = model.stage_layers - offload
    found: Policy | None = None
    for full in range(left + 1):
        for selective in range(left - full + 1) if Level.SELECTIVE in model.levels else (0,):
            policy = Policy(model, full, selective, offload)
            if found is not None and policy.added_flops >= found.added_flops:
                break
            if policy.activation_bytes <= memory_bytes:
                found = policy
                break
    return found


def uniform(model: Transformer, level: Level) -> Policy:
    """The policy with the same level in every layer."""
    stage = model.stage_layers
    return Policy(model, stage if level is Level.FULL else 0, stage if level is Level.SELECTIVE else 0)


def megatron_flags(model: Transformer, memory_bytes: int) -> tuple[str, Policy | None]:
    """Flags of Megatron-Core for the cheapest policy that it can express and that fits, and that policy.

    It recomputes either the attention core in every layer, or the first layers of each stage as a whole.
    """
    stage = model.stage_layers
    candidates = [(Policy(model, 0, 0), "")]
    if Level.SELECTIVE in model.levels:
        flags = "--recompute-granularity selective --recompute-modules core_attn"
        candidates.append((uniform(model, Level.SELECTIVE), flags))
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers {}"
    candidates += [(Policy(model, n, 0), block.format(n)) for n in range(1, stage + 1)]
    fitting = [c for c in candidates if c[0].activation_bytes <= memory_bytes]
    parallel = [f"--tensor-model-parallel-size {model.tensor_parallel}"] if model.tensor_parallel > 1 else []
    parallel += ["--sequence-parallel"] if model.sequence_parallel and model.tensor_parallel > 1 else []
    parallel += ["--use-flash-attn"] if model.flash else []
    if not fitting:
        return " ".join(parallel), None
    policy, flags = min(fitting, key=lambda c: c[0].added_flops)
    return " ".join([*parallel, *([flags] if flags else [])]), policy


def megatron_offload(policy: Policy) -> str:
    """Megatron-Core's configuration of a policy that only copies; empty for others: it does not do both.

    Its own limit is all layers but one, without pipeline stages.
    """
    model = policy.transformer
    if not policy.offload or policy.full or policy.selective or model.pipeline_parallel > 1:
        return ""
    count = min(policy.offload, model.layers - 1)
    return f"TransformerConfig(cpu_offloading=True, cpu_offloading_weights=False, cpu_offloading_num_layers={count})"


def huggingface_lines(model: Transformer, memory_bytes: int) -> tuple[str, ...]:
    """Python for transformers, whose layers are recomputed as a whole or not at all."""
    attention = "sdpa" if model.flash else "eager"
    lines = [f'model.set_attn_implementation("{attention}")']
    count = _full_layers_needed(model, memory_bytes)
    if count:
        lines.append("model.gradient_checkpointing_enable()")
        if count < model.stage_layers:
            lines.append(f"for layer in model.model.layers[{count}:]: layer.gradient_checkpointing = False")
    return tuple(lines)


_TORCH: Final = {
    Level.OFFLOAD: "with torch.autograd.graph.save_on_cpu(pin_memory=True):  # waits\n    {}: x = layer(x)",
    Level.FULL: "{}: x = checkpoint(layer, x, use_reentrant=False)  # all of it",
    Level.SELECTIVE: "{}: x = layer(x)  # with checkpoint(core_attention, q, k, v, use_reentrant=False) in it",
    Level.NONE: "{}: x = layer(x)",
}


def torch_lines(policy: Policy) -> tuple[str, ...]:
    """Python for plain torch: one checkpoint per recomputed layer."""
    if policy.none == policy.transformer.stage_layers:
        return ("# nothing to recompute",)
    lines, start = [], 0
    if policy.full or policy.selective:
        lines.append("from torch.utils.checkpoint import checkpoint")
    for level, count in policy._counts:  # noqa: SLF001 - the same module
        if count:
            lines.append(_TORCH[level].format(f"for layer in layers[{start or ''}:{start + count}]"))
            start += count
    return tuple(lines)


def _full_layers_needed(model: Transformer, memory_bytes: int) -> int:
    """The fewest layers to recompute as a whole so that the rest can keep everything; all where that is too much."""
    counts: Sequence[int] = range(model.stage_layers)
    return next((n for n in counts if Policy(model, n, 0).activation_bytes <= memory_bytes), model.stage_layers)
