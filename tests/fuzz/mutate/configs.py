"""Folders of models: config.json and the files beside it, with sound weights of a layer or two."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from strata.io import save_safetensors
from strata.models import load
from tests.fuzz.mutate.base import Files, Format
from tests.fuzz.mutate.changes import change_bytes, change_json, json_bytes
from tests.fuzz.mutate.weights import inspect

HIDDEN, INNER, VOCAB, POSITIONS = 8, 12, 16, 32
ENCODER = {
    "model_type": "bert", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": INNER, "max_position_embeddings": POSITIONS, "type_vocab_size": 2, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12, "architectures": ["BertModel"],
}  # fmt: skip
SHORT = {
    "model_type": "distilbert", "vocab_size": VOCAB, "dim": HIDDEN, "n_layers": 1, "n_heads": 2, "hidden_dim": INNER,
    "max_position_embeddings": POSITIONS, "activation": "gelu",
}  # fmt: skip
MODERN = {
    "model_type": "modernbert", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": INNER, "max_position_embeddings": POSITIONS, "norm_eps": 1e-5,
    "hidden_activation": "gelu", "local_attention": 8, "global_attn_every_n_layers": 2, "global_rope_theta": 160000.0,
    "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
DECODER = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": INNER, "max_position_embeddings": POSITIONS, "head_dim": 4,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "rope_theta": 10000.0,
    "sliding_window": 8, "layer_types": ["sliding_attention"], "no_rope_layers": [1],
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32},
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 20,
}  # fmt: skip
LONG = {
    **DECODER, "model_type": "phi3", "original_max_position_embeddings": 16, "partial_rotary_factor": 1.0,
    "rope_scaling": {"type": "longrope", "long_factor": [1.0, 2.0], "short_factor": [1.0, 1.0]},
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 1, "n_head": 2, "n_inner": INNER,
    "n_positions": POSITIONS, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3")
WORDS = (
    *FAMILIES,
    "bert",
    "gpt2",
    "phi3",
    "relu",
    "gelu",
    "silu",
    "linear",
    "dynamic",
    "llama3",
    "longrope",
    "default",
)


def _linear(at: str, n: int, k: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{at}.weight": (n, k)} | ({f"{at}.bias": (n,)} if bias else {})


def _norm(at: str) -> dict[str, tuple[int, ...]]:
    return {f"{at}.weight": (HIDDEN,), f"{at}.bias": (HIDDEN,)}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights that a sound configuration asks for."""
    h, i = HIDDEN, INNER
    match config["model_type"]:
        case "bert":
            at = "encoder.layer.0."
            table = "embeddings.{}_embeddings.weight".format
            return {
                table("word"): (VOCAB, h), table("position"): (POSITIONS, h), table("token_type"): (2, h),
                **_norm("embeddings.LayerNorm"), **_norm(f"{at}attention.output.LayerNorm"),
                **_norm(f"{at}output.LayerNorm"), **_linear(f"{at}attention.output.dense", h, h),
                **_linear(f"{at}attention.self.query", h, h), **_linear(f"{at}attention.self.key", h, h),
                **_linear(f"{at}attention.self.value", h, h), **_linear(f"{at}intermediate.dense", i, h),
                **_linear(f"{at}output.dense", h, i), **_linear("classifier", 3, h), **_linear("pooler.dense", h, h),
            }  # fmt: skip
        case "distilbert":
            at = "transformer.layer.0."
            made = {"embeddings.word_embeddings.weight": (VOCAB, h), **_norm("embeddings.LayerNorm"),
                    "embeddings.position_embeddings.weight": (POSITIONS, h), **_norm(f"{at}sa_layer_norm"),
                    **_norm(f"{at}output_layer_norm"), **_linear(f"{at}ffn.lin1", i, h),
                    **_linear(f"{at}ffn.lin2", h, i)}  # fmt: skip
            for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
                made |= _linear(f"{at}attention.{part}", h, h)
            return made
        case "modernbert":
            made = {"embeddings.tok_embeddings.weight": (VOCAB, h), "embeddings.norm.weight": (h,),
                    "final_norm.weight": (h,)}  # fmt: skip
            for n in range(2):
                at = f"layers.{n}."
                made |= {f"{at}attn_norm.weight": (h,), f"{at}mlp_norm.weight": (h,)}
                made |= _linear(f"{at}attn.Wqkv", 3 * h, h, False) | _linear(f"{at}attn.Wo", h, h, False)
                made |= _linear(f"{at}mlp.Wi", 2 * i, h, False) | _linear(f"{at}mlp.Wo", h, i, False)
            return made
        case "gpt2":
            return {
                "wte.weight": (VOCAB, h), "wpe.weight": (POSITIONS, h), **_norm("h.0.ln_1"), **_norm("h.0.ln_2"),
                **_norm("ln_f"), "h.0.attn.c_attn.weight": (h, 3 * h), "h.0.attn.c_attn.bias": (3 * h,),
                **_linear("h.0.attn.c_proj", h, h), "h.0.mlp.c_fc.weight": (h, i), "h.0.mlp.c_fc.bias": (i,),
                "h.0.mlp.c_proj.weight": (i, h), "h.0.mlp.c_proj.bias": (h,),
            }  # fmt: skip
    at = "model.layers.0."
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return {
        "model.embed_tokens.weight": (VOCAB, h), "model.norm.weight": (h,), **{f"{at}{n}.weight": (h,) for n in norms},
        **_linear(f"{at}self_attn.q_proj", h, h, False), **_linear(f"{at}self_attn.k_proj", 4, h, False),
        **_linear(f"{at}self_attn.v_proj", 4, h, False), **_linear(f"{at}self_attn.o_proj", h, h, False),
        **_linear(f"{at}mlp.gate_proj", i, h, False), **_linear(f"{at}mlp.up_proj", i, h, False),
        **_linear(f"{at}mlp.down_proj", h, i, False),
    }  # fmt: skip


class Configs(Format):
    name = "config"

    def prepare(self, folder: Path) -> None:
        self.sound: list[tuple[dict[str, Any], bytes]] = []
        rng = np.random.default_rng(0)
        kinds = [ENCODER, SHORT, MODERN, GPT2, LONG, *({**DECODER, "model_type": f} for f in FAMILIES)]
        for config in kinds:
            path = folder / "model.safetensors"
            save_safetensors(path, {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes(config).items()})
            self.sound.append((config, path.read_bytes()))
            (folder / "config.json").write_text(json.dumps(config))
            assert self.attempt(folder, random.Random(0)) == "ran", config
            path.unlink()

    def mutant(self, rng: random.Random) -> Files:
        config, weights = rng.choice(self.sound)
        files = {"model.safetensors": weights, "config.json": json.dumps(config).encode()}
        beside = {
            "1_Pooling/config.json": {"pooling_mode_cls_token": True, "word_embedding_dimension": 8},
            "sentence_bert_config.json": {"max_seq_length": 16},
            "model.safetensors.index.json": {"weight_map": {"model.norm.weight": "model.safetensors"}},
            "modules.json": [{"type": "sentence_transformers.models.Normalize"}],
        }
        match rng.randrange(10):
            case 0:
                return {**files, "config.json": change_bytes(files["config.json"], rng)}
            case 1 | 2:
                name, value = rng.choice(list(beside.items()))
                data = json_bytes(change_json(value, rng), rng)
                return {**files, name: change_bytes(data, rng) if rng.random() < 0.3 else data}
        return {**files, "config.json": json_bytes(change_json(config, rng, WORDS), rng)}

    def attempt(self, folder: Path, rng: random.Random) -> str:
        if rng.random() < 0.1:
            inspect(folder)
        model = load(folder, device="reference")
        ids = np.array([[1, 2, 3]])
        if rng.random() < 0.5 or not hasattr(model, "embedder"):
            model.run(input_ids=ids)
        else:
            graph = model.embedder(model.pooling, model.normalize)
            graph.run(input_ids=ids.astype(np.int32), attention_mask=np.ones((1, 3), bool))
        return "ran"
