"""Modules against torch: the same parameters by the same names give the same outputs and gradients."""

import numpy as np
import pytest

import strata as st
from strata import nn
from strata.errors import OptionError, ShapeError, UnknownNameError

torch = pytest.importorskip("torch")
tnn = torch.nn


def arrays(shape, rng, dtype="f"):
    return rng.standard_normal(shape).astype(dtype)


def pair(ours, theirs):
    """Our module with torch's parameters."""
    return ours.load_state_dict({k: v.detach().numpy().copy() for k, v in theirs.state_dict().items()}), theirs


CASES = {
    "linear": (lambda: (nn.Linear(5, 3), tnn.Linear(5, 3)), (4, 5)),
    "linear without bias": (lambda: (nn.Linear(5, 3, bias=False), tnn.Linear(5, 3, bias=False)), (2, 4, 5)),
    "conv1d": (lambda: (nn.Conv1d(2, 4, 3, padding=1), tnn.Conv1d(2, 4, 3, padding=1)), (2, 2, 9)),
    "conv2d": (lambda: (nn.Conv2d(2, 4, 3, stride=2, groups=2), tnn.Conv2d(2, 4, 3, stride=2, groups=2)), (2, 2, 9, 8)),
    "conv3d": (lambda: (nn.Conv3d(2, 3, 2), tnn.Conv3d(2, 3, 2)), (1, 2, 4, 5, 3)),
    "layer norm": (lambda: (nn.LayerNorm(6), tnn.LayerNorm(6)), (3, 6)),
    "layer norm of two axes": (lambda: (nn.LayerNorm((4, 6)), tnn.LayerNorm((4, 6))), (3, 4, 6)),
    "rms norm": (lambda: (nn.RMSNorm(6, eps=1e-6), tnn.RMSNorm(6, eps=1e-6)), (3, 6)),
    "group norm": (lambda: (nn.GroupNorm(2, 4), tnn.GroupNorm(2, 4)), (2, 4, 3, 3)),
    "batch norm": (lambda: (nn.BatchNorm2d(4).eval(), tnn.BatchNorm2d(4).eval()), (2, 4, 3, 3)),
    "sequential": (
        lambda: (
            nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)),
            tnn.Sequential(tnn.Linear(5, 8), tnn.ReLU(), tnn.Linear(8, 2)),
        ),
        (4, 5),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_torch(name, rng):
    make, shape = CASES[name]
    ours, theirs = pair(*make())
    x = arrays(shape, rng)
    expected = theirs(torch.from_numpy(x))
    np.testing.assert_allclose(ours(st.asarray(x)).numpy(), expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    weights = arrays(tuple(expected.shape), rng)
    (expected * torch.from_numpy(weights)).sum().backward()
    grads = st.grad(lambda m: (m(st.asarray(x)) * st.asarray(weights)).sum())(ours)
    found = grads.named_parameters()
    for key, p in theirs.named_parameters():
        np.testing.assert_allclose(found[key].numpy(), p.grad.numpy(), rtol=1e-3, atol=1e-4)


def test_embedding(rng):
    ours, theirs = pair(nn.Embedding(10, 4), tnn.Embedding(10, 4))
    ids = rng.integers(0, 10, (2, 5))
    np.testing.assert_array_equal(ours(ids).numpy(), theirs(torch.from_numpy(ids)).detach().numpy())


@pytest.mark.parametrize("causal", [False, True])
def test_attention(rng, causal):
    ours, theirs = pair(nn.MultiheadAttention(8, 2), tnn.MultiheadAttention(8, 2, batch_first=True))
    x, y = arrays((3, 5, 8), rng), arrays((3, 6, 8), rng)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5) if causal else None
    tx, ty = torch.from_numpy(x), torch.from_numpy(y)
    expected = theirs(tx, tx, tx, attn_mask=mask, is_causal=causal)[0].detach().numpy()
    np.testing.assert_allclose(ours(st.asarray(x), is_causal=causal).numpy(), expected, rtol=1e-4, atol=1e-5)
    expected = theirs(tx, ty, ty)[0].detach().numpy()
    np.testing.assert_allclose(ours(st.asarray(x), st.asarray(y)).numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}])
def test_recurrent(rng, kind, options):
    ours, theirs = pair(getattr(nn, kind)(3, 4, **options), getattr(tnn, kind)(3, 4, **options))
    x = arrays((5, 2, 3), rng)
    expected, _ = theirs(torch.from_numpy(x))
    out, _ = ours(st.asarray(x))
    np.testing.assert_allclose(out.numpy(), expected.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_batch_norm_hands_its_statistics_out(rng):
    ours, theirs = pair(nn.BatchNorm2d(4), tnn.BatchNorm2d(4))
    x = arrays((6, 4, 3, 3), rng)

    @st.jit
    def step(model, x):
        y = model(x)
        return model, y

    model, y = step(ours, x)
    expected = theirs(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.running_var.numpy(), theirs.running_var.numpy(), rtol=1e-5)
    np.testing.assert_array_equal(ours.running_mean.numpy(), np.zeros(4))
    assert nn.trainable(ours) == [True, False, False, True]  # bias, running_mean, running_var, weight


def test_dropout_needs_a_key_in_training_only():
    layer = nn.Dropout(0.5)
    x = st.ones((1000,))
    kept = (layer(x, st.random.key(1)) != 0.0).sum().item()
    assert 400 < kept < 600
    with pytest.raises(OptionError, match="needs a key"):
        layer(x)
    assert layer.eval()(x) is x
    model = nn.Sequential(nn.Linear(3, 100), nn.Dropout(0.5), lambda v: v * 2.0)
    a, b = (model(st.ones((2, 3)), st.random.key(i)) for i in (0, 1))
    assert (a != b).any().item()


def test_a_module_is_a_pytree(rng):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    calls = []

    @st.jit
    def run(m, x):
        calls.append(1)
        return m(x)

    x = arrays((2, 3), rng)
    run(model, x)
    run(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), x)
    assert calls == [1]
    run(model.eval(), x)
    assert len(calls) == 2
    assert st.vmap(model)(st.asarray(x)).shape == (2, 1)
    assert model.num_parameters == 3 * 4 + 4 + 4 + 1
    assert list(model.state_dict()) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert model.astype("bf16")[0].weight.dtype is st.bfloat16
    assert "Linear(weight=f32[4, 3], bias=f32[4])" in repr(model)


def test_keys_make_layers_reproducible():
    a, b = nn.Linear(3, 3, key=st.random.key(5)), nn.Linear(3, 3, key=st.random.key(5))
    np.testing.assert_array_equal(a.weight.numpy(), b.weight.numpy())
    nn.manual_seed(1)
    c, d = nn.Linear(3, 3), nn.Linear(3, 3)
    assert (c.weight != d.weight).any().item()
    nn.manual_seed(1)
    np.testing.assert_array_equal(nn.Linear(3, 3).weight.numpy(), c.weight.numpy())


def test_state_dicts_are_checked_before_anything_changes():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = model.state_dict()
    with pytest.raises(ShapeError, match=r"'0.weight' is f32\[2, 2\], got f32\[3, 2\]"):
        model.load_state_dict({**before, "0.weight": np.zeros((3, 2), "f")})
    with pytest.raises(UnknownNameError, match=r"has no '0\.bias'"):
        model.load_state_dict({})
    with pytest.raises(UnknownNameError, match=r"has '2\.weight'"):
        model.load_state_dict({**before, "2.weight": np.zeros((3, 2), "f")})
    for name, array in model.state_dict().items():
        assert array is before[name] or np.shares_memory(array, before[name])
    model.load_state_dict({"0.bias": np.ones(2, "f")}, strict=False)
    np.testing.assert_array_equal(model[0].bias.numpy(), [1, 1])


def test_mistakes():
    with pytest.raises(OptionError, match="do not split"):
        nn.GroupNorm(3, 4)
    with pytest.raises(OptionError, match="do not split"):
        nn.MultiheadAttention(9, 2)
    with pytest.raises(OptionError, match="do not split"):
        nn.Conv2d(3, 4, 1, groups=2)
    with pytest.raises(OptionError, match="no __call__"):
        nn.Module()(1)


def test_fixed_attributes_are_those_of_now():
    """They are remembered between calls of jitted functions: every way to change them must be seen."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            self.w = st.tensor(np.ones(3, "f"))
            self.factor = 2.0
            self.powers = [1, 2]

        def __call__(self, x):
            total = x * self.w * getattr(self, "factor", 1.0)
            return sum(total**p for p in self.powers)

    layer = Scaled()
    f = st.jit(lambda layer, x: layer(x))
    x = np.ones(3, "f")
    assert f(layer, x).numpy()[0] == 2 + 4
    layer.factor = 3.0
    assert f(layer, x).numpy()[0] == 3 + 9
    layer.powers.append(3)
    assert f(layer, x).numpy()[0] == 3 + 9 + 27
    layer.powers = (1,)
    assert f(layer, x).numpy()[0] == 3
    layer.factor = 5.0
    assert f(layer, x).numpy()[0] == 5
    del layer.factor
    assert f(layer, x).numpy()[0] == 1
    again = st.jit(lambda layer: layer)(layer)
    again.factor = 7.0
    assert f(again, x).numpy()[0] == 7
    assert f(layer, x).numpy()[0] == 1
    layer.w = None  # a part stays one
    assert "w" in layer.__tree_flatten__()[0]
    del layer.w
    assert layer.__tree_flatten__()[0] == ()


def test_layers_live_on_the_device_of_their_moment_whichever_started_the_stream() -> None:
    from tests.dry_cuda import dry_cuda

    with dry_cuda("for_a_while"):
        with st.config.using(device="for_a_while"):
            nn.manual_seed(3)
        first = nn.Linear(3, 2).weight
        assert first.device == "cpu"
    nn.manual_seed(3)
    np.testing.assert_array_equal(nn.Linear(3, 2).weight.numpy(), first.numpy())
