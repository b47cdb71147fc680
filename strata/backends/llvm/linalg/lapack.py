"""LAPACK routines by address, through the pointers that SciPy exports, and their workspace sizes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from strata.core import DType

_PREFIX = {"f32": "s", "f64": "d", "c64": "c", "c128": "z"}
_COMPLEX = {"orgqr": "ungqr", "syevd": "heevd"}


def routine(name: str, dtype: DType) -> int:
    """The address of a routine for a type, named after its real form."""
    return _address(_PREFIX[dtype.name] + (_COMPLEX.get(name, name) if dtype.is_complex else name))


@cache
def _address(name: str) -> int:
    import scipy.linalg.cython_lapack as lapack  # takes long to import, and most programs need none of it

    capsule = lapack.__pyx_capi__[name]
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = (
        ctypes.c_void_p,
        [ctypes.py_object, ctypes.c_char_p],
    )
    return int(api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule)))


# lock, callers inside, threads to go back to: see `matrices`. One for the process, like the setting it guards
THREADS_GUARD = np.zeros(8, np.int64)


@cache
def thread_functions() -> tuple[int, int]:
    """OpenBLAS' functions that read and set its number of threads; 0 where SciPy brings another library."""
    import scipy.linalg.cython_lapack

    for path in sorted((Path(scipy.__file__).parents[1] / "scipy.libs").glob("*openblas*")):
        library = ctypes.CDLL(str(path))  # loaded already: this only looks it up
        for prefix in ("scipy_openblas", "openblas"):
            names = (f"{prefix}_get_num_threads", f"{prefix}_set_num_threads")
            if all(hasattr(library, name) for name in names):
                read, write = (ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names)
                return read, write
    return 0, 0


@cache
def work_size(name: str, dtype: DType, letters: str, sizes: tuple[int, ...]) -> tuple[int, int, int]:
    """What a routine says it needs for its letters and numbers: elements of work, of real work and of integer work."""
    void = ctypes.c_void_p
    work, real, whole = np.zeros(2, dtype.np), np.zeros(2, np.float64), np.zeros(2, np.int32)
    integers = [ctypes.c_int(n) for n in sizes]
    characters = [ctypes.c_char(c.encode()) for c in letters]
    minus, info = ctypes.c_int(-1), ctypes.c_int()
    n = [ctypes.addressof(i) for i in integers]
    c = [ctypes.addressof(i) for i in characters]
    w, r, i, query, status = (
        work.ctypes.data,
        real.ctypes.data,
        whole.ctypes.data,
        ctypes.addressof(minus),
        ctypes.addressof(info),
    )
    match name:
        case "geqrf":  # m n a lda tau work lwork info
            arguments = [n[0], n[1], w, n[2], w, w, query, status]
        case "orgqr":  # m n k a lda tau work lwork info
            arguments = [n[0], n[1], n[2], w, n[3], w, w, query, status]
        case "gesdd":  # jobz m n a lda s u ldu vt ldvt work lwork [rwork] iwork info
            tail = [r, i] if dtype.is_complex else [i]
            arguments = [c[0], n[0], n[1], w, n[2], r, w, n[3], w, n[4], w, query, *tail, status]
        case _:  # jobz uplo n a lda w work lwork [rwork lrwork] iwork liwork info
            middle = [r, query] if dtype.is_complex else []
            arguments = [c[0], c[1], n[0], w, n[1], r, w, query, *middle, i, query, status]
    ctypes.CFUNCTYPE(None, *[void] * len(arguments))(routine(name, dtype))(*arguments)
    assert info.value == 0, f"{name}: query for {sizes} gives {info.value}"
    found = int(work[0].real)
    if name == "gesdd":
        low, high = sorted(sizes[:2])
        real_size = max(5 * low * low + 5 * low, 2 * high * low + 2 * low * low + low) + 7 * low  # as its page says
        return found, real_size if dtype.is_complex else 0, 8 * low
    if name == "syevd":
        real_size = np.frombuffer(real.tobytes(), dtype.real.np)[0]
        return found, int(real_size) if dtype.is_complex else 0, int(whole[0])
    return found, 0, 0
