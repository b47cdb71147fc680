"""ViT, DeiT, DINOv2 (with and without registers): patches and a few learned tokens through a stack of layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from strata.core import Dim
from strata.mir import Value
from strata.models.base import Folder
from strata.models.blocks.activations import activated, activation_of
from strata.models.blocks.patches import PatchBuilder
from strata.models.blocks.transformer import LayerNames, LayerSizes, pair
from strata.models.config_values import real, whole
from strata.models.vision.model import ImageModel, image_model
from strata.models.weights import Weights, check_layers, ops, without_prefix

FAMILIES = ("vit", "deit", "dinov2", "dinov2_with_registers")
NAMES = LayerNames(
    at="encoder.layer.{}.", q="attention.attention.query", k="attention.attention.key", v="attention.attention.value",
    o="attention.output.dense", norm1="layernorm_before", up="intermediate.dense", down="output.dense",
    norm2="layernorm_after",
)  # fmt: skip
DINO_NAMES = LayerNames(
    at="encoder.layer.{}.", q=NAMES.q, k=NAMES.k, v=NAMES.v, o=NAMES.o, norm1="norm1", up="mlp.fc1", down="mlp.fc2",
    norm2="norm2",
)  # fmt: skip
SCALES = {"norm1": "layer_scale1.lambda1", "norm2": "layer_scale2.lambda1"}  # what DINOv2 multiplies


@dataclass(frozen=True, kw_only=True)
class VitConfig:
    """The sizes of a ViT."""

    family: str
    sizes: LayerSizes
    image: tuple[int, int]
    patch: tuple[int, int]
    tokens: tuple[str, ...]  # learned tokens before the patches, each with a position of its own
    registers: int = 0  # and those without one
    is_gated: bool = False
    pooler_activation: str = "tanh"
    pooler_size: int = 0

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> VitConfig:
        family, hidden = found["model_type"], whole(found, "hidden_size", 768)
        dino = family.startswith("dinov2")
        inner, gated = whole(found, "intermediate_size", 4 * hidden), bool(dino and found.get("use_swiglu_ffn"))
        if dino:
            inner = int(hidden * real(found, "mlp_ratio", 4.0))
            inner = (int(inner * 2 / 3) + 7) // 8 * 8 if gated else inner
        sizes = LayerSizes(
            hidden=hidden, layers=whole(found, "num_hidden_layers", 12), heads=whole(found, "num_attention_heads", 12),
            inner=inner, eps=real(found, "layer_norm_eps", 1e-6 if dino else 1e-12), activation=activation_of(found),
        )  # fmt: skip
        return cls(
            family=family, sizes=sizes, image=pair(found, "image_size", 224), patch=pair(found, "patch_size", 16),
            tokens=("cls_token", "distillation_token") if family == "deit" else ("cls_token",),
            registers=whole(found, "num_register_tokens", 4, least=0) if family.endswith("registers") else 0,
            is_gated=gated, pooler_activation=activation_of(found, "pooler_act", "tanh"),
            pooler_size=whole(found, "pooler_output_size", hidden),
        )  # fmt: skip


class VitGraph(PatchBuilder):
    """Builds the graph of a ViT."""

    def __init__(self, config: VitConfig, weights: Weights, batch: Dim, size: tuple[int, int]) -> None:
        super().__init__(config.family, weights, batch, size, config.patch)
        self.config = config

    def feed_forward(self, x: Value, at: str, names: LayerNames, sizes: LayerSizes) -> Value:
        if not self.config.is_gated:
            return super().feed_forward(x, at, names, sizes)
        both = self.linear(x, f"{at}mlp.weights_in", 2 * sizes.inner, sizes.hidden)
        gate, up = ops.narrow(both, -1, 0, sizes.inner), ops.narrow(both, -1, sizes.inner, sizes.inner)
        return self.linear(ops.silu(gate) * up, f"{at}mlp.weights_out", sizes.hidden, sizes.inner)

    def scaled(self, x: Value, at: str, norm: str, sizes: LayerSizes) -> Value:
        name = at + SCALES.get(norm, "")
        return x * self.param(name, (sizes.hidden,)) if norm in SCALES else x

    def build(self) -> dict[str, Value]:
        c, h = self.config, self.config.sizes.hidden
        first, (high, wide) = len(c.tokens), (c.image[0] // c.patch[0], c.image[1] // c.patch[1])
        table = self.param("embeddings.position_embeddings", (1, high * wide + first, h))
        tokens = [self.rows(f"embeddings.{name}", 1, h) for name in c.tokens]
        x = ops.concat([*tokens, self.patches("embeddings.patch_embeddings.projection", h)], 1)
        x = x + self.positions(ops.reshape(table, (-1, h)), first, antialias=c.registers > 0)
        if c.registers:
            registers = self.rows("embeddings.register_tokens", c.registers, h)
            x = ops.concat([ops.narrow(x, 1, 0, 1), registers, ops.narrow(x, 1, 1, x.shape[1] - 1)], 1)
        x = self.stack(x, DINO_NAMES if c.family.startswith("dinov2") else NAMES, c.sizes)
        x = self.layer_norm(x, "layernorm", h, c.sizes.eps)
        results = {"last_hidden_state": x, "pooler_output": self.row(x, 0)}
        if self.has("pooler.dense.weight"):
            pooled = self.linear(self.row(x, 0), "pooler.dense", c.pooler_size, h)
            results["pooler_output"] = activated(pooled, c.pooler_activation)
        return results | self.head(x)

    def head(self, x: Value) -> dict[str, Value]:
        """Logits of labels, where the weights have a head for them."""
        h = self.config.sizes.hidden
        if self.has("classifier.weight"):
            count, seen = self.weights["classifier.weight"].shape[0], self.row(x, 0)
            if self.config.family.startswith("dinov2"):
                skip = 1 + self.config.registers
                seen = ops.concat([seen, ops.mean(ops.narrow(x, 1, skip, x.shape[1] - skip), 1)], -1)
            return {"logits": self.linear(seen, "classifier", count, seen.shape[-1].__index__())}
        names = ("cls_classifier", "distillation_classifier")
        if not self.has(f"{names[0]}.weight"):
            return {}
        count = self.weights[f"{names[0]}.weight"].shape[0]
        both = [self.linear(self.row(x, i), name, count, h) for i, name in enumerate(names)]
        return {"logits": (both[0] + both[1]) / 2.0, "cls_logits": both[0], "distillation_logits": both[1]}


def load(folder: Folder) -> ImageModel:
    """A model from a folder."""
    config = VitConfig.from_json(folder.settings)
    weights = without_prefix(folder.weights, ("vit.", "deit.", "dinov2.", "dinov2_with_registers."))
    check_layers(config.family, config.sizes.layers, weights, NAMES.at)
    kind = {"vit": "ViT", "deit": "DeiT"}.get(config.family, "Bit")
    return image_model(folder, partial(VitGraph, config, weights), kind, size=config.image)
