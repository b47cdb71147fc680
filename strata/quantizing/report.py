"""What quantising a model changed: perplexity before and after, size, speed, the layers that lost most."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LayerReport:
    """One weight: its format, its bytes before and after, and its error relative to its size."""

    name: str
    kind: str
    before: int
    after: int
    error: float  # of the matmul's results where there was calibration, of the numbers otherwise


@dataclass
class QuantReport:
    """The report of `quantize`."""

    format: str
    layers: list[LayerReport] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    tokens_per_second_before: float | None = None
    tokens_per_second_after: float | None = None
    calibration_tokens: int = 0
    output: str | None = None

    @property
    def change(self) -> float | None:
        """How much the perplexity rose, as a part of what it was."""
        if self.perplexity_before is None or self.perplexity_after is None:
            return None
        return self.perplexity_after / self.perplexity_before - 1

    def worst(self, count: int = 5) -> list[LayerReport]:
        """The weights with the largest errors."""
        return sorted(self.layers, key=lambda layer: -layer.error)[:count]

    def as_dict(self) -> dict[str, Any]:
        """For a program to read."""
        fields = ("format", "bytes_before", "bytes_after", "perplexity_before", "perplexity_after", "output",
                  "calibration_tokens", "tokens_per_second_before", "tokens_per_second_after")  # fmt: skip
        return {name: getattr(self, name) for name in fields} | {
            "change": self.change, "layers": [vars(layer) for layer in self.layers],
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{self.format}: {self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB"]
        if self.perplexity_before is not None and self.perplexity_after is not None and self.change is not None:
            lines.append(
                f"perplexity: {self.perplexity_before:.3f} -> {self.perplexity_after:.3f} ({100 * self.change:+.2f} %)"
            )
        if self.tokens_per_second_before and self.tokens_per_second_after:
            lines.append(
                f"decode: {self.tokens_per_second_before:.1f} -> {self.tokens_per_second_after:.1f} tokens a second"
            )
        lines += [f"worst: {x.name} ({x.kind}), error {x.error:.4f}" for x in self.worst()]
        return "\n".join(lines)
