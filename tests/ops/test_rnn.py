"""Recurrent layers against onnx's reference, torch's modules and plain loops; gradients against torch."""

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from strata import ops
from strata.core import TensorType, f64, sym
from strata.errors import OptionError, ShapeError
from strata.mir import Value, constant, evaluate_values, placeholder, pullback

RNG = np.random.default_rng(9)
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def run(*values: Value) -> list[np.ndarray]:
    return list(evaluate_values(values, {}, {}))


def close(actual: Value, expected: object, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(run(actual)[0], np.asarray(expected), rtol=tolerance, atol=tolerance)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape) * 0.7


def onnx_inputs(kind: str, directions: int, layout: int = 0) -> dict[str, np.ndarray]:
    steps, batch, size, hidden, gates = 4, 2, 3, 5, GATES[kind]
    state = (batch, directions, hidden) if layout else (directions, batch, hidden)
    inputs = {
        "x": normal(batch, steps, size) if layout else normal(steps, batch, size),
        "w": normal(directions, gates * hidden, size), "r": normal(directions, gates * hidden, hidden),
        "b": normal(directions, 2 * gates * hidden), "h": normal(*state),
    }  # fmt: skip
    if kind == "LSTM":
        inputs |= {"c": normal(*state), "p": normal(directions, 3 * hidden)}
    return {name: a.astype(np.float32) for name, a in inputs.items()}


@pytest.mark.parametrize("kind", list(GATES))
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("layout", [0, 1])
def test_onnx(kind: str, direction: str, layout: int) -> None:
    feeds = onnx_inputs(kind, 2 if direction == "bidirectional" else 1, layout)
    names = ["x", "w", "r", "b", "", "h"] + (["c", "p"] if kind == "LSTM" else [])
    options = {"hidden_size": 5, "direction": direction, "layout": layout}
    for extra in [{}, {"linear_before_reset": 1}] if kind == "GRU" else [{}]:
        outputs = ["y", "yh"] + (["yc"] if kind == "LSTM" else [])
        node = onnx.helper.make_node(kind, names, outputs, **options, **extra)
        expected = ReferenceEvaluator(node).run(None, feeds)
        args = [constant(feeds[n]) if n else None for n in names]
        got = getattr(ops, f"onnx_{kind.lower()}")(*args, direction=direction, layout=layout, **extra)
        for a, b in zip(got, expected, strict=True):
            close(a, b, 1e-5)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_onnx_lstm_with_clip_coupled_gates_activations_and_lengths_equals_a_loop() -> None:
    feeds = {k: v.astype(np.float64) for k, v in onnx_inputs("LSTM", 2).items()}
    lens, clip = np.int32([4, 2]), 0.6
    got = ops.onnx_lstm(
        *(constant(feeds[n]) for n in ("x", "w", "r", "b")), constant(lens),
        *(constant(feeds[n]) for n in ("h", "c", "p")), direction="bidirectional", clip=clip, input_forget=True,
        activations=["HardSigmoid", "Affine", "Tanh", "Sigmoid", "LeakyRelu", "Softsign"],
        activation_alpha=[0.3, 2.0, 0.1], activation_beta=[0.4, 0.5],
    )  # fmt: skip
    functions = [
        (lambda x: np.clip(0.3 * x + 0.4, 0, 1), lambda x: 2.0 * x + 0.5, np.tanh),
        (_sigmoid, lambda x: np.where(x > 0, x, 0.1 * x), lambda x: x / (1 + np.abs(x))),
    ]
    y = np.zeros((4, 2, 2, 5))
    ends_h, ends_c = np.zeros((2, 2, 5)), np.zeros((2, 2, 5))
    for d, (f, g, h) in enumerate(functions):
        for n in range(2):
            hidden, cell = feeds["h"][d, n], feeds["c"][d, n]
            pi, po, _ = np.split(feeds["p"][d], 3)
            wb, rb = np.split(feeds["b"][d], 2)
            for t in range(lens[n]) if d == 0 else reversed(range(lens[n])):
                gates = feeds["w"][d] @ feeds["x"][t, n] + feeds["r"][d] @ hidden + wb + rb
                i, o, _, c = np.split(gates, 4)
                i = f(np.clip(i + pi * cell, -clip, clip))
                cell = (1 - i) * cell + i * g(np.clip(c, -clip, clip))
                hidden = f(np.clip(o + po * cell, -clip, clip)) * h(cell)
                y[t, d, n] = hidden
            ends_h[d, n], ends_c[d, n] = hidden, cell
    for a, b in zip(got, (y, ends_h, ends_c), strict=True):
        close(a, b)


MODULES = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}


@pytest.mark.parametrize("kind", list(MODULES))
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True},
     {"proj_size": 2, "num_layers": 2}, {"nonlinearity": "relu"}],
)  # fmt: skip
def test_torch_modules_with_gradients(kind: str, options: dict) -> None:
    if ("proj_size" in options and kind != "lstm") or ("nonlinearity" in options and kind != "rnn"):
        return
    torch.manual_seed(0)
    module = MODULES[kind](3, 4, **options).double()
    x = normal(2, 5, 3) if options.get("batch_first") else normal(5, 2, 3)
    rows = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    h, c = normal(rows, 2, options.get("proj_size", 4)), normal(rows, 2, 4)
    tx, th, tc = (torch.tensor(a, requires_grad=True) for a in (x, h, c))
    expected, last = module(tx, (th, tc) if kind == "lstm" else th)
    arrays = [x, h, c, *(p.detach().numpy() for p in module._flat_weights)]
    vx, vh, vc, *params = (placeholder("v", TensorType(f64, a.shape)) for a in arrays)
    known = dict(zip([vx, vh, vc, *params], arrays, strict=True))

    def check(values: list[Value], wanted: list[torch.Tensor]) -> None:
        for got, want in zip(evaluate_values(values, known, {}), wanted, strict=True):
            np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-9, atol=1e-9)

    out, ours_last = getattr(ops, kind)(vx, (vh, vc) if kind == "lstm" else vh, params, **options)
    check([out, *(ours_last if kind == "lstm" else [ours_last])], [expected, *(last if kind == "lstm" else [last])])
    ct = normal(*expected.shape)
    expected.backward(torch.tensor(ct))
    wrt = [vx, vh, *params] + ([vc] if kind == "lstm" else [])
    wanted = [tx.grad, th.grad, *(p.grad for p in module._flat_weights)] + ([tc.grad] if kind == "lstm" else [])
    check(pullback([out], [constant(ct)], wrt), wanted)


def test_lengths_equal_a_packed_sequence() -> None:
    torch.manual_seed(1)
    module = torch.nn.LSTM(3, 4, bidirectional=True).double()
    x, lengths = normal(5, 3, 3), [5, 2, 3]
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.tensor(x), lengths, enforce_sorted=False)
    expected, (h, c) = module(packed)
    padded, _ = torch.nn.utils.rnn.pad_packed_sequence(expected, total_length=5)
    params = [constant(p.detach().numpy()) for p in module._flat_weights]
    out, (ours_h, ours_c) = ops.lstm(constant(x), None, params, bidirectional=True, lengths=constant(np.array(lengths)))
    close(out, padded.detach())
    close(ours_h, h.detach())
    close(ours_c, c.detach())


def test_one_sequence_without_a_batch_axis() -> None:
    torch.manual_seed(2)
    module = torch.nn.GRU(3, 4).double()
    x = normal(5, 3)
    expected, h = module(torch.tensor(x))
    out, ours_h = ops.gru(constant(x), None, [constant(p.detach().numpy()) for p in module._flat_weights])
    close(out, expected.detach())
    close(ours_h, h.detach())


def test_symbolic_steps_and_batch() -> None:
    steps, batch = sym("T"), sym("B")
    x = placeholder("x", TensorType(f64, (steps, batch, 3)))
    params = [constant(normal(16, 3)), constant(normal(16, 4)), constant(normal(16)), constant(normal(16))]
    out, (h, _) = ops.lstm(x, None, params)
    assert out.shape == (steps, batch, 4)
    assert h.shape == (1, batch, 4)
    array = normal(5, 2, 3)
    got = evaluate_values([out], {x: array}, {"T": 5, "B": 2})[0]
    want = run(ops.lstm(constant(array), None, params)[0])[0]
    np.testing.assert_allclose(got, want)


def test_mistakes() -> None:
    x, w, r = constant(normal(4, 2, 3)), constant(normal(1, 20, 3)), constant(normal(1, 20, 5))
    with pytest.raises(OptionError, match="direction"):
        ops.onnx_lstm(x, w, r, direction="backward")
    with pytest.raises(OptionError, match="Swish"):
        ops.onnx_lstm(x, w, r, activations=["Swish", "Tanh", "Tanh"])
    with pytest.raises(ShapeError, match="need weights"):
        ops.onnx_gru(x, w, r)
    with pytest.raises(OptionError, match="parameters"):
        ops.lstm(x, None, [w])


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("steps", [1, 4])
def test_parameters_in_torch_order_are_read_where_they_lie(kind: str, steps: int) -> None:
    """Gates are picked from the products, not the rows of weights put into another order in each run."""
    import strata as st
    from strata import nn

    step = st.jit(lambda m, x: m(x))
    kernels = step.explain(getattr(nn, kind)(16, 16), np.zeros((steps, 2, 16), np.float32)).kernels
    assert not [k for k in kernels if "concat" in k]
