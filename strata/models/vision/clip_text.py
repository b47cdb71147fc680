"""The sizes of both sides of CLIP and SigLIP, and the side of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.core import bool_, f32, i32, sym
from strata.mir import Value
from strata.models.blocks.activations import activation_of
from strata.models.blocks.transformer import LayerNames, LayerSizes, TransformerBuilder, pair
from strata.models.config_values import real, whole
from strata.models.weights import Weights, ops

NAMES = {"norm1": "layer_norm1", "norm2": "layer_norm2", "up": "mlp.fc1", "down": "mlp.fc2"}
TEXT = LayerNames(at="text_model.encoder.layers.{}.", **NAMES)


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """The sizes of one of the two sides."""

    is_siglip: bool
    sizes: LayerSizes
    projection: int
    image: tuple[int, int] = (224, 224)
    patch: tuple[int, int] = (16, 16)
    vocab: int = 0
    positions: int = 0

    @classmethod
    def from_json(cls, found: Mapping[str, Any], *, is_siglip: bool, is_text: bool, projection: int) -> TowerConfig:
        hidden = whole(found, "hidden_size", 512 if is_text and not is_siglip else 768)
        sizes = LayerSizes(
            hidden=hidden, layers=whole(found, "num_hidden_layers", 12),
            heads=whole(found, "num_attention_heads", hidden // 64 or 1),
            inner=whole(found, "intermediate_size", 4 * hidden),
            eps=real(found, "layer_norm_eps", 1e-6 if is_siglip else 1e-5),
            activation=activation_of(found, default="gelu_pytorch_tanh" if is_siglip else "quick_gelu"),
        )  # fmt: skip
        if is_text:
            return cls(
                is_siglip=is_siglip, sizes=sizes, projection=whole(found, "projection_size", projection or hidden),
                vocab=whole(found, "vocab_size", 32000 if is_siglip else 49408),
                positions=whole(found, "max_position_embeddings", 64 if is_siglip else 77),
            )  # fmt: skip
        return cls(
            is_siglip=is_siglip, sizes=sizes, projection=projection or hidden, image=pair(found, "image_size", 224),
            patch=pair(found, "patch_size", 16 if is_siglip else 32),
        )  # fmt: skip


class TextTowerGraph(TransformerBuilder):
    """Builds the graph of the side of texts, over ids i32[B, S]; `last` is the token of each row that is its vector."""

    def __init__(self, config: TowerConfig, weights: Weights) -> None:
        super().__init__("siglip" if config.is_siglip else "clip", weights)
        self.config = config

    def build(self) -> dict[str, Value]:
        c, h, at = self.config, self.config.sizes.hidden, "text_model."
        batch, length = sym("B", 1), sym("S", 1, c.positions)
        ids = self.graph.input("input_ids", (batch, length), i32)
        mask = self.graph.input("attention_mask", (batch, length), bool_)
        last = self.graph.input("last", (batch,), i32)
        x = self.embedding(ids, f"{at}embeddings.token_embedding.weight", c.vocab, h)
        places = self.param(f"{at}embeddings.position_embedding.weight", (c.positions, h))
        x = x + ops.narrow(places, 0, 0, length)
        kept = ops.reshape(mask, (batch, 1, 1, length))
        x = self.stack(x, TEXT, c.sizes, mask=kept, mask_kind="custom", causal=not c.is_siglip)
        x = self.layer_norm(x, f"{at}final_layer_norm", h, c.sizes.eps)
        place = ops.reshape(ops.iota((length,), 0, i32), (1, length))
        chosen = ops.cast(ops.equal(place, ops.reshape(last, (batch, 1))), f32)
        pooled = ops.sum(x * ops.insert_axis(chosen, -1), 1)
        head = f"{at}head" if c.is_siglip else "text_projection"
        results = {"last_hidden_state": x, "pooler_output": pooled}
        if self.has(f"{head}.weight"):
            results["text_embeds"] = self.linear(pooled, head, c.projection, h)
            if c.is_siglip:
                results["pooler_output"] = results["text_embeds"]
        return results
