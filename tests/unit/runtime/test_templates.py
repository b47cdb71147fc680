"""Templates: specialised variants, components, plans kept on disk. Numbers are those of the behaviour list."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import strata as st
from strata.config import using
from strata.core import sym
from strata.errors import FileError, OptionError
from strata.mir import Graph
from strata.ops.control.custom import Custom, Extension
from strata.runtime import (
    AotCache,
    BucketedCompileCache,
    CompilationMode,
    CompileCache,
    CompileOptions,
    CompilePipeline,
    DynamicDimCompileCache,
    ModelCompilePipeline,
    ModelComponent,
    ModelVariant,
)
from tests.unit.runtime.builders import Counting, relu_graph, symbolic

# templates


def test_dynamic_cache_builds_once() -> None:  # behaviour 98
    build = Counting(symbolic)
    cache = DynamicDimCompileCache("cpu", 4)
    assert not cache.has_template()
    for key, sizes in (("a", (1, 2)), ("b", (2, 3)), ("a", (1, 2))):
        c = cache.get_or_specialize(key, {"batch": sizes[0], "seq": sizes[1]}, build)
        assert (
            c.signature == f"(x: f32[{sizes[0]}, {sizes[1]}, 4], param w: f32[4, 4]) -> f32[{sizes[0]}, {sizes[1]}, 4]"
        )
    assert len(build.calls) == 1
    assert len(cache) == 2
    assert cache.contains("a")
    assert cache.has_template()
    cache.get_or_specialize("a", {"batch": 1, "seq": 2}, build, CompileOptions(fusion=False))
    assert len(build.calls) == 2  # other options, another template
    assert len(cache) == 3


def test_pipeline_of_a_model_step_by_step() -> None:  # behaviour 99
    pipe = ModelCompilePipeline("cpu")
    with pytest.raises(OptionError, match="no template"):
        pipe.specialize_template({})
    template = pipe.build_template(symbolic)
    assert template.dynamic_symbols == ("batch", "seq")
    assert pipe.template_binding_manifest().param_names[0] == "w"
    result = pipe.specialize_template({"batch": 1, "seq": 2})
    c = pipe.compile_lir(result)
    c.set_param("w", np.eye(4, dtype=np.float32))
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    np.testing.assert_array_equal(c.run(x=x)[0], x)
    whole = pipe.compile_lir(pipe.specialize_template({}))
    whole.set_param("w", np.eye(4, dtype=np.float32))
    np.testing.assert_array_equal(whole.run(x=x)[0], x)
    assert pipe.binding_manifest_for_binding({"batch": 2, "seq": 3}).inputs[0].shape == (2, 3, 4)


def test_components_work_on_a_fresh_pipeline() -> None:  # behaviour 100
    build = Counting(symbolic)
    pipe = ModelCompilePipeline("cpu")
    part = ModelComponent(ModelVariant.encoder(2, 5), layer_composition_key="enc")
    c, manifest = pipe.get_or_compile_component(part, build)
    again, _ = pipe.get_or_compile_component(part, build)
    assert again is c
    assert manifest.param_names == ("w",)
    assert manifest.inputs[0].shape == (2, 5, 4)
    other, _ = pipe.get_or_compile_component(
        ModelComponent(ModelVariant.encoder(1, 7), layer_composition_key="enc"), build
    )
    assert other is not c
    assert len(build.calls) == 1
    assert len(pipe) == 2


def test_variant_keys_are_stable() -> None:
    v = ModelVariant.decode(2, 10, 1).with_extra("z", 3).with_extra("a", 4)
    assert v.dim_binding() == {"batch": 2, "past_seq": 10, "seq": 1, "a": 4, "z": 3}
    assert v.cache_key() == ModelVariant.decode(2, 10, 1).with_extra("a", 4).with_extra("z", 3).cache_key()
    assert ModelVariant.prefill(2, 5).dim_binding() == ModelVariant.encoder(2, 5).dim_binding()
    assert ModelVariant.prefill(2, 5).cache_key() != ModelVariant.encoder(2, 5).cache_key()
    a = ModelComponent(v)
    assert a.aot_disk_base() == f"strata_{a.cache_key()}"
    assert len(a.cache_key()) == 16
    assert a.cache_key() != ModelComponent(v, quant="q4").cache_key() != ModelComponent(v, profile_key="p").cache_key()
    code = (
        "from strata.runtime import ModelComponent, ModelVariant\n"
        "print(ModelComponent(ModelVariant.decode(2, 10, 1).with_extra('z', 3).with_extra('a', 4)).cache_key())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == a.cache_key()


# ahead of time


def test_aot_round_trip(tmp_path) -> None:  # behaviour 101
    aot = AotCache(tmp_path)
    lir = CompilePipeline("cpu").compile(symbolic().bind({"batch": 1, "seq": 2})).lir
    mark = aot.put_lir("m", lir)
    assert mark == lir.fingerprint() == aot.fingerprint("m")
    assert "m" in aot
    assert "n" not in aot
    back = aot.get_lir("m")
    assert back is not None
    assert back.summary() == lir.summary()
    assert st.parse(str(back)) == back
    assert str(back.graph.results[0].type) == "f32[1, 2, 4]"


def test_aot_specialisation_hits_and_heals(tmp_path) -> None:
    build = Counting(symbolic)
    sizes = {"seq": 3, "batch": 2}
    x, w = np.ones((2, 3, 4), np.float32), np.full((4, 4), 2, np.float32)

    def run() -> np.ndarray:
        cache = DynamicDimCompileCache("cpu", 2)
        c = cache.get_or_specialize_aot(AotCache(tmp_path), "base", 1, sizes, build)
        c.set_param("w", w)
        return c.run(x=x)[0]

    np.testing.assert_array_equal(run(), 8)
    sizes = {"batch": 2, "seq": 3}
    np.testing.assert_array_equal(run(), 8)
    assert len(build.calls) == 1
    for path in tmp_path.glob("??/*.bin"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    np.testing.assert_array_equal(run(), 8)
    assert len(build.calls) == 2


AOT_PROCESS = """
import sys, numpy as np
from strata.core import sym
from strata.mir import Graph
from strata.runtime import AotCache, DynamicDimCompileCache

def build():
    print("built")
    g = Graph("template")
    x, w = g.input("x", (sym("batch", 1, 8), sym("seq", 1, 64), 4)), g.param("w", (4, 4))
    return g.outputs(x @ w)

sizes = {"batch": 2, "seq": 3} if sys.argv[2] == "a" else {"seq": 3, "batch": 2}
c = DynamicDimCompileCache("cpu", 2).get_or_specialize_aot(AotCache(sys.argv[1]), "b", 0, sizes, build)
c.set_param("w", np.ones((4, 4), np.float32))
print(c.run(x=np.ones((2, 3, 4), np.float32))[0].sum())
"""


def test_another_process_hits(tmp_path) -> None:
    outs = [
        subprocess.run(
            [sys.executable, "-c", AOT_PROCESS, str(tmp_path), v], capture_output=True, text=True, check=True
        )
        for v in "ab"
    ]
    assert [o.stdout.split() for o in outs] == [["built", "96.0"], ["96.0"]]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no owners of files")
@pytest.mark.parametrize("where", ["folder", "entry", "swapped"])
def test_a_folder_of_plans_is_trusted_no_more_than_the_cache(tmp_path, monkeypatch, where: str) -> None:
    monkeypatch.setattr("strata.cache.store._is_own_group", lambda _: False)
    root = tmp_path / "aot"
    double, other = (CompilePipeline("cpu").compile(relu_graph(n)).lir for n in (4, 5))
    written = AotCache(root)
    written.put_lir("mine", double)
    (entry,) = root.glob("*/*.bin")
    written.put_lir("other", other)
    (second,) = (path for path in root.glob("*/*.bin") if path != entry)
    if where == "swapped":
        entry.write_bytes(second.read_bytes())
    else:
        victim = root if where == "folder" else entry
        victim.chmod(victim.stat().st_mode | 0o002)
    again = AotCache(root)
    assert again.get_lir("mine") is None
    assert again.fingerprint("mine") is None
    assert not again.contains("mine")


def test_compile_graph_cached(tmp_path) -> None:
    aot = AotCache(tmp_path)
    x = np.array([-1, 1, 2, 3], np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(aot.compile_graph_cached("g", relu_graph()).run(x=x)[0], [0, 1, 2, 3])
    assert len(list(aot.store.entries())) == 1
    aot.compile_graph_cached("g", relu_graph(), options=CompileOptions(fusion=False))
    assert len(list(aot.store.entries())) == 2
    build = Counting(relu_graph)
    for _ in range(2):
        aot.compile_hir_cached("h", build)
    assert len(build.calls) == 1


# keys name all that an entry depends on


def test_threads_and_settings_are_part_of_every_key() -> None:
    def options(threads: int) -> CompileOptions:
        return CompileOptions(threads=threads)

    build = Counting(symbolic)
    whole = CompileCache("cpu", 8)
    ranges = BucketedCompileCache("cpu", [range(1, 8)])
    sizes = DynamicDimCompileCache("cpu", 8)

    def made(threads: int) -> list[object]:
        some = ranges.get_or_compile(3, lambda _: build(), options(threads))
        assert some is not None
        return [
            whole.get_or_compile(1, build, options(threads)),
            some[1],
            sizes.get_or_specialize(1, {"batch": 1, "seq": 2}, build, options(threads)),
        ]

    first, other = made(1), made(2)
    assert [c.options.threads for c in first] == [1] * 3
    assert [c.options.threads for c in other] == [2] * 3
    assert all(a is b for a, b in zip(made(1), first, strict=True))
    with using(check_indices=True):
        checked = made(1)
    assert all(a is not b for a, b in zip(checked, first, strict=True))
    assert all(a is b for a, b in zip(made(1), first, strict=True))
    assert whole.contains(1, options(2))
    assert not whole.contains(1, options(3))
    assert sizes.contains(1, options(2))
    assert not sizes.contains(1, options(3))


def test_templates_keep_the_precision_of_their_cache() -> None:
    cache = DynamicDimCompileCache("cpu", 4, options=CompileOptions(precision="f16"))
    for options in (None, CompileOptions(exact=False)):
        template = cache.ensure_template(symbolic, options)
        assert template.pipeline.options.precision == "f16"


def scaled(factor: float) -> Graph:
    g = Graph("part")
    return g.outputs(g.input("x", (sym("batch", 1, 8), sym("seq", 1, 64))) * factor)


def test_ahead_of_time_components_do_not_share_a_template(tmp_path) -> None:
    one = np.ones((1, 2), np.float32)
    for _ in range(2):  # the second pipeline finds both on disk
        pipe, aot = ModelCompilePipeline("cpu"), AotCache(tmp_path)
        for key, factor in (("A", 2.0), ("B", 3.0)):
            part = ModelComponent(ModelVariant.encoder(1, 2), profile_key=key)
            compiled = pipe.get_or_specialize_aot(aot, part, lambda factor=factor: scaled(factor))
            np.testing.assert_array_equal(compiled.run(x=one)[0], factor * one)


def test_ahead_of_time_variants_of_a_component_share_a_template(tmp_path) -> None:
    build = Counting(lambda: scaled(2.0))
    pipe, aot = ModelCompilePipeline("cpu"), AotCache(tmp_path)
    for seq in (2, 3, 4):
        part = ModelComponent(ModelVariant.encoder(1, seq), profile_key="A")
        pipe.get_or_specialize_aot(aot, part, build)
        pipe.get_or_compile_component(part, build)
    assert len(build.calls) == 1


def test_what_was_made_in_memory_goes_to_disk_when_that_is_asked_for(tmp_path) -> None:
    part = ModelComponent(ModelVariant.encoder(1, 2), profile_key="A")
    pipe, build = ModelCompilePipeline("cpu"), Counting(lambda: scaled(2.0))
    pipe.get_or_compile_component(part, build)
    for folder in ("one", "two"):
        pipe.get_or_specialize_aot(AotCache(tmp_path / folder), part, build)
        ModelCompilePipeline("cpu").get_or_specialize_aot(AotCache(tmp_path / folder), part, build)
    assert len(build.calls) == 1


def test_names_on_disk_have_templates_and_entries_of_their_own(tmp_path) -> None:
    cache, aot = DynamicDimCompileCache("cpu", 8), AotCache(tmp_path)
    one, sizes = np.ones((1, 2), np.float32), {"batch": 1, "seq": 2}
    for base, factor in (("a", 2.0), ("b", 3.0)):
        compiled = cache.get_or_specialize_aot(aot, base, 7, sizes, lambda factor=factor: scaled(factor))
        np.testing.assert_array_equal(compiled.run(x=one)[0], factor * one)
    assert cache.contains(7)
    assert cache.contains(7, model="a")
    assert not cache.contains(7, model="c")


def test_a_plan_on_disk_is_of_one_device_and_one_template(tmp_path) -> None:
    aot, one, sizes = AotCache(tmp_path), np.ones((1, 2), np.float32), {"batch": 1, "seq": 2}
    for factor, precision in ((2.0, None), (3.0, None), (1 / 3, None), (1 / 3, "f16")):
        template = CompilePipeline("cpu", CompileOptions(precision=precision)).compile(scaled(factor))
        compiled = aot.specialize_cached("base", sizes, "cpu", template)
        expected = template.pipeline.options.precision
        (made,) = compiled.run(x=one)
        np.testing.assert_allclose(made, factor * one, rtol=1e-6 if expected is None else 1e-3)
        assert (made[0, 0] == np.float32(factor)) == (expected is None)
    for device in ("cpu:baseline", "reference"):  # of equal targets
        compiled = aot.compile_hir_cached("h", Counting(relu_graph), device)
        assert bool(compiled.host_steps) == (device == "reference")
        marks = list(tmp_path.glob("??/*.bin"))
    assert len(marks) == 6


def test_functions_of_the_user_are_not_kept_under_a_name(tmp_path) -> None:
    def graph_of(scale: float) -> Graph:
        extension = Extension(
            "times", infer=lambda x, attrs: x, execute=lambda x, attrs: x * np.float32(scale), differentiable=False
        )
        g = Graph("g")
        return g.outputs(*Custom(extension)(g.input("x", (3,))))

    aot, one = AotCache(tmp_path), np.ones(3, np.float32)
    for scale in (2.0, 3.0):
        np.testing.assert_array_equal(aot.compile_graph_cached("k", graph_of(scale)).run(x=one)[0], scale * one)


# names of the pipeline, modes, profiles


def linear_hir() -> st.hir.Module:
    m = st.hir.Module("linear")
    x = m.input("x", (sym("batch", 1, 64), 4))
    return m.outputs(m.linear(x, m.param("w", (4, 2)), bias=m.param("b", (2,)), act="relu"))


def fed(compiled, batch: int = 2) -> np.ndarray:
    compiled.set_params({"w": np.ones((4, 2), np.float32), "b": np.ones(2, np.float32)})
    return compiled.run(x=np.ones((batch, 4), np.float32))[0]


def test_names_of_the_dynamic_cache() -> None:
    cache = DynamicDimCompileCache("cpu")
    assert cache.compile_device == "cpu"
    assert cache.is_empty
    cache.get_or_specialize(1, {"batch": 2}, linear_hir)
    assert not cache.is_empty
    assert len(cache) == 1


def test_names_of_the_model_pipeline() -> None:
    pipe = ModelCompilePipeline("cpu")
    build = Counting(linear_hir)
    assert (pipe.device, pipe.is_empty, len(pipe), pipe.has_template(), pipe.contains(1)) == (
        "cpu",
        True,
        0,
        False,
        False,
    )
    assert pipe.template_result() is None
    template = pipe.ensure_template(build)
    assert pipe.ensure_template(build) is template
    assert pipe.template_result() is template
    assert pipe.has_template()
    assert pipe.is_empty
    compiled = pipe.get_or_compile(1, {"batch": 2}, build)
    assert len(build.calls) == 1
    assert (1 in pipe, pipe.contains(1), pipe.contains(2), len(pipe), pipe.is_empty) == (True, True, False, 1, False)
    assert not pipe.has_template(CompileOptions(fusion=False))
    np.testing.assert_array_equal(fed(compiled), np.full((2, 2), 5, np.float32))


def test_plans_on_disk_by_base_key_and_binding(tmp_path) -> None:
    build = Counting(linear_hir)
    first = ModelCompilePipeline("cpu").get_or_specialize_aot(AotCache(tmp_path), "linear", 7, {"batch": 2}, build)
    np.testing.assert_array_equal(fed(first), np.full((2, 2), 5, np.float32))
    pipe = ModelCompilePipeline("cpu")
    again = pipe.get_or_specialize_aot(AotCache(tmp_path), "linear", 7, {"batch": 2}, build)
    assert len(build.calls) == 1  # the second has its plan from disk
    assert pipe.get_or_specialize_aot(AotCache(tmp_path), "linear", 7, {"batch": 2}, build) is again
    np.testing.assert_array_equal(fed(again), fed(first))
    other = pipe.get_or_specialize_aot(AotCache(tmp_path), "linear", 8, {"batch": 3}, build)
    assert other is not again
    assert fed(other, 3).shape == (3, 2)
    assert len(build.calls) == 2
    ModelCompilePipeline("cpu").get_or_specialize_aot(AotCache(tmp_path), "another", 7, {"batch": 2}, build)
    assert len(build.calls) == 3
    with pytest.raises(OptionError, match="needs a key, sizes and a function"):
        pipe.get_or_specialize_aot(AotCache(tmp_path), "linear", 7)


def test_manifest_of_a_component_under_other_options() -> None:
    pipe = ModelCompilePipeline("cpu")
    component = ModelComponent(ModelVariant.encoder(2, 8))
    wide = CompileOptions(arena_alignment=256)
    pipe.get_or_compile_component(component, linear_hir)
    assert pipe.binding_manifest_for_component(component).alignment == 64
    with pytest.raises(OptionError, match="no template yet"):
        pipe.binding_manifest_for_component(component, wide)
    pipe.get_or_compile_component(component, linear_hir, wide)
    made = pipe.binding_manifest_for_component(component, wide)
    assert made.alignment == 256
    assert made.inputs[0].shape == (2, 4)
    assert pipe.contains(component)
    assert pipe.contains(component, wide)


def spans(path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())]


def test_modes_say_when_a_component_is_compiled(tmp_path) -> None:
    """Eager: machine code at once. Lazy: when it first runs. Ahead of time: the next process finds the plan on disk."""
    variant = ModelVariant.encoder(2, 8)
    for mode, early in ((CompilationMode.EAGER, True), (CompilationMode.LAZY, False)):
        pipe = ModelCompilePipeline("cpu")
        with st.trace(tmp_path / "made.json"):
            compiled, manifest = pipe.get_or_compile_component(ModelComponent(variant, mode=mode), linear_hir)
        assert manifest.param_names == ("w", "b")
        assert ("code" in spans(tmp_path / "made.json")) is early
        with st.trace(tmp_path / "run.json"):
            first = fed(compiled)
        assert ("code" in spans(tmp_path / "run.json")) is not early
        assert "code" not in spans_of_run(tmp_path, compiled)
        np.testing.assert_array_equal(first, np.full((2, 2), 5, np.float32))
        np.testing.assert_array_equal(fed(compiled.clone()), first)
    build = Counting(linear_hir)
    component = ModelComponent(variant, mode=CompilationMode.AOT)
    for _ in range(2):
        compiled, _ = ModelCompilePipeline("cpu", aot=tmp_path / "plans").get_or_compile_component(component, build)
        np.testing.assert_array_equal(fed(compiled), np.full((2, 2), 5, np.float32))
    assert len(build.calls) == 1


def spans_of_run(tmp_path, compiled) -> list[str]:
    with st.trace(tmp_path / "again.json"):
        fed(compiled)
    return spans(tmp_path / "again.json")


def test_profiles(tmp_path) -> None:
    decode = st.CompileProfile.preset("decode")
    assert decode.options().blocks == "fusable"
    cache = DynamicDimCompileCache("cpu", profile="decode")
    template = cache.ensure_template(linear_hir)
    assert not any(n.op.name == "fused_matmul_bias_act" for n in template.source.nodes())
    direct = DynamicDimCompileCache("cpu", profile="prefill").ensure_template(linear_hir)
    assert any("matmul_bias" in n.op.name for n in direct.source.nodes())
    assert st.CompileProfile.preset("diffusion").options().fusion is False
    path = tmp_path / "small.toml"
    path.write_text(
        '[fusion]\npolicy = "fusable"\nskip = true\n[passes]\ndce = true\nconstant_folding = false\n'
        '[precision]\ncompute = "bf16"\n'
    )
    made = ModelCompilePipeline("cpu", profile=str(path)).session.options
    assert (made.blocks, made.fusion, made.drop_unused, made.precision) == ("fusable", False, True, "bf16")
    assert made.skip_passes == ("fold",)
    for text, match in [
        ("[fusion]\npolicy = 'fast'", "one of direct, fusable"),
        ("[fusion]\npolicies = 'direct'", "has no 'policies'"),
        ("[cpu]\nx = 1", "no table 'cpu'"),
        ("[passes]\ndce = 1", "is True or False"),
    ]:
        path.write_text(text)
        with pytest.raises(OptionError, match=match):
            st.CompileProfile.load(path)
    path.write_text("[fusion")
    with pytest.raises(FileError, match="not a compile profile"):
        st.CompileProfile.load(path)
    with pytest.raises(OptionError, match="did you mean 'prefill'"):
        st.CompileProfile.preset("prefil")
