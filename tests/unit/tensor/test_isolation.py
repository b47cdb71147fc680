"""What happens to one tensor, array or result happens to nobody else: copies, plans, programs, pickles, threads."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.core import f32
from strata.errors import OptionError, TraceError
from strata.kernel import Axis
from strata.mir import constant, placeholder


class Wrapped:
    """Something that NumPy reads, and hands its own memory out."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array


COPIES: dict[str, Callable[[st.Tensor], st.Tensor]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "tensor": st.tensor,
    "plus": lambda x: +x,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),  # noqa: S301 - our own
    "asarray": lambda x: x.__array_namespace__().asarray(x, copy=True),
}


@pytest.mark.parametrize("size", [3, 3000])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_a_tensor_of_its_own(name: str, size: int) -> None:
    kinds: list[Callable[[], st.Tensor]] = [
        lambda: st.tensor(np.ones(size, "f")),
        lambda: st.tensor(np.zeros(size, "f")) + 1.0,
        lambda: st.realize(st.tensor(np.zeros(size, "f")) + 1.0),
        lambda: st.jit(lambda x: x + 1.0)(np.zeros(size, "f")),
        lambda: st.ones((size,)),
    ]
    for make in kinds:
        for first, second in ((0, 1), (1, 0)):  # the copy is written to, then what it is a copy of
            x = make()
            pair = (COPIES[name](x), x)
            pair[first][0] = 5.0
            assert pair[second].numpy()[0] == 1.0
            pair = (COPIES[name](pair[second]), pair[second])
            pair[first].realize().data()[:] = 7.0
            assert pair[second].numpy().tolist() == [1.0] * size
            assert pair[first].numpy().tolist() == [7.0] * size
            st.jit(lambda x: x * 2.0, donate_argnums=(0,))(pair[first])
            assert pair[second].numpy().tolist() == [1.0] * size


def test_a_pickle_holds_sizes_that_have_names() -> None:
    n = st.Variable("N", 1, 8)
    x = st.empty((n.bind(3), 2))
    x.data()[:] = 4.0
    y = pickle.loads(pickle.dumps(x + 1.0))  # noqa: S301 - our own
    assert str(y.type) == "f32[N, 2]"
    assert y.tolist() == [[5.0, 5.0]] * 3


def test_a_traced_tensor_has_nothing_to_pickle() -> None:
    def fn(x: st.Tensor) -> st.Tensor:
        pickle.dumps(x)
        return x

    with pytest.raises(TraceError, match="no value while its function is traced"):
        st.jit(fn)(np.ones(3))


def test_a_tensor_is_a_copy_of_whatever_it_is_made_of() -> None:
    array = np.ones(3, "f")
    readable = array.view()
    readable.flags.writeable = False
    for given in (array, readable, memoryview(array), Wrapped(array), array.view(np.matrix)):
        array[:] = 1.0
        x = st.tensor(given)
        array[:] = 5.0
        assert x.numpy().ravel().tolist() == [1.0] * 3


@pytest.mark.torch
def test_a_tensor_is_a_copy_of_a_torch_tensor() -> None:
    torch = pytest.importorskip("torch")
    given = torch.ones(3)
    x = st.tensor(given)
    given[:] = 5.0
    assert x.tolist() == [1.0] * 3


@pytest.mark.parametrize("size", [1, 64, 65, 5000])
def test_an_operand_is_what_it_was_when_it_was_given(size: int) -> None:
    array = np.ones(size, "f")
    readable = st.asarray(array).numpy()
    x = st.zeros((size,))
    sums = [x + array, array + x, x + readable, x == array]
    array[:] = 5.0
    assert [s.numpy().all() for s in sums[:3]] == [True] * 3
    assert max(s.numpy().max() for s in sums[:3]) == 1.0
    assert not sums[3].numpy().any()


def test_a_constant_of_a_graph_is_what_it_was_when_it_was_given() -> None:
    array = np.ones(3, "f")
    readable = array[:]
    readable.flags.writeable = False
    g = st.Graph("g")
    g.outputs(g.input("x", (3,)) + g.constant(array) + g.constant(readable))
    array[:] = 5.0
    assert st.Session("cpu").compile(g).run(x=np.zeros(3, "f"))[0].tolist() == [2.0] * 3
    assert constant(np.ones(3, "f")).node is constant(readable.copy() * 0 + 1).node


@pytest.mark.parametrize("shape", [(4, 4), (300, 40)])
def test_what_was_computed_does_not_follow_its_operands(shape: tuple[int, int]) -> None:
    """Small expressions run in NumPy, which makes views; a program does not."""
    array = np.ones(shape, "f")
    x = st.asarray(array)
    made = st.realize(x.reshape((-1,)), x[1:], x.T, x.reshape((-1,)))
    other = st.tensor(made[0]).reshape(shape).realize()
    array[:] = 5.0
    x.data()[:] = 6.0
    for y in (*made, other):
        assert set(y.numpy().ravel().tolist()) == {1.0}, y.type
    made[0].data()[:] = 7.0
    for y in made[1:]:
        assert y.numpy().max() == 1.0


@pytest.mark.parametrize("size", [3, 5000])
def test_a_jitted_function_keeps_what_it_closed_over(size: int) -> None:
    array = np.ones(size, "f")
    seen = st.tensor(array)
    view = seen.data()
    for w, write in (
        (st.tensor(array), lambda w: w.data().fill(5.0)),
        (seen, lambda w: view.fill(5.0)),
        (st.asarray(array), lambda w: array.fill(5.0)),
        (st.tensor(np.zeros(size, "f")) + 1.0, lambda w: w.realize().data().fill(5.0)),
        (np.ones(size, "f"), lambda w: w.fill(5.0)),
    ):
        fn = st.jit(lambda x, w=w: x * w)
        x = np.ones(size, "f")
        for _ in range(3):
            assert fn(x).numpy().max() == 1.0
        write(w)
        assert np.asarray(w).max() == 5.0
        assert fn(x).numpy().max() == 1.0


def test_results_without_a_program_do_not_follow_their_arguments() -> None:
    fn = st.jit(lambda x: (x, x + 1.0, x.reshape((-1,))), max_variants=1, on_miss="interpret")
    fn(np.ones(3))
    for given in (np.ones(4), st.tensor(np.ones(4))):
        made = fn(given)
        (given.data() if isinstance(given, st.Tensor) else given)[:] = 5.0
        assert [y.tolist() for y in made] == [[1.0] * 4, [2.0] * 4, [1.0] * 4]
        made[0].data()[:] = 7.0
        assert np.asarray(given).max() == 5.0


def test_equal_expressions_know_nothing_of_a_plan() -> None:
    x = st.tensor([1.0, 2.0])
    planned, other, late = x * 5.0, x * 5.0, x * 5.0 + 1.0
    plan = planned.prepare()
    assert planned.tolist() == [0.0, 0.0]  # nothing was run
    assert other.tolist() == [5.0, 10.0]
    plan.execute()
    plan.output(0)[:] = 7.0
    assert planned.tolist() == [7.0, 7.0]
    assert (x * 5.0).tolist() == [5.0, 10.0]
    x.data()[:] = 3.0
    plan.execute()
    assert planned.tolist() == [15.0, 15.0]
    assert other.tolist() == [5.0, 10.0]
    assert late.tolist() == [6.0, 11.0]  # of the array that the other one has


def test_a_plan_of_what_is_computed_does_not_open_it() -> None:
    x = st.tensor([1.0, 2.0])
    first, second = x * 5.0, x * 5.0
    second.realize()
    first.prepare().execute()
    first.data()[:] = 0.0
    assert second.tolist() == [5.0, 10.0]


def test_memory_given_away_is_nobody_elses() -> None:
    x = st.tensor([1.0, 2.0])
    first, second = x + 3.0, x + 3.0
    third = second * 2.0
    taken = np.from_dlpack(first)
    taken[:] = 0.0
    assert first.tolist() == [0.0, 0.0]  # that memory itself
    assert second.tolist() == [4.0, 5.0]
    assert third.tolist() == [8.0, 10.0]


def test_code_of_users_neither_changes_its_arguments_nor_follows_its_results() -> None:
    own = np.ones(4, "f")
    writes = st.custom_op(lambda x: (x.fill(9.0), x)[1], name="writes_its_argument")
    gives = st.custom_op(lambda x: own, name="gives_its_own")
    same = st.custom_op(lambda x: x, name="gives_its_argument")
    for call in (lambda f, x: f(x).realize(), lambda f, x: st.jit(f)(x)):
        x = st.tensor(np.ones(4, "f"))
        with pytest.raises(ValueError, match="read-only"):
            call(writes, x)
        assert x.tolist() == [1.0] * 4
        made, shaped, given = call(gives, x), call(lambda x: gives(x).reshape((2, 2)), x), call(same, x)
        own[:] = 5.0
        x.data()[:] = 6.0
        for y in (made, shaped, given):
            assert y.numpy().ravel().tolist() == [1.0] * 4
        own[:] = 1.0


def test_an_error_in_code_of_users_leaves_everything_as_it_was() -> None:
    """Through programs that call programs, in loops, and in threads."""
    inner = st.jit(lambda x: x * 3.0)

    def fail(x: np.ndarray) -> np.ndarray:
        inner(x).numpy()
        raise ZeroDivisionError("as planned")

    fails = st.custom_op(fail, name="fails_as_planned")
    works = st.custom_op(lambda x: inner(x).numpy() + 1.0, name="calls_a_program")
    bad = st.jit(lambda x: (fails(x + 1.0) * 2.0).sum())
    loop = st.jit(lambda x: st.scan(lambda c, r: (fails(c) + r, r), x[0], x)[0])
    good = st.jit(lambda x: (works(x + 1.0) * 2.0).sum())
    x = np.ones((5, 1000), "f")
    want = good(x).item()
    wrong: list[BaseException] = []

    def mixed() -> None:
        for _ in range(20):
            try:
                for fn in (bad, loop):
                    with pytest.raises(ZeroDivisionError, match="as planned"):
                        fn(x).numpy()
                assert good(x).item() == want
            except BaseException as error:  # noqa: BLE001 - shown below
                wrong.append(error)

    threads = [threading.Thread(target=mixed) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ------------------------------------------------------------------------------------------------- signatures of calls


@pytest.mark.parametrize("static", [(), (1,)])
def test_numbers_that_are_equal_but_not_alike_have_graphs_of_their_own(static: tuple[int, ...]) -> None:
    divide = st.jit(lambda x, s: x / s, static_argnums=static)
    x = np.ones(2, "f")
    for _ in range(4):  # by the signature, then as a call like one before
        assert divide(x, 0.0).tolist() == [np.inf] * 2
        assert divide(x, -0.0).tolist() == [-np.inf] * 2
    times = st.jit(lambda x, s: x * s, static_argnums=static)
    whole = np.ones(2, "i4")
    for _ in range(4):
        assert [str(times(whole, s).dtype) for s in (1, 1.0, True)] == ["i32", "f32", "i32"]


def test_static_tuples_are_compared_with_their_types() -> None:
    times = st.jit(lambda x, s: x * s[0], static_argnums=(1,))
    whole = np.ones(2, "i4")
    for _ in range(3):
        assert [str(times(whole, (s,)).dtype) for s in (1, 1.0, True)] == ["i32", "f32", "i32"]
    divide = st.jit(lambda x, s: x / s["s"][0])
    for _ in range(3):
        got = [divide(np.ones(1, "f"), {"s": [s]}).item() for s in (0.0, -0.0, 0)]
        assert got == [np.inf, -np.inf, np.inf]


def test_a_number_that_is_no_number_is_one_signature() -> None:
    add = st.jit(lambda x, s: x + s)
    for _ in range(5):
        assert np.isnan(add(np.ones(2, "f"), float("nan")).numpy()).all()
    assert len(add.variants) == 1


def test_ops_tell_zeros_of_both_signs_apart() -> None:
    """Equal ops are one node, as long as one of them lives: -0.0 is not to become the 0.0 of somebody else."""
    x = st.tensor([1.0, 2.0])
    made = [st.pad(x, ((1, 1),), constant_values=zero) for zero in (0.0, -0.0, 0, -0.0)]
    assert [np.signbit(y.numpy()[0]) for y in made] == [False, True, False, True]
    assert made[1].value.node is not made[0].value.node
    first, second = (st.pad(x, ((2, 2),), constant_values=-0.0) for _ in range(2))
    assert first.value.node is second.value.node


# ---------------------------------------------------------------------------------------------- functions and programs


@st.jit
def doubled(x: Any) -> Any:
    return x * 2.0


class Layer:
    """A class like any other, with a jitted method."""

    def __init__(self, by: float) -> None:
        self.by = by

    @st.jit
    def scaled(self, x: Any) -> Any:
        return x * self.by


def test_jitted_functions_are_copied_and_pickled_as_functions_are() -> None:
    assert copy.deepcopy({"f": doubled})["f"] is doubled
    assert copy.copy(doubled) is doubled
    sys.modules.setdefault(__name__, type(sys)(__name__))
    vars(sys.modules[__name__]).setdefault("doubled", doubled)
    assert pickle.loads(pickle.dumps(doubled)) is doubled  # noqa: S301 - our own
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(st.jit(lambda x: x))


def test_jitted_methods_know_their_object() -> None:
    x = np.ones(2, "f")
    first, second = Layer(2.0), Layer(3.0)
    assert [first.scaled(x).tolist(), second.scaled(x).tolist()] == [[2.0, 2.0], [3.0, 3.0]]
    assert Layer.scaled(first, x).tolist() == [2.0, 2.0]


def test_compiled_graphs_are_cloned_not_pickled() -> None:
    g = st.Graph("g")
    g.outputs(g.input("x", (3,)) + 1.0)
    compiled = st.Session("cpu").compile(g)
    assert copy.copy(compiled).run(x=np.zeros(3, "f"))[0].tolist() == [1.0] * 3
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(OptionError, match="cannot be pickled"):
            attempt(compiled)


# ------------------------------------------------------------------------------------------------------------- threads


def test_equal_nodes_are_one_object_also_when_threads_make_them() -> None:
    """Whoever is first makes the node; with many switches between threads, several are on their way to be first."""
    x = placeholder("x", f32[4])
    found: list[list[Any]] = [[] for _ in range(4)]
    ready = threading.Barrier(4)

    def make(mine: list[Any]) -> None:
        for i in range(400):
            ready.wait()
            mine.append((constant(np.float32(i)) * x, Axis(f"racing{i}", i + 2) + 1))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=make, args=(mine,)) for mine in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    for made in zip(*found, strict=True):
        assert len({id(value.node) for value, _ in made}) == 1
        assert len({id(axis) for _, axis in made}) == 1


SAME: dict[str, Callable[[st.Tensor], st.Tensor]] = {
    "all": lambda x: x[...],
    "reshape": lambda x: x.reshape(x.shape),
    "astype": lambda x: x.astype("float32"),
    "broadcast": lambda x: st.broadcast_to(x, x.shape),
    "assign": lambda x: st.zeros(x.shape).assign(x),
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_nothing_gives_a_tensor_of_its_own(name: str) -> None:
    """Written to, or donated, it is so for one of the two."""
    for turned in (False, True):
        x = st.tensor(np.ones(3, "f"))
        y = SAME[name](x)
        changed, other = (x, y) if turned else (y, x)
        changed.realize().data()[:] = 5.0
        assert (changed.tolist(), other.tolist()) == ([5.0] * 3, [1.0] * 3)
        x = st.jit(lambda v: v + 1.0)(np.zeros(3, "f"))
        y = SAME[name](x)
        given, other = (x, y) if turned else (y, x)
        made = st.jit(lambda v: v * 2.0, donate_argnums=(0,))(given)
        assert (made.tolist(), other.tolist()) == ([2.0] * 3, [1.0] * 3)
