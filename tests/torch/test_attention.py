"""The overloads of attention that torch calls on a GPU: traced on tensors without elements, run on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import strata as st
from strata.torch.attention import forget, remember
from strata.torch.convert import convert
from strata.torch.meanwhile import Meanwhile
from strata.torch.program import CudaProgram
from strata.torch.table import TABLE

ATEN = torch.ops.aten
NAMES = ("flash", "efficient", "cudnn")


def traced(f: Any, *args: torch.Tensor | None) -> Any:
    """The graph of a function of tensors on a GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = [None if a is None else torch.empty_strided(a.shape, a.stride(), device="cuda") for a in args]
        return make_fx(f)(*there)


def attention(
    name: str, q: Any, k: Any, v: Any, bias: Any, sums: bool, dropout: float, causal: bool, scale: Any
) -> Any:
    op = getattr(ATEN, f"_scaled_dot_product_{name}_attention").default
    if name == "flash":
        return op(q, k, v, dropout, causal, scale=scale)
    return op(q, k, v, bias, sums, dropout, causal, scale=scale)


def scores(q: Any, k: Any, bias: Any, causal: bool, scale: Any) -> Any:
    q, k = q.double(), k.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if bias is None else s + bias.double()
    return s.masked_fill(~torch.ones(s.shape[-2:]).tril().bool(), -torch.inf) if causal else s


def expected(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: Any) -> Any:
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return scores(q, k, bias, causal, scale).softmax(-1) @ v


def inputs(name: str, heads: int = 4, with_bias: bool = True) -> tuple[Any, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 17, 16), torch.randn(2, heads, 19, 16), torch.randn(2, heads, 19, 16)
    bias = torch.randn(2, 4, 17, 24)[..., :19] if with_bias and name != "flash" else None
    return q, k, v, bias


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("heads", "with_bias", "causal", "scale"), [(4, True, False, None), (4, False, True, 0.3)])
def test_output_and_sums(name: str, heads: int, with_bias: bool, causal: bool, scale: float | None) -> None:
    q, k, v, bias = inputs(name, heads, with_bias)

    def f(*args: Any) -> Any:
        found = attention(name, *args, *(None,) * (4 - len(args)), True, 0.0, causal, scale)
        rest = found[2:] if name == "efficient" else found[6:8]
        return found[0], found[1], *rest

    args = [x for x in (q, k, v, bias) if x is not None]
    made = convert(traced(f, *args))
    assert not made.unsupported
    assert made.place is not None
    assert made.place.type == "cuda"
    made.place = torch.device("cpu")
    y, sums, *state = CudaProgram(made, st.Session("cpu"))(list(args))
    torch.testing.assert_close(y.double(), expected(q, k, v, bias, causal, scale), rtol=1e-5, atol=1e-5)
    exact = scores(q, k, bias, causal, scale).logsumexp(-1)
    torch.testing.assert_close(sums.reshape(2, 4, -1)[..., :17].double(), exact, rtol=1e-5, atol=1e-5)
    if name == "efficient":
        assert sums.shape == (2, 4, 32)
        assert (sums[..., 17:] == torch.inf).all()
    assert all((s == 0).all() for s in state)


def test_sums_that_are_not_asked_for_and_groups_of_heads() -> None:
    q, k, v, _ = inputs("flash", 2)
    made = convert(traced(lambda *a: attention("flash", *a, None, False, 0.0, False, None)[:2], q, k, v))
    assert not made.unsupported
    made.place = torch.device("cpu")
    y, sums = CudaProgram(made, st.Session("cpu"))([q, k, v])
    torch.testing.assert_close(y.double(), expected(q, k, v, None, False, None), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.double(), scores(q, k, None, False, None).logsumexp(-1), rtol=1e-5, atol=1e-5)
    q, k, v, _ = inputs("efficient")
    made = convert(traced(lambda *a: attention("efficient", *a, None, False, 0.0, False, None)[:2], q, k, v))
    made.place = torch.device("cpu")
    assert CudaProgram(made, st.Session("cpu"))([q, k, v])[1].shape == (2, 4, 0)


@pytest.mark.parametrize("name", NAMES)
def test_dropout_stays_in_torch(name: str) -> None:
    q, k, v, _ = inputs(name)
    made = convert(traced(lambda *a: attention(name, *a, None, True, 0.5, False, None)[0], q, k, v))
    assert "attention with dropout" in str(made.unsupported)


def backward(name: str, ct: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
    op = getattr(ATEN, f"_scaled_dot_product_{name}_attention_backward").default
    y = attention(name, q, k, v, bias, True, 0.0, False, 0.2)
    match name:
        case "flash":
            return op(ct, q, k, v, *y[:6], 0.0, False, y[6], y[7], scale=0.2)
        case "efficient":
            return op(ct, q, k, v, bias, *y, 0.0, [True] * 3 + [bias is not None], False, scale=0.2)
    return op(ct, q, k, v, y[0], y[1], y[6], y[7], bias, *y[2:6], 0.0, False, scale=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    q, k, v, bias = inputs(name)
    ct = torch.randn(2, 4, 17, 16)
    args = [x for x in (ct, q, k, v, bias) if x is not None]
    gm = traced(lambda *a: backward(name, *a, *(None,) * (5 - len(a))), *args)
    for node in gm.graph.nodes:
        forget(node)
    gm.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    ops = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert len([op for op in ops if "attention" in str(op)]) == 1  # the forward pass is not asked for
    made = convert(gm)
    assert not made.unsupported
    made.place = torch.device("cpu")
    found = CudaProgram(made, st.Session("cpu"))(list(args))
    leaves = [x.double().requires_grad_() for x in args[1:]]
    whole = [*leaves, None] if bias is None else leaves
    y = expected(*whole, False, 0.2)
    exact = torch.autograd.grad(y, leaves, ct.double())
    for ours, theirs in zip(found, exact, strict=False):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    assert len([x for x in found if x is not None]) == (4 if name == "efficient" else 3)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_forgotten_comes_back(name: str) -> None:
    q, k, v, bias = inputs(name)
    args = [x for x in (q, q, k, v, bias) if x is not None]
    gm = traced(lambda *a: backward(name, *a, *(None,) * (5 - len(a))), *args)
    before = str(gm.graph)
    for node in gm.graph.nodes:
        forget(node)
    gm.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    assert str(gm.graph) != before
    for node in list(gm.graph.nodes):
        remember(node)
    gm.recompile()
    (again,) = [n for n in gm.graph.nodes if n.op == "call_function" and str(n.target).endswith("attention.default")]
    (node,) = [n for n in gm.graph.nodes if str(n.target).endswith("attention_backward.default")]
    assert again.kwargs == {"scale": 0.2}
    parts = [a for a in node.args if isinstance(a, torch.fx.Node) and a in again.users]
    assert [p.args[1] for p in parts] == {"flash": [0, 1, 6, 7], "efficient": [0, 1, 2, 3], "cudnn": [0, 1, 6, 7]}[name]


@pytest.mark.parametrize("how", ["meanwhile", "refused"])
def test_gradients_where_the_backward_pass_stays_in_torch(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    st.torch.register()
    torch._dynamo.reset()
    if how == "refused":
        rule = TABLE["aten::_scaled_dot_product_flash_attention_for_cpu_backward.default"]
        monkeypatch.delitem(TABLE, rule.overload)
    else:
        monkeypatch.setattr(Meanwhile, "finish", lambda self: None)  # the program is never there
    options = {"background": True} if how == "meanwhile" else {}
    run: Any = torch.compile(torch.nn.functional.scaled_dot_product_attention, backend="strata", options=options)
    torch.manual_seed(0)
    found = []
    args = [torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3)]
    for f in (run, torch.nn.functional.scaled_dot_product_attention):
        found.append(torch.autograd.grad(f(*args).square().sum(), args))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
