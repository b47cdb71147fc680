"""How many kernels programs take, and how much memory: pinned, so that a loss of fusion is a red test."""

from collections.abc import Callable

import numpy as np
import pytest

from strata import ops
from strata.core import f32
from strata.io import quantized_tensor
from strata.mir import Graph, Value, evaluate
from strata.models.decoder_config import DecoderConfig
from strata.models.llama import LlamaGraph
from strata.runtime import CompilePipeline, CompileResult, Session, assert_fused
from tests.counts import calls
from tests.programs import graphs


def compiled(graph: Graph) -> CompileResult:
    return CompilePipeline("cpu").compile(graph)


def steady(graph: Graph) -> list[str]:
    """What runs each time, by label."""
    return [s.label for s in compiled(graph).lir.schedule if s.phase != "prologue"]


def one(build: Callable[..., object], *shapes: tuple[int, ...]) -> Graph:
    g = Graph("one")
    return g.outputs(build(*(g.input(f"x{i}", shape) for i, shape in enumerate(shapes))))


SINGLE = {
    "softmax": one(ops.softmax, (16, 64)),
    "log_softmax": one(ops.log_softmax, (16, 64)),
    "layer_norm": one(ops.layer_norm, (16, 64), (64,), (64,)),
    "rms_norm": one(ops.rms_norm, (16, 64), (64,)),
    "dense": one(lambda x, w, b: ops.gelu(x @ w + b), (16, 64), (64, 32), (32,)),
    "residual and norm": one(lambda x, y, g, b: ops.layer_norm(x + y, g, b), (16, 64), (16, 64), (64,), (64,)),
    "bias, residual and norm": one(lambda x, y, z, g: ops.rms_norm(x + z + y, g), (16, 64), (16, 64), (64,), (64,)),
    "swiglu of halves": one(lambda x: ops.narrow(x, -1, 0, 32) * ops.silu(ops.narrow(x, -1, 32, 32)), (16, 64)),
    "matmul and residual": one(lambda x, w, y: x @ w + y, (16, 64), (64, 32), (16, 32)),
    "attention": one(lambda q, k, v: ops.attention(q, k, v, num_heads=4, layout="bsd"), *[(2, 9, 64)] * 3),
    "mean squared error": one(lambda x, y: ops.mean(ops.square(x - y), axis=-1), (16, 64), (16, 64)),
}


@pytest.mark.parametrize("name", SINGLE)
def test_one_kernel(name: str) -> None:
    assert len(steady(SINGLE[name])) == 1, steady(SINGLE[name])


def test_softmax_of_an_inner_axis() -> None:
    """Four, as its rows are not the leading axes of the index space."""
    assert len(steady(one(lambda x: ops.softmax(x, axis=1), (4, 16, 64)))) == 4


def test_encoder_layer() -> None:
    """q, k and v in one product; attention; its projection; residual and norm; two products; residual and norm."""
    labels = steady(graphs.one_encoder_layer())
    assert len(labels) == 7, labels
    assert labels[:2] == ["matmul + add", "attention"]
    assert labels[4] == "matmul + add + gelu"
    assert_fused(graphs.one_encoder_layer(), "matmul", "gelu")


def test_encoder_layers_share_their_kernels() -> None:
    few, many = compiled(graphs.encoder(2)).lir, compiled(graphs.encoder(6)).lir
    assert len(few.kernels) == len(many.kernels) == 9
    assert len(many.schedule) - len(few.schedule) == 4 * 9  # seven a run, and two when parameters are set


def test_decoder_layer_at_decode() -> None:
    """Two norms, four products, attention; queries and the new rows of both caches in one kernel. The gate is in its
    product, and the caches are changed in place."""
    labels = steady(graphs.llama())
    assert len(labels) == 8, labels
    assert "matmul + slice + silu + multiply" in labels
    caches = [s.updates for s in compiled(graphs.llama()).lir.schedule if s.updates]
    assert caches == [(("out1", "k0"), ("out2", "v0"))]


def decoder(layers: int, kind: str | None, packed: bool) -> Graph:
    """A Llama as `strata.models` builds it: weights in f32 or quantised, projections apart or packed in the file."""
    hidden, inner, narrow = 256, 512, 128
    shapes = {"embed_tokens": (96, hidden)}
    for i in range(layers):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes |= {f"{attention}o_proj": (hidden, hidden), f"{mlp}down_proj": (hidden, inner)}
        if packed:
            shapes |= {f"{attention}qkv_proj": (hidden + 2 * narrow, hidden), f"{mlp}gate_up_proj": (2 * inner, hidden)}
        else:
            shapes |= {f"{attention}{n}_proj": (w, hidden) for n, w in (("q", hidden), ("k", narrow), ("v", narrow))}
            shapes |= {f"{mlp}{n}_proj": (inner, hidden) for n in ("gate", "up")}
    weights = {}
    for name, shape in shapes.items():
        plain = np.full(shape, 0.01, np.float32)
        weights[f"{name}.weight"] = plain if kind is None else quantized_tensor(name, plain, kind)
    norms = ["norm", *(f"layers.{i}.{n}_layernorm" for i in range(layers) for n in ("input", "post_attention"))]
    weights |= {f"{name}.weight": np.ones(hidden, np.float32) for name in norms}
    config = DecoderConfig("llama", 96, hidden, layers, 4, 2, 64, inner, 64)
    return LlamaGraph(config, weights, 64).build().graph


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize(("kind", "most"), [(None, 8), ("q8_0", 9), ("q4k", 9)])
def test_layer_of_a_loaded_decoder(kind: str | None, most: int, packed: bool) -> None:
    """One graph of symbolic length serves prefill and decode. A product of quantised weights is a step of its own, so
    its gate is one more kernel; residuals join the norms behind them."""
    counts = [len(steady(decoder(layers, kind, packed))) for layers in (1, 2, 3)]
    assert counts[1] - counts[0] == counts[2] - counts[1] == most, counts


def test_gpt2_layers() -> None:
    counts = [len(steady(graphs.gpt2(layers))) for layers in (1, 2, 3)]
    assert counts[1] - counts[0] == counts[2] - counts[1] == 7, counts


def test_convolutions_have_epilogues() -> None:
    labels = steady(one(lambda x, w, b: ops.relu(ops.conv2d(x, w) + b), (1, 4, 9, 9), (8, 4, 3, 3), (8, 1, 1)))
    (product,) = [label for label in labels if "conv" in label]
    assert product.endswith("add + relu")
    assert len(labels) <= 3, labels


def test_resnet_block_is_one_kernel_a_convolution() -> None:
    labels = steady(graphs.resnet_block())
    assert sum("conv" in label or "matmul" in label for label in labels) == 3, labels
    assert len(labels) <= 5, labels  # in another layout, the ends of a block that stands alone are converted


MODELS = {
    "encoder": graphs.encoder,
    "resnet": graphs.resnet,
    "gpt2": graphs.gpt2,
    "unet": graphs.unet,
}


@pytest.mark.parametrize("name", MODELS)
def test_planned_memory_is_near_the_lower_bound(name: str) -> None:
    placement = compiled(MODELS[name]()).lir.placement()
    assert 0 < placement.lower_bound <= placement.arena_size <= 1.05 * placement.lower_bound


@pytest.mark.parametrize("build", [graphs.encoder, graphs.gpt2, graphs.llama], ids=lambda b: b.__name__)
def test_compiling_is_linear_in_layers(build: Callable[[int], Graph]) -> None:
    programs = {layers: build(layers) for layers in (3, 6, 12)}
    compiled(build(2))  # fills what is remembered of ops
    work = {layers: calls(lambda g=graph: compiled(g)) for layers, graph in programs.items()}
    assert work[12] - work[6] < 2.3 * (work[6] - work[3]), work
    assert work[12] < 150_000 * 12, work


@pytest.mark.parametrize(
    ("build", "most_calls"),
    [
        pytest.param(lambda: graphs.encoder(12), 1_150_000, id="encoder of 12 layers"),
        pytest.param(lambda: graphs.llama(32), 2_350_000, id="decoder of 32 layers"),
        pytest.param(lambda: decoder(32, None, False), 3_700_000, id="loaded decoder of 32 layers"),
    ],
)
def test_compiling_is_quick(build: Callable[[], Graph], most_calls: int) -> None:
    """The Python part, without machine code. What it takes in seconds is in benchmarks/costs.py."""
    graph = build()
    compiled(graph)  # fills what is remembered of ops
    assert calls(lambda: compiled(graph)) < most_calls


def test_a_long_chain_is_linear() -> None:
    def chain(length: int) -> Graph:
        g = Graph("chain")
        y = g.input("x", f32[8])
        for i in range(length):
            y = ops.sort(y) if i % 40 == 39 else ops.sin(y)
        return g.outputs(y)

    small, large = (calls(lambda n=n: compiled(chain(n))) for n in (400, 1600))
    assert large < 5 * small


def turned(y: Value) -> Value:
    return ops.flip(y, 0)


LINKS: dict[str, Callable[[Value, Value, Value, int], Value]] = {
    "arrays": lambda y, a, b, i: y * a + b,
    "numbers": lambda y, a, b, i: y * (0.5 + i % 5 / 10) + i % 7,
    "choices": lambda y, a, b, i: ops.where(y > b, y * a, y + a),
    "rows": lambda y, a, b, i: y * 0.5 + a[0:1],
    "turned": lambda y, a, b, i: turned(y * a + b),
    "turned twice": lambda y, a, b, i: turned(turned(y) * a + turned(b)),
}


def chain_of(link: str, length: int) -> Graph:
    g = Graph("chain")
    x, a, b = (g.input(name, f32[6, 33]) for name in "xab")
    y = x
    for i in range(length):
        y = LINKS[link](y, a, b, i)
    return g.outputs(y, ops.sum(y * 2.0, axis=1))


@pytest.mark.few(2)
@pytest.mark.parametrize("link", LINKS)
def test_a_chain_of_512_fused_steps_compiles_in_linear_time_and_is_right(link: str) -> None:
    """Kernels that were joined are as deep as all of the chain: nothing may recurse along it, or build it anew."""
    small, large = (calls(lambda n=n: compiled(chain_of(link, n))) for n in (256, 512))
    assert large < 2.4 * small
    graph = chain_of(link, 512)
    run = Session("cpu").compile(graph)
    assert len(run.lir.schedule) <= 24  # kernels of 96 ops would be 22
    rng = np.random.default_rng(0)
    feeds = {name: rng.uniform(-0.9, 0.9, (6, 33)).astype(np.float32) for name in "xab"}
    for got, want in zip(run.run(feeds), evaluate(graph, feeds, wide=True), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def layers_with_numbers(numbers: list[float], size: int = 64) -> Graph:
    """Equal layers that differ in one learned number each."""
    g = Graph("scaled")
    x = g.input("x", (16, size))
    for i, number in enumerate(numbers):
        x = ops.relu(x @ g.param(f"w{i}", (size, size)) * np.float32(number)) * np.float32(0.5)
    return g.outputs(x)


def test_learned_numbers_are_no_part_of_kernels() -> None:
    """Kernels that differ in a number that training found are one kernel; a few such numbers are literals."""
    rng = np.random.default_rng(7)
    numbers = [float(x) for x in rng.uniform(0.5, 1.5, 9)]
    assert len(compiled(layers_with_numbers(numbers)).lir.kernels) == 1
    assert len(compiled(layers_with_numbers(numbers[:3])).lir.kernels) == 3
    few = compiled(layers_with_numbers([0.5, 0.25, 2.0] * 3)).lir  # numbers that a person wrote
    assert len(few.kernels) == 3
    assert few.constants == ()


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_learned_numbers_give_the_same_results(threads: int) -> None:
    rng = np.random.default_rng(8)
    numbers = [float(np.float32(x)) for x in rng.uniform(0.5, 1.5, 9)]
    graph = layers_with_numbers(numbers, 32)
    made = Session("cpu", threads=threads).compile(graph)
    weights = {f"w{i}": rng.standard_normal((32, 32)).astype(np.float32) * 0.3 for i in range(9)}
    made.set_params(weights)
    x = rng.standard_normal((16, 32)).astype(np.float32)
    expected = x.astype(np.float64)
    for i, number in enumerate(numbers):
        expected = np.maximum(expected @ weights[f"w{i}"] * number, 0) * 0.5
    np.testing.assert_allclose(made.run(x=x)[0], expected, rtol=2e-5, atol=1e-6)
