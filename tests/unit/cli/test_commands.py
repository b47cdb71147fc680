"""Commands, as they are typed: what they print, write and refuse."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import strata as st
from strata.cli import main
from strata.cli.cache import read_size
from strata.cli.demo.digits import draw
from strata.cli.parser import make_parser

LAYER = """mir @layer(x: f32[batch, 8], param w: f32[8, 4], param b: f32[4]) -> f32[batch, 4] where batch in 1..64 {
  %0 = matmul(x, w) : f32[batch, 4]
  %1 = add(%0, b) : f32[batch, 4]
  %2 = tanh(%1) : f32[batch, 4]
  return %2
}
"""


@pytest.fixture
def layer(tmp_path: Path) -> str:
    path = tmp_path / "layer.mir"
    path.write_text(LAYER)
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a mistake."""
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.strip()


# ---------------------------------------------------------------------------------------------------------------- help


def test_help_loads_nothing_that_takes_time() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "strata.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert "doctor" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "strata.cli.parser" in loaded
    assert not loaded & {"numpy", "llvmlite", "rich", "strata.core", "strata.mir", "strata.ops", "strata.runtime"}


def test_every_command_has_help_and_a_handler(capsys: pytest.CaptureFixture[str]) -> None:
    import importlib

    parser = make_parser()
    (commands,) = [a.choices for a in parser._actions if a.dest == "command"]
    assert commands is not None
    for name, sub in commands.items():  # type: ignore[attr-defined]
        module, _, function = sub.get_default("handler").partition(":")
        assert callable(getattr(importlib.import_module(f"strata.cli.{module}"), function)), name
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        assert f"strata {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rum"], "strata: no command is named 'rum'; did you mean run? (see strata --help)"),
        (["run"], "strata run: the following arguments are required: MODEL (see strata run --help)"),
        (["run", "no.onnx"], "strata: there is no file or folder no.onnx"),
        (["run", "no.mir"], "strata: no.mir: no such file or directory"),
        (["doctor", "--jsno"], "strata: unrecognized arguments: --jsno (see strata --help)"),
        (["cache", "prune", "--to", "much"], "strata: 'much' is not a size: write 500MB or 2GB"),
        (
            ["demo", "opera"],
            (
                "strata: demo: there is no part 'opera'; known: compile, train, embed, generate, read, digits, "
                "language_model, ocr, voice_activity, semantic_search, heat_equation, diode_circuit, splats"
            ),
        ),
        (
            ["opt", "--passes", "simplfy", "LAYER"],
            "strata: no pass is named 'simplfy'; did you mean 'simplify'?   [N120]",
        ),
        (["run", "LAYER", "--size", "batch"], "strata: --size batch: write NAME=N, as in batch=4"),
        (["run", "LAYER", "--size", "width=3"], "strata: --size width: the sizes are batch"),
        (["run", "LAYER", "-i", "y=a.npy"], "strata: 'a.npy' cannot be read: No such file or directory   [F121]"),
        (["run", "LAYER", "-o", "out.txt"], "strata: --output out.txt: results are written as .npz"),
        (
            ["run", "LAYER", "--threads", "0"],
            "strata run: argument --threads: '0' is not a whole number of at least 1 (see strata run --help)",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], layer: str, words: list[str], told: str
) -> None:
    assert complaint(capsys, *(layer if w == "LAYER" else w for w in words)) == told


# -------------------------------------------------------------------------------------------------------- run and write


def test_run_on_given_arrays(capsys: pytest.CaptureFixture[str], layer: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((3, 8), (8, 4), (4,)))
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "weights.npz", w=w, b=b)
    out = tmp_path / "out.npz"
    printed = answer(
        capsys, "run", layer, "-i", str(tmp_path / "x.npy"), "--params", str(tmp_path / "weights.npz"), "-o", str(out)
    )
    np.testing.assert_allclose(np.load(out)["out0"], np.tanh(x @ w + b), rtol=1e-5, atol=1e-6)
    assert "float32[3, 4]" in printed
    assert "random" not in printed


def test_run_on_random_arrays_is_repeatable(capsys: pytest.CaptureFixture[str], layer: str) -> None:
    words = ("run", layer, "--size", "batch=5", "--seed", "3", "--json")
    first, second = (json.loads(answer(capsys, *words)) for _ in range(2))
    assert first["outputs"] == second["outputs"]
    assert first["outputs"][0]["shape"] == [5, 4]
    assert first["inputs"][0]["random"] is True


def test_run_takes_sizes_from_arrays(capsys: pytest.CaptureFixture[str], layer: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((7, 8), np.float32))
    found = json.loads(answer(capsys, "run", layer, "-i", str(tmp_path / "x.npz"), "--json"))
    assert found["outputs"][0]["shape"] == [7, 4]


def test_run_onnx(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "small",
        [helper.make_tensor_value_info("x", kind, ["n", 3])], [helper.make_tensor_value_info("y", kind, ["n", 3])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    path = tmp_path / "small.onnx"
    onnx.save(model, str(path))
    found = json.loads(answer(capsys, "run", str(path), "--size", "n=2", "--json"))
    assert found["outputs"][0]["name"] == "y"
    assert found["outputs"][0]["min"] >= 0
    assert json.loads(answer(capsys, "inspect", str(path), "--json"))["ops"] == {"Relu": 1}
    assert "relu" in answer(capsys, "inspect", str(path), "--stage", "graph")


# --------------------------------------------------------------------------------------------------------------- stages


def test_opt_reads_and_writes_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = "mir @f(x: f32[4]) -> f32[4] {\n  %0 = NEG(x) : f32[4]\n  %1 = NEG(%0) : f32[4]\n  return %1\n}\n"
    program = program.replace("NEG", "negative")
    monkeypatch.setattr(sys, "stdin", io.StringIO(program))
    printed = answer(capsys, "opt", "--passes", "simplify")
    graph = st.parse(printed)
    assert graph.results[0].same_as(graph.inputs[0])  # two signs cancel
    path = tmp_path / "f.mir"
    path.write_text(printed)
    assert answer(capsys, "opt", "--passes", "simplify", str(path)) == printed


def test_opt_lists_passes(capsys: pytest.CaptureFixture[str]) -> None:
    printed = answer(capsys, "opt", "--list")
    assert "slices of x @ [" in printed  # brackets are text
    assert all(name in printed for name in st.passes.PASSES)


@pytest.mark.parametrize("stage", ["graph", "passes", "optimized", "plan", "kernels", "all"])
def test_inspect_shows_each_stage(capsys: pytest.CaptureFixture[str], layer: str, stage: str) -> None:
    printed = answer(capsys, "inspect", layer, "--stage", stage)
    telling = {"passes": "simplify", "plan": "lir @layer", "kernels": "kernel @k0", "all": "══ LIR ══"}
    assert telling.get(stage, "mir @layer") in printed


def test_explain(capsys: pytest.CaptureFixture[str], layer: str, tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    assert "matmul + add + tanh" in answer(capsys, "explain", layer)
    found = json.loads(answer(capsys, "explain", layer, "--size", "batch=4", "--memory", str(picture), "--json"))
    assert found["steps"][0]["ops"] == ["matmul", "add", "tanh"]
    assert picture.read_text().startswith("<svg")


def test_explain_draws_memory_of_sizes_without_a_bound(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "open.mir"
    path.write_text(LAYER.replace(" where batch in 1..64", ""))
    assert "scratch memory, batch=128: none is needed" in answer(capsys, "explain", str(path), "--memory")
    path.write_text(path.read_text().replace("tanh(%1)", "softmax(%1) {axis = 1}"))
    drawn = answer(capsys, "explain", str(path), "--memory")
    assert "scratch memory, batch=128: kB in use" in drawn
    assert re.search(r"^2.048 │", drawn, re.MULTILINE), "128 rows of 4 floats"
    assert re.search(r"^ +0 │", drawn, re.MULTILINE), "from zero"
    assert main(["explain", str(path), "--memory", str(tmp_path / "plan.svg")]) == 0
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


# -------------------------------------------------------------------------------------------------- bundles and traces


def test_compile_makes_a_bundle_that_runs(capsys: pytest.CaptureFixture[str], layer: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights, bundle = tmp_path / "w.npz", str(tmp_path / "layer.strata")
    np.savez(weights, w=rng.standard_normal((8, 4)).astype(np.float32), b=np.ones(4, np.float32))
    made = json.loads(answer(capsys, "compile", layer, "--params", str(weights), "-o", bundle, "--json"))
    assert made["bytes"] == Path(bundle).stat().st_size
    words = ("--size", "batch=3", "--json")
    one = json.loads(answer(capsys, "run", bundle, *words))
    other = json.loads(answer(capsys, "run", layer, "--params", str(weights), *words))
    assert one["outputs"] == other["outputs"]
    about = json.loads(answer(capsys, "inspect", bundle, "--json"))
    assert about["kind"] == "bundle"
    assert about["weights"] == {"w": "f32[8, 4]", "b": "f32[4]"}


def test_compile_makes_a_bundle_of_an_onnx_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((8, 4)).astype(np.float32), rng.standard_normal((5, 8)).astype(np.float32)
    graph = st.Graph("model")
    graph.outputs((graph.input("x", (st.sym("n"), 8)) @ graph.constant(w)).relu(), graph.constant(w[0]))
    path, bundle, array = str(tmp_path / "model.onnx"), str(tmp_path / "model.strata"), str(tmp_path / "x.npy")
    st.onnx.export(graph, path)
    np.save(array, x)
    for _ in range(2):  # as read, and as the store has it
        assert "n" in json.loads(answer(capsys, "compile", path, "-o", bundle, "--json"))["signature"]
        rows, fixed = st.load_compiled(bundle).run(x=x)
        np.testing.assert_allclose(rows, np.maximum(x @ w, 0), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(fixed, w[0])
    assert "float32[5, 4]" in answer(capsys, "run", bundle, "--input", f"x={array}")
    assert "(x: f32[5, 8])" in answer(capsys, "compile", path, "--size", "n=5", "-o", bundle)
    assert "has no symbolic size 'm'; it has n" in complaint(capsys, "compile", path, "--size", "m=5", "-o", bundle)


def test_compile_wants_weights_or_a_word(capsys: pytest.CaptureFixture[str], layer: str, tmp_path: Path) -> None:
    bundle = str(tmp_path / "layer.strata")
    assert "--no-weights" in complaint(capsys, "compile", layer, "-o", bundle)
    assert "layer.strata" in answer(capsys, "compile", layer, "--no-weights", "-o", bundle)
    assert "float32[16, 4]" in answer(capsys, "run", bundle)


def test_trace_is_json_that_viewers_open(capsys: pytest.CaptureFixture[str], layer: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    answer(capsys, "trace", layer, "-o", str(path))
    events = json.loads(path.read_text())
    assert any(e["name"].startswith("run ") for e in events)


# ----------------------------------------------------------------------------------------------------- cache and others


def test_cache_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path, layer: str) -> None:
    with st.config.using(cache_dir=tmp_path / "cache"):
        store = st.cache.default_store()
        key = st.cache.digest("x")
        store.put(key, b"code", {"kernel": "k"})
        found = json.loads(answer(capsys, "cache", "ls", "--json"))
        assert [e["key"] for e in found["entries"]] == [key]
        assert "1 entries" in answer(capsys, "cache")
        assert key[:12] in answer(capsys, "cache", "why", key[:8])
        assert "1 entries are good" in answer(capsys, "cache", "verify")
        assert json.loads(answer(capsys, "cache", "export", str(tmp_path / "copy"), "--json"))["entries"] == 1
        next((tmp_path / "cache").rglob("*.bin")).write_bytes(b"damaged")
        assert main(["cache", "verify"]) == 1
        other = st.cache.digest("y")
        store.put(key, b"code", {})
        store.put(other, b"code", {})
        places = {p.stem: p for p in (tmp_path / "cache").rglob("*.bin")}
        places[key].write_bytes(places[other].read_bytes())
        capsys.readouterr()
        assert f"not used: it is the entry of {other[:12]}" in answer(capsys, "cache", "ls")
        assert f"not used: it is the entry of {other[:12]}" in answer(capsys, "cache", "why", key[:12])
        assert main(["cache", "verify"]) == 1
        assert "1 entries are good, 1 were damaged or misplaced and removed" in capsys.readouterr().out
        store.put(key, b"code", {})
        assert "removed" in answer(capsys, "cache", "prune")
        assert not list(store.entries())


@pytest.mark.parametrize(("text", "count"), [("0", 0), ("500MB", 500_000_000), ("1.5 GB", 1_500_000_000)])
def test_sizes_are_read(text: str, count: int) -> None:
    assert read_size(text) == count


def test_bench_times_a_program(capsys: pytest.CaptureFixture[str], layer: str) -> None:
    found = json.loads(answer(capsys, "bench", layer, "--seconds", "0.01", "--json"))
    assert found["ways"][0]["name"] == "strata"
    assert 0 < found["ways"][0]["best"] <= found["ways"][0]["median"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_the_commands(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    script = answer(capsys, "completion", shell)
    assert "doctor" in script
    assert "max-tokens" in script


def test_digits_are_drawn_alike() -> None:
    images, labels = draw(200, seed=1)
    again, _ = draw(200, seed=1)
    assert images.shape == (200, 256)
    assert set(labels) == set(range(10))
    np.testing.assert_array_equal(images, again)


def test_the_demo_learns() -> None:
    from strata.cli.demo.tour import train

    assert train(steps=150) > 0.85
