"""Random models of every family of decoders, made by transformers: the oracle of several tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64, rope_theta=10000.0)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0)
UNTURNED = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.0)
LINEAR = dict(rope_type="linear", factor=2.0, rope_theta=500.0)
MLA = dict(kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, first_k_dense_replace=1,
           moe_intermediate_size=24, n_shared_experts=2, num_key_value_heads=4)  # fmt: skip
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=16, hidden_size=64)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=10,
             layer_types=["linear_attention", "full_attention"])  # fmt: skip
TEXT = ("Gemma3", "Gemma3n", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")  # whose configuration has a name of its own
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "phi3": ("Phi3", {}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20}),
    "smollm3": ("SmolLM3", {}),
    "llama-dynamic": ("Llama", {"rope_parameters": dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)}),
    "falcon3": ("Llama", {"head_dim": 32, "tie_word_embeddings": False}),
    "olmo": ("Olmo", {"clip_qkv": 0.5}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 7, "num_hidden_layers": 4}),
    "exaone4": ("Exaone4", {"sliding_window": 7, "sliding_window_pattern": 4, "num_hidden_layers": 4}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "granite": ("Granite", {"embedding_multiplier": 6.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5,
                            "logits_scaling": 4.0}),
    "cohere": ("Cohere", {"use_qk_norm": True}),
    "cohere2": ("Cohere2", {"sliding_window": 7, "num_hidden_layers": 4}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "nemotron": ("Nemotron", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": 7}),
    "phi": ("Phi", {"qk_layernorm": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                               "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                               "norm_topk_prob": True, "mlp_only_layers": [0], "head_dim": 16}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 1.5}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 6.0,
                                  "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 4.0}),
    "granitemoeshared": ("GraniteMoeShared", {"num_local_experts": 4, "shared_intermediate_size": 24}),
    "deepseek_v2": ("DeepseekV2", {**MLA, "q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 2,
                                   "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}),
    "deepseek_v3": ("DeepseekV3", {**MLA, "q_lora_rank": 20, "n_routed_experts": 8, "num_experts_per_tok": 3,
                                   "n_group": 4, "topk_group": 2, "rope_parameters": {
                                       **YARN, "mscale": 0.7, "mscale_all_dim": 0.9}}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7,
                           "rope_parameters": {**YARN, "truncate": False}}),
    "llama4": ("Llama4", {"num_local_experts": 4, "head_dim": 16, "attention_chunk_size": 16, "floor_scale": 8,
                          "num_hidden_layers": 4, "intermediate_size_mlp": 56, "interleave_moe_layer_step": 2}),
    "mamba": ("Mamba", {"state_size": 8, "intermediate_size": 128}),
    "falcon_mamba": ("FalconMamba", {"state_size": 8, "intermediate_size": 128}),
    "mamba2": ("Mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "hidden_size": 64}),
    "jamba": ("Jamba", {"num_experts": 4, "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2,
                        "mamba_d_state": 8, "mamba_dt_rank": 5}),
    "bamba": ("Bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    "granitemoehybrid": ("GraniteMoeHybrid", {**MAMBA2, "num_local_experts": 4, "shared_intermediate_size": 24,
                                              "layer_types": ["mamba", "attention"], "residual_multiplier": 0.5}),
    "granitemoehybrid-dense": ("GraniteMoeHybrid", {
        **MAMBA2, "num_local_experts": 0, "shared_intermediate_size": 24, "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope"}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
                      "block_multiple_of": 16}),
    "qwen3_next": ("Qwen3Next", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                                 "shared_expert_intermediate_size": 40, "linear_num_key_heads": 2, "head_dim": 16,
                                 "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 10,
                                 "layer_types": ["linear_attention", "full_attention"]}),
    "stablelm-unturned": ("StableLm", {"rope_parameters": UNTURNED}),
    "qwen3_next-unturned": ("Qwen3Next", {
        **DELTA, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "rope_parameters": UNTURNED}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}),
    "glm4_moe": ("Glm4Moe", {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
                             "moe_intermediate_size": 24, "use_qk_norm": True, "head_dim": 16}),
    "dots1": ("Dots1", {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16,
                        "n_shared_experts": 2, "first_k_dense_replace": 1}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24}),
    "gemma3n": ("Gemma3n", {"intermediate_size": 96, "num_hidden_layers": 5, "num_kv_shared_layers": 2,
                            "head_dim": 16, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 100,
                            "laurel_rank": 8, "sliding_window": 7, "altup_num_inputs": 3,
                            "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.0], "layer_types": [
                                "sliding_attention", "full_attention", "sliding_attention", "full_attention",
                                "sliding_attention"]}),
    "ministral": ("Ministral", {"head_dim": 16, "sliding_window": 7, "layer_types": [
        "sliding_attention", "full_attention"]}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": {
        **YARN, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3}}),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "cwm": ("Cwm", {"head_dim": 16, "sliding_window": 7, "num_hidden_layers": 5}),
    "helium": ("Helium", {"head_dim": 16, "hidden_size": 64}),
    "internlm3": ("InternLM3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("IQuestCoder", {"head_dim": 24}),
    "arcee": ("Arcee", {}),
    "jais2": ("Jais2", {"head_dim": 16}),
    "vaultgemma": ("VaultGemma", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20}),
    "nanochat": ("NanoChat", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 16, "rope_parameters": dict(
        rope_type="dynamic", factor=1.0, alpha=1000.0, rope_theta=10000.0)}),
    "hyperclovax": ("HyperCLOVAX", {"embedding_multiplier": 6.0, "residual_multiplier": 0.5, "logits_scaling": 0.3}),
    "apertus": ("Apertus", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"head_dim": 16, "num_experts": 4, "moe_topk": [2, 2]}),
    "qwen3_5": ("Qwen3_5", {**DELTA, "head_dim": 16}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2,
                                   "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
    "lfm2_moe": ("Lfm2Moe", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
                             "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2,
                             "moe_intermediate_size": 24}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}),
    "exaone_moe": ("ExaoneMoe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                                 "sliding_window": 7, "num_hidden_layers": 4, "n_group": 4, "topk_group": 2,
                                 "head_dim": 16}),
    "solar_open": ("SolarOpen", {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                                 "head_dim": 16}),
    "glm4_moe_lite": ("Glm4MoeLite", {**{k: v for k, v in MLA.items() if k != "first_k_dense_replace"},
                                      "q_lora_rank": 20, "n_routed_experts": 8, "num_experts_per_tok": 3,
                                      "n_group": 4, "topk_group": 2}),
    "gemma4": ("Gemma4", {"head_dim": 16, "global_head_dim": 24, "num_hidden_layers": 5, "num_kv_shared_layers": 2,
                          "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 128, "sliding_window": 7,
                          "use_double_wide_mlp": True, "layer_types": ["sliding_attention", "full_attention"] * 2
                          + ["full_attention"]}),
    "gemma4-experts": ("Gemma4", {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
                                  "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 7,
                                  "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
                                  "moe_intermediate_size": 24, "final_logit_softcapping": 5.0,
                                  "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_neox-serial": ("GPTNeoX", {"use_parallel_residual": False, "rope_parameters": dict(
        rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)}),
}  # fmt: skip


def family_model(name: str, sizes: dict[str, Any] | None = None, **more: Any) -> Any:
    """A random model of a family, of these sizes where it has none of its own."""
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        old = {"vocab_size": "vocab_size", "hidden_size": "n_embd", "max_position_embeddings": "n_positions"}
        plain = dict(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2)
        plain |= {old[key]: value for key, value in (sizes or {}).items() if key in old}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**plain))
    family, extra = FAMILIES[name]
    kind = getattr(transformers, f"{family}{'Text' if family in TEXT else ''}Config")
    config = kind(**{**SIZES, **(sizes or {}), **extra, **more})
    return transformers.AutoModelForCausalLM.from_config(config)


def random_model(folder: Path, name: str, **more: Any) -> Any:
    """A random model of a family, saved to a folder."""
    model = family_model(name, **more)
    for p in model.parameters():
        if p.ndim > 1:
            p.data.mul_(3.0)  # logits of a few units, so that an error shows
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and not tensor.any():
            tensor.normal_(0.0, 0.3)  # such as biases of routers, and norms that are stored less 1
    model.eval().save_pretrained(folder)
    return model


def reference_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        found: np.ndarray = model(torch.tensor(ids).long()).logits.numpy()
    return found
