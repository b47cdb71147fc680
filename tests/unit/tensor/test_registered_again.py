"""A name that another backend takes: no program that is kept by the name goes on with the backend that had it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import strata as st
from strata import nn
from strata.backends import register_backend, registry
from strata.backends.reference import ReferenceBackend, ReferenceExecutable
from strata.config import using
from strata.lir import Lir
from tests.dry_cuda import dry_cuda

NAME = "taken_twice"


class Counting(ReferenceBackend):
    """Says how often it was asked to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = 0

    def compile(self, lir: Lir) -> ReferenceExecutable:
        self.compiled += 1
        return super().compile(lir)


@pytest.fixture(autouse=True)
def _free() -> Iterator[None]:
    yield
    registry._made.pop(NAME, None)


def ones(rows: int) -> st.Tensor:
    return st.tensor(np.ones((rows, 64), np.float32))


def lazy() -> Callable[[], object]:
    def run() -> object:
        return (ones(3) * 2 + 1).numpy()

    return run


def many_shapes() -> Callable[[], object]:
    return lambda: [(st.exp(ones(rows)) * 2 + 1).numpy() for rows in (300, 400, 500)]


def jitted() -> Callable[[], object]:
    made = st.jit(lambda x: x * 2 + 1)
    return lambda: made(ones(3)).numpy()


def jitted_in_buckets() -> Callable[[], object]:
    made = st.jit(lambda x: x * 2 + 1, buckets={0: {0: [16, 64]}})
    return lambda: made(ones(3)).numpy()


def jitted_on_an_open_form() -> Callable[[], object]:
    made = st.jit(lambda x: x * 2 + 1, max_variants=4, on_miss="bucket")
    return lambda: [made(ones(rows)).numpy() for rows in (20, 30, 40, 50, 60)]


def session() -> Callable[[], object]:
    def run() -> object:
        g = st.Graph("f")
        g.outputs(g.input("x", (3,)) * 2)
        return st.Session(NAME).compile(g).run(x=np.ones(3, np.float32))

    return run


WAYS = (lazy, many_shapes, jitted, jitted_in_buckets, jitted_on_an_open_form, session)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_programs_are_those_of_the_backend_that_has_the_name(way: Callable[[], Callable[[], object]]) -> None:
    run = way()
    counts = []
    with using(device=NAME):
        for backend in (Counting(), Counting()):
            register_backend(NAME, backend)
            run()
            run()
            counts.append(backend.compiled)
    assert counts[0] > 0
    assert counts[1] > 0


def test_the_same_backend_again_keeps_its_programs() -> None:
    backend, run = Counting(), jitted()
    with using(device=NAME):
        register_backend(NAME, backend)
        run()
        before = backend.compiled
        register_backend(NAME, backend)
        run()
    assert backend.compiled == before


def test_a_shared_program_is_of_one_device() -> None:
    """A form of a jitted function that one device has is not what another runs."""
    backend = Counting()
    register_backend(NAME, backend)
    run = jitted_on_an_open_form()
    run()
    with using(device=NAME):
        run()
    assert backend.compiled > 0


def test_layers_go_where_the_default_is_when_they_are_made() -> None:
    """A seed that was set while another device was the default binds nothing to it."""
    with dry_cuda("dry_for_seeds"), using(device="dry_for_seeds"):
        nn.manual_seed(5)
    model = nn.Linear(3, 2)
    nn.manual_seed(5)
    assert model.weight.device == "cpu"
    np.testing.assert_array_equal(model.weight.numpy(), nn.Linear(3, 2).weight.numpy())
    nn.manual_seed(0)
