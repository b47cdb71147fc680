"""Mixtures of experts from GGUF files: Mixtral, Qwen2 and 3 MoE, OLMoE; blocks of experts are read where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata.io import GgufTensor
from strata.models.config_values import optional_real, whole
from strata.models.decoder_config import DecoderConfig, from_gguf
from strata.models.decoders.mixtral import OlmoeConfig, OlmoeGraph
from strata.models.decoders.moe import MoeConfig, MoeGraph, Named
from strata.models.llama import gguf_names

RENORMALIZED = {"llama": True, "qwen2moe": False, "qwen3moe": True, "olmoe": False}
NAMES = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip


def is_moe(metadata: Mapping[str, Any]) -> bool:
    """Whether a file holds a mixture of experts that is known."""
    family = metadata.get("general.architecture")
    return family in RENORMALIZED and bool(metadata.get(f"{family}.expert_count"))


def moe_config(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> MoeConfig:
    """From the metadata of a GGUF file."""
    family = str(metadata.get("general.architecture"))
    inner = whole(metadata, f"{family}.expert_feed_forward_length", whole(metadata, f"{family}.feed_forward_length", 1))
    made: DecoderConfig = from_gguf(metadata, tensors, known=tuple(RENORMALIZED), inner=inner)
    shared = next((tensors[n] for i in range(made.layers) if (n := f"blk.{i}.ffn_up_shexp.weight") in tensors), None)
    fields: dict[str, Any] = dict(
        experts=whole(metadata, f"{family}.expert_count"), chosen=whole(metadata, f"{family}.expert_used_count"),
        expert_inner=inner, shared_inner=0 if shared is None else int(shared.shape[0]),
        sparse=tuple(f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(made.layers)),
        renormalize=RENORMALIZED[family],
    )  # fmt: skip
    if family == "olmoe":
        return OlmoeConfig(**{**vars(made), **fields}, clip=optional_real(metadata, "olmoe.attention.clamp_kqv"))
    return MoeConfig(**{**vars(made), **fields})


def moe_names(tensors: Mapping[str, GgufTensor], config: DecoderConfig) -> Named:
    """GGUF names as those that the graph asks for."""
    found = gguf_names(tensors, config, NAMES)
    for name in [name for name in found if ".experts." in name]:
        found[name.removesuffix(".weight")] = found.pop(name)
    for name, tensor in found.items():
        if name.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1 and isinstance(tensor, GgufTensor):
            found[name] = tensor.dequantize().reshape(1, -1)
    return found


def moe_graph(config: MoeConfig) -> type[MoeGraph]:
    return OlmoeGraph if config.family == "olmoe" else MoeGraph
