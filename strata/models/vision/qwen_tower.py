"""The vision tower of Qwen2-VL and Qwen2.5-VL: any number of patches, rotary positions of rows and columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.core import f32, i32, sym
from strata.errors import FileError
from strata.mir import Value
from strata.models.blocks.activations import activated, activation_of
from strata.models.blocks.transformer import TransformerBuilder
from strata.models.config_values import mapping, real, whole, wholes
from strata.models.weights import Weights, ops

EPS = 1e-6


@dataclass(frozen=True)
class PatchSizes:
    """The sizes of the part that sees."""

    width: int
    layers: int
    heads: int
    inner: int
    out: int
    patch: int
    times: int
    merge: int
    activation: str
    window: int = 0  # pixels of a side within which layers attend; 0 where all attend to all
    full: tuple[int, ...] = ()  # the layers that attend to all, where others do not
    theta: float = 10000.0

    @classmethod
    def from_json(cls, found: Mapping[str, Any], hidden: int, *, is_later: bool) -> PatchSizes:
        width = whole(found, "hidden_size" if is_later else "embed_dim", 1280)
        made = cls(
            width, whole(found, "depth", 32), whole(found, "num_heads", 16),
            whole(found, "intermediate_size", 3420) if is_later else int(width * real(found, "mlp_ratio", 4.0)),
            whole(found, "out_hidden_size" if is_later else "hidden_size", hidden), whole(found, "patch_size", 14),
            whole(found, "temporal_patch_size", 2), whole(found, "spatial_merge_size", 2),
            activation_of(found, default="silu" if is_later else "quick_gelu"),
            whole(found, "window_size", 112) if is_later else 0,
            (wholes(found, "fullatt_block_indexes") or (7, 15, 23, 31)) if is_later else (),
            real(mapping(found, "rope_parameters"), "rope_theta", 10000.0),
        )  # fmt: skip
        if made.width % (4 * made.heads) or made.out != hidden:
            raise FileError(f"the configuration of the vision tower makes no sense: {made}", code="F140")
        return made


class PatchGraph(TransformerBuilder):
    """Builds the graph from the patches of an image, of any number, to vectors of the decoder."""

    def __init__(self, sizes: PatchSizes, weights: Weights) -> None:
        super().__init__("qwen2_vl", weights)
        self.sizes = sizes

    def normed(self, x: Value, name: str) -> Value:
        gamma = self.param(f"{name}.weight", (self.sizes.width,))
        beta = self.param(f"{name}.bias", (self.sizes.width,)) if not self.sizes.window else None
        return ops.rms_norm(x, gamma, eps=EPS) if beta is None else ops.layer_norm(x, gamma, beta, eps=EPS)

    def build(self) -> dict[str, Value]:
        s, joined = self.sizes, self.sizes.merge**2
        count, head = sym("M", 1) * joined, s.width // s.heads
        flat = 3 * s.times * s.patch**2
        patches = self.graph.input("patches", (count, flat), f32)
        cos, sin = (self.graph.input(n, (count, head // 2), f32) for n in ("cos", "sin"))
        kernel = ops.reshape(self.param("patch_embed.proj.weight", (s.width, 3, s.times, s.patch, s.patch)), (-1, flat))
        x = ops.reshape(ops.matmul(patches, ops.transpose(kernel, (1, 0))), (1, count, s.width))
        near: dict[str, Any] = {}
        if s.window:
            window = self.graph.input("window", (count,), i32)
            same = ops.equal(ops.reshape(window, (1, 1, count, 1)), ops.reshape(window, (1, 1, 1, count)))
            near = {"mask": same, "mask_kind": "custom"}
        for i in range(s.layers):
            at, fields = f"blocks.{i}.", {} if i in s.full else near
            both = self.linear(self.normed(x, f"{at}norm1"), f"{at}attn.qkv", 3 * s.width, s.width)
            q, k, v = (ops.narrow(both, -1, j * s.width, s.width) for j in range(3))
            q, k = (ops.rope(y, cos, sin, head_dim=head, layout="bsd") for y in (q, k))
            mixed = ops.attention(q, k, v, num_heads=s.heads, kv_heads=s.heads, layout="bsd", **fields)
            x = x + self.linear(mixed, f"{at}attn.proj", s.width, s.width)
            x = x + self.forward(self.normed(x, f"{at}norm2"), f"{at}mlp.")
        wide = joined * s.width
        x = ops.reshape(self.normed(x, "merger.ln_q"), (sym("M", 1), wide))
        x = ops.gelu(self.linear(x, "merger.mlp.0", wide, wide))
        return {"image_rows": self.linear(x, "merger.mlp.2", s.out, wide)}

    def forward(self, x: Value, at: str) -> Value:
        s = self.sizes
        if not s.window:
            y = activated(self.linear(x, f"{at}fc1", s.inner, s.width), s.activation)
            return self.linear(y, f"{at}fc2", s.width, s.inner)
        gate = activated(self.linear(x, f"{at}gate_proj", s.inner, s.width), s.activation)
        return self.linear(gate * self.linear(x, f"{at}up_proj", s.inner, s.width), f"{at}down_proj", s.width, s.inner)
