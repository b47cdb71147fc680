"""Gaussian splats: against the oracle, finite differences, each other; scenes that are empty, degenerate or behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata as st
from strata.config import using
from strata.errors import OptionError, ShapeError, StrataError
from strata.mir import REGISTRY, Graph
from strata.ops.render.oracle import Camera, turned
from strata.ops.render.oracle import render as oracle
from strata.ops.render.raster import scenes

PICTURE = {"width": 24, "height": 20, "max_splat_steps": 0}


def scene(count: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    turned = rng.standard_normal((count, 4))
    turned /= np.linalg.norm(turned, axis=1, keepdims=True)
    made = (
        rng.uniform(-0.7, 0.7, (count, 3)), rng.uniform(-2.6, -1.6, (count, 3)), turned,
        rng.uniform(0.2, 0.95, count), rng.uniform(0, 1, (count, 3)),
    )  # fmt: skip
    return tuple(a.astype(np.float32) for a in made)


def camera(**changes: object) -> np.ndarray:
    given = {"position": (0.3, 0.4, -2.5), "target": (0.0, 0.0, 0.0), "fov": 50.0, "background": (0.1, 0.2, 0.3)}
    return st.splat_camera(**{**given, **changes}).numpy()  # type: ignore[arg-type]


def rendered(parts: tuple[np.ndarray, ...], view: np.ndarray | None = None, **fields: object) -> np.ndarray:
    return st.splat_render(*parts, camera=camera() if view is None else view, **{**PICTURE, **fields}).numpy()


def expected(parts: tuple[np.ndarray, ...], view: np.ndarray | None = None, **fields: object) -> np.ndarray:
    sh = parts[5] if len(parts) > 5 else np.zeros((len(parts[0]), 0, 3), np.float32)
    chosen = {"max_list_entries": max(576, 16 * len(parts[0])), **PICTURE, **fields, "sh_coefficients": sh.shape[1]}
    op = REGISTRY["gaussian_splat_render"](**chosen)
    flat = [p.reshape(-1) for p in (*parts[:5], sh)]
    return oracle(op, *flat, camera() if view is None else view).reshape(op.height, op.width, 4)


FIELDS: list[dict[str, object]] = [
    {}, {"tile_size": 7}, {"max_splat_steps": 3}, {"max_list_entries": 40}, {"transmittance_threshold": 0.3},
    {"radius_scale": 1.0, "alpha_cutoff": 0.02},
]  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS)
def test_pictures_are_those_of_the_oracle(fields: dict[str, object]) -> None:
    parts = scene(30)
    np.testing.assert_allclose(rendered(parts, **fields), expected(parts, **fields), atol=1e-4)


def test_harmonics_show_the_side_that_is_seen() -> None:
    rng = np.random.default_rng(5)
    parts = (*scene(12), rng.uniform(-0.6, 0.6, (12, 5, 3)).astype(np.float32))
    made = rendered(parts)
    np.testing.assert_allclose(made, expected(parts), atol=1e-4)
    behind = camera(position=(-0.3, 0.4, 2.5))
    assert np.abs(rendered(parts, behind) - rendered((*parts[:5], parts[5][:, :1]), behind)).max() > 0.01
    none = (*parts[:5], np.zeros_like(parts[5]))  # then the plain colours count
    np.testing.assert_allclose(rendered(none), rendered(parts[:5]), atol=1e-6)


def test_quaternions_begin_with_their_real_part() -> None:
    """A long splat turned a quarter around the axis that looks at the camera."""
    long = np.log(np.array([[0.5, 0.05, 0.05]], np.float32))
    half = np.float32(np.sqrt(0.5))
    parts = [np.zeros((1, 3), np.float32), long, None, np.full(1, 0.9, np.float32), np.ones((1, 3), np.float32)]
    spread = []
    for turn in ([1, 0, 0, 0], [half, 0, 0, half]):
        parts[2] = np.array([turn], np.float32)
        alpha = rendered(tuple(parts), camera(position=(0, 0, -3)), width=32, height=32)[:, :, 3]  # type: ignore[arg-type]
        spread.append((alpha.sum(0) > 0.1).sum() > (alpha.sum(1) > 0.1).sum())  # wider than high
    assert spread == [True, False]


@st.jit
def loss_and_gradients(parts, aim, view):
    def loss(*parts):
        off = st.splat_render(*parts, camera=view, **PICTURE) - aim
        return (off * off).mean()

    return st.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))(*parts)


@st.jit
def picture_of(parts, view):
    return st.splat_render(*parts, camera=view, **PICTURE)


def test_gradients_are_finite_differences() -> None:
    parts = tuple(p.astype(np.float64) for p in scene(10, 3))
    aim = np.random.default_rng(1).uniform(0, 1, (20, 24, 4))
    _, grads = loss_and_gradients(parts, aim, camera().astype(np.float64))
    rng = np.random.default_rng(2)
    for i, part in enumerate(parts):
        way = rng.standard_normal(part.shape)
        losses = []
        for step in (1e-5, -1e-5):
            moved = [p + step * way if j == i else p for j, p in enumerate(parts)]
            off = expected(tuple(moved)) - aim
            losses.append(np.mean(off * off))
        slope = (losses[0] - losses[1]) / 2e-5
        assert np.sum(grads[i].numpy() * way) == pytest.approx(slope, rel=1e-3, abs=1e-8)


def test_every_slope_in_f32_is_a_finite_difference_of_the_oracle() -> None:
    parts = scene(3, 8)
    aim = np.random.default_rng(1).uniform(0, 1, (20, 24, 4))
    loss, grads = loss_and_gradients(parts, aim.astype(np.float32), camera())
    wide = tuple(p.astype(np.float64) for p in parts)
    value, exact = loss_and_gradients(wide, aim, camera().astype(np.float64))
    assert loss.numpy() == pytest.approx(np.mean((expected(wide) - aim) ** 2), abs=1e-4)
    assert value.numpy() == pytest.approx(np.mean((expected(wide) - aim) ** 2), abs=1e-6)
    largest = max(np.abs(g.numpy()).max() for g in exact)
    for i, part in enumerate(wide):
        np.testing.assert_allclose(grads[i].numpy(), exact[i].numpy(), atol=1e-4 * largest)
        for place in np.ndindex(part.shape):
            losses = []
            for step in (1e-5, -1e-5):
                moved = [p.copy() for p in wide]
                moved[i][place] += step
                losses.append(np.mean((expected(tuple(moved)) - aim) ** 2))
            slope = (losses[0] - losses[1]) / 2e-5
            assert grads[i].numpy()[place] == pytest.approx(slope, rel=1e-3, abs=1e-4 * largest), (i, place)


def test_the_backward_op_gives_the_same_gradient() -> None:
    parts = scene(9, 4)
    ct = np.random.default_rng(6).standard_normal(20 * 24 * 4).astype(np.float32)
    fields = {**PICTURE, "max_list_entries": 576, "sh_coefficients": 0}
    g = Graph("backward")
    arrays = [p.reshape(-1) for p in parts] + [np.zeros(0, np.float32), camera(), ct]
    values = [g.input(f"x{i}", a.shape) for i, a in enumerate(arrays)]
    compiled = st.Session("cpu").compile(g.outputs(REGISTRY["gaussian_splat_render_backward"](**fields)(*values)))
    assert compiled.host_steps == []
    (packed,) = compiled.run({f"x{i}": a for i, a in enumerate(arrays) if f"x{i}" in compiled.inputs})

    def weighed(*parts):
        picture = st.splat_render(*parts, camera=camera(), max_list_entries=576, **PICTURE)
        return (picture.reshape((-1,)) * ct).sum()

    grads = st.grad(weighed, argnums=tuple(range(5)))(*parts)
    whole = np.concatenate([x.numpy().reshape(-1) for x in grads] + [np.zeros(27, np.float32)])
    np.testing.assert_allclose(packed, whole, rtol=1e-4, atol=1e-5)


def test_prepared_scenes_rasterise_to_the_same_picture() -> None:
    parts = scene(15, 7)
    fields = {**PICTURE, "max_list_entries": 200}
    flat = [p.reshape(-1) for p in parts] + [np.zeros(0, np.float32), camera()]
    g = Graph("two")
    values = [g.input(f"x{i}", a.shape) for i, a in enumerate(flat)]
    prepared = REGISTRY["gaussian_splat_prepare"](**fields)(*values)
    picture = REGISTRY["gaussian_splat_rasterize"](**fields)(prepared, values[6])
    compiled = st.Session("cpu").compile(g.outputs(prepared, picture))
    made, drawn = compiled.run({f"x{i}": a for i, a in enumerate(flat) if f"x{i}" in compiled.inputs})
    np.testing.assert_allclose(drawn.reshape(20, 24, 4), rendered(parts, max_list_entries=200), atol=2e-5)
    assert made.shape == (15 * 15 + 200 + 2 * 4 + 3 * 20 * 24 + 11,)
    assert made[-11:].tolist() == pytest.approx([24, 20, 16, 2, 1 / 255, 0.01, 0.1, 0.2, 0.3, 0, 0])
    rays = made[-11 - 3 * 480 : -11].reshape(480, 3)
    seen = Camera(camera().astype(np.float64), 24, 20)
    np.testing.assert_allclose(rays, seen.rays().reshape(480, 3), atol=1e-6)
    colour, valid, local, inverse, rotation = np.split(made[: 15 * 15], np.cumsum([60, 15, 45, 45]))
    np.testing.assert_allclose(colour.reshape(15, 4), np.concatenate([parts[4], parts[3][:, None]], 1), atol=1e-6)
    assert valid.tolist() == [1] * 15
    np.testing.assert_allclose(inverse, 1 / (3 * 1.6 * np.exp(parts[1].reshape(-1))), rtol=1e-5)
    np.testing.assert_array_equal(rotation, parts[2].reshape(-1))
    away = [
        turned(seen.position - p, q) for p, q in zip(*(x.astype(np.float64) for x in (parts[0], parts[2])), strict=True)
    ]
    np.testing.assert_allclose(local, np.reshape(away, -1) * inverse, rtol=1e-4, atol=1e-5)
    ids, spans = made[225:425], made[425:433].reshape(4, 2)
    distance = np.linalg.norm(parts[0] - seen.position, axis=1)
    for begin, end in spans.astype(np.int64):
        assert (np.diff(distance[ids[begin:end].astype(np.int64)]) >= 0).all()  # the nearest first
    empty = rendered_parts(0, fields)
    assert empty[15 + 200 : 15 + 208].reshape(4, 2).tolist() == [[np.float32(0xFFFFFFFF), 0]] * 4


def rendered_parts(count: int, fields: dict[str, object]) -> np.ndarray:
    """A prepared scene of some splats."""
    flat = [p.reshape(-1) for p in scene(count)] + [np.zeros(0, np.float32), camera()]
    g = Graph("prepared")
    values = [g.input(f"x{i}", a.shape) for i, a in enumerate(flat)]
    compiled = st.Session("cpu").compile(g.outputs(REGISTRY["gaussian_splat_prepare"](**fields)(*values)))
    return compiled.run({f"x{i}": a for i, a in enumerate(flat) if f"x{i}" in compiled.inputs})[0]


def test_gradients_go_through_a_prepared_scene() -> None:
    fields, parts = {**PICTURE, "max_list_entries": 200}, scene(6, 7)
    flat = [p.reshape(-1) for p in parts] + [np.zeros(0, np.float32), camera()]
    found = []
    for in_two in (False, True):
        g = Graph("loss")
        values = [g.param(f"x{i}", a.shape) for i, a in enumerate(flat)]
        if in_two:
            prepared = REGISTRY["gaussian_splat_prepare"](**fields)(*values)
            picture = REGISTRY["gaussian_splat_rasterize"](**fields)(prepared, values[6])
        else:
            picture = REGISTRY["gaussian_splat_render"](**fields)(*values)
        slopes = st.transforms.grad(g.outputs(st.ops.sum(picture * picture)), wrt=[f"x{i}" for i in range(5)])
        compiled = st.Session("cpu").compile(slopes)
        compiled.set_params({f"x{i}": a for i, a in enumerate(flat) if f"x{i}" in compiled.params})
        found.append(compiled.run(d_output=np.float32(1)))
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-4)


def test_empty_tiles_show_the_background_and_nothing_else() -> None:
    parts = scene(1)
    parts[0][:], parts[1][:] = 0, -5
    made = rendered(parts, camera(position=(0, 0, -2.5)), width=64, height=64)
    np.testing.assert_allclose(made[0, 0], [*(np.array([0.1, 0.2, 0.3]) ** 2.2), 0.0], atol=1e-6)
    assert made[32, 32, 3] > 0


def test_an_empty_scene() -> None:
    made = rendered(scene(0))
    np.testing.assert_allclose(made, np.broadcast_to([*(np.array([0.1, 0.2, 0.3]) ** 2.2), 0.0], made.shape), atol=1e-6)
    loss, grads = loss_and_gradients(scene(0), np.zeros((20, 24, 4), np.float32), camera())
    assert np.isfinite(loss.numpy())
    assert [g.shape for g in grads] == [(0, 3), (0, 3), (0, 4), (0,), (0, 3)]


BAD = {
    "behind": lambda p: p[0].__setitem__((slice(None, 4), 2), -9.0),
    "at the camera": lambda p: p[0].__setitem__(slice(None, 4), camera()[:3]),
    "nan position": lambda p: p[0].__setitem__(1, np.nan),
    "infinite position": lambda p: p[0].__setitem__(1, np.inf),
    "far away": lambda p: p[0].__setitem__(1, 1e30),
    "nan scale": lambda p: p[1].__setitem__(2, np.nan),
    "no width": lambda p: p[1].__setitem__((2, 0), -200.0),
    "a point": lambda p: p[1].__setitem__(2, -200.0),
    "everywhere": lambda p: p[1].__setitem__(2, 80.0),
    "no rotation": lambda p: p[2].__setitem__(3, 0.0),
    "a large rotation": lambda p: p[2].__setitem__(3, 40.0),
    "turned out of range": lambda p: p[2].__setitem__(slice(None, 5), 1e38),
    "turned too far": lambda p: p[2].__setitem__(3, 2e3),
    "no opacity": lambda p: p[3].__setitem__(slice(None, 3), 0.0),
    "opaque": lambda p: p[3].__setitem__(slice(None), 1.0),
    "more than opaque": lambda p: p[3].__setitem__(slice(None, 3), 7.0),
    "negative opacity": lambda p: p[3].__setitem__(slice(None, 3), -1.0),
    "nan colour": lambda p: p[4].__setitem__((1, 1), np.nan),
    "around the camera": lambda p: (
        p[0].__setitem__(1, camera()[:3] + np.array([0, 0, 0.2])),
        p[1].__setitem__(1, 0.5),
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_degenerate_splats_are_drawn_as_the_oracle_does_and_give_no_nan(what: str) -> None:
    parts = scene(10, 11)
    BAD[what](parts)
    made = picture_of(parts, camera()).numpy()
    assert np.isfinite(made).all()
    np.testing.assert_allclose(made, expected(parts), atol=1e-4)
    aim = np.random.default_rng(1).uniform(0, 1, made.shape).astype(np.float32)
    loss, grads = loss_and_gradients(parts, aim, camera())
    assert np.isfinite(loss.numpy())
    assert all(np.isfinite(g.numpy()).all() for g in grads)


def test_a_camera_that_looks_nowhere() -> None:
    parts = scene(10)
    nowhere = camera(target=(0.3, 0.4, -2.5))  # itself: it looks along the third axis
    np.testing.assert_allclose(picture_of(parts, nowhere).numpy(), expected(parts, nowhere), atol=1e-4)
    assert np.isfinite(picture_of(parts, camera(up=(0.0, 0.0, 0.0))).numpy()).all()


@pytest.mark.parametrize(
    "fields", [{"tile_size": 2.5}, {"width": 7.5}, {"max_splat_steps": True}, {"max_list_entries": 40.0}]
)
def test_sizes_are_whole_numbers(fields: dict[str, Any]) -> None:
    with pytest.raises(OptionError if "width" not in fields else StrataError, match=r"whole number|is not a size"):
        st.splat_render(*scene(2), camera=camera(), **fields)
    name, value = next(iter(fields.items()))
    g = Graph("g")
    inputs = [g.input(f"x{i}", (n,)) for i, n in enumerate((6, 6, 8, 2, 6, 0, 23))]
    with pytest.raises(OptionError, match=f"{name} is {value}, not a whole number"):
        REGISTRY["gaussian_splat_render"](**fields)(*inputs)


def test_opacities_are_one_number_for_each() -> None:
    parts = list(scene(4))
    parts[3] = parts[3][:, None]
    with pytest.raises(ShapeError, match=r"opacities is f32.4, 1., expected one number for each splat"):
        st.splat_render(*parts, camera=camera())


def test_threads_and_runs_give_the_same_bits() -> None:
    parts, aim = scene(10, 9), np.zeros((20, 24, 4), np.float32)
    found = []
    for threads in (1, 2, 5):
        with using(num_threads=threads):
            loss, grads = loss_and_gradients(parts, aim, camera())
            found.append([loss.numpy(), *(g.numpy() for g in grads)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_several_cameras_at_once() -> None:
    parts = scene(10)
    views = np.stack([camera(), camera(position=(1.0, 0.2, -2.0)), camera(fov=70.0)])
    made = st.vmap(lambda view: st.splat_render(*parts, camera=view, **PICTURE))(views).numpy()
    for picture, view in zip(made, views, strict=True):
        np.testing.assert_array_equal(picture, rendered(parts, view))


def test_the_parts_are_native_on_the_processor_and_taken_apart_elsewhere() -> None:
    g = Graph("picture")
    parts = scene(4)
    values = [g.input(f"x{i}", p.shape) for i, p in enumerate(parts)]
    graph = g.outputs(st.ops.splat_render(*values, camera=camera(), **PICTURE))
    report = st.dispatch_report(graph, "cpu")
    assert report.path("gaussian_splat_render") == "decomposed"
    compiled = st.Session("cpu").compile(graph)
    assert {"splat_bin", "splat_raster"} <= {step.name for step in compiled.lir.schedule}
    assert compiled.host_steps == []
    common = st.Session("cpu").compile(graph, force_common=("splat_bin", "splat_raster"))
    assert not {"splat_bin", "splat_raster"} & {step.name for step in common.lir.schedule}
    feeds = {f"x{i}": p for i, p in enumerate(parts)}
    np.testing.assert_allclose(common.run(feeds)[0], compiled.run(feeds)[0], atol=1e-5)
    np.testing.assert_allclose(compiled.run(feeds)[0], expected(parts), atol=1e-4)


def test_a_claim_without_splats_has_render_and_backward_taken_apart() -> None:
    parts = [p.reshape(-1) for p in scene(2)] + [np.zeros(0, np.float32), camera()]
    picture = np.zeros(20 * 24 * 4, np.float32)
    fields = {**PICTURE, "max_list_entries": 576, "sh_coefficients": 0}
    for name, arrays in (("gaussian_splat_render", parts), ("gaussian_splat_render_backward", [*parts, picture])):
        g = Graph("splats")
        g.outputs(REGISTRY[name](**fields)(*(g.input(f"x{i}", a.shape) for i, a in enumerate(arrays))))
        report = st.dispatch_report(g, "metal")
        assert report.path(name) == "decomposed"
        assert report.compile_ready
        graph, _ = st.CompilePipeline("cpu").with_supported_ops(()).optimize(g)  # an empty claim
        assert name not in {n.op.name for n in graph.nodes()}


@pytest.mark.parametrize("count", [0, 3])
def test_lists_that_lead_outside_are_read_at_the_nearest_entry_inside(count: int) -> None:
    arrays, fields = next(case for case in scenes() if bool(len(case[0][0])) == bool(count))
    splats, bounds, background, ids, _, places, starts, order = arrays
    rng = np.random.default_rng(count)
    wild = rng.integers(-9, 60, ids.shape).astype(np.int32)
    op = REGISTRY["splat_raster"](**fields)
    ranges = rng.integers(-5, len(ids) + 9, (op.tiles, 2)).astype(np.int32)
    kept, spans = np.clip(wild, 0, max(len(splats) - 1, 0)), np.clip(ranges, 0, len(ids) if len(splats) else 0)
    want = op.numpy(splats, bounds, background, kept, spans, places, starts, order)
    given = (splats, bounds, background, wild, ranges, places, starts, order)
    np.testing.assert_array_equal(op.numpy(*given), want)
    g = Graph("wild")
    g.outputs(op(*(g.input(f"x{i}", a.shape, str(a.dtype)) for i, a in enumerate(given))))
    feeds = {f"x{i}": a for i, a in enumerate(given)}
    # boxes may cut off what the oracle, which has none, still draws: so all of the picture is within them
    feeds["x1"] = np.tile(np.float32([-99, 99, -99, 99]), (len(splats), 1))
    for common in ((), ("splat_raster",)):
        np.testing.assert_allclose(st.Session("cpu").compile(g, force_common=common).run(feeds)[0], want, atol=1e-5)


def test_an_order_of_unknown_splats_lists_the_known_ones() -> None:
    op = REGISTRY["splat_bin"](width=8, height=8, tile=4, max_entries=16)
    outlines = np.float32([[2, 2, 1, 0, 1], [np.nan, 6, 1, 0, 1], [6, 6, 1, 0, 1]])
    order, seen = np.int64([7, 2, -1]), np.ones(3, bool)
    want = op.numpy(outlines, order, seen)
    assert want[3].tolist() == [0, 0, 1, 1]
    g = Graph("wild")
    g.outputs(*op(g.input("o", (3, 5)), g.input("r", (3,), "i64"), g.input("s", (3,), "bool")))
    for made, right in zip(st.Session("cpu").compile(g).run(o=outlines, r=order, s=seen), want, strict=True):
        np.testing.assert_array_equal(made, right)
