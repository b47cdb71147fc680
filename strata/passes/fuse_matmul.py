"""Join a matrix product with the bias and the activation behind it, for backends with a kernel for the three."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from strata.errors import OptionError
from strata.mir import REGISTRY, Graph, Value, near
from strata.ops import fused_matmul_bias_act
from strata.passes.base import Pass, PassContext, register
from strata.passes.match import RuleSet, V, pat

EPILOGUES = ("gelu", "gelu_tanh", "silu", "relu", "sigmoid", "tanh", "exp", "softplus")  # activations that are one op


@cache
def rules(acts: tuple[str, ...]) -> RuleSet:
    """The rules for some activations as epilogues."""
    made = RuleSet()

    @made.rule(pat.add(pat.matmul(V.x, V.w).once, V.bias))
    def bias_of_product(x: Value, w: Value, bias: Value) -> Value | None:
        """The sum is written once, where the product would be written and read again."""
        fits = w.ndim == 2 and x.ndim >= 2 and bias.shape == w.shape[1:] and x.dtype.is_float
        return fused_matmul_bias_act(x, w, bias) if fits else None

    for act in acts:
        _add_activation(made, act)
    return made


def _add_activation(rules: RuleSet, act: str) -> None:
    def activation_of_product(x: Value, w: Value, bias: Value) -> Value | None:
        return fused_matmul_bias_act(x, w, bias, act=act)

    activation_of_product.__name__ = f"{act}_of_product"
    inner = pat.fused_matmul_bias_act(V.x, V.w, V.bias, act=None).once
    rules.rule(getattr(pat, act)(inner))(activation_of_product)


@register
@dataclass(frozen=True)
class FuseMatMulBiasAct(Pass):
    """act(x w + bias) as one op, where nothing else reads the product or the sum. `acts` are joined by `+`."""

    acts: str = "gelu+silu"

    name: ClassVar[str] = "fuse_matmul_bias_act"

    def __post_init__(self) -> None:
        for act in filter(None, self.acts.split("+")):
            if act not in EPILOGUES or act not in REGISTRY:
                known = ", ".join(EPILOGUES)
                message = f"pass {self.name}: {act!r} cannot be an epilogue; these can: {known}{near(act, EPILOGUES)}"
                raise OptionError(message, code="O141")

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return rules(tuple(filter(None, self.acts.split("+"))))(graph, ctx, self.name)
