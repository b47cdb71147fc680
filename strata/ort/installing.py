"""`import onnxruntime` as strata.ort: a finder in front of those that look into folders."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "onnxruntime"
OURS = "strata.ort"
_PARTS = (
    "backend", "capi", "capi.onnxruntime_pybind11_state", "capi.onnxruntime_inference_collection", "capi._pybind_state",
)  # fmt: skip


class _Metadata(Distribution):
    """What `importlib.metadata` says of onnxruntime while strata stands in for it."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        version = import_module(OURS).__version__
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\nSummary: strata.ort\n"

    def locate_file(self, path: str | PathLike[str]) -> Any:
        raise FileNotFoundError(f"{NAME} is strata.ort here: it has no file {path}")


class _Alias(Loader):
    """Gives a module of ours under another name."""

    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        sys.modules[module.__spec__.name] = import_module(self.target)


_ANY = DistributionFinder.Context()


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == NAME:
            return ModuleSpec(fullname, _Alias(OURS), is_package=True)
        if not fullname.startswith(f"{NAME}."):
            return None
        part = fullname.removeprefix(f"{NAME}.")
        if part in _PARTS:
            return ModuleSpec(fullname, _Alias(f"{OURS}.{part}"), is_package=part == "capi")
        raise ModuleNotFoundError(
            f"No module named {fullname!r}: {NAME} is strata.ort here, which has only {NAME}.capi and {NAME}.backend",
            name=fullname,
        )

    def find_distributions(self, context: DistributionFinder.Context = _ANY) -> Iterator[Distribution]:
        if context.name is not None and context.name.lower() == NAME:
            yield _Metadata()


_finder = _Finder()
_replaced: dict[str, ModuleType] = {}


def install() -> None:
    """Make `import onnxruntime` mean strata.ort in this process, whether or not the real one is installed.

    Modules that took names from the real one before keep them.
    """
    if _finder in sys.meta_path:
        return
    for name in [n for n in sys.modules if n == NAME or n.startswith(f"{NAME}.")]:
        _replaced[name] = sys.modules.pop(name)
    sys.meta_path.insert(0, _finder)


def switch_folder() -> Path:
    """A folder that makes a Python program start with `install()`, if it is on its PYTHONPATH."""
    return Path(__file__).resolve().parent / "switch"


def uninstall() -> None:
    """Take it back: the next `import onnxruntime` finds the real one, or none."""
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    for name in [n for n in sys.modules if n == NAME or n.startswith(f"{NAME}.")]:
        del sys.modules[name]
    sys.modules.update(_replaced)
    _replaced.clear()
