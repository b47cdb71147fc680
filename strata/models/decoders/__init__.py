"""Families of decoders by the `model_type` of config.json; the module of one is imported when it is asked for."""

from importlib import import_module

from strata.models.cached import DECODERS, DecoderFamily
from strata.models.decoder_config import FAMILIES

_OWN = {
    "cohere": ("cohere", "cohere2"),
    "deepseek": ("deepseek_v2", "deepseek_v3"),
    "gemma3n": ("gemma3n", "gemma3n_text"),
    "glm": ("ernie4_5", "glm", "glm4"),
    "glm_moe": ("dots1", "ernie4_5_moe", "glm4_moe"),
    "gpt_oss": ("gpt_oss",),
    "granite": ("granite",),
    "hybrid": ("bamba", "granitemoehybrid", "jamba", "lfm2"),
    "layer_norm": ("gpt_neox", "nemotron", "phi", "stablelm", "starcoder2"),
    "llama4": ("llama4", "llama4_text"),
    "mamba": ("falcon_mamba", "mamba", "mamba2"),
    "mixtral": ("granitemoe", "granitemoeshared", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
    "olmo": ("exaone4", "olmo", "olmo2", "olmo3"),
    "phimoe": ("phimoe",),
    "qwen3_next": ("qwen3_next",),
    "rwkv7": ("rwkv7", "rwkv7_fla"),
}  # fmt: skip
MODULES: dict[str, str] = {
    "gpt2": "gpt2", **dict.fromkeys(FAMILIES, "llama"),
    **{kind: f"decoders.{module}" for module, kinds in _OWN.items() for kind in kinds},
}  # fmt: skip


def decoder_family(kind: str) -> DecoderFamily:
    """How folders of this kind are read; its module enters it into DECODERS."""
    if kind not in DECODERS:
        import_module(f"strata.models.{MODULES[kind]}")
    return DECODERS[kind]
