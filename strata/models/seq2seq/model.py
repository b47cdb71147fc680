"""Text to text: `generate` and `generate_many` over sources of any lengths, greedy, drawn or by beams."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from strata.arguments import own_checks
from strata.errors import OptionError
from strata.models.detokenize import streamed_text
from strata.models.encoders.embed import padded
from strata.models.sampling import Sampler
from strata.models.seq2seq.engine import TOKENS, EncoderDecoder
from strata.models.seq2seq.rules import TokenRules


class TextToText(EncoderDecoder):
    """A model that reads a text and makes another: `generate`, `generate_many`, `run` on ids."""

    @property
    def inputs(self) -> dict[str, str]:
        return {"input_ids": "i32[B, T]", "attention_mask": "bool[B, T]", "decoder_input_ids": "i32[B, S]"}

    def run(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Logits of every position: `run(input_ids=…, decoder_input_ids=…)`, with or without `attention_mask`."""
        if not {"input_ids", "decoder_input_ids"} <= set(arrays) <= set(self.inputs):
            raise OptionError(
                f"run: takes {', '.join(self.inputs)}, got {', '.join(sorted(arrays)) or 'nothing'}", code="O265"
            )
        ids = np.ascontiguousarray(arrays["input_ids"], np.int32)
        mask = arrays.get("attention_mask")
        kept = np.ones(ids.shape, bool) if mask is None else np.asarray(mask).astype(bool)
        states, source = self.encode({"input_ids": ids, "attention_mask": kept})
        return self._decoded(states, source, arrays["decoder_input_ids"])

    @own_checks()
    def source_ids(self, source: str | Sequence[int]) -> list[int]:
        """Ids of a text, or as they are."""
        if isinstance(source, str):
            return self.tokenizer.encode(source)
        try:
            return [operator.index(i) for i in source]
        except TypeError:
            kind = type(source).__name__
            raise OptionError(f"generate: a source is a text or token ids, got {kind}", code="O606") from None

    def sources(self, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        """Encoded sources of any lengths, in one batch."""
        if not rows or not all(rows):
            raise OptionError("generate: a source is empty", code="O266")
        longest, most = max(map(len, rows)), self.sizes.sources
        if most is not None and longest > most:
            raise OptionError(
                f"generate: {longest} tokens are more than the {most} that the encoder reads", code="O264"
            )
        block, mask = padded(rows)
        return self.encode({"input_ids": block, "attention_mask": mask})[1]

    def generate_ids(
        self, sources: Sequence[Sequence[int]], *, max_tokens: int | None = None, beams: int | None = None,
        sampler: Sampler | None = None, rules: TokenRules | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """New tokens for sources of any lengths, without the end."""
        return self._made(self.sources(sources), max_tokens, beams, sampler or Sampler(), rules or self.rules)

    def generate_many(
        self, sources: Sequence[str | Sequence[int]], *, max_tokens: int | None = None, temperature: float = 0.0,
        top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0,
        seed: int | None = None, beams: int | None = None, length_penalty: float | None = None,
        stop: str | Sequence[str] = (),
    ) -> list[str]:  # fmt: skip
        """Generate from sources of any lengths in one batch."""
        sampler = Sampler(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
            seed=seed,
        )  # fmt: skip
        rules = self.rules if length_penalty is None else replace(self.rules, length_penalty=length_penalty)
        if temperature > 0 and beams is None:
            beams = 1
        rows = [self.source_ids(s) for s in sources]
        found = (
            self.generate_ids(rows, max_tokens=max_tokens, beams=beams, sampler=sampler, rules=rules) if rows else []
        )
        return ["".join(streamed_text(tokens, self.tokenizer, stop)) for tokens in found]

    def generate(
        self, source: str | Sequence[int], *, max_tokens: int | None = None, temperature: float = 0.0, top_k: int = 0,
        top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0, seed: int | None = None,
        beams: int | None = None, length_penalty: float | None = None, stop: str | Sequence[str] = (),
        stream: bool = False,
    ) -> Any:  # fmt: skip
        """Generate text from a source (a text, or ids); with `stream`, an iterator of its pieces.

        `beams` is how many continuations are kept at once, `length_penalty` favours long ones where it is above 0. What
        is not given is as the folder's generation_config.json has it.
        """
        if stream and (beams or (1 if temperature > 0 else self.rules.beams)) == 1:
            sampler = Sampler(
                temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
                seed=seed,
            )  # fmt: skip
            most = (self.rules.max_tokens or TOKENS) if max_tokens is None else max_tokens
            rows = self.tokens(self.sources([self.source_ids(source)]), most, sampler, self.rules)
            return streamed_text((row[0] for row in rows if row[0] is not None), self.tokenizer, stop)
        (text,) = self.generate_many(
            [source], max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, seed=seed, beams=beams, length_penalty=length_penalty, stop=stop,
        )  # fmt: skip
        return iter([text]) if stream else text
