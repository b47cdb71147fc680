"""The moving picture of the first page: commands and what they print, as an SVG that plays by itself.

python docs/film.py     runs the commands of SCENES here, and writes docs/demo.svg
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYER = """mir @layer(x: f32[n, 256], param w: f32[256, 512], param b: f32[512]) -> f32[n, 512] where n in 1..64 {
  %0 = matmul(x, w) : f32[n, 512]
  %1 = add(%0, b) : f32[n, 512]
  %2 = gelu(%1) : f32[n, 512]
  return %2
}
"""
QUESTION = "what does a compiler do? answer in one sentence"
SCENES = (  # what is typed, the arguments, standard input, and how many lines are shown
    ("strata inspect layer.mir --stage kernels", ["inspect", "layer.mir", "--stage", "kernels"], "", 18),
    ('strata search docs/guides "fewer compiles for new shapes"',
     ["search", str(ROOT / "docs/guides"), "fewer compiles for new shapes", "--top", "2"], "", 18),
    (f"strata chat\n> {QUESTION}", ["chat", "--max-tokens", "60"], f"{QUESTION}\n", 18),
    ("strata demo heat_equation", ["demo", "heat_equation"], "", 22),
)  # fmt: skip
WIDE, LINE, COLUMNS = 760, 16, 100
TYPING, STEP, HOLD = 0.9, 0.09, 2.6  # seconds for a command, between lines, and before the next scene


def shown(words: list[str], given: str, folder: str) -> list[str]:
    """The lines that a command prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "COLUMNS": "100"}
    command = [sys.executable, "-m", "strata.cli", *words]
    done = subprocess.run(command, input=given, cwd=folder, env=env, capture_output=True, text=True, check=True)
    text = done.stdout.replace(f"{ROOT}/", "").rstrip().expandtabs()
    return [
        part
        for line in text.splitlines()
        for part in _fitted(line.rstrip()[: 2 * COLUMNS], is_prose=words[0] == "chat")
    ]


def _fitted(line: str, *, is_prose: bool) -> list[str]:
    """Prose is wrapped, other lines are cut."""
    if is_prose:
        return textwrap.wrap(line, COLUMNS) or [""]
    return [line if len(line) <= COLUMNS else line[:COLUMNS] if line.endswith("─") else f"{line[: COLUMNS - 1]}…"]


def _kept(line: str) -> str:
    """Spaces that stay: renderers disagree on the white space of texts."""
    return escape(line).replace(" ", "\u00a0")


def film(scenes: list[tuple[str, list[str]]]) -> str:
    """Scenes one after the other, for ever."""
    high = (max(len(lines) + typed.count("\n") for typed, lines in scenes) + 3) * LINE
    body, now = [], 0.0
    for typed, lines in scenes:
        first = [(f"$ {line}" if i == 0 else line, "#8fd19e") for i, line in enumerate(typed.split("\n"))]
        end = now + TYPING * len(first) + STEP * len(lines) + HOLD
        at = now
        for i, (line, colour) in enumerate([*first, *((line, "#d7dae0") for line in lines)]):
            body.append(
                f'<text x="14" y="{26 + i * LINE}" fill="{colour}" visibility="hidden">{_kept(line)}<set '
                f'attributeName="visibility" to="visible" begin="film.begin+{at:.2f}s" '
                f'end="film.begin+{end:.2f}s"/></text>'
            )
            at += TYPING if i < len(first) else STEP
        now = end
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {high}" width="{WIDE}" height="{high}" '
        'font-family="\'DejaVu Sans Mono\', ui-monospace, monospace" font-size="12">'
        '<rect width="100%" height="100%" rx="8" fill="#16191d"><animate id="film" attributeName="opacity" from="1" '
        f'to="1" begin="0s;film.end" dur="{now:.2f}s"/></rect>'
    )
    return "\n".join([head, *body, "</svg>", ""])


def main() -> int:
    scenes = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "layer.mir").write_text(LAYER, "utf-8")
        for typed, words, given, most in SCENES:
            lines = shown(words, given, folder)
            scenes.append((typed, lines if len(lines) <= most else [*lines[: most - 1], "…"]))
    (ROOT / "docs/demo.svg").write_text(film(scenes), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
