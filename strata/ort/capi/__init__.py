"""onnxruntime's inner package, for programs that take exceptions and classes from it."""

from strata.ort.capi import onnxruntime_inference_collection, onnxruntime_pybind11_state

__all__ = ["onnxruntime_inference_collection", "onnxruntime_pybind11_state"]
