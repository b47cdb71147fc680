"""Small models of every family of images, speech and encoder-decoders: a class of transformers, sizes, inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model: its class, its configuration, what goes in, and which results are compared."""

    model: str
    config: dict[str, Any]
    inputs: Callable[[np.random.Generator], Arrays]
    outputs: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)  # of the call in transformers
    tokens: bool = False  # whether text is generated, too
    generation: dict[str, Any] = field(default_factory=dict)  # what generation_config.json says of speech
    sees: bool = False  # whether text is generated from a prompt with images
    device: str = "cpu"  # of the stored comparison: variants of a graph that compiles for long are interpreted


def images(height: int, width: int, count: int = 3) -> Callable[[np.random.Generator], Arrays]:
    return lambda rng: {"pixel_values": rng.standard_normal((count, 3, height, width)).astype(np.float32)}


def images_and_texts(height: int, width: int) -> Callable[[np.random.Generator], Arrays]:
    def make(rng: np.random.Generator) -> Arrays:
        ids = rng.integers(3, 50, (4, 9))
        ids[np.arange(4), (4, 8, 6, 8)] = 50  # the end of a text
        mask = np.arange(9) <= np.array((4, 8, 6, 8))[:, None]
        return {**images(height, width)(rng), "input_ids": ids, "attention_mask": mask}

    return make


def sources(rng: np.random.Generator) -> Arrays:
    """Sources of three lengths, and what the decoder has made."""
    mask = np.arange(11) < np.array((11, 5, 8))[:, None]
    ids = np.where(mask, rng.integers(5, 90, mask.shape), 0)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": rng.integers(5, 90, (3, 7))}


def speech(rng: np.random.Generator) -> Arrays:
    """Features of two windows, and what the decoder has made."""
    features = rng.standard_normal((2, 16, 64)).astype(np.float32)
    return {"input_features": features, "decoder_input_ids": rng.integers(0, 50, (2, 7))}


def waveforms(rng: np.random.Generator) -> Arrays:
    """Sounds of two lengths."""
    mask = np.arange(900) < np.array((900, 611))[:, None]
    return {"input_values": np.where(mask, rng.standard_normal(mask.shape), 0).astype(np.float32),
            "attention_mask": mask}  # fmt: skip


def squares(rng: np.random.Generator) -> Arrays:
    """A prompt with two squares of four vectors each."""
    ids = rng.integers(3, 90, (1, 23))
    ids[0, 4:8] = ids[0, 10:14] = 99
    return {"input_ids": ids, "pixel_values": rng.standard_normal((1, 2, 3, 16, 16)).astype(np.float32)}


def patches(rng: np.random.Generator) -> Arrays:
    """A prompt with images of six and of eight vectors."""
    ids = rng.integers(3, 90, (1, 30))
    ids[0, 4:10] = ids[0, 14:22] = 99
    grids = np.array([[1, 4, 6], [1, 8, 4]])
    return {"input_ids": ids, "image_grid_thw": grids,
            "pixel_values": rng.standard_normal((56, 3 * 2 * 16)).astype(np.float32)}  # fmt: skip


TEXT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=60,
            max_position_embeddings=20, eos_token_id=50, bos_token_id=49, pad_token_id=50)  # fmt: skip
VIT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=24,
           patch_size=8, num_labels=5)  # fmt: skip
RESIZED = {"interpolate_pos_encoding": True}
STATES = ("last_hidden_state", "pooler_output")
PAIRS = ("logits_per_image", "image_embeds", "text_embeds")
T5 = dict(vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=2, num_heads=4,
          decoder_start_token_id=0, eos_token_id=1, pad_token_id=0)  # fmt: skip
BART = dict(vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
            bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2,
            forced_eos_token_id=2)  # fmt: skip
WHISPER = dict(vocab_size=140, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
               decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=32,
               max_target_positions=48, num_mel_bins=16, pad_token_id=50, bos_token_id=50, eos_token_id=50,
               decoder_start_token_id=51)  # fmt: skip
SPOKEN = dict(is_multilingual=True, lang_to_id={"<|en|>": 52, "<|de|>": 53, "<|fr|>": 54}, max_length=48,
              task_to_id={"transcribe": 55, "translate": 56}, no_timestamps_token_id=60, eos_token_id=50,
              max_initial_timestamp_index=20, decoder_start_token_id=51, pad_token_id=50,
              suppress_tokens=[1, 2, 7, *range(51, 60)], begin_suppress_tokens=[3, 50],
              return_timestamps=False)  # fmt: skip
WAVES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
             conv_dim=(16, 16, 24), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_conv_pos_embeddings=16,
             num_conv_pos_embedding_groups=4, vocab_size=20)  # fmt: skip
STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True}
RESNET = dict(embedding_size=8, hidden_sizes=[16, 32, 48], depths=[1, 2, 1], num_labels=5)
CONVNEXT = dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 2, 1, 1], num_labels=5)
SEGFORMER = dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 2, 1, 1], decoder_hidden_size=16, num_labels=5)
SWIN = dict(embed_dim=8, depths=[2, 1], num_heads=[2, 4], window_size=3, image_size=24, patch_size=2,
            num_labels=5)  # fmt: skip
BACKBONE = dict(model_type="resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
                out_indices=[2])  # fmt: skip
DETR = dict(backbone_config=BACKBONE, use_timm_backbone=False, backbone=None, d_model=16, encoder_layers=1,
            decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
            decoder_ffn_dim=24, num_queries=6, num_labels=4)  # fmt: skip
RT_DETR = {**DETR, "decoder_layers": 2, "encoder_hidden_dim": 16, "encoder_in_channels": [8, 16],
           "decoder_in_channels": [16, 16], "num_feature_levels": 2, "encode_proj_layers": [1], "feat_strides": [4, 8],
           "backbone_config": {**BACKBONE, "model_type": "rt_detr_resnet", "out_indices": [1, 2]}}  # fmt: skip
LANGUAGE = dict(vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
                pad_token_id=0)  # fmt: skip
SMOLVLM = dict(text_config=dict(model_type="llama", **LANGUAGE), image_token_id=99, scale_factor=2, pad_token_id=0,
               vision_config=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                                  image_size=16, patch_size=4))  # fmt: skip
MROPE = dict(rope_type="default", rope_theta=10000.0, mrope_section=[1, 1, 2])
QWEN_VL = dict(text_config=dict(**LANGUAGE, rope_parameters=MROPE), image_token_id=99, vision_start_token_id=98,
               vision_end_token_id=97, video_token_id=96, vision_config=dict(
                   depth=2, embed_dim=16, hidden_size=32, num_heads=2, patch_size=4, mlp_ratio=2))  # fmt: skip
QWEN_LATER = {**QWEN_VL, "vision_config": dict(
    depth=3, hidden_size=16, out_hidden_size=32, intermediate_size=24, num_heads=2, patch_size=4, window_size=16,
    fullatt_block_indexes=[1])}  # fmt: skip
SHOWN = {"mm_token_type_ids": (patches(np.random.default_rng(0))["input_ids"] == 99).astype(np.int64)}
FOUND = ("logits", "pred_boxes")
MADE = ("logits", "encoder_last_hidden_state")
CASES: dict[str, Case] = {
    "vit": Case("ViTForImageClassification", VIT, images(24, 24), ("logits",)),
    "vit, states": Case("ViTModel", VIT, images(24, 24), STATES),
    "vit, other size": Case("ViTForImageClassification", VIT, images(40, 32), ("logits",), RESIZED),
    "deit": Case("DeiTForImageClassificationWithTeacher", VIT, images(24, 24),
                 ("logits", "cls_logits", "distillation_logits")),
    "dinov2": Case("Dinov2ForImageClassification", {**VIT, "mlp_ratio": 2}, images(40, 32), ("logits",)),
    "dinov2_with_registers": Case("Dinov2WithRegistersModel", {**VIT, "use_swiglu_ffn": True}, images(32, 40), STATES),
    "clip": Case("CLIPModel", {"text_config": TEXT, "vision_config": VIT, "projection_dim": 16},
                 images_and_texts(24, 24), PAIRS),
    "clip, old end of text": Case(
        "CLIPModel", {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": VIT, "projection_dim": 16},
        images_and_texts(40, 32), PAIRS, RESIZED),
    "clip_vision_model": Case("CLIPVisionModelWithProjection", {**VIT, "projection_dim": 16}, images(24, 24),
                              ("image_embeds", "last_hidden_state")),
    "siglip": Case("SiglipModel", {"text_config": TEXT, "vision_config": VIT}, images_and_texts(24, 24), PAIRS),
    "siglip_vision_model": Case("SiglipVisionModel", VIT, images(24, 24), STATES),
    "t5": Case("T5ForConditionalGeneration", T5, sources, MADE, tokens=True),
    "t5, gated": Case(
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "relative_attention_max_distance": 8,
         "relative_attention_num_buckets": 8}, sources, MADE, tokens=True),
    "mt5": Case("MT5ForConditionalGeneration", T5, sources, MADE, tokens=True),
    "umt5": Case("UMT5ForConditionalGeneration", T5, sources, MADE, tokens=True),
    "bart": Case("BartForConditionalGeneration", BART, sources, MADE, tokens=True),
    "bart, untied": Case(
        "BartForConditionalGeneration", {**BART, "tie_word_embeddings": False}, sources, MADE, tokens=True
    ),
    "mbart": Case("MBartForConditionalGeneration", {**BART, "scale_embedding": True}, sources, MADE, tokens=True),
    "whisper": Case("WhisperForConditionalGeneration", WHISPER, speech, MADE, generation=SPOKEN),
    "wav2vec2": Case("Wav2Vec2ForCTC", WAVES, waveforms, ("logits",)),
    "wav2vec2, norms first": Case("Wav2Vec2ForCTC", {**WAVES, **STABLE}, waveforms, ("logits",)),
    "hubert": Case("HubertForCTC", WAVES, waveforms, ("logits",)),
    "hubert, norms first": Case("HubertModel", {**WAVES, **STABLE, "num_conv_pos_embeddings": 15}, waveforms,
                                ("last_hidden_state",)),
    "resnet": Case("ResNetForImageClassification", RESNET, images(64, 48), ("logits",)),
    "resnet, basic": Case("ResNetModel", {**RESNET, "layer_type": "basic", "downsample_in_first_stage": True},
                          images(48, 64), STATES),
    "resnet, silu": Case("ResNetForImageClassification", {**RESNET, "hidden_act": "silu"}, images(64, 48), ("logits",)),
    "convnext": Case("ConvNextForImageClassification", CONVNEXT, images(64, 96), ("logits",)),
    "convnextv2": Case("ConvNextV2ForImageClassification", CONVNEXT, images(64, 64), ("logits",)),
    "segformer": Case("SegformerForSemanticSegmentation", SEGFORMER, images(64, 96), ("logits",)),
    "swin": Case("SwinForImageClassification", SWIN, images(24, 24), ("logits",)),
    "swin, other size": Case("SwinModel", {**SWIN, "use_absolute_embeddings": True}, images(40, 32), STATES, RESIZED,
                             device="reference"),
    "swinv2": Case("Swinv2ForImageClassification", {**SWIN, "window_size": 8}, images(24, 24), ("logits",)),
    "swinv2, other size": Case("Swinv2Model", {**SWIN, "pretrained_window_sizes": [6, 3]}, images(31, 40), STATES,
                               device="reference"),
    "detr": Case("DetrForObjectDetection", DETR, images(48, 64), FOUND),
    "detr, learned": Case("DetrForObjectDetection", {**DETR, "position_embedding_type": "learned"}, images(32, 48),
                          FOUND, device="reference"),
    "detr, norms in each layer": Case(
        "DetrForObjectDetection", {**DETR, "auxiliary_loss": True, "decoder_layers": 2}, images(32, 48), FOUND,
        device="reference"),
    "rt_detr": Case("RTDetrForObjectDetection", RT_DETR, images(32, 48), FOUND),
    "rt_detr, narrow": Case(
        "RTDetrForObjectDetection",
        {**RT_DETR, "hidden_expansion": 0.5, "num_feature_levels": 3, "backbone_config": {
            **RT_DETR["backbone_config"], "layer_type": "bottleneck", "depths": [2, 1]}}, images(32, 32), FOUND,
        device="reference"),
    "smolvlm": Case("SmolVLMForConditionalGeneration", SMOLVLM, squares, ("logits",), sees=True),
    "idefics3": Case("Idefics3ForConditionalGeneration", {**SMOLVLM, "tie_word_embeddings": True}, squares,
                     ("logits",), sees=True),
    "qwen2_vl": Case("Qwen2VLForConditionalGeneration", QWEN_VL, patches, ("logits",), SHOWN, sees=True),
    "qwen2_5_vl": Case("Qwen2_5_VLForConditionalGeneration", QWEN_LATER, patches, ("logits",), SHOWN, sees=True),
    "segformer, labels": Case("SegformerForImageClassification", SEGFORMER, images(64, 64), ("logits",)),
}  # fmt: skip
