"""Kernels and models on an NVIDIA GPU beside PyTorch (eager and compiled) and JAX, in one process; JSON rows.

    python -m benchmarks.gpu                          all rows; benchmarks.gpu_page writes a page from them
    python -m benchmarks.gpu --only gemm,attention    some groups

Times are of kernels: medians of CUDA events around replays of a captured graph, all contenders in the same process, in
turns, on the same random data. A row says what share of the best peer, and of the limit of the card, strata reaches.
`benchmarks.gpu_sweep` times the schedules that kernels may have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import strata as st
from benchmarks.gpu_models import GPT2, Model, OnTorch, gpt2_step, gpt2_step_in_torch, gpt2_weights, models
from strata import ops
from strata.backends.checks import CHECKS, NUMBERS
from strata.backends.triton.backend import PlannedBackend, rendered_step
from strata.backends.triton.codegen.render import Rendered, TritonProgram, render
from strata.backends.triton.launch.calls import DriverCalls, PreparedLaunch
from strata.backends.triton.launch.compile import Binary, compile_program
from strata.backends.triton.launch.workers import compile_ahead
from strata.backends.triton.target import Gpu
from strata.core import DType, bf16, f16, f32, i64, u8
from strata.lir import Lir
from strata.mir import Graph
from strata.ops import gguf_blocks
from strata.ops.nn.attention import AttentionBackward
from strata.runtime import CompilePipeline

COPY_BYTES = 4.1e12  # that a copy moves in a second on an H200, read and written together
MATMUL_FLOPS = 7.9e14  # of bf16 in a second, by cuBLAS at 8192 x 8192 x 8192
_TYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "i64": "int64", "bool": "bool"}


# ------------------------------------------------------------------------------------------------------------- timing


def torch_() -> Any:
    import torch

    return torch


class Replayed:
    """A graph of several calls, and the times of its replays."""

    def __init__(self, work: Callable[[], Any]) -> None:
        torch = torch_()
        self.stream = torch.cuda.Stream()
        self.times: list[float] = []
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                work()
            self.stream.synchronize()
            begin = time.perf_counter()
            work()
            self.stream.synchronize()
            once = max(2e-6, time.perf_counter() - begin)
            self.count = max(1, min(100, int(2e-3 / once) + 1))
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                for _ in range(self.count):
                    work()
            for _ in range(2):
                self.graph.replay()
            self.stream.synchronize()

    def measure(self, budget: float, least: int = 1) -> None:
        torch = torch_()
        stop, done = time.perf_counter() + budget, 0
        with torch.cuda.stream(self.stream):
            while done < least or (time.perf_counter() < stop and done < 40):
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record(self.stream)
                self.graph.replay()
                b.record(self.stream)
                b.synchronize()
                self.times.append(a.elapsed_time(b) / self.count)
                done += 1

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.times)


def milliseconds(work: Callable[[], Any], budget: float = 0.06) -> float:
    """The median time of one call, from events around replays of a graph of several."""
    replayed = Replayed(work)
    replayed.measure(budget, 5)
    return replayed.milliseconds


def in_turns(works: dict[str, Callable[[], Any]], budget: float = 0.06, rounds: int = 6) -> dict[str, float]:
    """The same of several contenders that take turns: the card's clock follows its heat, and is the same for all."""
    made = {name: Replayed(work) for name, work in works.items()}
    for _ in range(rounds):
        for replayed in made.values():
            replayed.measure(budget / rounds)
    return {name: replayed.milliseconds for name, replayed in made.items()}


def random_tensor(dtype: DType, shape: Sequence[int], scale: float = 1.0) -> Any:
    torch = torch_()
    kind = getattr(torch, _TYPES[dtype.name])
    if dtype.is_float:
        return (torch.randn(*shape, device="cuda", dtype=torch.float32) * scale).to(kind)
    return torch.randint(0, 2, tuple(shape), device="cuda").to(kind)


# -------------------------------------------------------------------------------------------------------------- strata


class Programs:
    """Loaded Triton programs over torch's memory, launched on torch's current stream."""

    def __init__(self) -> None:
        from cuda import core

        if not hasattr(core, "Device"):
            from cuda.core import experimental as core
        self.core = core
        self.device = core.Device(0)
        self.device.set_current()
        major, minor = self.device.compute_capability
        self.gpu = Gpu.named(f"sm_{10 * major + minor}")
        self.calls = DriverCalls(overlaps=self.gpu.overlaps)
        self.known: dict[bytes, Any] = {}
        self.binaries: dict[int, tuple[TritonProgram, Binary]] = {}  # by program, which is kept
        self.room = torch_().empty(1 << 24, dtype=torch_().int8, device="cuda")

    def binary(self, program: TritonProgram) -> Binary:
        if id(program) not in self.binaries:
            self.binaries[id(program)] = (program, compile_program(program, self.gpu))
        return self.binaries[id(program)][1]

    def function(self, binary: Binary) -> Any:
        if binary.code not in self.known:
            code = self.core.ObjectCode.from_cubin(binary.code)
            made = code.get_kernel(binary.entry)
            if binary.shared_bytes > 48 << 10:
                from cuda.bindings import driver

                kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                (status,) = driver.cuKernelSetAttribute(kind, binary.shared_bytes, made.handle, 0)
                assert not int(status), f"shared memory of {binary.shared_bytes}"
            self.known[binary.code] = (code, made)
        return self.known[binary.code][1]

    def launcher(self, rendered: Rendered, memory: dict[str, Any]) -> Callable[[], None]:
        """A call that launches the programs of a kernel on tensors by name."""
        torch = torch_()
        for buffer in rendered.scratch:
            count = int(np.prod([int(d) for d in buffer.shape]))
            memory = {
                **memory,
                buffer.name: torch.empty(count * buffer.dtype.itemsize, dtype=torch.int8, device="cuda"),
            }
        prepared = []
        for program in rendered.programs:
            grid = tuple(int(d) for d in program.grid)
            if 0 in grid:
                continue
            binary = self.binary(program)
            function = self.function(binary)
            arguments = [memory[b.name].data_ptr() for b in program.buffers] + [int(d) for d in program.sizes]
            spare = [0] * (binary.arguments - len(arguments))
            if binary.scratch_bytes:
                assert binary.scratch_bytes * int(np.prod(grid)) <= self.room.numel()
                spare[0] = self.room.data_ptr()
            handle = self.calls.function(int(function.handle))
            prepared.append(
                PreparedLaunch(function, handle, grid, binary.threads, binary.shared_bytes, [*arguments, *spare], ())
            )
        held = memory
        known: dict[int, list[Callable[[], int]]] = {}

        def run() -> None:
            assert held is not None
            stream = int(torch.cuda.current_stream().cuda_stream)
            if stream not in known:
                known[stream] = [self.calls.launcher(p, stream, early=self.gpu.overlaps) for p in prepared]
            for launch in known[stream]:
                self.calls.check(launch())

        return run


@dataclass
class Planned:
    """A plan of kernels over torch's memory."""

    lir: Lir
    memory: dict[str, Any]
    run: Callable[[], None]
    count: int

    def output(self, number: int = 0) -> Any:
        return self.memory[self.lir.io.outputs[number]]


def planned(programs: Programs, graph: Graph, feeds: dict[str, Any], options: Any = None) -> Planned:
    """A graph for the card, with inputs and parameters by name; sizes are numbers."""
    torch = torch_()
    st.register_backend("triton_planned", PlannedBackend(programs.gpu))
    lir = CompilePipeline("triton_planned", options).compile(graph).lir if options else CompilePipeline(
        "triton_planned").compile(graph).lir  # fmt: skip
    rendered: list[Rendered] = []
    compile_ahead(_programs(lir, programs.gpu, rendered), programs.gpu)
    memory: dict[str, Any] = {}
    names = {buffer: name for name, buffer in lir.io.inputs}
    for buffer in lir.buffers:
        shape = [int(d) for d in buffer.type.shape]
        key = names.get(buffer.name, buffer.name)
        if key in feeds:
            memory[buffer.name] = feeds[key]
        elif buffer.role == "constant" and isinstance(buffer.key, int):
            array = np.ascontiguousarray(lir.constants[buffer.key])
            memory[buffer.name] = torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).cuda()
        elif buffer.role in ("param", "input"):
            memory[buffer.name] = random_tensor(buffer.type.dtype, shape, 0.02)
        else:
            memory[buffer.name] = torch.empty(
                max(1, int(np.prod(shape)) * buffer.type.dtype.itemsize), dtype=torch.int8, device="cuda"
            )
    launches = []
    for step, made in zip(lir.schedule, rendered, strict=True):
        if step.name in CHECKS:
            launches += checked(programs, made, [memory[n] for n in (*step.inputs, *step.outputs)])
            continue
        inside = [b.name for b in made.kernel.buffers]
        outside = [*step.inputs, *step.outputs]
        launch = programs.launcher(made, dict(zip(inside, (memory[n] for n in outside), strict=True)))
        if step.phase == "prologue":
            launch()  # of parameters only: once
        else:
            launches.append(launch)

    def run() -> None:
        for launch in launches:
            launch()

    counted = [r for s, r in zip(lir.schedule, rendered, strict=True) if s.phase != "prologue"]
    return Planned(lir, memory, run, sum(len(r.programs) for r in counted))


def _programs(lir: Lir, gpu: Gpu, rendered: list[Rendered]) -> Iterator[TritonProgram]:
    """The programs of a plan, as they are written; equal kernels are written once."""
    known: dict[str, Rendered] = {}
    for step in lir.schedule:
        if step.kernel is not None:
            made = known[step.name] if step.name in known else render(step.kernel, gpu)
            known[step.name] = made
        elif step.name in CHECKS:
            made = render(CHECKS[step.name][0](), gpu)
        else:
            found = rendered_step(step, gpu)
            assert found is not None, f"{step.name} would run on the host"
            made = found
        rendered.append(made)
        yield from made.programs


def checked(programs: Programs, note: Rendered, operands: list[Any]) -> list[Callable[[], Any]]:
    """A check of what a device found: it is noted, and the value is copied."""
    torch = torch_()
    x, found, out = operands
    noted = torch.zeros(NUMBERS, dtype=torch.int64, device="cuda")
    names = [b.name for b in note.kernel.buffers]
    copied = x.flatten().view(torch.int8)
    launch = programs.launcher(note, dict(zip(names, (found, noted, noted), strict=True)))
    return [launch, lambda: out.flatten()[: copied.numel()].copy_(copied)]


# --------------------------------------------------------------------------------------------------------------- rows


@dataclass
class Case:
    """One row: a graph, its inputs, the same in torch, and what has to be done at least."""

    group: str
    name: str
    graph: Graph
    feeds: dict[str, Any]
    torch: Callable[..., Any]
    arguments: tuple[Any, ...]
    flops: float = 0.0
    bytes: float = 0.0
    jax: Callable[..., Any] | None = None
    tolerance: float = 2e-2
    reference: Callable[..., Any] | None = None  # what is right, where the peer is not


def gemm_cases() -> Iterator[Case]:
    torch = torch_()
    sizes = [(8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 1024), (16, 4096, 4096),
             (128, 14336, 4096), (512, 3072, 768), (1, 14336, 4096), (1, 4096, 4096)]  # fmt: skip
    for m, n, k in sizes:
        a, b = random_tensor(bf16, (m, k)), random_tensor(bf16, (k, n), k**-0.5)
        yield Case("gemm", f"matmul {m}x{k}x{n}", matmul(m, n, k), {"a": a, "b": b}, torch.matmul, (a, b),
                   2.0 * m * n * k, 2.0 * (m * k + k * n + m * n), lambda a, b: a @ b)  # fmt: skip
    m = n = k = 4096
    a, b, c = random_tensor(bf16, (m, k)), random_tensor(bf16, (k, n), k**-0.5), random_tensor(bf16, (n,))
    yield Case("gemm", "gelu(4096x4096x4096 + bias)", matmul(m, n, k, epilogue=True), {"a": a, "b": b, "c": c},
               lambda a, b, c: torch.nn.functional.gelu(torch.addmm(c, a, b)), (a, b, c), 2.0 * m * n * k)  # fmt: skip


def matmul(m: int, n: int, k: int, dtype: DType = bf16, *, epilogue: bool = False) -> Graph:
    g = Graph("matmul")
    y = ops.matmul(g.input("a", dtype[m, k]), g.input("b", dtype[k, n]))
    g.outputs(ops.gelu(y + g.input("c", dtype[n])) if epilogue else y)
    return g


QUANTISED = [
    ("q4k", 1, 4096, 4096), ("q4k", 1, 14336, 4096), ("q6k", 1, 4096, 4096), ("q8_0", 1, 4096, 4096),
    ("q4_0", 1, 4096, 4096), ("iq4_xs", 1, 4096, 4096), ("u4_128h", 1, 4096, 4096), ("q4k", 4, 4096, 4096),
    ("q4k", 8, 4096, 4096), ("q6k", 1, 14336, 4096), ("q4k", 512, 4096, 4096), ("q4k", 2048, 14336, 4096),
]  # fmt: skip


def dequant_graph(name: str, m: int, n: int, k: int) -> Graph:
    g, form = Graph("dequant"), gguf_blocks.block_format(name)
    codes = g.param("codes", u8[n * k // form.elements * form.bytes])
    g.outputs(ops.dequant_matmul(g.input("x", bf16[m, k]), codes, scheme=f"gguf_{name}"))
    return g


def quantised_cases() -> Iterator[Case]:
    """Blocks as they are in a file; torch multiplies with the same weights in bf16."""
    torch = torch_()
    known: dict[tuple[str, int, int], tuple[Any, Any]] = {}
    for name, m, n, k in QUANTISED:
        if (name, n, k) not in known:
            form = gguf_blocks.block_format(name)
            blocks = gguf_blocks.random_blocks(form, n * k // form.elements, np.random.default_rng(0))
            wide = torch.from_numpy(gguf_blocks.decode(blocks.reshape(n, -1), name)).cuda()
            known[name, n, k] = torch.from_numpy(blocks.reshape(-1)).cuda(), wide.to(torch.bfloat16)
        codes, weights = known[name, n, k]
        x = random_tensor(bf16, (m, k))
        yield Case("quantised", f"{name} {m}x{k}x{n}", dequant_graph(name, m, n, k), {"x": x, "codes": codes},
                   lambda x, w: torch.matmul(x, w.t()), (x, weights), 2.0 * m * n * k,
                   codes.numel() + 2.0 * m * (n + k))  # fmt: skip


def attention_graph(b: int, h: int, q: int, s: int, d: int, *, shared: int, causal: bool) -> Graph:
    g = Graph("attention")
    inputs = [g.input(name, bf16[shape]) for name, shape in
              (("q", (b, h, q, d)), ("k", (b, shared, s, d)), ("v", (b, shared, s, d)))]  # fmt: skip
    g.outputs(ops.attention(*inputs, causal=causal, layout="bhsd"))
    return g


ATTENTIONS = [
    (4, 16, 4096, 4096, 128, 16, False), (4, 16, 4096, 4096, 128, 16, True), (8, 16, 1024, 1024, 64, 16, False),
    (32, 12, 128, 128, 64, 12, False), (1, 32, 2048, 2048, 64, 4, True), (1, 32, 1, 32768, 128, 8, False),
    (8, 32, 1, 8192, 128, 8, False),
]  # fmt: skip


def attention_cases() -> Iterator[Case]:
    torch = torch_()
    for b, h, q, s, d, shared, causal in ATTENTIONS:
        t = [random_tensor(bf16, shape) for shape in ((b, h, q, d), (b, shared, s, d), (b, shared, s, d))]

        def peer(q: Any, k: Any, v: Any, causal: bool = causal) -> Any:
            grouped = k.shape[1] != q.shape[1]
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        yield Case("attention", f"attention {b}x{h}({shared})x{q}x{s}x{d}{' causal' if causal else ''}",
                   attention_graph(b, h, q, s, d, shared=shared, causal=causal), dict(zip("qkv", t, strict=True)),
                   peer, tuple(t), 4.0 * b * h * q * s * d * (0.5 if causal else 1),
                   2.0 * (2 * b * h * q * d + 2 * b * shared * s * d))  # fmt: skip


def training_cases() -> Iterator[Case]:
    """Attention with its gradients, from the same inputs."""
    torch = torch_()
    for b, h, s, d, causal in ((16, 12, 1024, 64, True), (4, 16, 4096, 128, True), (8, 16, 1024, 64, False)):
        t = [random_tensor(bf16, (b, h, s, d)) for _ in range(4)]
        for x in t[:3]:
            x.requires_grad_(True)
        g = Graph("gradients")
        q, k, v, dy = (g.input(name, bf16[b, h, s, d]) for name in ("q", "k", "v", "dy"))
        back = AttentionBackward(h, h, d, causal=causal)(q, k, v, dy)
        g.outputs(*back, ops.attention(q, k, v, causal=causal, layout="bhsd"))

        def peer(q: Any, k: Any, v: Any, dy: Any, causal: bool = causal) -> Any:
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            return torch.autograd.grad(y, (q, k, v), dy)[0]

        yield Case("training", f"attention and gradients {b}x{h}x{s}x{d}{' causal' if causal else ''}", g,
                   dict(zip(("q", "k", "v", "dy"), (x.detach() for x in t), strict=True)), peer, tuple(t),
                   14.0 * b * h * s * s * d * (0.5 if causal else 1))  # fmt: skip


def memory_cases() -> Iterator[Case]:
    """Element-wise, rows, columns: what is bound by the copy bandwidth."""
    torch = torch_()
    functional = torch.nn.functional
    r, c = 16384, 4096
    x, w, y = random_tensor(bf16, (r, c)), random_tensor(bf16, (c,)), random_tensor(bf16, (r, c))

    def one(name: str, build: Callable[..., Any], peer: Callable[..., Any], moved: float, extra: str = "") -> Case:
        g = Graph(name)
        inputs, feeds, given = [g.input("x", bf16[r, c])], {"x": x}, [x]
        for letter, tensor, kind in (("w", w, bf16[c]), ("y", y, bf16[r, c])):
            if letter in extra:
                inputs.append(g.input(letter, kind))
                feeds[letter] = tensor
                given.append(tensor)
        g.outputs(build(*inputs))
        return Case("memory", f"{name} 16384x4096", g, feeds, peer, tuple(given), 0.0, moved * r * c)

    yield one("copy + 1", lambda x: x + 1.0, lambda x: x + 1, 4)
    yield one("softmax", lambda x: ops.softmax(x, axis=-1), lambda x: x.softmax(-1), 4)
    yield one(
        "layer norm", lambda x, w: ops.layer_norm(x, w, w), lambda x, w: functional.layer_norm(x, (c,), w, w), 4, "w"
    )
    yield one("rms norm of x + y", lambda x, w, y: ops.rms_norm(x + y, w),
              lambda x, w, y: functional.rms_norm(x + y, (c,), w), 6, "wy")  # fmt: skip
    yield one("gelu(x * w + w)", lambda x, w: ops.gelu(x * w + w), lambda x, w: functional.gelu(x * w + w), 4, "w")
    yield one("sum of rows", lambda x: x.sum(axis=1), lambda x: x.sum(1), 2)
    yield one("sum of columns", lambda x: x.sum(axis=0), lambda x: x.sum(0), 2)
    yield one("transpose", lambda x: ops.transpose(x, (1, 0)), lambda x: x.t().contiguous(), 4)
    running = one("cumsum of rows", lambda x: ops.cumsum(x, axis=1), lambda x: x.cumsum(1), 4)
    yield replace(running, reference=lambda x: x.float().cumsum(1))
    rows, vocabulary = 4096, 131072
    z = random_tensor(bf16, (rows, vocabulary))
    labels = torch.randint(0, vocabulary, (rows,), device="cuda")
    g = Graph("loss")
    g.outputs(ops.cross_entropy(g.input("z", bf16[rows, vocabulary]), g.input("t", i64[rows])).mean())
    yield Case("memory", f"cross entropy {rows}x{vocabulary}", g, {"z": z, "t": labels},
               lambda z, t: functional.cross_entropy(z.float(), t), (z, labels),
               0.0, 2.0 * rows * vocabulary)  # fmt: skip


def conv_cases() -> Iterator[Case]:
    torch = torch_()
    for dtype in (f32, f16):
        x, w = random_tensor(dtype, (32, 64, 56, 56)), random_tensor(dtype, (64, 64, 3, 3), 1 / 24)
        g = Graph("conv")
        y = ops.conv(g.input("x", dtype[32, 64, 56, 56]), g.input("w", dtype[64, 64, 3, 3]), padding=((1, 1), (1, 1)))
        g.outputs(ops.relu(y))
        yield Case("conv", f"relu(conv 3x3 {dtype} 32x64x56x56)", g, {"x": x, "w": w},
                   lambda x, w: torch.relu(torch.nn.functional.conv2d(x, w, padding=1)), (x, w),
                   2.0 * 32 * 64 * 64 * 9 * 56 * 56)  # fmt: skip


def model_cases() -> Iterator[Case]:
    for model in models():
        draw = {name: random_tensor(kind, shape, 0.02 if len(shape) > 1 else 1.0)
                for name, (kind, shape) in model.weights.items()}  # fmt: skip
        given = {name: random_tensor(kind, shape) for name, (kind, shape) in model.inputs.items()}

        def peer(given: dict[str, Any], weights: dict[str, Any], model: Model = model) -> Any:
            return model.call(OnTorch(), weights, given)

        yield Case(
            "models",
            model.name,
            model.graph(),
            {**draw, **given},
            peer,
            (given, draw),
            model.flops,
            model.bytes,
            tolerance=6e-2,
        )


def step_cases() -> Iterator[Case]:
    """A training step. Steps by torch change its weights: the losses of the first ones are compared."""
    torch, batch, length = torch_(), 16, 1024
    ids = {name: torch.randint(0, 50257, (batch, length), device="cuda") for name in ("ids", "targets")}
    sizes = (GPT2[name] for name in ("layers", "width", "vocabulary"))
    state: dict[str, list[Any]] = {}
    feeds = dict(ids)
    for name, shape in gpt2_weights(length, *sizes).items():
        near_one = len(shape) == 1 and name.startswith("n") and "_b" not in name
        weight = torch.ones(shape, device="cuda") if near_one else random_tensor(f32, shape, 0.02)
        state[name] = [weight.clone().requires_grad_(), torch.zeros_like(weight), torch.zeros_like(weight)]
        feeds |= {name: weight, f"first_{name}": torch.zeros_like(weight), f"second_{name}": torch.zeros_like(weight)}
    matrices = sum(w.numel() for w in (s[0] for s in state.values()) if w.ndim == 2) - state["places"][0].numel()
    flops = 6.0 * batch * length * matrices + 6.0 * GPT2["layers"] * batch * length * length * GPT2["width"]
    yield Case("steps", f"GPT-2 124M bf16 {batch}x{length}, AdamW", gpt2_step(batch, length), feeds,
               lambda: gpt2_step_in_torch(state, ids["ids"], ids["targets"]), (), flops)  # fmt: skip


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "gemm": gemm_cases, "quantised": quantised_cases, "attention": attention_cases, "training": training_cases,
    "memory": memory_cases, "conv": conv_cases, "models": model_cases, "steps": step_cases,
}  # fmt: skip


def measure(programs: Programs, case: Case, *, compiled: bool, jaxed: bool) -> dict[str, Any]:
    torch = torch_()
    row: dict[str, Any] = {"group": case.group, "work": case.name}
    begin = time.perf_counter()
    plan = planned(programs, case.graph, case.feeds)
    plan.run()
    torch.cuda.synchronize()
    row["first_s"] = round(time.perf_counter() - begin, 2)
    expected = case.torch(*case.arguments)
    kind = getattr(torch, _TYPES[plan.lir.buffer(plan.lir.io.outputs[0]).type.dtype.name])
    got = plan.output().view(kind).flatten()[: expected.numel()].view(expected.shape)
    if case.reference is not None:
        expected = case.reference(*case.arguments)
    scale = float(expected.float().abs().max())
    row["error"] = float((got.float() - expected.float()).abs().max()) / max(scale, 1e-9)
    row["right"] = row["error"] <= case.tolerance
    row["kernels"] = plan.count
    works = {"strata_ms": plan.run, "torch_ms": lambda: case.torch(*case.arguments)}
    if compiled:
        try:
            begin = time.perf_counter()
            fn = torch.compile(case.torch)
            fn(*case.arguments)
            torch.cuda.synchronize()
            row["torch_compile_first_s"] = round(time.perf_counter() - begin, 2)
            works["torch_compile_ms"] = lambda: fn(*case.arguments)
        except Exception as error:  # noqa: BLE001 - a peer that does not run is a missing column
            row["torch_compile_fails"] = str(error)[:100]
    row |= in_turns(works)
    if jaxed and case.jax is not None:
        row["jax_ms"] = jax_milliseconds(case.jax, case.arguments)
    best = min(v for k, v in row.items() if k in ("torch_ms", "torch_compile_ms", "jax_ms"))
    row["of_best_peer"] = round(best / row["strata_ms"], 3)
    if case.flops:
        row["tflops"] = round(case.flops / row["strata_ms"] / 1e9, 1)
    if case.bytes:
        row["tbs"] = round(case.bytes / row["strata_ms"] / 1e9, 3)
        row["of_copy"] = round(case.bytes / row["strata_ms"] / 1e-3 / COPY_BYTES, 3)
    return row


def jax_milliseconds(fn: Callable[..., Any], arguments: Sequence[Any]) -> float:
    import jax

    arrays = [jax.dlpack.from_dlpack(a.contiguous()) for a in arguments]
    made = jax.jit(fn)
    made(*arrays).block_until_ready()
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(10):
            out = made(*arrays)
        out.block_until_ready()
        times.append((time.perf_counter() - begin) * 100)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(GROUPS))
    parser.add_argument("--match", default="", help="only rows whose names have one of these words, by commas")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--no-jax", action="store_true")
    parser.add_argument("--out", default="", help="a file for the rows, beside standard output")
    given = parser.parse_args()
    torch = torch_()
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    programs = Programs()
    rows = []

    def tell(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if given.out:
            with open(given.out, "w", encoding="utf-8") as file:
                json.dump(rows, file, indent=1)

    tell({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "strata": st.__version__})
    for group in given.only.split(","):
        for case in GROUPS[group]():
            if not any(word in case.name for word in given.match.split(",")):
                continue
            try:
                tell(measure(programs, case, compiled=not given.no_compile, jaxed=not given.no_jax))
            except Exception as error:  # noqa: BLE001 - a row that fails is a row, too
                tell({"group": case.group, "work": case.name, "fails": f"{type(error).__name__}: {error}"[:300]})
    return 0 if all(r.get("right", True) and "fails" not in r for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
