"""What a release is, checked: `python -m tests.release`.

    python -m tests.release                         build, check contents, install in a clean place, run the demo
    python -m tests.release --python python3.13     with other interpreters, too; may be given often
    python -m tests.release --models FOLDER         a folder of installed models, for parts of the demo that need them

Needs the packages build and twine, and an index or a cache of wheels for pip. The sources are those of the last commit.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED_IN_WHEEL = (
    "strata/py.typed",
    "strata/cli/demo/receipt.png",
    "share/man/man1/strata.1",
    "examples/splats.py",
    "LICENSE",
)
NEEDED_IN_SDIST = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "tests/release.py", "docs/index.md",
                   "examples/splats.py", "notebooks/01-quickstart.ipynb")  # fmt: skip
LARGEST = 4_000_000  # bytes of a distribution


def run(*words: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """A command that must succeed; what it prints."""
    start = time.perf_counter()
    done = subprocess.run(
        [str(w) for w in words], cwd=cwd, env=env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    shown = " ".join(Path(str(w)).name if i == 0 else str(w) for i, w in enumerate(words))[:100]
    print(f"{time.perf_counter() - start:6.1f} s  {shown}", flush=True)
    if done.returncode:
        raise SystemExit(f"{shown}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def built(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution of the last commit, with the contents they need."""
    source = folder / "source"
    source.mkdir()
    archive = folder / "source.tar"
    run("git", "archive", "-o", archive, "HEAD", cwd=ROOT)
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", source)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        told = packed.read(next(n for n in names if n.endswith("METADATA"))).decode()
    with tarfile.open(sdist) as tar:
        source_names = [m.name for m in tar.getmembers()]
    missing = [n for n in NEEDED_IN_WHEEL if not any(m.endswith(n) for m in names)]
    missing += [n for n in NEEDED_IN_SDIST if not any(m.endswith(f"/{n}") for m in source_names)]
    stray = [n for n in names if n.startswith(("tests", "docs", "benchmarks")) or n.endswith((".pyc", ".so"))]
    large = [p.name for p in (wheel, sdist) if p.stat().st_size > LARGEST]
    if missing or stray or large or "License-Expression: Apache-2.0" not in told:
        raise SystemExit(f"missing {missing}, stray {stray[:5]}, too large {large}")
    return wheel, sdist


def tried(python: str, wheel: Path, folder: Path, models: str | None) -> None:
    """Install in a clean environment, away from the source tree, and use it as a newcomer does."""
    home, place = folder / f"home-{Path(python).name}", folder / f"venv-{Path(python).name}"
    home.mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("STRATA_", "PYTHON", "XDG_"))}
    env |= {"HOME": str(home)}
    run(python, "-m", "venv", place, env=env)  # packages of this process's PYTHONPATH are not there
    run(place / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel, env=env)
    env |= {"PYTHONPATH": models} if models else {}
    strata = place / "bin/strata"
    told = run(strata, "--version", cwd=home, env=env)
    assert told.split()[1] == wheel.name.split("-")[1], told
    run(strata, "doctor", "--json", cwd=home, env=env)
    shown = run(strata, "demo", "--tour", cwd=home, env=env)
    assert "unseen digits are right" in shown
    for example in ("heat_equation", "diode_circuit"):
        run(strata, "demo", example, cwd=home, env=env)
        assert (home / f"strata-demo/{example}.svg").stat().st_size > 1000
    assert (place / "share/man/man1/strata.1").exists()
    run(
        place / "bin/python",
        "-W",
        "error",
        "-c",
        "import strata; strata.Tensor, strata.jit, strata.load",
        cwd=home,
        env=env,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", action="append", default=[], metavar="NAME", help="an interpreter to install for")
    parser.add_argument("--models", metavar="FOLDER", help="where packages with models are installed")
    options = parser.parse_args()
    lacking = [name for name in ("build", "twine") if importlib.util.find_spec(name) is None]
    if lacking:
        print(f"pip install {' '.join(lacking)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        wheel, _ = built(folder)
        for python in options.python or [sys.executable]:
            tried(python, wheel, folder, options.models)
    print("the release holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
