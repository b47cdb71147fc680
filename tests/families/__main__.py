"""`python -m tests.families [name …]` prints how far each family is from transformers; `--write` stores the results."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from strata.io import load_safetensors
from tests.families import oracle, stored
from tests.families.cases import CASES
from tests.families.decoders import NAMES
from tests.families.decoders import table as decoder_table

COLUMNS = ("family", "class", "worst relative error", "of", "32 tokens, greedy and beams", "first run")
LIMIT = 2e-4  # relative, of f32


def measure(name: str, folder: Path) -> tuple[dict[str, float], dict[str, Any], float]:
    """The errors of a family's results, what is stored of it, and the seconds it took us."""
    case = CASES[name]
    model = oracle.make(case, folder)
    wanted = oracle.results(case, model)
    if case.generation:
        stored.complete(folder, case.generation, case.config["vocab_size"])
    start = time.perf_counter()
    ours = st.load(folder)
    found = ours.run(**case.inputs(np.random.default_rng(0)))
    seconds = time.perf_counter() - start
    shapes = {n: tuple(x.shape) for n, x in load_safetensors(folder / "model.safetensors").items()}
    kept = stored.record(oracle.settings(folder), shapes, wanted)
    errors = {n: oracle.error(found[n], wanted[n]) for n in case.outputs}
    if case.tokens:
        kept["tokens"] = {str(beams): oracle.tokens(case, model, beams) for beams in stored.BEAMS}
        for beams, rows in kept["tokens"].items():
            same = stored.generated(ours, case, int(beams)) == rows
            errors[f"tokens, {beams} beams"] = 0.0 if same else float("inf")
    if case.sees:
        kept["seen"] = oracle.seen_tokens(case, model)
        errors["tokens"] = 0.0 if stored.seen_tokens(ours, case) == kept["seen"] else float("inf")
    if case.generation:
        kept["speech"] = oracle.transcripts(case, model)
        errors["tokens of speech"] = 0.0 if stored.transcribed(ours) == kept["speech"] else float("inf")
    return errors, kept, seconds


def table(chosen: list[str], *, write: bool) -> bool:
    """Print the figures of these families; whether all are as they are to be."""
    kept, wrong = (stored.read() if stored.FILE.exists() else {}), []
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name in chosen:
        with tempfile.TemporaryDirectory() as place:
            errors, kept[name], seconds = measure(name, Path(place))
        worst = max(errors, key=lambda n: errors[n])
        same = "equal" if CASES[name].tokens or CASES[name].generation or CASES[name].sees else ""
        figures = (name, CASES[name].model, f"{errors[worst]:.1e}", worst, same, f"{seconds:.1f} s")
        print(f"| {' | '.join(figures)} |", flush=True)
        if not errors[worst] <= LIMIT:
            wrong.append(name)
    if write:
        stored.write({name: kept[name] for name in CASES if name in kept})
    said = f"; not: {', '.join(wrong)}" if wrong else ""
    print(f"\n{len(chosen) - len(wrong)} of {len(chosen)} within {LIMIT}{said}")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    parser.add_argument("names", nargs="*", help="families, or how their names begin; all by default")
    parser.add_argument("--write", action="store_true", help="store what transformers computes of all but decoders")
    options = parser.parse_args()
    oracle.transformers()

    def chosen(names: Iterable[str]) -> list[str]:
        return [n for n in names if not options.names or any(n.startswith(p) for p in options.names)]

    decoders, others = chosen(NAMES), chosen(CASES)
    good = [table(others, write=options.write)] if others else []
    good += [decoder_table(decoders)] if decoders and not options.write else []
    return 0 if good and all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
