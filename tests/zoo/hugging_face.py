"""Models of the transformers library, from configurations with tiny random weights: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import Tensor, nn

from tests.models import Case
from tests.zoo.common import Batch, integers, normal

VOCABULARY, WIDTH, HEADS, LAYERS = 96, 32, 4, 2
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_DECODER = {**_SIZES, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}


def _build(model: str, config: str, **options: Any) -> nn.Module:
    """A model in training mode; ``attn_implementation`` is passed on where it is given."""
    import transformers

    torch.manual_seed(0)
    configuration = getattr(transformers, config)(**options)
    built: nn.Module = getattr(transformers, model)(configuration).train()
    # Left to the first call that asks for hidden states or router logits, which takes a lock that no graph can hold.
    from transformers.utils.output_capturing import install_all_output_capturing_hooks

    install_all_output_capturing_hooks(built)
    return built


def _loss(output: Any) -> Tensor:
    return output.loss


def _tokens(seed: int, *, batch: int = 4, length: int = 24) -> Tensor:
    return integers(VOCABULARY - 3, batch, length, seed=seed) + 3  # no special tokens


def _language_model(model: str, config: str, *, padded: bool = True, **options: Any) -> Callable[[], Case]:
    """Predicts tokens; the labels are the inputs, and the model shifts them where it should.

    Every other sentence is shorter and ``padded``: without a mask of padding, transformers builds one while it is being
    compiled, and passes ``is_causal`` to another kernel when it is not.
    """

    def make() -> Case:
        def make_batch(seed: int) -> Batch:
            ids = _tokens(seed)
            if not padded:
                return (), {"input_ids": ids, "labels": ids.clone()}
            mask = torch.ones_like(ids)
            mask[1::2, 18:] = 0
            return (), {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

        return Case(_build(model, config, **options), make_batch, _loss)

    return make


def _masked_language_model(model: str, config: str, **options: Any) -> Callable[[], Case]:
    """Predicts a third of the tokens; sentences of two lengths are padded."""

    def make() -> Case:
        def make_batch(seed: int) -> Batch:
            ids = _tokens(seed)
            mask = torch.ones_like(ids)
            mask[1::2, 18:] = 0
            labels = ids.masked_fill((torch.arange(ids.shape[1]) % 3 != 0) | (mask == 0), -100)
            return (), {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}

        return Case(_build(model, config, **options), make_batch, _loss)

    return make


def _sequence_to_sequence(model: str, config: str, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        def make_batch(seed: int) -> Batch:
            return (), {"input_ids": _tokens(seed), "labels": _tokens(seed + 1000, length=15)}

        return Case(_build(model, config, **options), make_batch, _loss)

    return make


def _image_classifier(model: str, config: str, *, batch: int = 4, size: int = 32, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        def make_batch(seed: int) -> Batch:
            return (normal(batch, 3, size, size, seed=seed),), {"labels": integers(2, batch, seed=seed)}

        return Case(_build(model, config, **options), make_batch, _loss)

    return make


def make_clip() -> Case:
    """Two towers and a contrastive loss."""
    tower = {k: v for k, v in _SIZES.items() if k != "vocab_size"}
    model = _build(
        "CLIPModel",
        "CLIPConfig",
        text_config={**_SIZES, "max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
        vision_config={**tower, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )

    def make_batch(seed: int) -> Batch:
        ids = _tokens(seed, length=12)
        ids[:, -1] = 2
        return (), {"input_ids": ids, "pixel_values": normal(4, 3, 32, 32, seed=seed), "return_loss": True}

    return Case(model, make_batch, _loss)


def make_wav2vec2(*, with_labels: bool = False) -> Case:
    """Speech recognition. With labels the model checks their values in Python, which no graph can hold."""
    model = _build(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        **{**_SIZES, "vocab_size": 12},
        conv_dim=(16, 16, 16),
        conv_stride=(4, 2, 2),
        conv_kernel=(8, 3, 3),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.0,  # layer dropping is a Python branch on a random number
        apply_spec_augment=False,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
        pad_token_id=0,
    )
    model.freeze_feature_encoder()  # as in fine-tuning; else its forward sets requires_grad, which no graph can hold

    def make_batch(seed: int) -> Batch:
        labels = {"labels": integers(11, 2, 10, seed=seed) + 1} if with_labels else {}
        return (normal(2, 800, seed=seed),), labels

    def loss_of(output: Any) -> Tensor:
        if with_labels:
            return output.loss
        log_probabilities = output.logits.float().log_softmax(dim=-1).transpose(0, 1)
        frames = torch.full((2,), log_probabilities.shape[0])
        targets = torch.arange(20).view(2, 10) % 11 + 1
        return F.ctc_loss(log_probabilities, targets, frames, torch.full((2,), 10), zero_infinity=True)

    return Case(model, make_batch, loss_of)


def make_whisper() -> Case:
    """Speech to text: convolutional encoder stem, decoder with cross-attention."""
    model = _build(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        **_SEQ2SEQ,
        num_mel_bins=16,
        max_source_positions=40,
        max_target_positions=32,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )

    def make_batch(seed: int) -> Batch:
        return (), {"input_features": normal(2, 16, 80, seed=seed), "labels": _tokens(seed, batch=2, length=12)}

    return Case(model, make_batch, _loss)


def make_vit_mae() -> Case:
    """Masked autoencoder: sorts noise to pick the patches that it sees."""
    tower = {k: v for k, v in _SIZES.items() if k != "vocab_size"}
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    model = _build(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        **tower,
        **decoder,
        decoder_intermediate_size=32,
        image_size=32,
        patch_size=8,
    )

    def make_batch(seed: int) -> Batch:
        return (), {"pixel_values": normal(4, 3, 32, 32, seed=seed)}

    return Case(model, make_batch, _loss)


def make_segformer() -> Case:
    """Hierarchical transformer for segmentation: upsampled logits, a label per pixel."""
    model = _build(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        num_labels=5,
        drop_path_rate=0.1,
    )

    def make_batch(seed: int) -> Batch:
        return (), {"pixel_values": normal(2, 3, 32, 32, seed=seed), "labels": integers(5, 2, 32, 32, seed=seed)}

    return Case(model, make_batch, _loss)


_GROUPED = {**_DECODER, "num_key_value_heads": 2, "max_position_embeddings": 64}

DECODERS: dict[str, Callable[[], Case]] = {
    "gpt2": _language_model(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=64,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama": _language_model("LlamaForCausalLM", "LlamaConfig", **_GROUPED),
    "llama_unpadded": _language_model("LlamaForCausalLM", "LlamaConfig", **_GROUPED, padded=False),
    "mistral": _language_model("MistralForCausalLM", "MistralConfig", **_GROUPED, sliding_window=8),
    "qwen2": _language_model("Qwen2ForCausalLM", "Qwen2Config", **_GROUPED),
    "gemma": _language_model("GemmaForCausalLM", "GemmaConfig", **_GROUPED, head_dim=8),
    "gemma2": _language_model(
        "Gemma2ForCausalLM", "Gemma2Config", **_GROUPED, head_dim=8, sliding_window=8, attn_implementation="eager"
    ),
    "phi": _language_model("PhiForCausalLM", "PhiConfig", **_DECODER, max_position_embeddings=64, resid_pdrop=0.1),
    "opt": _language_model(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        ffn_dim=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
        word_embed_proj_dim=WIDTH,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "bloom": _language_model(
        "BloomForCausalLM",
        "BloomConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        use_cache=False,
        pad_token_id=0,
    ),
    "gpt_neox": _language_model(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", **_DECODER, hidden_dropout=0.1, attention_dropout=0.1
    ),
    "falcon": _language_model("FalconForCausalLM", "FalconConfig", **_DECODER, hidden_dropout=0.1, alibi=True),
}
MIXTURES: dict[str, Callable[[], Case]] = {
    "mixtral": _language_model(
        "MixtralForCausalLM",
        "MixtralConfig",
        **_GROUPED,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    ),
    "qwen2_moe": _language_model(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        **_GROUPED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
    ),
}
ENCODERS: dict[str, Callable[[], Case]] = {
    "bert": _masked_language_model("BertForMaskedLM", "BertConfig", **_SIZES, max_position_embeddings=64),
    "roberta": _masked_language_model("RobertaForMaskedLM", "RobertaConfig", **_SIZES, max_position_embeddings=64),
    "distilbert": _masked_language_model(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        vocab_size=VOCABULARY,
        dim=WIDTH,
        hidden_dim=2 * WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_position_embeddings=64,
    ),
    "electra": _masked_language_model(
        "ElectraForMaskedLM", "ElectraConfig", **_SIZES, embedding_size=16, max_position_embeddings=64
    ),
    "deberta_v2": _masked_language_model(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        **_SIZES,
        max_position_embeddings=64,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
    ),
    "albert": _masked_language_model(
        "AlbertForMaskedLM",
        "AlbertConfig",
        **{**_SIZES, "num_hidden_layers": 4},
        embedding_size=16,
        max_position_embeddings=64,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    ),
}
SEQUENCE_TO_SEQUENCE: dict[str, Callable[[], Case]] = {
    "t5": _sequence_to_sequence(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        use_cache=False,
        pad_token_id=0,
        decoder_start_token_id=0,
    ),
    "bart": _sequence_to_sequence("BartForConditionalGeneration", "BartConfig", **_SEQ2SEQ),
    "marian": _sequence_to_sequence("MarianMTModel", "MarianConfig", **_SEQ2SEQ),
}
_TOWER = {k: v for k, v in _SIZES.items() if k != "vocab_size"}
VISION: dict[str, Callable[[], Case]] = {
    "vit": _image_classifier(
        "ViTForImageClassification", "ViTConfig", **_TOWER, image_size=32, patch_size=8, hidden_dropout_prob=0.1
    ),
    "convnext": _image_classifier(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        hidden_sizes=[16, 32],
        depths=[2, 2],
        num_stages=2,
        patch_size=2,
        drop_path_rate=0.1,
    ),
    "swin": _image_classifier(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.1,
    ),
    "resnet_hf": _image_classifier(
        "ResNetForImageClassification",
        "ResNetConfig",
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        layer_type="basic",
    ),
    "mobilenet_v2": _image_classifier(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", image_size=32, depth_multiplier=0.25
    ),
    "vit_mae": make_vit_mae,
    "segformer": make_segformer,
    "clip": make_clip,
}
AUDIO: dict[str, Callable[[], Case]] = {"wav2vec2": make_wav2vec2, "whisper": make_whisper}
STATE_SPACE: dict[str, Callable[[], Case]] = {
    "mamba": _language_model(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        state_size=4,
        time_step_rank=4,
        use_cache=False,
        use_mambapy=False,
        use_associative_scan=False,  # else another scan runs while it is compiled than when it is not
    ),
}
