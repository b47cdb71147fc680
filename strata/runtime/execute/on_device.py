"""Runs on a device with its own memory: arrays that are there stay there, and nothing waits.

NumPy in means NumPy out. Where an input is on the device, or is an array of another library, so are the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.backends import DeviceArray, Entry
from strata.config import config
from strata.core import here
from strata.errors import ShapeError
from strata.lir import Spread
from strata.runtime.execute.arrays import check_output, describe, kept_apart
from strata.runtime.execute.feeds import by_name, check_outputs, check_params, read_input, refuse_extra
from strata.runtime.execute.foreign import TorchResults, Wrap, gathered
from strata.runtime.report.observe import OBSERVERS, run_observed

if TYPE_CHECKING:
    from strata.runtime.execute.compiled import CompiledGraph


def run_on_device(
    graph: CompiledGraph, given: Mapping[str, Any], over: Mapping[int, Any] | None = None
) -> tuple[Any, ...]:
    """What `run` does, for a graph whose device has its own memory."""
    enter = graph._executable.resident_entry
    if enter is not None and over is None and not OBSERVERS and not graph._missing:
        entered = _entered(graph, given, enter)
        if entered is not None:
            return entered
    arrays, wrap = _gathered(graph, given)
    if isinstance(wrap, TorchResults) and over is None:
        over = _torch_targets(graph, arrays, wrap)
    made = run_arrays(graph, arrays, over, resident=wrap is not None)
    return tuple(made) if wrap is None else wrap(made)


def _torch_targets(graph: CompiledGraph, arrays: Sequence[Any], wrap: TorchResults) -> dict[int, DeviceArray]:
    try:
        return wrap.targets(graph._makers if graph._is_static else graph._sized(arrays)[1])
    except Spread:  # another program runs instead
        return {}


def _entered(graph: CompiledGraph, given: Mapping[str, Any], enter: Entry) -> tuple[Any, ...] | None:
    """The short way, for tensors and arrays that are on the device; None where it is not for these."""
    fast = graph._fast
    if type(given) is not dict or len(given) != len(fast):
        return None
    arrays: list[DeviceArray] = []
    wrap: Any = None
    for name, dtype, shape in fast:
        value = given.get(name)
        if type(value) is not DeviceArray:
            find = getattr(value, "__resident__", None)
            if find is None:
                return None
            value, wrap = find()
        if type(value) is not DeviceArray or value.shape != shape or value.dtype != dtype:
            return None
        arrays.append(value)
    made = enter(arrays, None)
    return None if made is None else (wrap or tuple)(made)


def run_resident(
    graph: CompiledGraph, given: Mapping[str, Any], over: Mapping[int, Any] | None = None
) -> list[DeviceArray]:
    """The results in the device's memory, wherever the inputs are."""
    return run_arrays(graph, _gathered(graph, given)[0], over, resident=True)


def _gathered(graph: CompiledGraph, given: Mapping[str, Any]) -> tuple[list[Any], Wrap | None]:
    """Arrays in the order of the inputs: all that are missing, and all that are too many, are errors."""
    check_params(graph)
    named = by_name(graph, given)
    home = graph._home
    assert home is not None
    for at, (name, _) in enumerate(graph._inputs):
        if named.get(name) is None:
            read_input(graph, name, None, at)
    found = gathered(graph._inputs, named.get, home)
    if len(named) != len(found[0]):
        refuse_extra(graph, named)
    return found


def run_arrays(
    graph: CompiledGraph, arrays: Sequence[Any], over: Mapping[int, Any] | None, *, resident: bool
) -> list[Any]:
    """Run on arrays in the order of the inputs, of their types."""
    executable = graph._executable
    if graph._is_static:
        binding, makers = _NO_SIZES, graph._makers
    else:
        try:
            binding, makers = graph._sized(arrays)
        except Spread as spread:
            return run_arrays(graph._form(spread), arrays, None, resident=resident)
    if resident and not OBSERVERS:
        enter = executable.resident_entry
        entered = None if enter is None else enter(arrays, over)
        if entered is not None:
            return entered
        return executable.run_resident(arrays, binding, over)
    given = {} if resident or over is None else over
    outputs: list[Any] = [
        given[i] if i in given else make(shape, dtype) for i, (make, shape, dtype) in enumerate(makers)
    ]
    threads = graph._threads_option or config().num_threads
    if OBSERVERS:
        run_observed(graph, [np.asarray(a) for a in arrays], outputs, binding, threads)
    else:
        executable.run(arrays, outputs, binding, threads)
    graph._last = outputs
    if resident:
        home = graph._home
        assert home is not None
        return [home.upload(a, graph.name) for a in outputs]
    return outputs


def run_with_state(graph: CompiledGraph, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A run of a graph that keeps values between runs, on the device; the graph's lock is held.

    Outputs that are fed back are given as they are, on the device: who wants them on the host reads them."""
    state = graph._state
    assert state is not None
    named = by_name(graph, given)
    arrays, _ = _gathered(graph, {**state.values, **named})
    wrap = gathered([(n, t) for n, t in graph._inputs if n in named], named.get, graph._home)[1]  # type: ignore[arg-type]
    over = state.over(arrays)
    made = run_arrays(graph, arrays, over, resident=True)
    kept = state.take(made)
    if wrap is not None:
        return wrap(kept)
    return tuple(x if state.is_fed(i) else x.numpy() for i, x in enumerate(kept))


def _check_targets(graph: CompiledGraph, out: Sequence[Any], binding: Mapping[str, int], makers: Sequence[Any]) -> None:
    """Refuse arrays that results cannot be written into."""
    if len(out) != len(makers):
        check_outputs(graph, out, binding, makers)
    for i, (x, (_, shape, dtype)) in enumerate(zip(out, makers, strict=True)):
        if not isinstance(x, DeviceArray):
            check_output(i, graph._outputs[i].bind(binding), x)
        elif x.shape != shape or x.dtype != dtype or x.home is not graph._home:
            kind = graph._outputs[i].bind(binding)
            raise ShapeError(f"output {i} is {kind}, got {describe(x)} on {str(x.device)!r}", code="S107", place=here())


def _free(graph: CompiledGraph, arrays: Sequence[Any], out: Sequence[Any]) -> dict[int, DeviceArray]:
    """Arrays that outputs can be written to at once: no input is there, or one that the plan changes in place."""
    users: dict[int, list[int]] = {}
    for i, x in enumerate(arrays):
        if isinstance(x, DeviceArray):
            users.setdefault(id(x.block), []).append(i)
    found: dict[int, DeviceArray] = {}
    for output, target in enumerate(out):
        if isinstance(target, DeviceArray):
            at = users.get(id(target.block), ())
            if not at or (len(at) == 1 and graph.takes_over(graph._inputs[at[0]][0], output)):
                found[output] = target
    return found


_NO_SIZES: Mapping[str, int] = {}


def run_into(graph: CompiledGraph, feeds: Mapping[str, Any], out: Sequence[Any]) -> None:
    """Run into arrays of the host, or of the device; results that are not there yet are copied."""
    state = graph._state if graph._is_special else None
    given = by_name(graph, feeds)
    arrays, _ = _gathered(graph, given if state is None else {**state.values, **given})
    binding, makers = (_NO_SIZES, graph._makers) if graph._is_static else graph.sized(arrays)
    threads = graph._threads_option or config().num_threads
    _check_targets(graph, out, binding, makers)
    outputs = [x for x in out if not isinstance(x, DeviceArray)]
    kept_apart([], outputs, lambda at, output: False)  # outputs that overlap are refused
    if any(isinstance(x, DeviceArray) for x in out):
        over = _free(graph, arrays, out)
        for i, result in enumerate(run_arrays(graph, arrays, over, resident=True)):
            target = out[i]
            if isinstance(target, np.ndarray):
                result.home.download(result, target)
            elif target is not result:
                target.home.assign(target, result)
    elif OBSERVERS:
        run_observed(graph, [np.asarray(a) for a in arrays], outputs, binding, threads)
    else:
        graph._run(arrays, outputs, binding, threads)
    if state is not None:
        state.copy_from([np.asarray(x) for x in out])
