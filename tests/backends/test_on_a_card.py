"""What a GPU must show beyond results: calls that copy nothing, flat memory, threads, interrupts, a full card.

What needs no GPU runs on a `cuda.core` that is NumPy, on XLA's processor and on wgpu, too.
"""

from __future__ import annotations

import gc
import json
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.backends import registry
from strata.backends.recipe import room_for
from strata.backends.resident import HOMES
from strata.errors import OutOfMemoryError
from tests.fake_cuda import FakeCore, fake_backend
from tests.unit.models.test_encoders import KNOWN

HAS_CARD = any(name.startswith("cuda") for name in st.devices())
FAKE = "fake_card"
on_a_card = pytest.mark.skipif(not HAS_CARD, reason="no NVIDIA GPU here, or no triton and cuda.core packages")


PLANNED = [FAKE, *["cuda"][: int(HAS_CARD)], *["wgpu"][: int(any(name.startswith("wgpu") for name in st.devices()))]]


@pytest.fixture(params=[*PLANNED, "xla"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    name = str(request.param)
    if name == FAKE:
        st.register_backend(FAKE, fake_backend(FakeCore(), FAKE))
    yield name
    if name == FAKE:
        backend = registry._made.pop(FAKE)
        HOMES.remove(backend.home)  # type: ignore[arg-type]


def layers(device: str, rows: Any = 64, count: int = 6, width: int = 64) -> st.CompiledGraph:
    """Matmuls, each with a softmax, and their weights."""
    g = st.Graph("layers")
    x = g.input("x", (rows, width), "f32")
    for at in range(count):
        x = st.ops.softmax(x @ g.param(f"w{at}", (width, width), "f32"), axis=1)
    compiled = st.Session(device).compile(g.outputs(x))
    rng = np.random.default_rng(0)
    compiled.set_params({f"w{at}": rng.standard_normal((width, width)).astype(np.float32) for at in range(count)})
    return compiled


def drawn(seed: int, rows: int = 64, width: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


@on_a_card
@pytest.mark.torch
def test_a_call_with_tensors_of_torch_copies_nothing_and_waits_for_nothing(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    compiled = layers("cuda")
    x = torch.from_numpy(drawn(0)).cuda()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for _ in range(3):
        compiled.run(x=x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        with torch.profiler.record_function("ours"):
            results = [compiled.run(x=x)[0] for _ in range(10)]
        torch.cuda.synchronize()  # the last kernels end inside of the trace
    assert all(isinstance(y, torch.Tensor) and y.is_cuda for y in results)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if "dur" in e]
    (ours,) = [e for e in events if e["name"] == "ours" and e.get("cat") == "user_annotation"]
    begin, end = ours["ts"], ours["ts"] + ours["dur"]
    calls = [e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= e["ts"] <= end]
    work = {e["cat"] for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
    assert work == {"kernel"}
    assert not [name for name in calls if "Memcpy" in name or "Synchronize" in name]


@on_a_card
def test_a_batch_goes_up_while_the_card_works() -> None:
    """38 MB from pageable memory, behind work of a tenth of a second or more: the host does not wait for that."""
    step = st.jit(lambda x, w: x @ w)
    x, w = (st.tensor(np.eye(4096, dtype=np.float32), device="cuda") for _ in range(2))
    batch = np.ones((64, 3, 224, 224), np.float32)
    for _ in range(2):
        step(x, w).numpy()
        st.tensor(batch, device="cuda").realize()  # pinned memory is there from here on
    begin = perf_counter()
    for _ in range(100):
        x = step(x, w)
    up = st.tensor(batch, device="cuda").realize()
    asked = perf_counter() - begin
    np.testing.assert_array_equal(x.numpy(), np.eye(4096, dtype=np.float32))
    assert asked < 0.5 * (perf_counter() - begin)
    assert up.sum().item() == batch.size


def test_memory_is_flat_over_calls_of_changing_sizes(device: str) -> None:
    calls = 10_000 if device == "cuda" else 120
    compiled = layers(device, st.sym("n", 1, 512), 2, 16)
    sizes = np.random.default_rng(0).integers(1, 512 if device == "cuda" else 9, calls)
    inputs = {n: st.tensor(drawn(n, n, 16), device=device) for n in sorted({int(n) for n in sizes})}
    wanted = layers("cpu", st.sym("n", 1, 512), 2, 16)
    used = []
    for at, n in enumerate(sizes):
        (y,) = compiled.run(x=inputs[int(n)])
        if at % (calls // 5) == calls // 5 - 1:
            np.testing.assert_allclose(y.numpy(), wanted.run(x=drawn(n, n, 16))[0], rtol=1e-4, atol=1e-6)
            del y
            gc.collect()
            used.append(st.memory(device).in_use)
    assert used[1:] == [used[1]] * 4


@pytest.mark.parametrize("device", PLANNED, indirect=True)  # XLA has a plan of its own, and does not tell it
def test_the_peak_is_what_was_planned(device: str) -> None:
    compiled = layers(device)
    t = st.tensor(drawn(0), device=device)
    compiled.run(x=t)  # weights are there from here on
    gc.collect()
    home = registry.backend_for(device).home
    assert home is not None
    before = st.memory(device).in_use  # takes back what has ended
    home.ledger.peak = home.ledger.in_use
    planned = compiled.memory.scratch
    assert planned > 0
    (kept,) = compiled.run(x=t)
    assert st.memory(device).peak - before == room_for(planned) + room_for(64 * 64 * 4)
    assert st.memory(device).in_use - before == room_for(kept.nbytes)


def test_threads_have_the_bits_of_one(device: str) -> None:
    threads, calls = (8, 1000) if device == "cuda" else (8, 3)
    compiled = layers(device)
    inputs = [st.tensor(drawn(n), device=device) for n in range(threads)]
    alone = [compiled.run(x=x)[0].numpy() for x in inputs]

    def several(n: int) -> int:
        results = [compiled.run(x=inputs[n])[0] for _ in range(calls)]
        return sum(np.array_equal(y.numpy(), alone[n]) for y in results)

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(several, range(threads))) == [calls] * threads


def test_an_interrupt_leaves_the_device_usable(device: str) -> None:
    """A signal wherever it comes: in Python, within the driver, while a result is awaited."""
    compiled = layers(device)
    x = st.tensor(drawn(0), device=device)
    want = compiled.run(x=x)[0].numpy()
    gc.collect()
    before = st.memory(device).in_use
    for number in range(10 if device == "cuda" else 3):
        wait = threading.Event()  # as timers have: the loop below has begun when it is over
        timer = threading.Timer(0.02 + 0.0037 * number, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - wherever in the loop it comes
            timer.start()
            while not wait.is_set():
                results = [compiled.run(x=x)[0] for _ in range(20)]
                results[-1].numpy()
        timer.join()
        results = []
        np.testing.assert_array_equal(compiled.run(x=x)[0].numpy(), want)
    gc.collect()
    assert st.memory(device).in_use == before


def test_a_tensor_that_no_card_holds(device: str) -> None:
    compiled = layers(device)
    x = st.tensor(drawn(0), device=device)
    want = compiled.run(x=x)[0].numpy()
    gc.collect()
    before = st.memory(device).in_use
    with pytest.raises(OutOfMemoryError) as found:
        st.zeros((1 << 37,), device=device).realize()
    assert re.search("(137438953472|549755813888) bytes", found.value.summary.replace(",", ""))
    del found  # its traceback has what the call had
    gc.collect()
    assert st.memory(device).in_use == before
    np.testing.assert_array_equal(compiled.run(x=x)[0].numpy(), want)


@on_a_card
@pytest.mark.torch
def test_a_card_that_another_library_filled() -> None:
    """All but a gigabyte is PyTorch's: a run that needs two is an error, the next smaller one works."""
    torch = pytest.importorskip("torch")
    f = st.jit(lambda x: (x @ x).sum(axis=0))
    small = st.ones((256, 256), device="cuda")
    want = f(small).numpy()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(OutOfMemoryError) as found:
            st.full((1 << 29,), 2.0, device="cuda").realize()
        assert "bytes" in found.value.summary
        np.testing.assert_array_equal(f(small).numpy(), want)
        assert st.ones((1 << 20,), device="cuda").sum().item() == 1 << 20
    finally:
        del held
        torch.cuda.empty_cache()
    assert st.full((1 << 29,), 2.0, device="cuda")[:3].tolist() == [2.0] * 3


ENCODERS = {"MiniLM": (384, 6), "BERT-base": (768, 12)}


def encoder(path: Path, width: int, layers: int, kind: str) -> Path:
    """BERT's of a size, with random weights."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 12,
             "intermediate_size": 4 * width, "vocab_size": 30522, "max_position_embeddings": 512}  # fmt: skip
    path.mkdir()
    (path / "config.json").write_text(json.dumps(KNOWN["bert"]["config"] | sizes), "utf-8")
    grown = {32: width, 48: 4 * width, 60: 30522, 66: 512}
    rng, weights = np.random.default_rng(0), {}
    for name, small in KNOWN["bert"]["weights"].items():
        if ".layer.1." in name:
            continue
        for at in range(layers if ".layer.0." in name else 1):
            shape = tuple(grown.get(n, n) for n in small)
            drawn = rng.standard_normal(shape).astype(np.float32) * np.float32(0.04)
            is_scale = "LayerNorm" in name and name.endswith("weight")
            made = st.tensor(drawn + np.float32(is_scale)).cast(kind).numpy()
            weights[name.replace(".layer.0.", f".layer.{at}.")] = made
    st.io.save_safetensors(path / "model.safetensors", weights)
    return path


def encoded_by_torch(path: Path, kind: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The vectors of BERT's layers as PyTorch computes them on the card, in one kind of numbers."""
    torch = pytest.importorskip("torch")
    f = torch.nn.functional
    stored = st.io.load_safetensors(path / "model.safetensors")
    weights = {n: torch.from_numpy(np.array(w, np.float32)).cuda().to(kind) for n, w in stored.items()}
    width, eps = weights["embeddings.word_embeddings.weight"].shape[1], KNOWN["bert"]["config"]["layer_norm_eps"]

    def linear(x: Any, name: str) -> Any:
        return f.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Any, name: str) -> Any:
        return f.layer_norm(x, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    def heads(x: Any) -> Any:
        return x.unflatten(-1, (12, -1)).transpose(1, 2)

    seen = torch.from_numpy(mask).cuda()
    word, position, sort = (weights[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type"))
    x = norm(word[torch.from_numpy(ids).cuda()] + position[: ids.shape[1]] + sort[0], "embeddings.LayerNorm")
    layer = 0
    while f"encoder.layer.{layer}.output.dense.weight" in weights:
        here = f"encoder.layer.{layer}"
        q, k, v = (heads(linear(x, f"{here}.attention.self.{n}")) for n in ("query", "key", "value"))
        y = f.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None]).transpose(1, 2).flatten(2)
        x = norm(x + linear(y, f"{here}.attention.output.dense"), f"{here}.attention.output.LayerNorm")
        y = linear(f.gelu(linear(x, f"{here}.intermediate.dense")), f"{here}.output.dense")
        x = norm(x + y, f"{here}.output.LayerNorm")
        layer += 1
    return np.asarray(x[seen].float().cpu())


@on_a_card
@pytest.mark.torch
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_agree_with_the_processor(name: str, tmp_path: Path) -> None:
    """In f32 to its last digits; in bf16 the card is no further from the processor than PyTorch's bf16 is from f32."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    for kind in ("f32", "bf16"):
        path = encoder(tmp_path / kind, *ENCODERS[name], kind)
        here, there = st.load(path), st.load(path, device="cuda")
        for batch in (1, 32):
            ids = rng.integers(1000, 30000, (batch, 64)).astype(np.int32)
            mask = np.arange(64) < rng.integers(8, 65, (batch, 1))
            ours, wanted = (
                np.asarray(m.run(input_ids=ids, attention_mask=mask)["last_hidden_state"], np.float32)[mask]
                for m in (there, here)
            )
            exact, rounded = (encoded_by_torch(path, k, ids, mask) for k in (torch.float32, torch.bfloat16))
            size = np.linalg.norm(exact)
            assert np.linalg.norm(wanted - exact) <= 1e-5 * size
            bound = 1e-5 if kind == "f32" else 1.25 * np.linalg.norm(rounded - exact) / size
            found = np.linalg.norm(ours - wanted) / size
            print(f"{name} {kind} batch {batch}: {found:.2e} apart, {bound:.2e} allowed")
            assert found <= bound
