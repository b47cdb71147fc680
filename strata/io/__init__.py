"""Files in and out: safetensors, GGUF, ONNX. Parsers are bounded, and nothing in a file is ever executed."""

from strata.io.gguf import GgufFile, GgufTensor, load_gguf, quantized_tensor, save_gguf
from strata.io.safetensors import TensorFile, load_safetensors, save_safetensors
