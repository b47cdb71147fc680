"""Optimisers against torch's, step by step; schedules; clipping."""

import numpy as np
import pytest

import strata as st
from strata import nn
from strata.errors import OptionError

torch = pytest.importorskip("torch")

CASES = {
    "sgd": (st.optim.SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (
        st.optim.SGD(0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    ),
    "dampening": (
        st.optim.SGD(0.1, momentum=0.9, dampening=0.3),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3),
    ),
    "nesterov": (
        st.optim.SGD(0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    ),
    "adam": (st.optim.Adam(0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1)),
    "adamw": (st.optim.AdamW(0.01), lambda p: torch.optim.AdamW(p, 0.01)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("compiled", [False, True])
def test_twenty_steps_like_torch(name, compiled, rng):
    ours, make = CASES[name]
    start = rng.standard_normal((4, 3)).astype("f")
    target = rng.standard_normal((4, 3)).astype("f")
    p = torch.nn.Parameter(torch.from_numpy(start.copy()))
    theirs = make([p])
    params = {"w": st.asarray(start)}
    state = ours.init(params)

    def step(params, state):
        grads = st.grad(lambda q: ((q["w"] - st.asarray(target)) ** 2).sum())(params)
        return ours.update(params, grads, state)

    run = st.jit(step) if compiled else step
    for _ in range(20):
        theirs.zero_grad()
        ((p - torch.from_numpy(target)) ** 2).sum().backward()
        theirs.step()
        params, state = run(params, state)
        st.realize(params, state)
    np.testing.assert_allclose(params["w"].numpy(), p.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_lion_by_its_formula(rng):
    p, g, m = (rng.standard_normal(5).astype("f") for _ in range(3))
    opt = st.optim.Lion(0.1, weight_decay=0.2)
    before = {"count": st.asarray(3, "i32"), "exp_avg": [st.asarray(m)]}
    new, state = opt.update([st.asarray(p)], [st.asarray(g)], before)
    np.testing.assert_allclose(new[0].numpy(), p * (1 - 0.02) - 0.1 * np.sign(0.9 * m + 0.1 * g), rtol=1e-5)
    np.testing.assert_allclose(state["exp_avg"][0].numpy(), 0.99 * m + 0.01 * g, rtol=1e-5)
    assert state["count"].item() == 4


def test_buffers_and_integers_stay():
    model = nn.BatchNorm(3)
    opt = st.optim.AdamW(0.1)
    state = opt.init(model)
    assert [x is None for x in state["exp_avg"]] == [False, True, True, False]
    new, _ = opt.update(model, model, state)
    assert new.running_var is model.running_var
    assert (new.weight != model.weight).all().item()


def test_clipping_like_torch(rng):
    grads = [rng.standard_normal((3, 2)).astype("f"), rng.standard_normal(4).astype("f")]
    ps = [torch.nn.Parameter(torch.zeros(g.shape)) for g in grads]
    for p, g in zip(ps, grads, strict=True):
        p.grad = torch.from_numpy(g.copy())
    norm = torch.nn.utils.clip_grad_norm_(ps, 0.5)
    ours, found = st.optim.clip_by_global_norm([st.asarray(g) for g in grads], 0.5)
    np.testing.assert_allclose(found.item(), norm.item(), rtol=1e-6)
    for p, g in zip(ps, ours, strict=True):
        np.testing.assert_allclose(g.numpy(), p.grad.numpy(), rtol=1e-5)
    small, _ = st.optim.clip_by_global_norm([st.tensor([0.1])], 0.5)
    np.testing.assert_allclose(small[0].numpy(), [0.1])
    assert st.optim.clip_by_value([st.tensor([-3.0, 0.5])], 1.0)[0].tolist() == [-1.0, 0.5]


def test_schedules():
    def at(schedule, *steps):
        return [round(float(schedule(st.asarray(s, "i32"))), 6) for s in steps]

    o = st.optim
    assert at(o.constant_schedule(0.5), 0, 9) == [0.5, 0.5]
    assert at(o.linear_schedule(1.0, 0.0, 4), 0, 1, 4, 9) == [1.0, 0.75, 0.0, 0.0]
    assert at(o.cosine_schedule(1.0, 4), 0, 2, 4, 5) == [1.0, 0.5, 0.0, 0.0]
    assert at(o.exponential_schedule(1.0, 0.5), 0, 1, 3) == [1.0, 0.5, 0.125]
    assert at(o.step_schedule(1.0, 0.5, 2), 0, 1, 2, 4) == [1.0, 1.0, 0.5, 0.25]
    assert at(o.warmup(o.constant_schedule(1.0), 4), 0, 1, 4, 9) == [0.0, 0.25, 1.0, 1.0]
    joined = o.join_schedules([o.constant_schedule(1.0), o.linear_schedule(1.0, 0.0, 2)], [3])
    assert at(joined, 0, 2, 3, 4, 5) == [1.0, 1.0, 1.0, 0.5, 0.0]
    opt = o.SGD(o.linear_schedule(1.0, 0.0, 2))
    params, state = [st.tensor([0.0])], opt.init([st.tensor([0.0])])
    seen = []
    for _ in range(3):
        params, state = opt.update(params, [st.tensor([1.0])], state)
        seen.append(params[0].item())
    assert seen == [-1.0, -1.5, -1.5]


def test_mistakes():
    with pytest.raises(OptionError, match="nesterov needs momentum"):
        st.optim.SGD(0.1, nesterov=True)
    with pytest.raises(OptionError, match="2 schedules need 1 ends"):
        st.optim.join_schedules([st.optim.constant_schedule(1.0)] * 2, [])
    opt = st.optim.SGD(0.1)
    with pytest.raises(OptionError, match="differ"):
        opt.update([st.tensor(1.0)], [st.tensor(1.0), st.tensor(2.0)], opt.init([st.tensor(1.0)]))
