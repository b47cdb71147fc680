"""The gradient of a program as one of its steps, in the namespace of graph values or of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import strata.tensor as tensors
from strata import ops
from strata.mir import pullback

if TYPE_CHECKING:
    from tests.differential.program import Program


def pulled_back(base: Program, leaves: Sequence[Any], space: Any) -> list[Any]:
    """The outputs of a program, which are inexact; and of their weighted sum the gradient for every inexact leaf."""
    wanted = [i for i, leaf in enumerate(base.leaves) if leaf.dtype.is_inexact]

    def outputs(*given: Any) -> list[Any]:
        values = list(leaves)
        for i, x in zip(wanted, given, strict=True):
            values[i] = x
        base.replay(values, space)
        return [values[i] for i in base.outputs]

    given = [leaves[i] for i in wanted]
    if space is not ops:
        made, pull = tensors.vjp(outputs, *given)
        return [*made, *pull([weights(y, space) for y in made])]
    made = outputs(*given)
    grads = pullback(made, [weights(y, space) for y in made], given)
    return [*made, *(ops.zeros_like(x) if g is None else g for g, x in zip(grads, given, strict=True))]


def weights(y: Any, space: Any) -> Any:
    """Numbers in the shape of a value that are none of 0 and exact in every type: -1.5, -0.5, 0.5 and 1.5."""
    places = space.zeros(y.shape, "i64")
    for axis, size in enumerate(y.shape):
        ramp = space.reshape(space.arange(0, size), [size if a == axis else 1 for a in range(len(y.shape))])
        places = places + ramp * (axis + 1)
    return space.cast(space.cast(places % 4, "f32") - 1.5, y.dtype)
