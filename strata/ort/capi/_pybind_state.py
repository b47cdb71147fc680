"""The extension module under its private name, which some programs use."""

from strata.ort.capi.onnxruntime_pybind11_state import *  # noqa: F403 - the same names
