"""The viewer: its data is what the compiler did, its page is one file, and a browser shows it where there is one."""

from __future__ import annotations

import base64
import gzip
import html.parser
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import strata as st
from strata.cli import main
from strata.cli.view import LivePage
from strata.hir import Module
from strata.runtime import CompilePipeline
from strata.viewer import page_for

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def layer() -> st.Graph:
    g = st.Graph("layer")
    x = g.input("x", (st.sym("batch", 1, 64), 16))
    w, b = g.param("w", (16, 32)), g.param("b", (32,))
    g.outputs((x @ w + b).gelu().softmax(-1))
    return g


def read_page(path: Path) -> dict[str, Any]:
    packed = re.search(r'<script id="data"[^>]*>([^<]*)</script>', path.read_text("utf-8"))
    assert packed is not None
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return found


def test_stages_and_steps_are_those_of_the_pipeline(tmp_path: Path) -> None:
    graph = layer()
    result = CompilePipeline("cpu").compile(graph)
    data = read_page(st.view(graph, tmp_path / "layer.html"))
    ops = [data["texts"][data["nodes"][id][0]] for id in data["stages"][0]["nodes"]]
    assert ops == [n.op.name for n in graph.nodes()]
    last = [data["texts"][data["nodes"][id][0]] for id in data["stages"][-1]["nodes"]]
    assert last == [n.op.name for n in result.lir.graph.nodes()]
    assert [(s["name"], s["label"]) for s in data["steps"]] == [(s.name, s.label) for s in result.lir.schedule]
    assert [len(s["nodes"]) for s in data["steps"]] == [len(s.nodes) for s in result.lir.schedule]
    assert len(data["cuts"]) == len(result.lir.cuts)
    assert set(data["kernels"]) == set(result.lir.kernels)
    assert data["sizes"] == {"batch": 64}
    assert data["arena"]["size"] == result.lir.placement({"batch": 64}).arena_size
    changed = [r.name for r in result.passes if r.changed]
    assert [s["name"] for s in data["stages"][1:-1]] == changed


def test_a_pass_lists_what_is_gone_and_what_is_new() -> None:
    g = st.Graph("g")
    x = g.input("x", (4, 8))
    g.outputs((x * 1).tanh())
    data = page_for(g)

    def ops(ids: list[int]) -> list[str]:
        return [data["texts"][data["nodes"][id][0]] for id in ids]

    written, *_, planned = data["stages"]
    assert "multiply" in ops(written["nodes"])
    assert "multiply" not in ops(planned["nodes"])
    assert [op for s in data["stages"][1:] for op in ops(s["gone"])].count("multiply") == 1
    assert "tanh" not in [op for s in data["stages"][1:] for op in ops([*s["gone"], *s["new"]])], (
        "its input changed only"
    )


def test_code_is_what_runs() -> None:
    graph = layer()
    data = page_for(graph)
    result = CompilePipeline("cpu").compile(graph)
    assert data["code"] == dict(result.explain().code)
    assert all("define" in text for text in data["code"].values())


def test_blocks_come_first_and_lines_are_the_users() -> None:
    m = Module("ffn")
    x, w, b = m.input("x", (4, 8)), m.param("w", (8, 16)), m.param("b", (16,))
    m.outputs(m.linear(x, w, b, act="gelu"))
    data = page_for(m)
    assert [s["name"] for s in data["stages"][:2]] == ["HIR", "graph"]
    assert any("m.linear" in line for line in data["lines"].values())


def test_models_bundles_and_files(tmp_path: Path) -> None:
    compiled = st.Session("cpu").compile(layer())
    compiled.set_params({"w": np.ones((16, 32), np.float32), "b": np.zeros(32, np.float32)})
    data = page_for(compiled)
    assert data["name"] == "layer"
    compiled.save(tmp_path / "layer.strata")
    bundle = page_for(tmp_path / "layer.strata")
    assert [s["label"] for s in bundle["steps"]] == [s["label"] for s in data["steps"]]
    assert {t[0] for t in bundle["tensors"]} == {"w", "b"}
    (tmp_path / "layer.mir").write_text(str(layer()), "utf-8")
    assert [s["label"] for s in page_for(tmp_path / "layer.mir")["steps"]] == [s["label"] for s in data["steps"]]


def test_an_onnx_file(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    weight = onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], name="dense"), helper.make_node("Relu", ["h"], ["y"])]
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", 1, ["n", 4])], [helper.make_tensor_value_info("y", 1, None)],
        [weight],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "net.onnx")
    data = page_for(tmp_path / "net.onnx")
    assert data["tensors"] == [["w", "float", [4, 3], None]]
    assert any("MatMul 1, Relu 1" in value for _, value in data["facts"])
    assert len(data["steps"]) == 1
    assert [s["name"] for s in data["stages"][:2]] == ["ONNX", "graph"]
    assert [data["texts"][data["nodes"][id][0]] for id in data["stages"][0]["nodes"]] == [
        "input",
        "param",
        "MatMul",
        "Relu",
    ]
    blocks = {data["texts"][row[5]] for row in data["nodes"] if row[5] >= 0}
    assert "dense" in blocks


def test_an_onnx_file_that_is_not_one_graph(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    some = helper.make_node("NonZero", ["x"], ["y"])  # how many there are is known when it runs
    graph = helper.make_graph(
        [some, helper.make_node("StringNormalizer", ["s"], ["t"])], "net",
        [helper.make_tensor_value_info("x", 1, ["n"]), helper.make_tensor_value_info("s", 8, ["m"])],
        [helper.make_tensor_value_info("y", 7, None), helper.make_tensor_value_info("t", 8, None)],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "net.onnx")
    data = page_for(tmp_path / "net.onnx")
    assert [s["name"] for s in data["stages"]] == ["ONNX"]
    assert data["problem"]


def test_bodies_of_onnx_branches_are_shown(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    branches = {}
    for key, op in (("then_branch", "Exp"), ("else_branch", "Neg")):  # both call their result z, and read x outside
        nodes = [helper.make_node("Abs", ["x"], ["a"]), helper.make_node(op, ["a"], ["z"])]
        branches[key] = helper.make_graph(nodes, key, [], [helper.make_tensor_value_info("z", 1, ["n"])])
    node = helper.make_node("If", ["c"], ["y"], name="choice", **branches)
    inputs = [helper.make_tensor_value_info("c", 9, []), helper.make_tensor_value_info("x", 1, ["n"])]
    graph = helper.make_graph([node], "net", inputs, [helper.make_tensor_value_info("y", 1, ["n"])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "net.onnx")
    data = page_for(tmp_path / "net.onnx")
    ids = data["stages"][0]["nodes"]
    rows = {i: (data["texts"][data["nodes"][i][0]], [data["nodes"][j][0] for j, _ in data["nodes"][i][2]]) for i in ids}
    read = {op: [data["texts"][j] for j in inputs] for op, inputs in rows.values()}
    assert sorted(read["If"]) == ["Exp", "Neg", "input"]
    assert read["Exp"] == read["Neg"] == ["Abs"]
    assert read["Abs"] == ["input"]


def test_traces(tmp_path: Path) -> None:
    compiled = st.Session("cpu").compile(layer())
    compiled.set_params({"w": np.ones((16, 32), np.float32), "b": np.zeros(32, np.float32)})
    with st.trace(tmp_path / "run.json") as tracer:
        compiled.run(x=np.ones((2, 16), np.float32))
    data = page_for(tmp_path / "run.json")
    assert [s[0] for s in data["spans"]].count("run layer") == 1
    assert len(data["spans"]) == len(tracer.events) == len(page_for(tracer)["spans"])


def test_a_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    text = st.view(layer(), tmp_path / "layer.html").read_text("utf-8")
    found: list[str] = []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(value or "" for name, value in attrs if name in ("src", "href"))

    Reader().feed(text)
    assert found == []
    assert "fetch(" not in text
    assert "import(" not in text


def test_names_of_the_program_are_no_markup(tmp_path: Path) -> None:
    g = st.Graph("<script>alert(1)</script>")
    g.outputs(g.input("x", (2,)) + 1)
    path = st.view(g, tmp_path / "page.html")
    assert "<script>alert" not in path.read_text("utf-8")
    assert read_page(path)["name"] == "<script>alert(1)</script>"


def test_a_graph_of_5000_nodes_is_a_small_page(tmp_path: Path) -> None:
    g = st.Graph("deep")
    h = g.input("x", (8, 16))
    for i in range(1250):
        h = (h @ g.param(f"w{i}", (16, 16)) + g.param(f"b{i}", (16,))).tanh()
    g.outputs(h)
    path = st.view(g, tmp_path / "deep.html")
    assert path.stat().st_size < 5_000_000
    assert len(read_page(path)["stages"][-1]["nodes"]) > 5000


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("layer.mir").write_text(str(layer()), "utf-8")
    assert main(["view", "layer.mir", "--size", "batch=7"]) == 0
    assert "layer.html" in capsys.readouterr().out
    assert read_page(Path("layer.html"))["sizes"] == {"batch": 7}
    assert main(["view", "nothing.mir"]) == 2


def test_a_live_page_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "layer.mir"
    path.write_text(str(layer()), "utf-8")
    with LivePage(str(path), "cpu", {}) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        assert b"<title>layer" in httpx.get(address).content
        path.write_text(str(layer()).replace("@layer", "@changed"), "utf-8")
        assert b"<title>changed" in httpx.get(address).content
        assert httpx.get(address, headers={"Host": "elsewhere.example"}).status_code == 404
        server.shutdown()


# --------------------------------------------------------------------------------------------------------- in a browser

PROBE = """
<script>
document.title = "waiting";
(async () => {
  while (!document.documentElement.dataset.ready) await new Promise((r) => setTimeout(r, 20));
  const seen = {};
  for (const tab of Object.keys(TABS)) if (TABS[tab].has()) { state.tab = tab; render(); seen[tab] = true; }
  const unreachable = steps.filter((s) => !search(`step ${s.at}`).length).length;
  state.tab = "Stages"; state.fold = "none"; render();
  const drawing = state.views[0];
  for (let i = 0; i < 30; i++) { drawing.dx -= 7; drawing.zoom *= 0.99; drawing.paint(); }
  drawing.begin(); drawing.paint();
  const near = drawing.drawn.boxes;
  drawing.dy = -1e6; drawing.paint();
  const away = drawing.drawn;
  state.weights = false; render(); chooseNode(stages[state.left].nodes.find((id) => called(nodes[id]) === "w"));
  const bare = state.views[0], lit = bare.list.filter((b) => bare.lit.has(b.key)).map((b) => b.title);
  const matmul = (stage) => stage.nodes.filter((id) => nodes[id].op === "matmul");
  const [before, after] = [stages[0], stages[stages.length - 1]].map(matmul);
  for (const n of nodes) n.line = "";
  const linked = before[0] !== after[0] && String(alike(stages[0].nodes, after)) === String(before);
  const found = { tabs: Object.keys(seen), boxes: drawing.list.length, bare: bare.list.length };
  document.title = JSON.stringify({ ...found, unreachable, near, away, lit, linked });
})().catch((error) => { document.title = `failed: ${error.stack}`; });
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    graph = st.Graph("layer")
    x = graph.input("x", (st.sym("batch", 1, 64), 16))
    w, b = graph.param("w", (16, 32)), graph.param("b", (32,))
    graph.outputs(((x * 1) @ w + b).gelu().softmax(-1))  # without the product with 1, the matmul is another node
    path = st.view(graph, tmp_path / "layer.html")
    path.write_text(path.read_text("utf-8").replace("</body>", f"{PROBE}</body>"), "utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=8000", "--dump-dom", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    found = json.loads(title[1])
    assert found["tabs"] == ["Stages", "Plan", "Memory", "Fusion", "Weights"]
    assert found["unreachable"] == 0
    planned = CompilePipeline("cpu").compile(graph).lir.graph
    assert found["boxes"] == len(planned.nodes())
    assert found["near"] > 0
    assert found["away"] == {"boxes": 0, "texts": 0, "lines": 0}, "work follows what is in sight"
    leaves = [n for n in planned.nodes() if n.op.name in ("param", "constant")]
    assert len(leaves) >= 2
    assert found["bare"] == len(planned.nodes()) - len(leaves)
    assert found["lit"] == ["matmul"], "a weight that is not drawn lights what reads it"
    assert found["linked"], "an op is found again by its weights"
