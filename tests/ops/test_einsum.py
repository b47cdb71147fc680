"""einsum and its relatives against NumPy and torch."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from strata import ops
from strata.core import f32, f64, i32, sym
from strata.errors import OptionError, ShapeError
from strata.mir import Graph, Value, constant, evaluate, evaluate_values, placeholder, pullback, toposort

RNG = np.random.default_rng(21)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def value(x: Value | None) -> np.ndarray:
    assert x is not None
    return evaluate_values([x], {}, {})[0]


def close(actual: Value | None, expected: Any) -> None:
    got = value(actual)
    assert got.shape == np.shape(expected)
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)


CASES = [
    ("ij,jk->ik", (3, 4), (4, 5)), ("ij,jk", (3, 4), (4, 5)), ("ji,jk", (3, 4), (3, 5)),
    ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)), ("ii->i", (4, 4)), ("ii", (4, 4)), ("iij->ij", (3, 3, 2)),
    ("ijij->ji", (2, 3, 2, 3)), ("iii->i", (3, 3, 3)), ("ij->ji", (2, 3)), ("ij->", (2, 3)), ("ij->j", (2, 3)),
    ("i,j->ij", (2,), (3,)), ("i,i->", (3,), (3,)), ("i,i->i", (3,), (3,)), (",i->i", (), (3,)),
    ("...ij,...jk->...ik", (2, 1, 3, 4), (5, 4, 2)), ("...ij->...ji", (2, 3, 4)), ("i...->...", (3, 2, 2)),
    ("...,...", (2, 3), (3,)), ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("bshd,hde->bse", (2, 3, 4, 5), (4, 5, 6)), ("ab,bc,cd,de->ae", (2, 3), (3, 4), (4, 2), (2, 5)),
    ("ij,ij,ij->i", (2, 3), (2, 3), (2, 3)), ("ij,k->jk", (2, 3), (4,)), ("ij,jk,k->", (2, 3), (3, 4), (4,)),
    ("ij,j->ij", (2, 3), (3,)), ("ba,cb", (2, 3), (4, 2)), ("ij,ij->ij", (1, 3), (2, 3)),
    ("ii,jj->ij", (2, 2), (3, 3)), ("i j , j k -> i k", (2, 3), (3, 4)), ("ij,jk->ik", (0, 3), (3, 2)),
    ("ij,jk->ik", (2, 0), (0, 2)), ("a...b,b...->a...", (2, 4, 3), (3, 4)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_and_gradient(case: tuple[Any, ...]) -> None:
    text, *shapes = case
    arrays = [normal(*s) for s in shapes]
    inputs = [constant(a) for a in arrays]
    out = ops.einsum(text, *inputs)
    expected = np.einsum(text, *arrays)
    close(out, expected)
    ct = normal(*expected.shape)
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    torch.einsum(text, *tensors).backward(torch.tensor(ct))
    for g, t in zip(pullback([out], [constant(ct)], inputs), tensors, strict=True):
        close(g, t.grad)


def test_random_subscripts_equal_numpy() -> None:
    """W12: contractions, batches, sums and transposes in every mix."""
    rng = np.random.default_rng(2)
    sizes = {"a": 2, "b": 3, "c": 4, "d": 2, "e": 3}
    for _ in range(150):
        terms = ["".join(rng.choice(list(sizes), rng.integers(0, 5))) for _ in range(rng.integers(1, 5))]
        known = sorted(set("".join(terms)))
        output = "".join(rng.permutation(known)[: rng.integers(0, len(known) + 1)]) if known else ""
        text = f"{','.join(terms)}->{output}"
        arrays = [rng.standard_normal([sizes[c] for c in t]) for t in terms]
        np.testing.assert_allclose(
            value(ops.einsum(text, *arrays)), np.einsum(text, *arrays), rtol=1e-9, atol=1e-9, err_msg=text
        )


def test_lists_of_numbers_and_the_method() -> None:
    x, y = normal(3, 4), normal(4, 5)
    close(ops.einsum(x, [0, 1], y, [1, 2], [0, 2]), x @ y)
    close(ops.einsum(x, [1, 0], y, [0, 2]), np.einsum(x, [1, 0], y, [0, 2]))
    close(constant(x).einsum("ij,jk->ki", y), (x @ y).T)


def test_a_chain_is_contracted_in_a_cheap_order() -> None:
    """A vector at the end is multiplied first: no 100 × 100 product of matrices is made."""
    n = 100
    a, b, c = (placeholder(s, f32[n, n]) for s in "abc")
    out = ops.einsum("ij,jk,kl,l->i", a, b, c, placeholder("v", f32[n]))
    products = [node for node in toposort([out]) if node.op.name == "dot_general"]
    assert [node.types for node in products] == [(f32[n],)] * 3
    chain = [placeholder(f"m{i}", f32[s]) for i, s in enumerate([(10, 100), (100, 5), (5, 50)])]
    assert ops.multi_dot(chain).node.inputs[0].shape == (10, 5)


def test_products_of_integers_and_booleans() -> None:
    x, y = np.arange(6, dtype=np.int8).reshape(2, 3), np.arange(6, dtype=np.int8).reshape(3, 2)
    out = ops.einsum("ij,jk->ik", x * 40 // 2, y)
    assert out.dtype is i32
    mask = np.array([[True, False, True]])
    close(ops.einsum("ij->i", mask), [2])


def test_symbolic_sizes() -> None:
    graph = Graph("g")
    b, s = sym("B"), sym("S")
    q, k = graph.input("q", f64[b, s, 2, 4]), graph.input("k", f64[b, s, 2, 4])
    out = ops.einsum("bqhd,bkhd->bhqk", q, k)
    assert out.shape == (b, 2, s, s)
    graph.outputs(out)
    x, y = normal(3, 5, 2, 4), normal(3, 5, 2, 4)
    np.testing.assert_allclose(evaluate(graph, {"q": x, "k": y})[0], np.einsum("bqhd,bkhd->bhqk", x, y), atol=1e-12)


def test_relatives_equal_numpy() -> None:
    x, y = normal(2, 3, 4), normal(3, 4, 5)
    for axes in (2, 0, ((1, 2), (0, 1)), (1, 0), ((2, 1), (1, 0))):
        close(ops.tensordot(x, y, axes), np.tensordot(x, y, axes))
    z = normal(2, 3, 4) + 1j * normal(2, 3, 4)
    for axis in (-1, 0, 1):
        close(ops.vecdot(z, x, axis), np.vecdot(z, x, axis=axis))
    close(ops.vecdot(x, normal(1, 4) * 0 + 1), x.sum(-1))
    close(ops.vdot(z, x), np.vdot(z, x))
    close(ops.inner(x, normal(5, 4) * 0 + 2), np.inner(x, np.full((5, 4), 2.0)))
    close(ops.inner(x, 2.0), 2 * x)
    close(ops.outer(x[0], y[0]), np.outer(x[0], y[0]))
    for a, b in itertools.product((normal(2), normal(2, 3), normal(1, 2, 3)), repeat=2):
        close(ops.kron(a, b), np.kron(a, b))
    close(ops.multi_dot([x[0], y[0], normal(5, 2) * 0 + 1]), x[0] @ y[0] @ np.ones((5, 2)))
    close(ops.multi_dot([x[0, 0], y[0], y[0, 0]]), x[0, 0] @ y[0] @ y[0, 0])
    weight, bias = normal(6, 4, 4), normal(6)
    expected = torch.nn.functional.bilinear(*(torch.tensor(v) for v in (x, x[::-1].copy(), weight, bias)))
    close(ops.bilinear(x, x[::-1].copy(), weight, bias), expected)


MISTAKES = [
    ("ij,jk->ik", [(3, 4), (5, 6)], ShapeError, "index 'j' has size 4 in operand 0 and 5 in operand 1"),
    ("ijk->ik", [(3, 4)], ShapeError, "'ijk' names 3 axes, operand 0 is f64[3, 4]"),
    ("ij->ik", [(3, 4)], OptionError, "index 'k' of the output of 'ij->ik' is in no operand"),
    ("ij->ii", [(3, 4)], OptionError, "index 'i' is twice in the output"),
    ("ij,jk", [(3, 4)], OptionError, "names 2 operands, got 1"),
    ("i1->i", [(3, 4)], OptionError, "'1' in 'i1->i' is not an index"),
    ("...i->i", [(3, 4)], OptionError, "has '...' in an operand, but not in the output"),
    ("ii->i", [(3, 4)], ShapeError, "index 'i' has size 3 in operand 0 and 4 in operand 0"),
]


@pytest.mark.parametrize(("text", "shapes", "error", "message"), MISTAKES)
def test_mistakes(text: str, shapes: Any, error: Any, message: str) -> None:
    with pytest.raises(error) as caught:
        ops.einsum(text, *(normal(*s) for s in shapes))
    assert message in str(caught.value)


def test_very_many_operands(rng: np.random.Generator) -> None:
    """In an order that is found in time, and without nested calls."""
    matrices = [np.eye(4) + rng.standard_normal((4, 4)) / 64 for _ in range(200)]
    g = Graph("many")
    inputs = [g.input(f"x{i}", f64[4, 4]) for i in range(len(matrices))]
    text = ",".join(["ij"] * len(inputs)) + "->ij"
    g.outputs(ops.multi_dot(inputs), ops.einsum(text, *inputs))
    chain, product = evaluate(g, {f"x{i}": x for i, x in enumerate(matrices)})
    assert np.allclose(chain, functools.reduce(np.matmul, matrices))
    assert np.allclose(product, np.prod(matrices, axis=0))
