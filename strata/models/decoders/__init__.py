"""Families of decoders by the `model_type` of config.json; the module of one is imported when it is asked for."""

from importlib import import_module

from strata.models.cached import DECODERS, DecoderFamily
from strata.models.decoder_config import FAMILIES

_OWN = {
    "cohere": ("cohere", "cohere2"),
    "deepseek": ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    "gemma3n": ("gemma3n", "gemma3n_text"),
    "gemma4": ("gemma4", "gemma4_text"),
    "glm": ("ernie4_5", "glm", "glm4"),
    "glm_moe": ("dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "solar_open"),
    "gpt_oss": ("gpt_oss",),
    "granite": ("granite",),
    "hybrid": ("bamba", "granitemoehybrid", "jamba", "lfm2"),
    "layer_norm": ("gpt_neox", "nemotron", "phi", "stablelm", "starcoder2"),
    "lfm2_moe": ("lfm2_moe",),
    "llama4": ("llama4", "llama4_text"),
    "mamba": ("falcon_mamba", "mamba", "mamba2"),
    "mixtral": ("granitemoe", "granitemoeshared", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
    "olmo": ("exaone4", "olmo", "olmo2", "olmo3"),
    "phimoe": ("phimoe",),
    "qwen3_next": ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    "variants": (
        "apertus", "arcee", "cwm", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "internlm3",
        "iquestcoder", "jais2", "ministral", "ministral3", "mistral3", "nanochat", "seed_oss", "vaultgemma",
    ),
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
