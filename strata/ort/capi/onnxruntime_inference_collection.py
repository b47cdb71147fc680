"""Sessions and values under the name of onnxruntime's module of them."""

from strata.ort.binding import IOBinding
from strata.ort.session import InferenceSession
from strata.ort.values import OrtDevice, OrtValue

Session = InferenceSession

__all__ = ["IOBinding", "InferenceSession", "OrtDevice", "OrtValue", "Session"]
