"""Models of transformers, timm, torchvision and diffusers with random weights, their inputs, and what they give.

A model is a function that gives a module, its arguments and its keyword arguments. `python -m tests.torch_models` runs
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

SEED = 0

# Sizes that keep a model whole and quick: two layers, narrow, a short vocabulary.
_ENCODER = {
    "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MOE = {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_local_experts": 4}
_IMAGE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_SOUND = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 32,
}  # fmt: skip


def _ids(shape: tuple[int, ...] = (2, 17), high: int = 99) -> Any:
    import torch

    return torch.randint(3, high, shape)


def _picture(size: int, batch: int = 2, channels: int = 3) -> Any:
    import torch

    return torch.randn(batch, channels, size, size)


def _hugging(
    name: str, settings: dict[str, Any], kind: str = "text", head: str = "AutoModel", tokens: tuple[int, int] = (2, 17)
) -> Callable[[], Any]:
    """A model of transformers by the name of its configuration."""

    def make() -> Any:
        _vision()
        import torch
        import transformers

        config = getattr(transformers, f"{name}Config")(**settings)
        model = getattr(transformers, head).from_config(config)
        match kind:
            case "text":
                inputs = {"input_ids": _ids(tokens)}
            case "masked":
                mask = torch.ones(tokens, dtype=torch.int64)
                mask[1:, 11:] = 0
                inputs = {"input_ids": _ids(tokens), "attention_mask": mask}
            case "pair":
                inputs = {"input_ids": _ids(), "decoder_input_ids": _ids((2, 9))}
            case "image":
                inputs = {"pixel_values": _picture(settings.get("image_size", 32))}
            case "sound":
                inputs = {"input_values": torch.randn(2, 1600)}
            case "spectrum":
                inputs = {"input_features": torch.randn(2, 80, 64), "decoder_input_ids": _ids((2, 9))}
            case _:
                inputs = {"input_ids": _ids(), "pixel_values": _picture(32)}
        return model, (), inputs

    return make


def _timm(name: str, size: int = 64, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        _vision()
        import timm

        chosen = {"num_classes": 10, **settings}
        return timm.create_model(name, pretrained=False, **chosen), (_picture(size),), {}

    return make


def _torchvision(name: str, size: int = 64, *, listed: bool = False, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        _vision()
        import torch
        from torchvision import models

        maker: Any = models
        for part in name.split(".")[:-1]:
            maker = getattr(maker, part)
        model = getattr(maker, name.rsplit(".", maxsplit=1)[-1])(**{"weights": None, **settings})
        picture = torch.rand(2, 3, size, size)
        return model, ((list(picture),) if listed else (picture,)), {}

    return make


def _diffusers(name: str, inputs: Callable[[], Any], **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        _vision()
        import diffusers

        return getattr(diffusers, name)(**settings), *inputs()

    return make


UNUSED = (  # ops of torchvision that only have to be known
    "qnms", "qroi_align", "box_iou_rotated", "_roi_align_backward", "deform_conv2d", "_deform_conv2d_backward",
    "ps_roi_align", "roi_pool", "_ps_roi_align_backward", "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward",
)  # fmt: skip


def _vision() -> None:
    """torchvision needs its library of ops; where that is made for another torch, its ops in Python do."""
    import torch

    try:
        import torchvision
    except ModuleNotFoundError:  # most models do without
        return
    except RuntimeError:
        for module in [m for m in sys.modules if m.startswith("torchvision")]:
            del sys.modules[module]
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define(
            "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
            "int sampling_ratio, bool aligned) -> Tensor"
        )
        for other in UNUSED:
            library.define(f"{other}(Tensor x) -> Tensor")
        library.impl("nms", _nms, "CPU")
        _vision.kept = library  # type: ignore[attr-defined]
        import torchvision

        torchvision.extension._has_ops = lambda: True


def _nms(boxes: Any, scores: Any, threshold: float) -> Any:
    import torch

    order, kept = scores.argsort(descending=True, stable=True), []
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    while len(order):
        first, rest = order[0], order[1:]
        kept.append(first)
        low = torch.maximum(boxes[first, :2], boxes[rest, :2])
        high = torch.minimum(boxes[first, 2:], boxes[rest, 2:])
        both = (high - low).clamp(min=0).prod(1)
        order = rest[both / (area[first] + area[rest] - both) <= threshold]
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.int64)


def _noise() -> Any:
    import torch

    return (torch.randn(1, 4, 16, 16), torch.tensor([7])), {}


def _latents() -> Any:
    return (_picture(32, 1),), {}


def _prompted() -> Any:
    import torch

    return (torch.randn(1, 4, 16, 16), torch.tensor([7]), torch.randn(1, 7, 32)), {}


MODELS: dict[str, Callable[[], Any]] = {
    # encoders
    "bert": _hugging("Bert", _ENCODER, "masked"),
    "roberta": _hugging("Roberta", _ENCODER, "masked"),
    "distilbert": _hugging(
        "DistilBert", {"vocab_size": 99, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}, "masked"
    ),
    "albert": _hugging("Albert", {**_ENCODER, "embedding_size": 32}, "masked"),
    "electra": _hugging("Electra", {**_ENCODER, "embedding_size": 32}, "masked"),
    "mpnet": _hugging("MPNet", _ENCODER, "masked"),
    "deberta_v2": _hugging(
        "DebertaV2", {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "masked"
    ),
    "modernbert": _hugging("ModernBert", {**_ENCODER, "pad_token_id": 0}, "masked"),
    "roformer": _hugging("RoFormer", _ENCODER, "masked"),
    "nystromformer": _hugging("Nystromformer", {**_ENCODER, "segment_means_seq_len": 17, "num_landmarks": 17}, "text"),
    # decoders
    "gpt2": _hugging(
        "GPT2", {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4}, "masked", "AutoModelForCausalLM"
    ),
    "gpt_neo": _hugging(
        "GPTNeo",
        {
            "vocab_size": 99,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
        },
        "text",
        "AutoModelForCausalLM",
    ),
    "gpt_neox": _hugging("GPTNeoX", _ENCODER, "text", "AutoModelForCausalLM"),
    "opt": _hugging("OPT", {**_ENCODER, "ffn_dim": 128, "word_embed_proj_dim": 64}, "masked", "AutoModelForCausalLM"),
    "bloom": _hugging(
        "Bloom", {"vocab_size": 99, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "masked", "AutoModelForCausalLM"
    ),
    "llama": _hugging("Llama", _DECODER, "masked", "AutoModelForCausalLM"),
    "mistral": _hugging("Mistral", {**_DECODER, "sliding_window": 8}, "text", "AutoModelForCausalLM"),
    "qwen2": _hugging("Qwen2", _DECODER, "masked", "AutoModelForCausalLM"),
    "qwen3": _hugging("Qwen3", {**_DECODER, "head_dim": 16}, "text", "AutoModelForCausalLM"),
    "gemma": _hugging("Gemma", {**_DECODER, "head_dim": 16}, "text", "AutoModelForCausalLM"),
    "gemma2": _hugging("Gemma2", {**_DECODER, "head_dim": 16, "sliding_window": 8}, "text", "AutoModelForCausalLM"),
    "phi": _hugging("Phi", _DECODER, "text", "AutoModelForCausalLM"),
    "phi3": _hugging("Phi3", _DECODER, "text", "AutoModelForCausalLM"),
    "falcon": _hugging(
        "Falcon",
        {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "text",
        "AutoModelForCausalLM",
    ),
    "olmo": _hugging("Olmo", _DECODER, "text", "AutoModelForCausalLM"),
    "stablelm": _hugging("StableLm", _DECODER, "text", "AutoModelForCausalLM"),
    "cohere": _hugging("Cohere", _DECODER, "text", "AutoModelForCausalLM"),
    "mamba": _hugging(
        "Mamba",
        {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
        "text",
        "AutoModelForCausalLM",
    ),
    # mixtures of experts
    "mixtral": _hugging("Mixtral", _MOE, "text", "AutoModelForCausalLM"),
    "qwen2_moe": _hugging("Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 32}, "text", "AutoModelForCausalLM"),
    "qwen3_moe": _hugging("Qwen3Moe", {**_MOE, "head_dim": 16}, "text", "AutoModelForCausalLM"),
    "olmoe": _hugging("Olmoe", _MOE, "text", "AutoModelForCausalLM"),
    # encoders with decoders
    "t5": _hugging(
        "T5", {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}, "pair"
    ),
    "bart": _hugging(
        "Bart",
        {
            "vocab_size": 99,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_position_embeddings": 64,
        },
        "pair",
    ),
    "pegasus": _hugging(
        "Pegasus",
        {
            "vocab_size": 99,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_position_embeddings": 64,
        },
        "pair",
    ),
    # speech
    "whisper": _hugging(
        "Whisper",
        {
            "vocab_size": 99,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_source_positions": 32,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        "spectrum",
    ),
    "wav2vec2": _hugging("Wav2Vec2", _SOUND, "sound"),
    "hubert": _hugging("Hubert", _SOUND, "sound"),
    # images
    "vit": _hugging("ViT", _IMAGE, "image"),
    "deit": _hugging("DeiT", _IMAGE, "image"),
    "beit": _hugging("Beit", {**_IMAGE, "use_relative_position_bias": True}, "image"),
    "dinov2": _hugging("Dinov2", {**_IMAGE, "mlp_ratio": 2}, "image"),
    "swin": _hugging(
        "Swin",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        "image",
    ),
    "convnext": _hugging(
        "ConvNext", {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "image_size": 64}, "image"
    ),
    "resnet": _hugging(
        "ResNet",
        {
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [1, 1, 1, 1],
            "layer_type": "basic",
            "image_size": 64,
        },
        "image",
    ),
    "segformer": _hugging(
        "Segformer",
        {
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "image_size": 64,
        },
        "image",
        "AutoModelForSemanticSegmentation",
    ),
    "clip": _hugging(
        "CLIP", {"text_config": {**_ENCODER, "eos_token_id": 2}, "vision_config": _IMAGE, "projection_dim": 32}, "both"
    ),
    # timm
    "timm_resnet18": _timm("resnet18"),
    "timm_efficientnet_b0": _timm("efficientnet_b0"),
    "timm_mobilenetv3": _timm("mobilenetv3_small_100"),
    "timm_convnext_atto": _timm("convnext_atto"),
    "timm_vit_tiny": _timm("vit_tiny_patch16_224", img_size=64),
    "timm_mixer": _timm("mixer_s32_224", 224, num_classes=0),
    "timm_regnet": _timm("regnetx_002"),
    "timm_densenet": _timm("densenet121"),
    "timm_ghostnet": _timm("ghostnet_100"),
    "timm_poolformer": _timm("poolformer_s12"),
    # torchvision
    "tv_resnet18": _torchvision("resnet18"),
    "tv_mobilenet_v2": _torchvision("mobilenet_v2"),
    "tv_shufflenet": _torchvision("shufflenet_v2_x0_5"),
    "tv_squeezenet": _torchvision("squeezenet1_1"),
    "tv_lraspp": _torchvision("segmentation.lraspp_mobilenet_v3_large", weights_backbone=None),
    "tv_deeplab": _torchvision("segmentation.deeplabv3_mobilenet_v3_large", weights_backbone=None),
    "tv_ssdlite": _torchvision("detection.ssdlite320_mobilenet_v3_large", listed=True, weights_backbone=None),
    # diffusion
    "unet": _diffusers(
        "UNet2DModel",
        _noise,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
    ),
    "unet_condition": _diffusers(
        "UNet2DConditionModel",
        _prompted,
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=8,
    ),
    "vae": _diffusers(
        "AutoencoderKL",
        _latents,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        latent_channels=4,
    ),
}
_LLAMA = {
    **_DECODER, "vocab_size": 8000, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "intermediate_size": 1408, "max_position_embeddings": 256,
}  # fmt: skip
FULL: dict[str, Callable[[], Any]] = {
    # of the sizes that are in use: for times
    "full_bert": _hugging("Bert", {}, "masked", tokens=(1, 128)),
    "full_minilm": _hugging(
        "Bert", {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}, "masked", tokens=(8, 64)
    ),
    "full_gpt2": _hugging("GPT2", {}, "text", "AutoModelForCausalLM", tokens=(1, 64)),
    "full_llama": _hugging("Llama", _LLAMA, "text", "AutoModelForCausalLM", tokens=(1, 64)),
    "full_resnet18": _torchvision("resnet18", 224),
    "full_resnet50": _torchvision("resnet50", 224),
    "full_mobilenet_v2": _torchvision("mobilenet_v2", 224),
    "full_efficientnet_b0": _timm("efficientnet_b0", 224),
    "full_convnext_tiny": _timm("convnext_tiny", 224),
    "full_vit_small": _timm("vit_small_patch16_224", 224),
    "full_swin_tiny": _hugging("Swin", {"image_size": 224}, "image"),
}
TRAINED = (
    "bert",
    "gpt2",
    "llama",
    "t5",
    "vit",
    "convnext",
    "timm_resnet18",
    "timm_efficientnet_b0",
    "tv_mobilenet_v2",
    "unet",
    "deit",
    "gpt_neo",
    "electra",
    "swin",
)


def leaves(x: Any) -> list[Any]:
    """The float tensors of a result."""
    import torch

    if isinstance(x, torch.Tensor):
        return [x] if x.is_floating_point() else []
    if isinstance(x, dict) or hasattr(x, "values"):
        return [t for v in x.values() for t in leaves(v)]
    if isinstance(x, (list, tuple)):
        return [t for v in x for t in leaves(v)]
    if hasattr(x, "__dict__") and type(x).__module__.startswith("diffusers"):
        return [t for v in vars(x).values() for t in leaves(v)]
    return []


def wide(x: Any) -> Any:
    """The same inputs in f64."""
    import torch

    if isinstance(x, torch.Tensor):
        return x.double() if x.is_floating_point() else x
    if isinstance(x, dict):
        return {k: wide(v) for k, v in x.items()}
    return type(x)(wide(v) for v in x) if isinstance(x, (list, tuple)) else x


def begin() -> None:
    """From here on, models and inputs are drawn from one seed, and reports are empty."""
    import torch

    import strata as st
    from strata.torch.reports import REPORTS

    st.torch.register()
    torch._dynamo.reset()
    REPORTS.clear()
    torch.manual_seed(SEED)
