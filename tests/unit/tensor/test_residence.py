"""Tensors on XLA's CPU, a CUDA that is NumPy, and this machine's GPUs: where results are, copies, errors, memory."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.backends import registry
from strata.backends.recipe import room_for
from strata.backends.resident import HOMES
from strata.errors import DeviceError, OutOfMemoryError, RunError
from strata.models import Sampler
from tests.counts import codes
from tests.fake_cuda import FakeCalls, FakeCore, fake_backend

FOUND = [name for name in ("cuda", "wgpu") if any(n.startswith(name) for n in st.devices())]
CALLS = 10  # of Python, from a jitted function to the driver's library and back
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def core() -> Iterator[FakeCore]:
    made = FakeCore()
    st.register_backend("fake_cuda", fake_backend(made))
    yield made
    backend = registry._made.pop("fake_cuda")
    HOMES.remove(backend.home)  # type: ignore[arg-type]


@pytest.fixture(params=["xla", "fake_cuda", *FOUND])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "fake_cuda":
        request.getfixturevalue("core")
    return str(request.param)


def test_tensors_are_made_on_a_device_and_move(device: str) -> None:
    t = st.tensor(X, device=device)
    assert t.device == device
    assert t.to(device) is t
    np.testing.assert_array_equal(t.numpy(), X)
    back = t.to("cpu")
    assert back.device == "cpu"
    assert back.to(device).device == device
    assert back.to_device(device).device == t.device
    np.testing.assert_array_equal(back.data(), X)
    assert st.asarray(X, device=device).device == device
    assert st.asarray(t, device="cpu").device == "cpu"
    assert repr(str(t.device)) in repr(t)
    np.testing.assert_array_equal(np.asarray(t), X)
    assert t.tolist() == X.tolist()


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda d: st.zeros((2, 3), device=d), np.zeros((2, 3))),
        (lambda d: st.ones(4, device=d), np.ones(4)),
        (lambda d: st.full((2,), 7.0, device=d), np.full(2, 7.0)),
        (lambda d: st.arange(5, device=d), np.arange(5)),
        (lambda d: st.eye(3, device=d), np.eye(3)),
        (lambda d: st.empty((2, 2), device=d), np.zeros((2, 2))),
        (lambda d: st.full_like(st.ones(3, device=d), 2.0), np.full(3, 2.0)),
        (lambda d: st.xp.zeros((2, 3), device=d), np.zeros((2, 3))),
        (lambda d: st.xp.linspace(0, 1, 5, device=d), np.linspace(0, 1, 5, dtype=np.float32)),
        (lambda d: st.xp.ones_like(st.ones(3, device=d)), np.ones(3)),
        (lambda d: st.xp.asarray([1.0, 2.0], device=d), np.array([1.0, 2.0])),
    ],
)
def test_filled_tensors_are_made_there(device: str, make: Any, want: np.ndarray) -> None:
    made = make(device)
    assert made.device == device
    np.testing.assert_array_equal(made.numpy(), want)


def test_random_numbers_are_drawn_there_and_are_the_same(device: str) -> None:
    key = st.random.key(3)
    drawn = st.random.uniform(key, (5,), device=device)
    assert drawn.device == device
    np.testing.assert_allclose(drawn.numpy(), st.random.uniform(key, (5,)).numpy(), rtol=1e-6)


def test_a_result_lives_where_its_inputs_live(device: str) -> None:
    t = st.tensor(X, device=device)
    y = (t * 2 + 1).sum(axis=0)
    assert y.device == device
    np.testing.assert_allclose(y.numpy(), (X * 2 + 1).sum(axis=0))
    assert y.device == device
    big = np.arange(600, dtype=np.float32)
    z = st.zeros(600, device=device) + big  # an array of NumPy goes where the tensor is
    assert z.device == device
    np.testing.assert_array_equal(z.numpy(), big)
    assert (t + st.ones((2, 3))).device == device  # so does what is not computed yet
    assert t[0].device == device
    assert st.concat([t, t]).device == device


def test_what_rests_on_no_tensor_goes_anywhere_also_once_it_is_computed(device: str) -> None:
    t = st.tensor(X, device=device)
    part = (st.tensor(X) + 1.5).value.node.inputs[1]  # the constant: equal ones are one value
    whole = (st.ones((2, 3)) * 3.0 + 2.0).value
    with st.config.using(device="cpu"):
        for value in (part, whole):
            computed = st.Tensor(value)
            computed.numpy()
            assert computed.device == "cpu"
            with pytest.raises(DeviceError, match="operands are on"):
                (t + computed).numpy()
    kept = [st.tensor(X), st.Tensor(whole)]
    st.realize(*kept)
    for made, want in ((t + 1.5, X + 1.5), (t + st.Tensor(whole), X + 5)):
        assert made.device == device
        np.testing.assert_array_equal(made.numpy(), want)
    with st.config.using(device=device):
        assert (st.Tensor(whole) * 2).numpy().sum() == 60
        made = st.Tensor(whole) * 2
        made.numpy()
        assert made.device == device


def test_operands_on_two_devices_are_an_error_at_the_call(device: str) -> None:
    t, here = st.tensor(X, device=device), st.tensor(X)
    for wrong in (lambda: t + here, lambda: here @ t.T, lambda: st.where(t > 0, here, t), lambda: st.concat([t, here])):
        with pytest.raises(DeviceError, match=f"operands are on .*{device}") as found:
            wrong()
        assert found.value.code == "E103"
        assert "cpu" in found.value.summary
    with pytest.raises(DeviceError, match="operands are on"):
        st.jit(lambda a, b: a + b)(t, here)
    with pytest.raises(DeviceError, match="operands are on"):
        t[0] = here[0]
    np.testing.assert_array_equal(t.numpy(), X)  # and is as it was


def test_the_default_device(device: str) -> None:
    with st.config.using(device=device):
        made = st.tensor([1.0, 2.0])
        assert made.device == device
        assert st.ones(2).device == device
        assert st.random.normal(st.random.key(0), (3,)).device == device
        assert st.jit(lambda x: x + st.ones(2))(np.ones(2, np.float32)).device == device
        assert st.xp.__array_namespace_info__().default_device() == device
    assert st.tensor([1.0]).device == "cpu"
    assert (made + 1).device == device
    assert made.device in st.xp.__array_namespace_info__().devices()


def test_functions_take_and_give_tensors_of_the_device(device: str) -> None:
    w = st.tensor(X.T.copy(), device=device)
    f = st.jit(lambda x: (x @ w).relu())
    t = st.tensor(X, device=device)
    for _ in range(4):
        y = f(t)
        assert y.device == device
        np.testing.assert_allclose(y.numpy(), np.maximum(X @ X.T, 0), rtol=1e-5)
    np.testing.assert_allclose(f(X).numpy(), np.maximum(X @ X.T, 0), rtol=1e-5)  # NumPy goes where the weight is
    assert f(X).device == device
    g = st.grad(lambda x: (x * x).sum())(t)
    assert g.device == device
    np.testing.assert_allclose(g.numpy(), 2 * X)


def test_donated_tensors_are_given_up(device: str) -> None:
    f = st.jit(lambda x: x + 1, donate_argnums=(0,))
    t = st.tensor(X, device=device)
    first = t
    for n in range(1, 5):
        t = f(t)
        np.testing.assert_array_equal(t.numpy(), X + n)
    with pytest.raises(RunError, match="donated"):
        first.numpy()


def test_plans_run_on_the_device(device: str) -> None:
    t = st.tensor(X, device=device)
    plan = (t * 3).prepare()
    for _ in range(2):
        plan.execute()
        assert plan.output(0).device == device
        np.testing.assert_array_equal(np.asarray(plan.output(0)), X * 3)


def test_copies_are_lazy_and_steps_of_plans(device: str, tmp_path: Path) -> None:
    """Below a copy is a program of its own device, above it one of the other; a plan runs both each time."""
    x = st.tensor(X)
    y = ((x * 2.0 + 1.0).to(device) @ st.ones((3, 4), device=device)).to("cpu") - 1.0
    assert y.device == "cpu"
    want = (X * 2 + 1) @ np.ones((3, 4), np.float32) - 1
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-6)
    given = st.tensor(X)
    inside = (given * 2.0 + 1.0).to(device)
    assert inside.device == device
    assert inside.to(device) is inside
    with pytest.raises(DeviceError, match="operands are on"):
        inside + given
    plan = ((inside @ st.ones((3, 4), device=device)).to("cpu") - 1.0).prepare()
    name = str.__str__(inside.device)  # a card may have its number there
    assert [k.label for k in plan.kernels if k.name == "copy"] == [f"copy to {name}", "copy to cpu"]
    assert f"copy to {name}" in plan.explain()
    data = given.data()
    for step in range(3):  # a run reads the arrays of the leaves as they are now
        data[:] = X + step
        with st.trace(tmp_path / "run.json"):
            plan.execute()
        np.testing.assert_allclose(plan.output(0), ((X + step) * 2 + 1) @ np.ones((3, 4), np.float32) - 1, rtol=1e-6)
    copied = [e for e in json.loads((tmp_path / "run.json").read_text()) if e["name"] == "copy"]
    assert [e["args"]["device"] for e in copied] == [name, "cpu"]
    assert st.jit(lambda v: v + inside)(st.ones((2, 3), device=device)).device == device


@pytest.mark.parametrize("back", [False, True])
def test_a_plan_that_ends_in_a_copy_shows_what_it_copied(device: str, back: bool) -> None:
    given = st.tensor(X)
    made = (given * 2.0).to(device)
    plan = ((made + 1.0).to("cpu") if back else made).prepare()
    for step in range(2):
        given.data()[:] = X + step
        plan.execute()
        want = (X + step) * 2 + (1 if back else 0)
        np.testing.assert_array_equal(np.asarray(plan.output(0)), want)
        np.testing.assert_array_equal(plan.tensors[0].numpy(), want)


def test_clones_of_plans_have_copies_of_their_own(device: str) -> None:
    given = st.tensor(X)
    plan = ((given * 2.0).to(device) + 1.0).to("cpu").prepare()
    clone = plan.clone([given])
    clone.inputs[0].data()[:] = X + 5
    plan.execute()
    np.testing.assert_array_equal(clone.execute().output(0), (X + 5) * 2 + 1)
    np.testing.assert_array_equal(plan.output(0), X * 2 + 1)
    on_device = (given.to(device).realize() * 3.0).prepare().clone().execute()
    np.testing.assert_array_equal(np.asarray(on_device.output(0)), X * 3)


def compiled(device: str) -> st.CompiledGraph:
    g = st.Graph("scaled")
    x, w = g.input("x", (2, 3), "f32"), g.param("w", (3,), "f32")
    g.outputs(x * w, x.sum(axis=1))
    return st.Session(device).compile(g)


def test_compiled_graphs_give_what_they_are_given(device: str) -> None:
    c = compiled(device)
    w = np.array([1.0, 2.0, 3.0], np.float32)
    c.set_param("w", w)
    assert all(isinstance(y, np.ndarray) for y in c.run(x=X))
    y, total = c.run(x=st.tensor(X, device=device))
    assert isinstance(y, st.Tensor)
    assert y.device == total.device == device
    np.testing.assert_array_equal(y.numpy(), X * w)
    c.set_param("w", st.tensor(w * 2, device=device))
    np.testing.assert_array_equal(c.run(x=X)[0], X * w * 2)
    out = np.empty((2, 3), np.float32), np.empty(2, np.float32)
    c.run_into({"x": st.tensor(X, device=device)}, out)
    np.testing.assert_array_equal(out[0], X * w * 2)
    with pytest.raises(DeviceError, match="the program runs on 'cpu'"):
        compiled("cpu").set_param("w", st.tensor(w, device=device))


def test_state_is_kept_on_the_device(device: str) -> None:
    g = st.Graph("count")
    x, total = g.input("x", (3,), "f32"), g.input("total", (3,), "f32")
    g.outputs(x * 2, total + x)
    c = st.Session(device).compile(g)
    c.bind("total", np.zeros(3, np.float32))
    c.feed("total", output=1)
    for n in range(1, 4):
        y, kept = c.run(x=np.ones(3, np.float32))
        assert isinstance(y, np.ndarray)
        np.testing.assert_array_equal(np.asarray(kept), np.full(3, n))
    np.testing.assert_array_equal(c.read("total"), np.full(3, 3.0))


def test_symbolic_sizes(device: str) -> None:
    g = st.Graph("rows")
    x = g.input("x", (st.sym("n", 1, 64), 3), "f32")
    g.outputs(st.ops.softmax(x, axis=1))
    c = st.Session(device).compile(g)
    for rows in (1, 5, 3, 5):
        array = np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)
        (y,) = c.run(x=st.tensor(array, device=device))
        e = np.exp(array - array.max(axis=1, keepdims=True))
        np.testing.assert_allclose(y.numpy(), e / e.sum(axis=1, keepdims=True), rtol=1e-5)


def test_memory_is_counted_and_comes_back(device: str) -> None:
    gc.collect()
    before = st.memory(device).in_use
    t = st.zeros((256, 256), device=device)
    held = st.memory(device)
    assert held.in_use >= before + 256 * 256 * 4
    assert held.peak >= held.in_use
    assert held.device == device
    f = st.jit(lambda x: x * 2 + 1)
    for _ in range(3):
        f(t).numpy()
    steady = st.memory(device).in_use
    for n in range(40):
        f(t if n % 2 else t * 1).numpy()
    assert st.memory(device).in_use == steady
    del t
    gc.collect()
    assert st.memory(device).in_use <= before + 1024


def test_memory_comes_back_from_any_thread(device: str) -> None:
    box = [st.zeros((64, 64), device=device)]
    gc.collect()
    before = st.memory(device).in_use
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert st.memory(device).in_use <= before - 64 * 64 * 4


def test_memory_in_a_cycle_of_references_comes_back_as_it_was(device: str) -> None:
    for number in range(3):
        held: list[Any] = [st.full((5,), float(number + i), device=device).realize() for i in range(3)]
        held.append(held)
        del held
        gc.collect()
        made = [st.full((5,), float(i), device=device).realize() for i in range(4)]
        assert [t.tolist() for t in made] == [[float(i)] * 5 for i in range(4)]


def test_memory_that_is_short_is_an_error_and_smaller_runs_work(device: str) -> None:
    f = st.jit(lambda x: (x @ x).sum(axis=0))
    small = st.ones((8, 8), device=device)
    f(small).numpy()
    gc.collect()
    st.memory(device, limit=st.memory(device).in_use + 16_384)
    try:
        with pytest.raises(OutOfMemoryError, match="the limit is") as found:
            st.ones((512, 512), device=device)
        assert "bytes are in use" in found.value.summary
        np.testing.assert_allclose(f(small).numpy(), np.full(8, 64.0))
    finally:
        st.memory(device, limit=None)
    assert st.ones((512, 512), device=device).shape == (512, 512)


def test_many_threads_have_the_results_of_one(device: str) -> None:
    w = st.tensor(np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32), device=device)
    f = st.jit(lambda x: st.softmax(x @ w, axis=-1))
    arrays = [np.random.default_rng(n).standard_normal((2, 3)).astype(np.float32) for n in range(24)]
    alone = [f(st.tensor(a, device=device)).numpy() for a in arrays]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda a: f(st.tensor(a, device=device)).numpy(), arrays))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_peak_is_what_was_planned(core: FakeCore) -> None:
    g = st.Graph("layers")
    x = g.input("x", (64, 64))
    for at in range(5):
        x = st.ops.softmax(x @ g.param(f"w{at}", (64, 64)), axis=1)
    compiled = st.Session("fake_cuda").compile(g.outputs(x))
    weights = {f"w{at}": np.full((64, 64), 0.1, np.float32) for at in range(5)}
    compiled.set_params(weights)
    t = st.tensor(np.ones((64, 64), np.float32), device="fake_cuda")
    compiled.run(x=t)  # weights are there from here on
    gc.collect()
    home = registry.backend_for("fake_cuda").home
    assert home is not None
    st.memory("fake_cuda")  # takes back what has ended
    home.ledger.peak = home.ledger.in_use
    before = st.memory("fake_cuda").in_use
    planned = compiled.memory.scratch
    assert planned > 0
    (kept,) = compiled.run(x=t)
    assert st.memory("fake_cuda").peak - before == room_for(planned) + room_for(64 * 64 * 4)
    assert st.memory("fake_cuda").in_use - before == room_for(kept.nbytes)


@pytest.mark.parametrize("at", range(4))
def test_an_interrupted_run_leaves_the_device_usable(core: FakeCore, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((8, 8)).astype(np.float32) for _ in range(2)]
    f = st.jit(lambda x: st.softmax(st.softmax(x @ x, axis=1) @ x, axis=0).sum(axis=1))
    tensors = [st.tensor(a, device="fake_cuda") for a in arrays]
    wanted = [f(t).numpy() for t in tensors]
    for t in tensors:  # now it is a graph
        f(t).numpy()
    gc.collect()
    before = st.memory("fake_cuda").in_use
    execute, count = FakeCalls.execute, iter(range(10**6))

    def interrupted(*given: Any) -> None:
        if next(count) == at:
            raise KeyboardInterrupt
        execute(*given)

    with monkeypatch.context() as patch:
        patch.setattr(FakeCalls, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            f(tensors[0]).numpy()
    gc.collect()
    assert st.memory("fake_cuda").in_use == before
    for t, want in zip(tensors, wanted, strict=True):
        np.testing.assert_array_equal(f(t).numpy(), want)
    assert st.memory("fake_cuda").in_use == before


def test_one_upload_serves_all_programs(core: FakeCore) -> None:
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    x = st.tensor(np.ones((2, 64), np.float32), device="fake_cuda")
    graphs = []
    for rows in (2, 3):
        g = st.Graph(f"layer{rows}")
        g.outputs(g.input("x", (rows, 64), "f32") @ g.param("w", (64, 64), "f32"))
        graphs.append(st.Session("fake_cuda").compile(g))
        graphs[-1].set_param("w", w)
    graphs[0].run(x=x)
    before = st.memory("fake_cuda").in_use
    y = graphs[1].run(x=st.tensor(np.ones((3, 64), np.float32), device="fake_cuda"))
    assert st.memory("fake_cuda").in_use - before < w.nbytes
    np.testing.assert_allclose(y[0].numpy(), np.ones((3, 64), np.float32) @ w, rtol=1e-4, atol=1e-4)


def test_calls_with_resident_tensors_copy_nothing_and_wait_for_nothing(core: FakeCore) -> None:
    f = st.jit(lambda x: x + 1)
    t = st.tensor(X, device="fake_cuda")
    f(t)
    f(t)
    core.log.clear()
    y = f(t)
    assert [line.partition(" ")[0] for line in core.log] == ["launch"]
    np.testing.assert_array_equal(y.numpy(), X + 1)  # which waits
    assert "sync" in core.log


def test_the_short_way_of_a_call_takes_what_is_like_it_and_leaves_the_rest(core: FakeCore) -> None:
    f = st.jit(lambda x, y=None, **more: {"sum": x + (x if y is None else y), "more": [v * 2 for v in more.values()]})
    x, y = (st.tensor(X + i, device="fake_cuda") for i in range(2))
    for _ in range(4):
        assert f(x)["more"] == []
        np.testing.assert_array_equal(f(x, y)["sum"].numpy(), 2 * X + 1)
        np.testing.assert_array_equal(f(x, y=y, z=x)["more"][0].numpy(), 2 * X)
    single = st.jit(lambda x: x + 1)
    for _ in range(4):
        single(x)
    np.testing.assert_array_equal(single(X).numpy(), X + 1)  # an array of the host
    np.testing.assert_array_equal(single(x + 1).numpy(), X + 2)  # not computed yet
    np.testing.assert_array_equal(single(x[:1]).numpy(), X[:1] + 1)  # another shape
    np.testing.assert_array_equal(single(st.tensor(X)).numpy(), X + 1)  # elsewhere
    np.testing.assert_array_equal(st.jit(lambda v: single(v) * 2)(x).numpy(), 2 * X + 2)  # within a trace
    with pytest.raises(TypeError):
        single(x, x)


def test_a_call_with_resident_tensors_enters_few_functions(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCalls, "launch", lambda *_: None)  # which would interpret the kernel
    f = st.jit(lambda x: x + 1)
    t = st.tensor(X, device="fake_cuda")
    for _ in range(4):
        f(t)
    ours = [code for code in codes(lambda: f(t)) if "/strata/" in code.co_filename.replace("\\", "/")]
    assert len(ours) <= CALLS


def test_a_donated_argument_is_written_where_it_is(core: FakeCore) -> None:
    f = st.jit(lambda x: x * 2, donate_argnums=(0,))
    t = st.tensor(X, device="fake_cuda")
    place = t._held.array.place  # type: ignore[union-attr]
    t = f(t)
    assert t._held.array.place == place  # type: ignore[union-attr]
    np.testing.assert_array_equal(t.numpy(), X * 2)


def test_state_is_updated_in_place(core: FakeCore) -> None:
    g = st.Graph("cache")
    cache, new = g.input("cache", (8, 3), "f32"), g.input("new", (1, 3), "f32")
    at = g.input("at", (), "i32")
    g.outputs(st.ops.dynamic_update_slice(cache, new, (at, g.constant(np.int32(0)))))
    c = st.Session("fake_cuda").compile(g)
    c.bind("cache", np.zeros((8, 3), np.float32))
    c.feed("cache", output=0)
    want = np.zeros((8, 3), np.float32)
    for n in range(4):
        core.log.clear()
        c.run(new=np.full((1, 3), n, np.float32), at=np.array(n, np.int32))
        want[n] = n
        assert not [line for line in core.log if line == f"copy {want.nbytes}"]
    np.testing.assert_array_equal(c.read("cache"), want)


def test_memory_that_another_library_refuses_comes_back(core: FakeCore) -> None:
    t = st.tensor(X, device="fake_cuda")
    before = st.memory("fake_cuda").in_use
    with pytest.raises((RuntimeError, BufferError), match="device"):  # NumPy's own error
        np.from_dlpack(t)
    capsule = t.__dlpack__()
    del t
    assert st.memory("fake_cuda").in_use == before
    del capsule
    assert st.memory("fake_cuda").in_use == before - room_for(X.nbytes)


def test_arrays_of_the_host_come_back_there(device: str) -> None:
    """Also where the library has not heard of the device."""
    torch = pytest.importorskip("torch")
    g = st.Graph("doubled")
    g.outputs(g.input("x", (2, 3), "f32") * 2)
    (out,) = st.Session(device).compile(g).run(x=torch.from_numpy(X.copy()))
    assert isinstance(out, torch.Tensor)
    assert out.device.type == "cpu"
    np.testing.assert_array_equal(out.numpy(), X * 2)


def test_arrays_of_jax_and_torch_come_and_go() -> None:
    jax = pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    c = compiled("xla")
    c.set_param("w", np.ones(3, np.float32))
    y, _ = c.run(x=jax.numpy.asarray(X))
    assert isinstance(y, jax.Array)
    np.testing.assert_array_equal(np.asarray(y), X)
    y, _ = c.run(x=torch.from_numpy(X.copy()))
    assert isinstance(y, torch.Tensor)
    np.testing.assert_array_equal(y.cpu().numpy(), X)
    t = st.tensor(X, device="xla")
    np.testing.assert_array_equal(torch.from_dlpack(t * 2).cpu().numpy(), X * 2)
    np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(t * 2)), X * 2)
    adopted = st.asarray(jax.numpy.asarray(X), device="xla")
    assert adopted.device == "xla"
    np.testing.assert_array_equal((adopted + 1).numpy(), X + 1)
    where = st.asarray(jax.numpy.asarray(X)).device
    assert (where == "cpu") == (jax.default_backend() == "cpu")  # where its memory is, whoever has used XLA before


def test_arrays_that_others_write_are_copied_and_layouts_are_minded() -> None:
    jax = pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    given = torch.arange(24.0).reshape(2, 3, 4)
    st.zeros(1, device="xla")
    assert st.asarray(given).device == "cpu"
    turned = given.permute(2, 0, 1)
    want = turned.numpy().copy()
    for kind in (torch.float32, torch.bfloat16):
        array = jax.dlpack.from_dlpack(turned.to(kind))  # XLA keeps the order of the memory
        for made in (st.asarray(array, device="xla"), st.asarray(array), st.asarray(turned.to(kind), device="xla")):
            np.testing.assert_array_equal((made.cast("f32") + 1).numpy(), want + 1)
    copy = st.tensor(given, device="xla")
    shared = st.asarray(given, device="xla")
    given[:] = 0
    np.testing.assert_array_equal(copy.numpy().transpose(2, 0, 1), want)
    np.testing.assert_array_equal(shared.numpy().transpose(2, 0, 1), want)


def tiny_llama(folder: Path) -> None:
    """Two layers with random weights."""
    settings = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    shapes = {"model.embed_tokens.weight": (50, 32), "model.norm.weight": (32,)}
    for i in range(2):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{n}_proj.weight": s for n, s in (("q", (32, 32)), ("k", (16, 32)), ("v", (16, 32)))}
        shapes |= {f"{at}.self_attn.o_proj.weight": (32, 32), f"{at}.mlp.down_proj.weight": (32, 64)}
        shapes |= {f"{at}.mlp.{n}_proj.weight": (64, 32) for n in ("gate", "up")}
        shapes |= {f"{at}.{n}_layernorm.weight": (32,) for n in ("input", "post_attention")}
    rng = np.random.default_rng(0)
    weights = {
        n: (rng.standard_normal(s) * 0.3 if len(s) > 1 else np.ones(s)).astype(np.float32) for n, s in shapes.items()
    }
    st.io.save_safetensors(folder / "model.safetensors", weights)


@pytest.mark.parametrize("device", ["xla", *FOUND])
def test_a_decoder_keeps_its_cache_on_the_device(device: str, tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    results = []
    for name in ("cpu", device):
        model = st.load(tmp_path, device=name)
        results.append(list(model.tokens([3, 1, 4, 1, 5], 6, Sampler(temperature=0.0))))
        state = model.start(capacity=8)
        model.step(state, np.array([[3, 1, 4]], np.int32))
        places = [getattr(c, "place", None) for c in state.caches]
        model.step(state, np.array([[1]], np.int32))
        if name not in ("cpu", "xla"):  # arrays of XLA never change
            assert [c.place for c in state.caches] == places
        assert isinstance(state.caches[0], np.ndarray) == (name == "cpu")
    assert results[0] == results[1]
