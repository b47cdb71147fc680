"""Kernels that people write: what their stores must cover, and loads that stay inside their buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata.errors import RunError, VerifyError
from strata.kernel import check_access, contained, interpret, is_plain, numbered_reads, parse_kernel, verify_kernel


def text(body: str, x: str = "f32[N]", y: str = "f32[N]") -> str:
    lines = "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())
    return (
        f"kernel @k(x: {x}) -> y: {y} {{\n  size M in 0..\n  size N in 0..\n  axis i in N\n  axis j in M\n{lines}\n}}"
    )


GOOD = {
    "in order": ("%0 = x[i]\nstore y[i] = %0 over i", "f32[N]", "f32[N]"),
    "reversed": ("%0 = x[i]\n%1 = sub((N - 1), i)\nstore y[%1] = %0 over i", "f32[N]", "f32[N]"),
    "transposed": ("%0 = x[i, j]\nstore y[j, i] = %0 over i, j", "f32[N, M]", "f32[M, N]"),
    "flattened": (
        "%0 = x[i, j]\n%1 = mul(i, (M))\n%2 = add(%1, j)\nstore y[%2] = %0 over i, j", "f32[N, M]", "f32[M*N]",
    ),
    "woven": (
        "%0 = x[i]\n%1 = mul(i, 2)\n%2 = add(%1, 1)\nstore y[%1] = %0 over i\nstore y[%2] = %0 over i",
        "f32[N]", "f32[2*N]",
    ),
    "joined": ("%0 = x[i]\n%1 = add(i, (N))\nstore y[i] = %0 over i\nstore y[%1] = %0 over i", "f32[N]", "f32[2*N]"),
    "one row": ("%0 = x[i]\nstore y[0, i] = %0 over i", "f32[N]", "f32[1, N]"),
    "nothing": ("store y[] = 1.0:f32", "f32[N]", "f32[]"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_stores_that_write_everything_once(name: str) -> None:
    body, x, y = GOOD[name]
    kernel = parse_kernel(text(body, x, y))
    verify_kernel(kernel)
    check_access(kernel)
    assert is_plain(kernel) == (name in ("in order", "nothing"))
    shape = tuple({"N": 3, "M": 4}[d] for d in x[4:-1].split(", "))
    values = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    (out,) = interpret(kernel, [values], {"N": 3, "M": 4})
    assert (out != 0).all(), "an element that nothing writes is 0"


BAD = {
    "a part only": ("%0 = x[i]\nstore y[i] = %0 over i", "f32[N]", "f32[N + 1]", "write N of the N \\+ 1 elements"),
    "nothing at all": ("%0 = x[i]", "f32[N]", "f32[N]", "write 0 of the N elements"),
    "one element often": ("%0 = x[i]\nstore y[0] = %0 over i", "f32[N]", "f32[1]", "one element several times"),
    "a diagonal": ("%0 = x[i]\nstore y[i, i] = %0 over i", "f32[N]", "f32[N, N]", "one element several times"),
    "overlapping": (
        "%0 = x[i]\n%1 = add(i, 1)\nstore y[i] = %0 over i\nstore y[%1] = %0 over i", "f32[N]", "f32[2*N]", "goes to",
    ),
    "twice": ("%0 = x[i]\nstore y[i] = %0 over i\nstore y[i] = %0 over i", "f32[N]", "f32[2*N]", "the same element"),
    "outside": ("%0 = x[i]\n%1 = add(i, 1)\nstore y[%1] = %0 over i", "f32[N]", "f32[N]", "goes to 1..N of 0..N - 1"),
    "by a number": ("%0 = x[i]\nstore y[%0] = i over i", "i64[N]", "i64[N]", "not a sum of axes"),
    "a load outside": ("%1 = add(i, 1)\n%0 = x[%1]\nstore y[i] = %0 over i", "f32[N]", "f32[N]", "reads at 1..N"),
    "a scan": (
        "%0 = x[j]\n%1 = scan sum %0 over j through i\nstore y[i] = %1 over i", "f32[M]", "f32[N]", "not read along",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_stores_and_loads_that_are_refused(name: str) -> None:
    body, x, y, message = BAD[name]
    kernel = parse_kernel(text(body, x, y))
    verify_kernel(kernel)
    with pytest.raises(VerifyError, match=message):
        check_access(kernel)


def test_reductions_inside_each_other_are_limited() -> None:
    lines = ["%0 = x[i]", *(f"%{n} = sum %{n - 1} over i" for n in range(1, 19)), "store y[] = %18"]
    with pytest.raises(VerifyError, match="more than 16 reductions"):
        check_access(parse_kernel(text("\n".join(lines), y="f32[]")))


GUARDS = {
    "shown by a condition": ("%0 = sub(i, 1)\n%1 = ge(%0, 0)", "%0", "%1", True),
    "shown by two": ("%0 = add(i, -2)\n%1 = ge(%0, 0)\n%2 = lt(%0, (N))\n%3 = and(%1, %2)", "%0", "%3", True),
    "shown by not": ("%0 = sub(i, 1)\n%1 = lt(%0, 0)\n%2 = not(%1)", "%0", "%2", True),
    "another condition": ("%0 = sub(i, 1)\n%1 = lt(i, 3)", "%0", "%1", False),
    "a remainder": ("%0 = add(i, 5)\n%1 = mod(%0, (N))\n%2 = lt(i, 3)", "%1", "%2", True),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_load_is_clamped_unless_it_is_known_to_stay_inside(name: str) -> None:
    lines, index, where, is_known = GUARDS[name]
    kernel = parse_kernel(text(f"{lines}\n%9 = x[{index}] where {where}\nstore y[i] = %9 over i"))
    check_access(kernel)
    safe = contained(kernel)
    assert (safe == kernel) == is_known
    for size in (0, 1, 2, 7):
        x = np.arange(1, size + 1, dtype=np.float32)
        (out,) = interpret(safe, [x])
        try:
            (expected,) = interpret(kernel, [x])
        except RunError:
            assert not is_known
        else:
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("size", [0, 1, 5])
def test_an_index_out_of_range_becomes_the_nearest_one(size: int) -> None:
    kernel = parse_kernel(
        text("%0 = x[i]\n%1 = cast.i64(%0)\n%2 = x[%1]\nstore y[i] = %2 over i", x="f64[N]", y="f64[N]")
    )
    check_access(kernel)
    x = np.arange(size, dtype=np.float64) * 3 - 4
    (out,) = interpret(contained(kernel), [x])
    np.testing.assert_array_equal(out, x[np.clip(x.astype(int), 0, max(size - 1, 0))])
    if size > 1:
        with pytest.raises(RunError, match=r"index -4 is outside 0\.\.4"):
            interpret(kernel, [x])


def test_indices_can_be_computed_apart() -> None:
    """So that they can be checked in between."""
    kernel: Any = parse_kernel(
        text("%0 = x[i]\n%1 = lt(%0, 9)\n%2 = x[%0] where %1\nstore y[i] = %2 over i", x="i64[N]", y="i64[N]")
    )
    found = numbered_reads(kernel)
    assert found is not None
    indices, extents, reader = found
    x = np.array([2, 0, 1, 11])
    (places,) = interpret(indices, [x])
    assert [str(e) for e in extents] == ["N"]
    assert places[:3].tolist() == [2, 0, 1]
    assert places[3] < 0, "not read"
    np.testing.assert_array_equal(interpret(reader, [x, places])[0], [1, 2, 0, 0])
    assert numbered_reads(parse_kernel(text(*GOOD["woven"]))) is None
