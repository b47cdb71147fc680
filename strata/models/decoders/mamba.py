"""Mamba 1 and 2, and Falcon Mamba: no attention, a state of constant size for each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from strata.errors import FileError
from strata.io import GgufTensor
from strata.mir import Value
from strata.models.blocks.activations import activation_of
from strata.models.cached import DECODERS, CacheSizes, DecoderFamily, Layout, Slot
from strata.models.config_values import layer_count, real, whole
from strata.models.decoders.recurrent import ENDLESS, RecurrentGraph, step_limits
from strata.models.weights import Weights, check_layers, check_shapes, np, ops, without_prefix


@dataclass(frozen=True)
class MambaConfig:
    """The sizes of a Mamba."""

    family: str
    vocab: int
    hidden: int
    layers: int
    inner: int
    state: int
    kernel: int
    rank: int = 1  # of time steps, in the first Mamba
    heads: int = 1  # in the second
    groups: int = 1
    eps: float = 1e-5
    activation: str = "silu"
    mixer_eps: float | None = None  # Falcon Mamba normalises time steps, inputs and outputs of the state
    limits: tuple[float, float] = (0.0, math.inf)  # of time steps
    positions: int = ENDLESS

    @property
    def mixed(self) -> int:
        """The features that are convolved."""
        return self.inner + (2 * self.groups * self.state if self.is_second else 0)

    @property
    def is_second(self) -> bool:
        return self.family == "mamba2"

    @property
    def slots(self) -> tuple[Slot, ...]:
        state = (self.heads, self.inner // self.heads, self.state) if self.is_second else (self.inner, self.state)
        kinds = (("conv", (self.kernel - 1, self.mixed)), ("state", state))
        return tuple(Slot(f"{kind}{i}", shape, is_fixed=True) for i in range(self.layers) for kind, shape in kinds)

    def check(self, weights: Weights) -> None:
        check_layers(self.family, self.layers, weights, "layers.{}.")
        check_shapes(self.family, weights, {
            "embeddings.weight": (self.vocab, self.hidden),
            "layers.0.mixer.conv1d.weight": (self.mixed, 1, self.kernel),
        })  # fmt: skip


def mamba_config(found: dict[str, Any]) -> MambaConfig:
    """From config.json."""
    family, hidden = found.get("model_type", ""), whole(found, "hidden_size")
    inner = int(real(found, "expand", 2.0) * hidden)
    if family != "mamba2":
        inner = whole(found, "intermediate_size", inner)
    rank = found.get("time_step_rank", "auto")
    made = MambaConfig(
        family, whole(found, "vocab_size"), hidden, layer_count(found), inner,
        whole(found, "state_size", 128 if family == "mamba2" else 16), whole(found, "conv_kernel", 4),
        rank=-(-hidden // 16) if rank == "auto" else whole(found, "time_step_rank"),
        heads=whole(found, "num_heads", 128) if family == "mamba2" else 1, groups=whole(found, "n_groups", 1),
        eps=real(found, "layer_norm_epsilon", 1e-5), activation=activation_of(found, default="silu"),
        mixer_eps=real(found, "mixer_rms_eps", 1e-6) if family == "falcon_mamba" else None,
        limits=step_limits(found),
    )  # fmt: skip
    if made.inner % made.heads or made.heads % made.groups or made.kernel < 2:
        raise FileError(f"the configuration of the {family} makes no sense: {made}", code="F140")
    return made


class MambaGraph(RecurrentGraph):
    """Builds the graph of a Mamba."""

    def __init__(
        self, config: MambaConfig, weights: Weights, length: int, *, every: bool = False, layout: Layout = "plain"
    ) -> None:
        none = CacheSizes(0, 1, 1, 2)
        super().__init__("decoder", weights, none, length, every=every, layout=layout, slots=config.slots)
        self.config = config

    def norm(self, x: Value, name: str) -> Value:
        return ops.rms_norm(x, self.param(f"{name}.weight", (int(x.shape[-1]),)), eps=self.config.eps)

    def mixer(self, x: Value, layer: int) -> Value:
        c, at = self.config, f"layers.{layer}.mixer."
        normal = None if c.mixer_eps is None else lambda y, _: ops.rms_norm(y, eps=c.mixer_eps)
        return self.channels_mixed(x, at, layer, c.inner, c.state, c.rank, c.kernel, c.activation, normal)

    def build(self) -> MambaGraph:
        c = self.config
        x = self.embedding(self.ids, "embeddings.weight", c.vocab, c.hidden)
        for i in range(c.layers):
            x = x + self.mixer(self.norm(x, f"layers.{i}.norm"), i)
        head = "lm_head" if self.has("lm_head.weight") else "embeddings"
        self.finish(self.linear(self.norm(self.asked(x), "norm_f"), head, c.vocab, c.hidden))
        return self


class Mamba2Graph(MambaGraph):
    """Builds the graph of a Mamba-2."""

    def mixer(self, x: Value, layer: int) -> Value:
        c, at = self.config, f"layers.{layer}.mixer."
        found, gate = self.heads_mixed(x, at, layer, c.heads, c.inner // c.heads, c.state, c.groups, c.kernel,
                                       c.limits, c.activation)  # fmt: skip
        y = self.gated_norm(found, ops.silu(gate), f"{at}norm", c.groups, c.eps)
        return self.linear(y, f"{at}out_proj", c.hidden, c.inner)


def mamba_names(weights: Weights) -> dict[str, np.ndarray | GgufTensor]:
    return without_prefix(weights, ("backbone.",))


DECODERS.update(dict.fromkeys(("mamba", "falcon_mamba"), DecoderFamily(mamba_config, MambaGraph, mamba_names)))
DECODERS["mamba2"] = DecoderFamily(mamba_config, Mamba2Graph, mamba_names)
