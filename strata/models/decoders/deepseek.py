"""DeepSeek V2 and V3, GLM-4.7 Flash: multi-head latent attention, routed and shared experts.

What is cached of a token is one latent vector for all heads, with its rotary part behind it. Queries are brought to the
latent space before attention and results from there, so that keys and values of heads are never made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily, Slot
from strata.models.config_values import mapping, of_layers, optional_real, real, whole
from strata.models.decoder_config import listed_json, meant, with_defaults, yarn_scale
from strata.models.decoders.moe import MoeConfig, MoeGraph, moe_fields, stacked
from strata.models.weights import Weights, check_layers, check_shapes, ops

LATENT_EPS = 1e-6
GLM_LITE = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5,
                routed_scaling_factor=1.8, num_experts_per_tok=4, n_routed_experts=64, moe_intermediate_size=1536,
                first_k_dense_replace=1, n_group=1, topk_group=1)  # fmt: skip


@dataclass(frozen=True)
class DeepseekConfig(MoeConfig):
    """The sizes of a DeepSeek. `head_dim` and `kv_heads` are those of attention over latent vectors."""

    query_rank: int = 0  # 0: queries have one matrix
    rank: int = 1  # of the latent vectors
    plain: int = 1  # features of a head that are not rotated
    rotated: int = 2
    value_dim: int = 1

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(f"keys{i}", (self.head_dim,)) for i in range(self.layers))

    @property
    def rotary_dim(self) -> int:
        return self.rotated

    def check(self, weights: Weights) -> None:
        check_layers(self.family, self.layers, weights, "layers.{}.")
        at = "layers.0.self_attn."
        check_shapes(self.family, weights, {
            "embed_tokens.weight": (self.vocab, self.hidden),
            f"{at}kv_a_proj_with_mqa.weight": (self.head_dim, self.hidden),
            f"{at}kv_b_proj.weight": (self.heads * (self.plain + self.value_dim), self.rank),
        })  # fmt: skip


def score_scale(found: Mapping[str, Any], size: int) -> float:
    """What scores are multiplied by; yarn has a factor of its own."""
    rope = {**mapping(found, "rope_scaling"), **mapping(found, "rope_parameters")}
    of_all = optional_real(rope, "mscale_all_dim")
    more = yarn_scale(real(rope, "factor", 1.0), of_all) if of_all else 1.0
    return size**-0.5 * more * more


def deepseek_config(found: dict[str, Any]) -> DeepseekConfig:
    """From config.json of V2 or V3."""
    third = found.get("model_type") != "deepseek_v2"
    if found.get("model_type") == "glm4_moe_lite":
        found = with_defaults(found, **GLM_LITE)
    found = with_defaults(meant(found), rms_norm_eps=1e-6, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    rank, plain, rotated = (whole(found, k) for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
    made = listed_json({**found, "head_dim": rotated, "num_key_value_heads": 1})
    dense = whole(found, "first_k_dense_replace", 3 if third else 0, least=0)
    kinds = of_layers(found, "mlp_layer_types", made.layers)
    sparse = tuple(k == "sparse" for k in kinds) if kinds else tuple(i >= dense for i in range(made.layers))
    is_grouped = third or found.get("topk_method") == "group_limited_greedy"
    fields = moe_fields(
        found, made.layers, sparse=sparse,
        shared_inner=whole(found, "moe_intermediate_size") * whole(found, "n_shared_experts", 1 if third else 2),
        score="sigmoid" if third else "softmax", routed_scale=real(found, "routed_scaling_factor", 2.5 if third else 1),
        renormalize=bool(found.get("norm_topk_prob", True)) if third else False,
        groups=whole(found, "n_group", 1) if is_grouped else 1,
        chosen_groups=whole(found, "topk_group", 1) if is_grouped else 1,
    )  # fmt: skip
    own = dict(
        head_dim=rank + rotated, n_rot=rotated, rank=rank, plain=plain, rotated=rotated, interleaved=not third
        or bool(found.get("rope_interleave", True)), value_dim=whole(found, "v_head_dim"),
        query_rank=whole(found, "q_lora_rank", 0), score_scale=score_scale(found, plain + rotated),
    )  # fmt: skip
    return DeepseekConfig(**{**vars(made), **fields, **own})


class DeepseekGraph(MoeGraph):
    """Builds the graph of a DeepSeek."""

    config: DeepseekConfig
    shared = "shared_experts"

    def rotate(self, x: Value) -> Value:
        c, (cos, sin) = self.config, self.tables[False]
        found: Value = ops.rope(
            x, cos, sin, head_dim=c.rotated, n_rot=c.rotated, interleaved=c.interleaved, layout="bsd"
        )
        return found

    def queries(self, x: Value, at: str) -> Value:
        c = self.config
        wide = c.heads * (c.plain + c.rotated)
        if not c.query_rank:
            return self.linear(x, f"{at}q_proj", wide, c.hidden)
        low = self.linear(x, f"{at}q_a_proj", c.query_rank, c.hidden)
        low = self.latent_norm(low, f"{at}q_a_layernorm", c.query_rank)
        return self.linear(low, f"{at}q_b_proj", wide, c.query_rank)

    def latent_norm(self, x: Value, name: str, width: int) -> Value:
        """The norms of latent vectors have an eps of their own."""
        found: Value = ops.rms_norm(x, self.param(f"{name}.weight", (width,)), eps=LATENT_EPS)
        return found

    def attention(self, x: Value, layer: int) -> Value:
        c, at = self.config, f"layers.{layer}.self_attn."
        rows = self.batch * self.count
        q = ops.reshape(self.queries(x, at), (rows, c.heads, c.plain + c.rotated))
        both = self.param(f"{at}kv_b_proj.weight", (c.heads * (c.plain + c.value_dim), c.rank))
        expand = ops.reshape(both, (c.heads, c.plain + c.value_dim, c.rank))
        to_latent, from_latent = ops.narrow(expand, 1, 0, c.plain), ops.narrow(expand, 1, c.plain, c.value_dim)
        still = ops.matmul(ops.transpose(ops.narrow(q, 2, 0, c.plain), (1, 0, 2)), to_latent)  # [heads, rows, rank]
        rotated = ops.reshape(ops.narrow(q, 2, c.plain, c.rotated), (self.batch, self.count, c.heads * c.rotated))
        rotated = ops.reshape(self.rotate(rotated), (rows, c.heads, c.rotated))
        asked = ops.concat([ops.transpose(still, (1, 0, 2)), rotated], -1)
        pair = self.linear(x, f"{at}kv_a_proj_with_mqa", c.head_dim, c.hidden)
        latent = self.latent_norm(ops.narrow(pair, -1, 0, c.rank), f"{at}kv_a_layernorm", c.rank)
        keys = ops.concat([latent, self.rotate(ops.narrow(pair, -1, c.rank, c.rotated))], -1)
        asked = ops.reshape(asked, (self.batch, self.count, c.heads * c.head_dim))
        mixed = ops.reshape(self.attend(layer, asked, keys, keys, scale=c.score_scale), (rows, c.heads, c.head_dim))
        mixed = ops.transpose(ops.narrow(mixed, 2, 0, c.rank), (1, 2, 0))  # [heads, rank, rows]
        values = ops.transpose(ops.matmul(from_latent, mixed), (2, 0, 1))
        wide = c.heads * c.value_dim
        return self.linear(ops.reshape(values, (self.batch, self.count, wide)), f"{at}o_proj", c.hidden, wide)


KINDS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
DECODERS.update(dict.fromkeys(KINDS, DecoderFamily(deepseek_config, DeepseekGraph, stacked())))
