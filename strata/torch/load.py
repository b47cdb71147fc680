"""Programs of `torch.export` as graphs and models of ours: torch is not needed to run them afterwards."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from strata.config import using
from strata.core import here
from strata.errors import FileError, LowerError, MissingFileError, OptionError
from strata.kinds import counted
from strata.mir import Graph
from strata.models import Model
from strata.runtime import CompiledGraph, CompileOptions, Session
from strata.torch.backend import decompositions
from strata.torch.convert import Conversion, Drawn, Length, TensorInput, convert
from strata.torch.kinds import to_array
from strata.torch.program import size_of
from strata.torch.results import Result, SizeResult


class TorchModel(Model):
    """An exported program. `run(x=array)` or a call with arrays in order; arrays by output name come back.

    `program` is its graph and `params` the arrays of its parameters and buffers. Buffers that the program changes are
    kept from run to run, and arrays of inputs that it changes are written, as they are in torch.
    """

    def __init__(
        self, compiled: CompiledGraph, names: Sequence[str], params: Mapping[str, np.ndarray], shown: Sequence[Any],
        state: Sequence[str] = (), sizes: Mapping[str, tuple[str, int]] | None = None,
        changed: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(compiled, tuple(names))
        self.params, self._shown, self._state = dict(params), tuple(shown), frozenset(state)
        self._changed = dict(changed or {})  # inputs that the program changes, and the results that they become
        self._sizes = dict(sizes or {})  # by symbol, an input and the axis that has it

    @property
    def inputs(self) -> dict[str, str]:
        """Input names and types."""
        return {name: kind for name, kind in super().inputs.items() if name not in self._state}

    @property
    def program(self) -> Graph:
        """The graph that was compiled, before any pass."""
        return self.graph.source

    def run(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Run on arrays by input name; gives arrays by output name: torch's where torch's are given."""
        made = self.graph.run(arrays)
        for name, at in self._changed.items():
            _write(arrays[name], made[at])
        return {name: self._arranged(made, r, arrays) for name, r in zip(self.outputs, self._shown, strict=True)}

    def _arranged(self, made: Sequence[np.ndarray], result: Any, arrays: Mapping[str, Any]) -> Any:
        if isinstance(result, SizeResult):
            return size_of(result.dim, {s: np.shape(arrays[name])[axis] for s, (name, axis) in self._sizes.items()})
        return made[result.at] if isinstance(result, Result) else None

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Arrays in the order of the inputs; the one result, or a tuple."""
        if len(arrays) > len(self.inputs):
            raise OptionError(
                f"the model takes {counted(len(self.inputs), 'input')}, got {len(arrays)}", code="O661", place=here()
            )
        made = tuple(self.run(**dict(zip(self.inputs, arrays, strict=False)), **named).values())
        return made[0] if len(made) == 1 else made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a bundle, which `strata.load_compiled` runs."""
        self.graph.save(path)


def _write(to: Any, made: Any) -> None:
    """A new value for an array that was given, torch's or NumPy's; what has no memory of its own keeps no trace."""
    if isinstance(to, torch.Tensor):
        to.detach().copy_(torch.as_tensor(made))
    elif isinstance(to, np.ndarray):
        np.copyto(to, np.asarray(made))


def load(
    program: Any, example_inputs: Any = None, *, kwargs: Mapping[str, Any] | None = None, dynamic_shapes: Any = None,
    device: str = "cpu", options: CompileOptions | None = None,
) -> TorchModel:  # fmt: skip
    """A model from an exported program, a `.pt2` file, or a module with example inputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's export warns of torch's own pytrees
        exported = _exported(program, example_inputs, kwargs, dynamic_shapes)
        exported = exported.run_decompositions(decompositions())
    is_file = isinstance(program, (str, os.PathLike))
    signature = exported.graph_signature
    changed = set(signature.buffers_to_mutate.values())
    kept: dict[int, tuple[str, np.ndarray]] = {}
    state: dict[str, int] = {}
    for at, spec in enumerate(signature.input_specs):
        if spec.target is None:
            continue
        held = exported.state_dict if spec.target in exported.state_dict else exported.constants
        if not isinstance(held.get(spec.target), torch.Tensor):
            raise LowerError(f"{spec.target} is not a tensor, so it cannot leave torch", code="L660", place=here())
        array = to_array(held[spec.target].detach().contiguous())
        kept[at] = spec.target, array if is_file else array.copy()  # the module goes on, and may be trained
        if spec.target in changed:
            state[spec.target] = at
    bound = frozenset(at for at, (name, _) in kept.items() if name not in state)
    ranges = {str(symbol): bounds for symbol, bounds in exported.range_constraints.items()}
    names = {at: name for at, (name, _) in kept.items()}
    made = convert(exported.graph_module, "model", bound, names, ranges, plain=True)
    if made.unsupported:
        node, reason = next(iter(made.unsupported.items()))
        raise LowerError(
            f"{node.target} would stay in torch: {reason} ({len(made.unsupported)} such in this graph)",
            code="L660",
            place=here(),
        )
    for source in made.inputs:
        if isinstance(source, Drawn):
            raise LowerError(
                f"{source.name.removesuffix('_drawn')} takes numbers from torch's generator, which is not there when "
                "the model runs; export the module in eval mode, or give it the numbers as an input",
                code="L660",
                place=here(),
            )
    return _model(exported, made, kept, state, Session(device, options))


def _model(
    exported: Any, made: Conversion, kept: dict[int, tuple[str, np.ndarray]], state: dict[str, int], session: Session
) -> TorchModel:
    if made.graph is None:
        raise LowerError("the program computes nothing: its results are its inputs", code="L660", place=here())
    with using(check_indices=True):
        compiled = session.compile(made.graph)
    params = {}
    for source in (*made.params, *made.inputs):
        if isinstance(source, TensorInput) and source.at in kept:
            name, array = kept[source.at]
            if name in state:
                compiled.bind(name, array)
            else:
                params[name] = array if source.order is None else np.ascontiguousarray(array.transpose(source.order))
    compiled.set_params(params)
    specs = exported.graph_signature.output_specs
    shown: list[Any] = []
    names: list[str] = []
    written: dict[str, int] = {}
    for spec, result in zip(specs, made.results, strict=True):
        if spec.kind.name == "BUFFER_MUTATION":
            if isinstance(result, Result):
                compiled.feed(spec.target, result.at)
            continue
        if spec.kind.name == "USER_INPUT_MUTATION":
            if isinstance(result, Result):
                written[spec.target] = result.at
            continue
        shown.append(result)
        names.append(getattr(spec.arg, "name", f"output_{len(names)}"))
    named = _keys(exported, len(shown))
    sources = {source.at: source.name for source in made.inputs if isinstance(source, (TensorInput, Length))}
    sizes = {symbol: (sources[at], max(axis, 0)) for symbol, at, axis in reversed(made.sizes) if at in sources}
    return TorchModel(compiled, named or _distinct(names), params, shown, list(state), sizes, written)


def _keys(exported: Any, count: int) -> list[str] | None:
    """Names of results that a dictionary, or a class like one, gives them."""
    spec = exported.call_spec.out_spec
    found = spec.context if spec is not None else None
    keys = found[0] if isinstance(found, list) and found and isinstance(found[0], list) else found
    if isinstance(keys, list) and len(keys) == count and all(isinstance(k, str) for k in keys):
        return keys
    return None


def _distinct(names: Sequence[str]) -> list[str]:
    return [name if name not in names[:i] else f"{name}_{i}" for i, name in enumerate(names)]


def _exported(program: Any, example_inputs: Any, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any) -> Any:
    from torch.export import ExportedProgram, export
    from torch.export import load as load_file

    if isinstance(program, ExportedProgram):
        return program
    if isinstance(program, (str, os.PathLike)):
        if not os.path.isfile(program):
            raise MissingFileError(f"there is no file {os.fspath(program)}", code="F660", place=here())
        log = logging.getLogger("torch.export")
        quiet, log.disabled = log.disabled, True  # it writes the traceback of what is raised here
        try:
            return load_file(program)
        except Exception as error:  # noqa: BLE001 - of any class, by what is damaged
            told = "torch cannot read it" if "warnings above" in str(error) else str(error) or type(error).__name__
            reason = " ".join(told.split())[:200]
            raise FileError(
                f"{os.fspath(program)} is not an exported program: {reason}", code="F660", place=here()
            ) from None
        finally:
            log.disabled = quiet
    if isinstance(program, torch.nn.Module):
        if example_inputs is None and kwargs is None:
            raise OptionError(
                "a module needs example_inputs, from which torch.export traces it", code="O661", place=here()
            )
        args = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
        if example_inputs is None:
            args = ()
        return export(program, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
    raise OptionError(
        f"load takes a module, an exported program or a .pt2 file, got {type(program).__name__}",
        code="O661",
        place=here(),
    )
