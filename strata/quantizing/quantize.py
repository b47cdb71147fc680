"""Quantise a decoder: `quantize(model, format="q4_k", calibration=texts)`, to a GGUF file, a folder, or in memory."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from strata import tensor as tensors
from strata.arguments import own_checks
from strata.errors import FileError, OptionError
from strata.io import GgufTensor, load_gguf, load_safetensors, quantized_tensor, save_gguf, save_safetensors
from strata.kinds import with_article
from strata.models import Decoder, load, read_json
from strata.ops import gguf_blocks
from strata.quantizing import gguf_export, layouts
from strata.quantizing.calibrate import Activations, collect_activations
from strata.quantizing.onnx_static import quantize_onnx
from strata.quantizing.perplexity import perplexity
from strata.quantizing.report import LayerReport, QuantReport

Stage = Callable[[str, int, int], None]
OUTER: Final = ("embed_tokens", "lm_head")
SENSITIVE: Final = ("v_proj", "down_proj")  # whose errors cost most
FALLBACK: Final = {
    "q2k": "q4_0",
    "q3k": "q4_0",
    "q4k": "q5_0",
    "q5k": "q5_1",
    "q6k": "q8_0",
    "iq4_xs": "iq4_nl",
    "tq1_0": "q4_0",
    "tq2_0": "q4_0",
}  # fmt: skip - for rows that are no multiple of 256
SPEED_TOKENS: Final = 12


@dataclass(frozen=True)
class BlockMix:
    """Block formats of a GGUF file: of most weights, of sensitive ones, of the vocabulary's matrices."""

    kind: str
    sensitive: str
    outer: str
    file_type: int  # general.file_type


MIXES: Final = {
    "q2_k": BlockMix("q2k", "q4k", "q6k", 10), "q3_k": BlockMix("q3k", "q5k", "q6k", 12),
    "q4_k": BlockMix("q4k", "q6k", "q6k", 15), "q5_k": BlockMix("q5k", "q6k", "q6k", 17),
    "q6_k": BlockMix("q6k", "q6k", "q6k", 18), "q8_0": BlockMix("q8_0", "q8_0", "q8_0", 7),
    "q4_0": BlockMix("q4_0", "q4_0", "q6k", 2), "q4_1": BlockMix("q4_1", "q4_1", "q6k", 3),
    "q5_0": BlockMix("q5_0", "q5_0", "q6k", 8), "q5_1": BlockMix("q5_1", "q5_1", "q6k", 9),
    "iq4_nl": BlockMix("iq4_nl", "q5k", "q6k", 25), "iq4_xs": BlockMix("iq4_xs", "q5k", "q6k", 30),
    "mxfp4": BlockMix("mxfp4", "mxfp4", "q8_0", 38),
}  # fmt: skip
FOLDERS: Final = ("int8", "int4-awq", "gptq", "fp8")
FORMATS: Final = (*MIXES, *FOLDERS)


@own_checks("x", "scale", "zero_point", "axis", "calibration", "evaluate")
def quantize(
    x: Any, scale: Any = None, zero_point: Any = None, axis: Any = None, *,
    format: str = "q4_k", calibration: Sequence[Any] | None = None,
    output: str | os.PathLike[str] | None = None, evaluate: Sequence[str] | None = None, context: int = 512,
    group_size: int = 128, progress: Stage | None = None,
) -> Any:  # fmt: skip
    """A decoder with quantised weights; its `report` says what that cost. With a `scale`, the op of the same name.

    `x` is a decoder or the path of one. `calibration` are texts that tell which columns of weights matter, and that
    perplexity is measured on unless `evaluate` has others. With `output`, a GGUF file, or a folder (int8, int4-awq,
    gptq, fp8), is written. `progress(stage, done, all)` is called on the way. An ONNX file becomes int8,
    calibrated with arrays by input name.
    """
    if scale is not None:
        return tensors.quantize(x, scale, 0 if zero_point is None else zero_point, axis)
    is_path = isinstance(x, (str, os.PathLike))
    if is_path and Path(x).suffix.lower() == ".onnx":
        if format != "int8":
            raise OptionError(f"quantize: ONNX models are quantised to int8, not to {format!r}", code="O681")
        return quantize_onnx(x, calibration or (), output)
    if format not in FORMATS:
        raise OptionError(f"quantize: there is no format {format!r}; known: {', '.join(FORMATS)}", code="O681")
    if format in ("int4-awq", "gptq") and not calibration:
        raise OptionError(f"quantize: {format} needs texts to calibrate with", code="O681")
    if group_size < 32 or group_size % 32:
        raise OptionError(f"quantize: groups of {group_size} are not a multiple of 32", code="O681")
    given = load(x) if is_path else x
    if not isinstance(given, Decoder) or not hasattr(given.config, "family"):
        raise OptionError(f"quantize: {with_article(type(given))} is not a decoder of a known family", code="O681")
    return _Quantizing(given, format, group_size, progress or _silent).run(calibration, evaluate, context, output)


def _silent(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


class _Quantizing:
    """One model on its way."""

    def __init__(self, model: Decoder, kind: str, group: int, progress: Stage) -> None:
        self.model, self.kind, self.group, self.progress = model, kind, group, progress
        builder = model._build(16, every=False)
        builder.watched = {}
        builder.build()
        self.weights: Mapping[str, Any] = builder.weights
        self.names = [n for n in builder.watched if self._is_matrix(n, builder.watched[n])]
        self.report = QuantReport(kind)
        self.acts = Activations()
        self.parts: dict[str, dict[str, np.ndarray]] = {}  # by weight, of a folder's layout
        self.settings: dict[str, Any] = {}
        self.plain: dict[str, np.ndarray] = {}  # weights that a folder's layout scales

    def _is_matrix(self, name: str, x: Any) -> bool:
        shape = tuple(self.weights[f"{name}.weight"].shape)
        return len(shape) == 2 and shape[1] == x.shape[-1]

    def run(self, texts: Sequence[str] | None, evaluate: Sequence[str] | None, context: int, output: Any) -> Decoder:
        told = texts if evaluate is None else evaluate
        self._check_output(output)
        if told:
            self.report.perplexity_before = self._perplexity("perplexity before", self.model, told, context)
            self.report.tokens_per_second_before = _speed(self.model)
        if texts:
            wanted = self.names if self.kind == "gptq" else ()
            self.acts = collect_activations(
                self.model, texts, products=wanted, context=context,
                progress=lambda done, total: self.progress("calibrate", done, total),
            )  # fmt: skip
            self.report.calibration_tokens = self.acts.tokens
        made = self._made(self._quantized())
        if told:
            self.report.perplexity_after = self._perplexity("perplexity after", made, told, context)
            self.report.tokens_per_second_after = _speed(made)
        if output is not None:
            self._save(Path(output))
            self.report.output = str(output)
            made.source = Path(output)
        made.report = self.report  # type: ignore[attr-defined]
        return made

    def _perplexity(self, stage: str, model: Decoder, texts: Sequence[str], context: int) -> float:
        return perplexity(
            model, texts, context=context, progress=lambda done, total: self.progress(stage, done, total)
        ).value

    def _check_output(self, output: Any) -> None:
        """Refuse what cannot be written, before any work is done."""
        if output is None:
            return
        source = self.model.source
        if source is None:
            raise FileError(
                "quantize: the model was not loaded from a file or a folder that can be written again", code="F158"
            )
        is_file = Path(output).suffix.lower() == ".gguf"
        if is_file != (self.kind in MIXES):
            wanted = "a file named .gguf" if self.kind in MIXES else "a folder"
            raise OptionError(f"quantize: {self.kind} is written to {wanted}, not to {output}", code="O681")
        if is_file:
            gguf_export.architecture(self.model)
        elif not source.is_dir():
            raise FileError(
                f"quantize: {self.kind} is a folder, and {source.name} is none to take its settings from", code="F158"
            )
        if Path(output).exists() and Path(output).resolve() == source.resolve():
            raise FileError(f"quantize: {output} is the model that is read", code="F158")

    # ------------------------------------------------------------------------------------------------------- weights

    def _array(self, name: str) -> np.ndarray:
        found = self.weights[f"{name}.weight"]
        if isinstance(found, GgufTensor):
            return found.dequantize()
        result: np.ndarray = np.asarray(found).astype(np.float32)
        return result

    def _quantized(self) -> dict[str, Any]:
        """All weights, with the matrices as blocks."""
        made: dict[str, Any] = dict(self.weights)
        if self.kind == "int4-awq":
            whole = {n: self._array(n.removesuffix(".weight")) for n in self.weights if n.endswith(".weight")}
            self.plain = layouts.awq_scaled(whole, self.acts, self.group, self.model.config.norm_offset)
            made |= {n: a for n, a in self.plain.items() if a is not whole[n]}
        names = [n for n in self.names if self.kind in MIXES or n not in OUTER]
        if self.kind in FOLDERS:
            self.settings = layouts.settings_of(self.kind, self.group, [n for n in OUTER if f"{n}.weight" in made])
        for done, name in enumerate(names, 1):
            self.progress("quantize", done, len(names))
            array = self.plain[f"{name}.weight"] if self.plain else self._array(name)
            tensor = self._tensor(name, array)
            if tensor is None:
                continue
            made[f"{name}.weight"] = tensor
            self._tell(name, self.weights[f"{name}.weight"], array, tensor)
        if self.kind in MIXES and "embed_tokens.weight" in made and "embed_tokens" not in names:
            array = self._array("embed_tokens")
            made["embed_tokens.weight"] = quantized_tensor(
                "embed_tokens", array, self._fitting(MIXES[self.kind].outer, array)
            )
        self.report.bytes_before, self.report.bytes_after = (_bytes(w) for w in (self.weights, made))
        self.new = made
        return made

    def _tensor(self, name: str, array: np.ndarray) -> GgufTensor | None:
        """A matrix as blocks; None where its rows are no whole groups."""
        if self.kind in MIXES:
            kind = self._fitting(self._block_kind(name), array)
            if kind == "f16":
                return GgufTensor(name, "f16", array.shape, array.astype(np.float16))
            return quantized_tensor(name, array, kind, self.acts.importance(name))
        if array.shape[1] % (self.group if self.kind in ("int4-awq", "gptq") else 32) or len(array) % 8:
            return None
        match self.kind:
            case "int8":
                parts = layouts.channel_int8(array)
            case "fp8":
                parts = layouts.channel_fp8(array)
            case "int4-awq":
                parts = layouts.awq_parts(array, self.group)
            case _:
                parts = layouts.gptq_parts(array, self.acts.products.get(name), self.group)
        self.parts[name] = parts
        return layouts.as_blocks(parts, self.settings)

    def _block_kind(self, name: str) -> str:
        mix, layers = MIXES[self.kind], self.model.config.layers
        if name in OUTER:
            return mix.outer
        parts = name.split(".")
        if parts[-1] in SENSITIVE and parts[0] == "layers":
            layer = int(parts[1])
            if layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2 or layers < 8:
                return mix.sensitive
        return mix.kind

    def _fitting(self, kind: str, array: np.ndarray) -> str:
        """The format, or the one for rows that are no whole blocks of it."""
        if array.shape[1] % gguf_blocks.block_format(kind).elements == 0:
            return kind
        other = FALLBACK.get(kind, kind)
        return other if array.shape[1] % gguf_blocks.block_format(other).elements == 0 else "f16"

    def _tell(self, name: str, before: Any, array: np.ndarray, tensor: GgufTensor) -> None:
        importance = self.acts.importance(name)
        counts = np.float32(1) if importance is None else importance
        lost = float((counts * (tensor.dequantize() - array) ** 2).sum())
        whole = float((counts * array**2).sum())
        error = (lost / whole) ** 0.5 if whole > 0 else 0.0
        self.report.layers.append(LayerReport(name, tensor.kind, _nbytes(before), _nbytes(tensor), error))

    def _made(self, weights: dict[str, Any]) -> Decoder:
        old = self.model

        def build(length: int, **more: Any) -> Any:
            builder = old._build(length, **more)
            builder.weights = weights
            return builder

        made = Decoder(old.config, build, lambda: old.tokenizer, device=old.device, context=old.context)
        made.is_quantized = True
        made.source = old.source
        return made

    # -------------------------------------------------------------------------------------------------------- writing

    def _save(self, place: Path) -> None:
        source = self.model.source
        assert source is not None
        if self.kind in FOLDERS:
            self._save_folder(source, place)
        elif source.is_dir():
            self._save_new(source, place)
        else:
            self._save_again(source, place)

    def _save_again(self, source: Path, place: Path) -> None:
        """From a GGUF file: its keys, its names, other tensors."""
        file = load_gguf(source)
        shape = self.model.config.has_outer_norms
        new = {gguf_export.gguf_name(n, shape): t for n, t in self.new.items() if t is not self.weights[n]}
        keys = dict(file.metadata) | self._file_keys()
        save_gguf(place, {name: new.get(name, tensor) for name, tensor in file.items()}, keys)

    def _save_new(self, source: Path, place: Path) -> None:
        """From a folder."""
        model = self.model
        tensors: dict[str, Any] = {}
        for name, tensor in self.new.items():
            if name.endswith("rotary_emb.inv_freq"):
                continue
            to = gguf_export.gguf_name(name, model.config.has_outer_norms)
            if isinstance(tensor, GgufTensor):
                data = gguf_export.arranged(model, name, tensor.data)
                tensors[to] = GgufTensor(to, tensor.kind, tensor.shape, np.ascontiguousarray(data))
            else:
                array = np.asarray(tensor).astype(np.float32)
                tensors[to] = np.ascontiguousarray(gguf_export.arranged(model, name, array))
        divisors = gguf_export.rope_divisors(model)
        if divisors is not None:
            tensors["rope_freqs.weight"] = divisors
        keys = gguf_export.model_keys(model) | {"general.name": source.name} | self._file_keys()
        save_gguf(place, tensors, keys | gguf_export.vocabulary_keys(source, model.config.vocab))

    def _file_keys(self) -> dict[str, Any]:
        return {"general.file_type": MIXES[self.kind].file_type, "general.quantization_version": 2}

    def _save_folder(self, source: Path, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if (
                file.is_file()
                and file.suffix in (".json", ".txt", ".jinja", ".model")
                and "safetensors" not in file.name
            ):
                shutil.copyfile(file, place / file.name)
        tensors: dict[str, np.ndarray] = {}
        for name, array in _folder_arrays(source).items():
            base, short = name.removesuffix(".weight"), self._short(name)
            known = short.removesuffix(".weight")
            if known in self.parts:
                tensors |= {f"{base}.{end}": part for end, part in self.parts[known].items()}
            else:
                scaled = self.new.get(short)
                changed = scaled is not None and scaled is not self.weights.get(short)
                tensors[name] = np.asarray(scaled) if changed else array
        save_safetensors(place / "model.safetensors", tensors, {"format": "pt"})
        config = read_json(source / "config.json") | {"quantization_config": self.settings}
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def _short(self, name: str) -> str:
        """The name without what whole models put before it."""
        parts = name.split(".")
        return next((s for s in (".".join(parts[i:]) for i in range(len(parts))) if s in self.weights), name)


def _folder_arrays(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: array for file in files for name, array in load_safetensors(file).items()}


def _nbytes(tensor: Any) -> int:
    return int(tensor.data.nbytes if isinstance(tensor, GgufTensor) else np.asarray(tensor).nbytes)


def _bytes(weights: Mapping[str, Any]) -> int:
    return sum(map(_nbytes, weights.values()))


def _speed(model: Decoder) -> float:
    """Tokens a second of decode, by one stream."""
    state = model.start()
    model.step(state, np.zeros((1, 4), np.int32))
    model.step(state, np.zeros((1, 1), np.int32))
    start = time.perf_counter()
    for _ in range(SPEED_TOKENS):
        model.step(state, np.zeros((1, 1), np.int32))
    return SPEED_TOKENS / (time.perf_counter() - start)
