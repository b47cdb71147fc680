"""Every op of the catalogue, a family a file, and the front-end functions that apply them to values.

`strata.ops.<name>` is the function of that name, whichever family it lives in; so is `value.<name>(...)`.
"""

from collections.abc import Callable
from typing import Any

from strata.mir import METHODS, near
from strata.ops import activation as _activation
from strata.ops import attention as _attention
from strata.ops import attention_functions as _attention_functions
from strata.ops import complex as _complex
from strata.ops import conv as _conv
from strata.ops import conv_last as _conv_last
from strata.ops import cumulative, elementwise, logic, movement, reduce, scanning
from strata.ops import grid as _grid
from strata.ops import indexing, moving_window, numeric, scattering, sorting, subscript
from strata.ops import einsum as _einsum
from strata.ops import factorize as _factorize
from strata.ops import fft as _fft
from strata.ops import linalg as _linalg
from strata.ops import math as _math
from strata.ops import matmul as _matmul
from strata.ops import fused, fused_blocks, losses, norm, norm_gradients
from strata.ops import pool as _pool
from strata.ops import pool_functions as _pool_functions
from strata.ops import resize as _resize
from strata.ops import rnn as _rnn
from strata.ops import rope as _rope
from strata.ops import signal as _signal
from strata.ops import softmax as _softmax
from strata.ops import solve as _solve
from strata.ops import spectral as _spectral
from strata.ops import windows as _windows
from strata.ops.branching import Cond, cond
from strata.ops import sequence as _sequence
from strata.ops import random as _random
from strata.ops import sampling as _sampling
from strata.ops.arrange import arange, eye, linspace, tri
from strata.ops.custom import (
    Custom,
    CustomFn,
    Extension,
    Extensions,
    custom,
    custom_fn,
    extensions,
    require_no_traced_captures,
)
from strata.ops import dequant as _dequant
from strata.ops import moe as _moe
from strata.ops import quantize as _quantize
from strata.ops import fake_quantize as _fake_quantize
from strata.ops.elementwise import accepts
from strata.ops.looping import While, scan, scan_backward, scan_carry, while_loop
from strata.ops.fft import fftfreq, hann_window, rfftfreq
from strata.ops.movement import full, iota, ones, zeros
from strata.ops.pruning import prune
from strata.ops.remat import Checkpoint, checkpoint
from strata.ops.scanning import Scan
from strata.ops.tracing import make_graph, numbered, outer_values, trace_body
from strata.ops.signal import blackman_window, hamming_window, mel_weight_matrix


for _name in [name for name in globals() if name in METHODS]:  # a function hides the module of its own name
    globals()[_name] = METHODS[_name]


def __getattr__(name: str) -> Callable[..., Any]:
    if name in METHODS:
        return METHODS[name]
    raise AttributeError(f"strata.ops has no function {name!r}{near(name, METHODS)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *METHODS})
