"""Python imports this when it starts, if its folder is on the path: `import onnxruntime` is strata.ort from then on.

`strata exec` puts the folder on PYTHONPATH. A sitecustomize that is further down the path runs as well.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from strata.ort.installing import install

install()
_here = Path(__file__).resolve().parent
_spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if p and Path(p).resolve() != _here])
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(module_from_spec(_spec))
