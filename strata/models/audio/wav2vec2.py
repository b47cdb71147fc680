"""wav2vec 2.0 and HuBERT: convolutions over the waveform, a transformer, and letters by CTC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import bool_, f32, sym
from strata.errors import FileError
from strata.mir import Value
from strata.models.audio.ctc import CtcSettings, CtcSpeech
from strata.models.base import Folder
from strata.models.blocks.activations import activated, activation_of
from strata.models.blocks.transformer import LayerNames, LayerSizes, TransformerBuilder
from strata.models.config_values import real, refuse, whole
from strata.models.weights import Weights, check_layers, ops, without_prefix

NAMES = LayerNames(
    at="encoder.layers.{}.", q="attention.q_proj", k="attention.k_proj", v="attention.v_proj", o="attention.out_proj",
    norm1="layer_norm", up="feed_forward.intermediate_dense", down="feed_forward.output_dense",
)  # fmt: skip
POSITIONS = "encoder.pos_conv_embed.conv"


@dataclass(frozen=True, kw_only=True)
class Wav2Vec2Config:
    """The sizes of a wav2vec 2.0 or a HuBERT."""

    family: str
    sizes: LayerSizes
    convs: tuple[tuple[int, int, int], ...]  # channels, kernel and stride of each
    is_layer_normed: bool  # every convolution is, by channels; else the first one, over time
    has_norm: bool  # of features, before they are projected
    activation: str  # of convolutions
    position_kernel: int
    position_groups: int

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Wav2Vec2Config:
        refuse(found, "add_adapter", "adapter_attn_dim", "conv_pos_batch_norm")
        lists = [found.get(key, default) for key, default in (
            ("conv_dim", [512] * 7), ("conv_kernel", [10, 3, 3, 3, 3, 2, 2]), ("conv_stride", [5, 2, 2, 2, 2, 2, 2]),
        )]  # fmt: skip
        whole_numbers = all(isinstance(row, list) and all(type(n) is int and n > 0 for n in row) for row in lists)
        if not whole_numbers or len({len(row) for row in lists}) != 1 or not lists[0]:
            raise FileError(f"the configuration has convolutions of {lists}, which do not fit", code="F140")
        sizes = LayerSizes(
            hidden=whole(found, "hidden_size", 768), layers=whole(found, "num_hidden_layers", 12),
            heads=whole(found, "num_attention_heads", 12), inner=whole(found, "intermediate_size", 3072),
            eps=real(found, "layer_norm_eps", 1e-5), activation=activation_of(found),
            is_pre=bool(found.get("do_stable_layer_norm")),
        )  # fmt: skip
        return cls(
            family=found["model_type"], sizes=sizes, convs=tuple(zip(*lists, strict=True)),
            is_layer_normed=found.get("feat_extract_norm") == "layer",
            has_norm=bool(found.get("feat_proj_layer_norm", True)),
            activation=activation_of(found, "feat_extract_activation"),
            position_kernel=whole(found, "num_conv_pos_embeddings", 128),
            position_groups=whole(found, "num_conv_pos_embedding_groups", 16),
        )  # fmt: skip

    def frames(self, samples: int) -> int:
        """Frames that so many samples make."""
        for _, kernel, stride in self.convs:
            samples = (samples - kernel) // stride + 1
        return samples


class Wav2Vec2Graph(TransformerBuilder):
    """Builds the graph over a waveform of one length."""

    def __init__(self, config: Wav2Vec2Config, weights: Weights, samples: int) -> None:
        super().__init__(config.family, weights)
        self.config, self.samples = config, samples

    def build(self) -> dict[str, Value]:
        c, h, batch = self.config, self.config.sizes.hidden, sym("B", 1)
        x = ops.reshape(self.graph.input("input_values", (batch, self.samples), f32), (batch, 1, self.samples))
        count = c.frames(self.samples)
        kept = self.graph.input("frames_mask", (batch, count), bool_)
        width = 1
        for i, (channels, kernel, stride) in enumerate(c.convs):
            at = f"feature_extractor.conv_layers.{i}."
            bias = self.param(f"{at}conv.bias", (channels,)) if self.has(f"{at}conv.bias") else None
            x = ops.conv1d(x, self.param(f"{at}conv.weight", (channels, width, kernel)), bias, stride=stride)
            if c.is_layer_normed:
                normed = self.layer_norm(ops.transpose(x, (0, 2, 1)), f"{at}layer_norm", channels, 1e-5)
                x = ops.transpose(normed, (0, 2, 1))
            elif i == 0:
                scale, shift = (self.param(f"{at}layer_norm.{p}", (channels,)) for p in ("weight", "bias"))
                x = ops.group_norm(x, channels, scale, shift)
            x, width = activated(x, c.activation), channels
        x = ops.transpose(x, (0, 2, 1))
        if c.has_norm:
            x = self.layer_norm(x, "feature_projection.layer_norm", width, c.sizes.eps)
        x = self.linear(x, "feature_projection.projection", h, width)
        x = x * ops.insert_axis(ops.cast(kept, f32), -1)  # what is no sound is silence to the convolution of positions
        x = x + self.placed(x)
        if not c.sizes.is_pre:
            x = self.layer_norm(x, "encoder.layer_norm", h, c.sizes.eps)
        mask = ops.reshape(kept, (batch, 1, 1, count))
        x = self.stack(x, NAMES, c.sizes, mask=mask, mask_kind="custom")
        if c.sizes.is_pre:
            x = self.layer_norm(x, "encoder.layer_norm", h, c.sizes.eps)
        results = {"last_hidden_state": x}
        if self.has("lm_head.weight"):
            results["logits"] = self.linear(x, "lm_head", int(self.weights["lm_head.weight"].shape[0]), h)
        return results

    def placed(self, x: Value) -> Value:
        """Positions: a wide convolution in groups, whose weight is a direction and a length for each tap."""
        c, h, k = self.config, self.config.sizes.hidden, self.config.position_kernel
        shape = (h, h // c.position_groups, k)
        if self.has(f"{POSITIONS}.weight"):
            weight = self.param(f"{POSITIONS}.weight", shape)
        else:
            new = self.has(f"{POSITIONS}.parametrizations.weight.original0")
            names = ("parametrizations.weight.original0", "parametrizations.weight.original1")
            length, direction = (f"{POSITIONS}.{n}" for n in (names if new else ("weight_g", "weight_v")))
            v = self.param(direction, shape)
            size = ops.sqrt(ops.sum(v * v, (0, 1), keepdims=True))
            weight = v * (self.param(length, (1, 1, k)) / size)
        bias = self.param(f"{POSITIONS}.bias", (h,))
        y = ops.conv1d(ops.transpose(x, (0, 2, 1)), weight, bias, padding=k // 2, groups=c.position_groups)
        if k % 2 == 0:
            y = ops.narrow(y, 2, 0, y.shape[2] - 1)
        return ops.transpose(activated(y, c.activation), (0, 2, 1))


def load(folder: Folder) -> CtcSpeech:
    """A model from a folder."""
    config = Wav2Vec2Config.from_json(folder.settings)
    weights = without_prefix(folder.weights, ("wav2vec2.", "hubert."))
    check_layers(config.family, config.sizes.layers, weights, NAMES.at)

    def build(samples: int) -> tuple[Wav2Vec2Graph, dict[str, Value]]:
        made = Wav2Vec2Graph(config, weights, samples)
        return made, made.build()

    least = 1  # the samples of one frame
    for _, kernel, stride in reversed(config.convs):
        least = (least - 1) * stride + kernel
    return CtcSpeech(
        build, config.frames, CtcSettings.from_folder(folder.path, folder.settings), least=least,
        stride=int(np.prod([s for _, _, s in config.convs])), device=folder.device,
    )  # fmt: skip
