"""All architectures of the zoo by name, what is special about each, and which are in the fast subset."""

from __future__ import annotations

import dataclasses
import functools

from tests.zoo import classics, generative, hugging_face
from tests.zoo.common import Entry

# Covered by every test run: one of each kind that once failed, or is likely to.
_FAST = frozenset({"gpt2", "lstm", "vq_vae", "nerf"})

_HAND_WRITTEN = {
    "recurrent": {
        "lstm": classics.make_lstm,
        "gru": classics.make_gru,
        "lstm_cell_loop": classics.make_lstm_cell_loop,
    },
    "convolutional": {
        "densenet": classics.make_densenet,
        "unet": generative.make_unet_classic,
        "wavenet": classics.make_wavenet,
    },
    "graph": {"graph_network": classics.make_graph_network, "pointnet": classics.make_pointnet},
    "coordinates": {"nerf": classics.make_nerf},
    "repeated": {
        "fixed_point": classics.make_fixed_point,
        "shared_blocks": classics.make_shared_blocks,
        "siamese": classics.make_siamese,
    },
    "mixing": {"mixer": classics.make_mixer, "transformer": generative.make_transformer},
    "generative": {
        "diffusion": generative.make_diffusion,
        "vae": generative.make_vae,
        "gan": generative.make_gan,
        "vq_vae": generative.make_vq_vae,
    },
    "mixture of experts": {"experts": generative.make_experts},
}
_HUGGING_FACE = {
    "decoder": hugging_face.DECODERS,
    "mixture of experts": hugging_face.MIXTURES,
    "encoder": hugging_face.ENCODERS,
    "encoder-decoder": hugging_face.SEQUENCE_TO_SEQUENCE,
    "vision": hugging_face.VISION,
    "audio": hugging_face.AUDIO,
    "state space": hugging_face.STATE_SPACE,
}


def _entries() -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for families in (_HUGGING_FACE, _HAND_WRITTEN):
        for family, models in families.items():
            for name, make in models.items():
                found[name] = Entry(make, family, fast=name in _FAST)
    found["llama_unpadded"] = dataclasses.replace(
        found["llama_unpadded"],
        rtol=1e-4,
        atol=1e-7,
        tolerance_reason="transformers passes a mask while it is compiled, is_causal when not: two kernels",
    )
    found["clip"] = dataclasses.replace(
        found["clip"],
        rtol=1e-5,
        atol=1e-7,
        tolerance_reason="the gradient of the scale sums logits and their transpose, in the order of their layout",
    )
    found["gru"] = dataclasses.replace(
        found["gru"],
        rtol=1e-5,
        atol=1e-7,
        tolerance_reason="the gates are computed in place on strided views, here on dense tensors: other kernels",
    )
    # The shapes within its CTC loss depend on its inputs' values, so that it stays outside of the module.
    found["wav2vec2"] = dataclasses.replace(found["wav2vec2"], outside_bytes=21_352)
    # Its outputs are read by hooks through a context variable, which no graph holds.
    found["vit_mae"] = dataclasses.replace(found["vit_mae"], refused="could not be captured as one graph")
    found["wav2vec2_labels"] = Entry(
        functools.partial(hugging_face.make_wav2vec2, with_labels=True),
        "audio",
        refused="could not be captured as one graph",
    )
    return found


ZOO: dict[str, Entry] = _entries()
