"""Models for `benchmarks.gpu`, written once over a small set of functions: for strata's graphs, and for PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from strata import ops
from strata.core import DType, bf16, f16, f32, i64
from strata.mir import Graph, Value, constant, pullback

Weights = dict[str, tuple[DType, tuple[int, ...]]]


class OnStrata:
    """The functions that models are made of, over values of a graph."""

    def linear(self, x: Value, w: Value, b: Value | None = None) -> Value:
        y = ops.matmul(x, w)
        return y if b is None else y + b

    def gelu(self, x: Value) -> Value:
        return ops.gelu(x)

    def silu(self, x: Value) -> Value:
        return ops.silu(x)

    def relu(self, x: Value) -> Value:
        return ops.relu(x)

    def layer_norm(self, x: Value, w: Value, b: Value) -> Value:
        return ops.layer_norm(x, w, b)

    def rms_norm(self, x: Value, w: Value) -> Value:
        return ops.rms_norm(x, w)

    def heads(self, x: Value, count: int) -> Value:
        b, s, d = x.shape
        return ops.reshape(x, (b, s, count, d // count))

    def together(self, x: Value) -> Value:
        b, s, h, d = x.shape
        return ops.reshape(x, (b, s, h * d))

    def cached(self, x: Value) -> Value:
        return ops.transpose(x, (0, 2, 1, 3))  # a view: the cache has its heads first

    def attention(self, q: Value, k: Value, v: Value, causal: bool) -> Value:
        return ops.attention(q, k, v, causal=causal, layout="bshd")

    def turned(self, x: Value, cos: Value, sin: Value) -> Value:
        half = x.shape[-1] // 2
        swapped = ops.concat([-x[..., half:], x[..., :half]], axis=-1)
        cos, sin = (ops.reshape(t, (t.shape[0], 1, t.shape[1])) for t in (cos, sin))
        return x * cos + swapped * sin

    def conv(self, x: Value, w: Value, b: Value, stride: int) -> Value:
        pad = int(w.shape[-1]) // 2
        y = ops.conv(x, w, stride=(stride, stride), padding=((pad, pad), (pad, pad)))
        return y + ops.reshape(b, (1, b.shape[0], 1, 1))

    def max_pool(self, x: Value) -> Value:
        return ops.max_pool2d(x, 3, stride=2, padding=1)

    def pixel_mean(self, x: Value) -> Value:
        return ops.mean(x, axis=(2, 3))

    def embedding(self, ids: Value, w: Value) -> Value:
        return ops.embedding(ids, w)

    def gelu_tanh(self, x: Value) -> Value:
        return ops.gelu(x, approximate="tanh")

    def turned_over(self, w: Value) -> Value:
        return ops.transpose(w, (1, 0))

    def loss(self, z: Value, targets: Value) -> Value:
        rows = z.shape[0] * z.shape[1]
        flat = ops.reshape(ops.cast(z, f32), (rows, z.shape[2]))
        return ops.cross_entropy(flat, ops.reshape(targets, (rows,))).mean()


class OnTorch:
    """The same over tensors."""

    def __init__(self) -> None:
        import torch

        self.torch, self.f = torch, torch.nn.functional

    def linear(self, x: Any, w: Any, b: Any = None) -> Any:
        return x @ w if b is None else x @ w + b

    def gelu(self, x: Any) -> Any:
        return self.f.gelu(x)

    def silu(self, x: Any) -> Any:
        return self.f.silu(x)

    def relu(self, x: Any) -> Any:
        return self.f.relu(x)

    def layer_norm(self, x: Any, w: Any, b: Any) -> Any:
        return self.f.layer_norm(x, w.shape, w, b)

    def rms_norm(self, x: Any, w: Any) -> Any:
        return self.f.rms_norm(x, w.shape, w)

    def heads(self, x: Any, count: int) -> Any:
        b, s, d = x.shape
        return x.view(b, s, count, d // count).transpose(1, 2)

    def together(self, x: Any) -> Any:
        b, h, s, d = x.shape
        return x.transpose(1, 2).reshape(b, s, h * d)

    def cached(self, x: Any) -> Any:
        return x

    def attention(self, q: Any, k: Any, v: Any, causal: bool) -> Any:
        grouped = q.shape[1] != k.shape[1]
        return self.f.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        half = x.shape[-1] // 2
        swapped = self.torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos + swapped * sin

    def conv(self, x: Any, w: Any, b: Any, stride: int) -> Any:
        return self.f.conv2d(x, w, b, stride, w.shape[-1] // 2)

    def max_pool(self, x: Any) -> Any:
        return self.f.max_pool2d(x, 3, 2, 1)

    def pixel_mean(self, x: Any) -> Any:
        return x.mean((2, 3))

    def embedding(self, ids: Any, w: Any) -> Any:
        return self.f.embedding(ids, w)

    def gelu_tanh(self, x: Any) -> Any:
        return self.f.gelu(x, approximate="tanh")

    def turned_over(self, w: Any) -> Any:
        return w.t()

    def loss(self, z: Any, targets: Any) -> Any:
        return self.f.cross_entropy(z.flatten(0, 1).float(), targets.flatten())


@dataclass
class Model:
    """A function over a toolbox, weights by name and inputs by name, and what one run of it computes."""

    name: str
    call: Callable[[Any, dict[str, Any], dict[str, Any]], Any]
    weights: Weights
    inputs: Weights
    flops: float
    bytes: float = 0.0

    def graph(self) -> Graph:
        g = Graph("model")
        given = {name: g.input(name, kind[shape]) for name, (kind, shape) in self.inputs.items()}
        weights = {name: g.param(name, kind[shape]) for name, (kind, shape) in self.weights.items()}
        g.outputs(self.call(OnStrata(), weights, given))
        return g


def bert(batch: int, length: int, layers: int = 12, width: int = 768, count: int = 12) -> Model:
    """The encoder of BERT-base behind its embeddings."""
    weights: Weights = {}
    for i in range(layers):
        shapes = {"qkv": (width, 3 * width), "o": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        for name, shape in shapes.items():
            weights[f"{name}{i}"] = (bf16, shape)
            weights[f"{name}_b{i}"] = (bf16, shape[1:])
        for name in ("n1", "n1_b", "n2", "n2_b"):
            weights[f"{name}{i}"] = (bf16, (width,))

    def call(f: Any, w: dict[str, Any], given: dict[str, Any]) -> Any:
        x = given["x"]
        for i in range(layers):
            y = f.linear(x, w[f"qkv{i}"], w[f"qkv_b{i}"])
            q, k, v = (f.heads(y[..., n * width : (n + 1) * width], count) for n in range(3))
            y = f.linear(f.together(f.attention(q, k, v, False)), w[f"o{i}"], w[f"o_b{i}"])
            x = f.layer_norm(x + y, w[f"n1{i}"], w[f"n1_b{i}"])
            y = f.gelu(f.linear(x, w[f"up{i}"], w[f"up_b{i}"]))
            x = f.layer_norm(x + f.linear(y, w[f"down{i}"], w[f"down_b{i}"]), w[f"n2{i}"], w[f"n2_b{i}"])
        return x

    tokens = batch * length
    flops = 2.0 * tokens * layers * (12 * width * width + 2 * length * width)
    return Model(f"BERT-base bf16 {batch}x{length}", call, weights, {"x": (bf16, (batch, length, width))}, flops)


def llama(tokens: int, past: int, layers: int = 22, width: int = 2048, heads: int = 32, shared: int = 4) -> Model:
    """Llama-1.1B behind its embeddings: a prompt, or one token over a KV cache."""
    inner, vocabulary, each = 5632, 32000, width // heads
    weights: Weights = {"head": (bf16, (width, vocabulary)), "norm": (bf16, (width,))}
    inputs: Weights = {"x": (bf16, (1, tokens, width)), "cos": (bf16, (tokens, each)), "sin": (bf16, (tokens, each))}
    for i in range(layers):
        weights |= {
            f"qkv{i}": (bf16, (width, width + 2 * shared * each)), f"o{i}": (bf16, (width, width)),
            f"up{i}": (bf16, (width, inner)), f"gate{i}": (bf16, (width, inner)), f"down{i}": (bf16, (inner, width)),
            f"n1{i}": (bf16, (width,)), f"n2{i}": (bf16, (width,)),
        }  # fmt: skip
        if past:
            inputs |= {f"k{i}": (bf16, (1, shared, past, each)), f"v{i}": (bf16, (1, shared, past, each))}

    def call(f: Any, w: dict[str, Any], given: dict[str, Any]) -> Any:
        x = given["x"]
        for i in range(layers):
            y = f.linear(f.rms_norm(x, w[f"n1{i}"]), w[f"qkv{i}"])
            side = shared * each
            q = f.turned(f.heads(y[..., :width], heads), given["cos"], given["sin"])
            k = f.turned(f.heads(y[..., width : width + side], shared), given["cos"], given["sin"])
            v = f.heads(y[..., width + side :], shared)
            if past:  # the token's own key and value would be written into the cache; the cache is read
                k, v = f.cached(given[f"k{i}"]), f.cached(given[f"v{i}"])
            x = x + f.linear(f.together(f.attention(q, k, v, not past)), w[f"o{i}"])
            y = f.rms_norm(x, w[f"n2{i}"])
            x = x + f.linear(f.silu(f.linear(y, w[f"gate{i}"])) * f.linear(y, w[f"up{i}"]), w[f"down{i}"])
        return f.linear(f.rms_norm(x[:, -1:], w["norm"]), w["head"])

    matrices = layers * (width * (width + 2 * shared * each) + width * width + 3 * width * inner)
    flops = 2.0 * tokens * matrices + 2.0 * layers * tokens * tokens * width
    read = 2.0 * (matrices + width * vocabulary) + (4.0 * layers * past * shared * each)
    name = f"Llama-1.1B bf16 decode over {past}" if past else f"Llama-1.1B bf16 prefill {tokens}"
    return Model(name, call, weights, inputs, flops, read if past else 0.0)


def resnet(batch: int, kind: DType = f16) -> Model:
    """ResNet-50, its norms folded into biases."""
    weights: Weights = {}
    plan: list[tuple[str, int, int, int, int, bool]] = []  # block, inputs, inner, outputs, stride, joined

    def conv(name: str, inputs: int, outputs: int, size: int) -> None:
        weights[name] = (kind, (outputs, inputs, size, size))
        weights[f"{name}_b"] = (kind, (outputs,))

    conv("stem", 3, 64, 7)
    inputs = 64
    for stage, (inner, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            name, stride = f"s{stage}b{block}", 2 if stage and not block else 1
            conv(f"{name}a", inputs, inner, 1)
            conv(f"{name}b", inner, inner, 3)
            conv(f"{name}c", inner, 4 * inner, 1)
            if not block:
                conv(f"{name}d", inputs, 4 * inner, 1)
            plan.append((name, inputs, inner, 4 * inner, stride, not block))
            inputs = 4 * inner
    weights["fc"] = (kind, (2048, 1000))

    def call(f: Any, w: dict[str, Any], given: dict[str, Any]) -> Any:
        x = f.max_pool(f.relu(f.conv(given["x"], w["stem"], w["stem_b"], 2)))
        for name, _, _, _, stride, joined in plan:
            y = f.relu(f.conv(x, w[f"{name}a"], w[f"{name}a_b"], 1))
            y = f.relu(f.conv(y, w[f"{name}b"], w[f"{name}b_b"], stride))
            y = f.conv(y, w[f"{name}c"], w[f"{name}c_b"], 1)
            beside = f.conv(x, w[f"{name}d"], w[f"{name}d_b"], stride) if joined else x
            x = f.relu(y + beside)
        return f.linear(f.pixel_mean(x), w["fc"])

    return Model(f"ResNet-50 {kind} {batch}", call, weights, {"x": (kind, (batch, 3, 224, 224))}, 8.2e9 * batch)


GPT2 = {"layers": 12, "width": 768, "count": 12, "vocabulary": 50304}  # 124M, the vocabulary in whole tiles


def gpt2_loss(f: Any, w: dict[str, Any], ids: Any, targets: Any, *, layers: int, width: int, count: int) -> Any:
    """The loss of GPT-2 over weights of one type."""
    x = f.embedding(ids, w["tokens"]) + w["places"]
    for i in range(layers):
        y = f.linear(f.layer_norm(x, w[f"n1{i}"], w[f"n1_b{i}"]), w[f"qkv{i}"], w[f"qkv_b{i}"])
        q, k, v = (f.heads(y[..., n * width : (n + 1) * width], count) for n in range(3))
        x = x + f.linear(f.together(f.attention(q, k, v, True)), w[f"o{i}"], w[f"o_b{i}"])
        y = f.linear(f.layer_norm(x, w[f"n2{i}"], w[f"n2_b{i}"]), w[f"up{i}"], w[f"up_b{i}"])
        x = x + f.linear(f.gelu_tanh(y), w[f"down{i}"], w[f"down_b{i}"])
    x = f.layer_norm(x, w["norm"], w["norm_b"])
    return f.loss(f.linear(x, f.turned_over(w["tokens"])), targets)


def gpt2_step(batch: int, length: int, *, layers: int = GPT2["layers"], kind: DType = bf16) -> Graph:
    """A training step of GPT-2 124M: the loss in `kind` over weights in f32, gradients, AdamW. Results are the loss,
    then the new weights and both moments of each."""
    width, count, vocabulary = (GPT2[name] for name in ("width", "count", "vocabulary"))
    g = Graph("step")
    ids, targets = (g.input(name, i64[batch, length]) for name in ("ids", "targets"))
    shapes = gpt2_weights(length, layers, width, vocabulary)
    weights = {name: g.input(name, f32[shape]) for name, shape in shapes.items()}
    used = {name: ops.cast(value, kind) for name, value in weights.items()}
    loss = gpt2_loss(OnStrata(), used, ids, targets, layers=layers, width=width, count=count)
    slopes = pullback([loss], [constant(1.0, f32)], list(weights.values()))
    results = [loss]
    for (name, value), slope in zip(weights.items(), slopes, strict=True):
        assert slope is not None, f"{name} has a gradient"
        first, second = (g.input(f"{moment}_{name}", value.type) for moment in ("first", "second"))
        first = first * 0.9 + slope * 0.1
        second = second * 0.95 + slope * slope * 0.05
        step = first / (ops.sqrt(second) + 1e-8) * 3e-4
        results += [value * (1 - 3e-4 * 0.1) - step, first, second]
    g.outputs(*results)
    return g


def gpt2_step_in_torch(state: dict[str, list[Any]], ids: Any, targets: Any) -> Any:
    """The same by PyTorch, over lists of weights and moments; gives the loss."""
    import torch

    names, weights = list(state), [s[0] for s in state.values()]
    narrow = dict(zip(names, (w.to(torch.bfloat16) for w in weights), strict=True))
    sizes = {name: GPT2[name] for name in ("layers", "width", "count")}
    loss = gpt2_loss(OnTorch(), narrow, ids, targets, **sizes)
    slopes = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        first, second = ([s[n] for s in state.values()] for n in (1, 2))
        torch._foreach_mul_(first, 0.9)
        torch._foreach_add_(first, slopes, alpha=0.1)
        torch._foreach_mul_(second, 0.95)
        torch._foreach_addcmul_(second, slopes, slopes, value=0.05)
        below = torch._foreach_add(torch._foreach_sqrt(second), 1e-8)
        torch._foreach_mul_(weights, 1 - 3e-4 * 0.1)
        torch._foreach_addcdiv_(weights, first, below, value=-3e-4)
    return loss.detach()


def gpt2_weights(length: int, layers: int, width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"tokens": (vocabulary, width), "places": (length, width)}
    for i in range(layers):
        shapes |= {
            f"qkv{i}": (width, 3 * width), f"qkv_b{i}": (3 * width,), f"o{i}": (width, width), f"o_b{i}": (width,),
            f"up{i}": (width, 4 * width), f"up_b{i}": (4 * width,), f"down{i}": (4 * width, width),
            f"down_b{i}": (width,), f"n1{i}": (width,), f"n1_b{i}": (width,), f"n2{i}": (width,), f"n2_b{i}": (width,),
        }  # fmt: skip
    return shapes | {"norm": (width,), "norm_b": (width,)}


def models() -> Iterator[Model]:
    yield bert(1, 128)
    yield bert(32, 128)
    yield llama(2048, 0)
    yield llama(1, 1024)
    yield resnet(1)
    yield resnet(64)
