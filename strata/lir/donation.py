"""Buffer donation: where a plan may write a result over an argument that its caller gives up."""

from __future__ import annotations

from strata.kernel import Axis, Expr, Load, Scan, postorder
from strata.lir.ir import Lir, Step


def may_take_over(lir: Lir, name: str, output: int) -> bool:
    """Whether an output may be written where an input lies: nothing reads the input once writing has begun.

    The step that writes may itself read it: an update starts from it, and a kernel computes each element before it
    stores it, so that reads at the element's own index come first; epilogues of matmuls, too, read beside their sums.
    """
    source, result = dict(lir.io.inputs)[name], lir.io.outputs[output]
    if source in lir.io.outputs or lir.io.outputs.count(result) != 1 or lir.buffer(result).role != "result":
        return False
    if lir.buffer(source).type != lir.buffer(result).type:
        return False
    at = next(i for i, step in enumerate(lir.schedule) if result in step.outputs)
    readers = [i for i, step in enumerate(lir.schedule) if source in step.read_buffers]
    if any(i > at for i in readers):
        return False
    return at not in readers or _reads_before_it_writes(lir.schedule[at], source, result)


def _reads_before_it_writes(step: Step, source: str, result: str) -> bool:
    starts = [made for made, start in step.updates if start == source]
    if starts:
        return starts == [result] and source not in step.inputs
    if step.kernel is None or step.updates or step.slides is not None:
        return False
    stores = step.kernel.stores
    exprs = postorder([s.value for s in stores])
    same_points = len({s.axes for s in stores}) == 1 and all(tuple(s.index) == tuple(s.axes) for s in stores)
    if not same_points or any(isinstance(e, Scan) for e in exprs):
        return False
    names = {b.name for b, given in zip(step.kernel.inputs, step.inputs, strict=True) if given == source}
    here = stores[0].axes
    return all(_is_at(e.index, here) for e in exprs if isinstance(e, Load) and e.buffer.name in names)


def _is_at(index: tuple[Expr, ...], axes: tuple[Axis, ...]) -> bool:
    """Whether an element is read at the point itself; along an axis of size 1 there is no other."""
    return all(i is axis or axis.extent == 1 for i, axis in zip(index, axes, strict=True))
