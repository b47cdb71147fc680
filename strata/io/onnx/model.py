"""OnnxModel: an ONNX file that runs on arrays of any size it allows.

The whole model is compiled once with symbolic sizes where that is possible. Otherwise it is compiled for the sizes that
come, and models whose shapes depend on data run as several compiled segments with the host in between. What reading a
file gives is kept in the store: a process that finds it there needs nothing of ONNX.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.arguments import hot
from strata.config import config, logger
from strata.core import Dim, Table, give_back, here, located, new_rlock, symbols
from strata.errors import DTypeError, RunError, ShapeError, StrataError, UnknownMethodError, UnknownNameError
from strata.io.onnx.dtypes import TEXT, as_texts
from strata.io.onnx.file import ModelFile
from strata.io.onnx.plans import OnnxPlan, Port, Shapes, samples
from strata.io.onnx.stored import StoredPlan, head_key, plan_key, read_head, read_stored, write_head, write_stored
from strata.mir import Graph, near
from strata.runtime import CompiledGraph, Session, as_given

if TYPE_CHECKING:
    from strata.io.onnx.program import OnnxProgram
    from strata.io.onnx.reading import Reading
    from strata.io.onnx.training import TrainableModel

SYMBOLIC_PLANS = 16
TRIES = 4  # sets of input shapes for which a symbolic plan is looked for though data decide sizes
WORTH_SECONDS = 0.02  # of reading; less is not worth an entry of the store

_Quick = tuple[CompiledGraph, tuple[str, ...] | None]  # with the inputs that it takes, where these are not all


class OnnxModel:
    """`m.run(x=array)` gives a tuple of arrays, one for each output. Safe to call from many threads."""

    def __init__(
        self,
        source: Any,
        *,
        device: str | None = None,
        custom_ops: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.session = Session(device)
        self._lock = new_rlock()
        self._custom = custom_ops
        self._proto = source if hasattr(source, "SerializeToString") else None
        self._file = None if self._proto is not None else ModelFile(source)
        self._read: Reading | None = None
        self._declare()
        self._plans: list[OnnxPlan] = []  # with symbolic sizes
        self._by_signature: Table[Any, OnnxPlan | None] = Table("onnx plans")  # None: run in segments
        self._assumed: set[str] = set()  # inputs whose elements some plan depends on
        self._quick: Table[Any, _Quick] = Table("onnx calls")  # for arrays as they are, by what `_quick_key` says
        self.why_not_symbolic: list[str] = []
        self._tries = TRIES
        self._told: set[str] = set()  # inputs that came in another form than declared

    def _declare(self) -> None:
        """Inputs and outputs, from the store or from the model, which is then read."""
        key = head_key(self._file) if self._file is not None and not self._custom else None
        declared = read_head(key)
        self._is_kept = declared is not None
        if declared is None:
            declared = self.program.declared()
            self._is_kept = key is not None and self.program.decides_all
        self.declared = declared
        self.inputs, self.optional_inputs, self.outputs = declared.inputs, declared.optional_inputs, declared.outputs
        self._dtypes = {p.name: p.dtype for p in self.inputs if p.kind == "tensor"}

    @property
    def program(self) -> OnnxProgram:
        """The model as its file has it."""
        return self._reading.program

    @property
    def _reading(self) -> Reading:
        """Reads the model; made again where it was let go of, once plans were in the store."""
        with self._lock:
            if self._read is None:
                from strata.io.onnx.reading import Reading, read_program

                program = read_program(self._proto if self._file is None else self._file, self._custom)
                self._read = Reading(program, self.session, self._lock)
            return self._read

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says about itself: its `metadata_props`."""
        return dict(self.declared.about.properties)

    if not TYPE_CHECKING:  # names are still checked

        def __getattr__(self, name: str) -> Any:
            """What other models do, and this one does not: it runs on arrays, whatever they stand for."""
            if name in ("embed", "generate", "generate_many"):
                inputs = ", ".join(f"{p.name}=…" for p in self.inputs)
                raise UnknownMethodError(
                    f"{name}: an ONNX model takes arrays and gives arrays, not texts", code="N503", place=here(),
                    fix=f"run({inputs}) on the ids of a tokenizer",
                )  # fmt: skip
            raise AttributeError(f"an OnnxModel has no attribute {name!r}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"<OnnxModel ({', '.join(map(str, self.inputs))}) -> {', '.join(map(str, self.outputs))}>"

    # running

    @hot
    def run(self, feeds: Mapping[str, Any] | None = None, /, **named: Any) -> tuple[Any, ...]:
        """Run on arrays by input name: a tuple of arrays, one for each output (lists for sequences).

        Arrays of PyTorch, JAX or CuPy give results of that library.
        """
        given = named if feeds is None else feeds if type(feeds) is dict and not named else {**feeds, **named}
        quick = self._quick.peek(self._quick_key(given))
        if quick is None:
            arrays = self._checked(given)
            key, plan = self._plan_for(arrays)
        try:
            if quick is not None:
                compiled, names = quick
                return compiled.run(given if names is None else {name: given[name] for name in names})
            if plan is not None:
                self._remember_quick(arrays, plan)
                return as_given(given.values(), plan.run(arrays))
            keep = partial(self._kept, arrays, time.perf_counter(), False)
            results, plan = self._reading.run_sized(key, arrays, keep)
            self._by_signature.put(key, plan)
            return as_given(given.values(), results)
        except StrataError:
            raise
        except (MemoryError, OSError, OverflowError) as error:
            raise RunError(f"the model needs more memory than there is: {error}", place=here()) from error
        except (ValueError, IndexError) as error:
            raise RunError(f"the model does not fit these inputs: {error}", place=here()) from error

    __call__ = run

    def _plan_for(self, arrays: dict[str, Any]) -> tuple[Any, OnnxPlan | None]:
        """What decides the plan of a run, and the plan, made if need be; None where it depends on all sizes."""
        key = self._signature(arrays)
        with self._lock:
            plan = self._by_signature.peek(key)
            if key not in self._by_signature:
                plan = next((p for p in self._plans if p.fits(arrays)), None) or self._made(arrays)
                if plan is not None:
                    self._by_signature.put(self._signature(arrays), plan)
        return key, plan

    def _quick_key(self, given: Mapping[str, Any]) -> Any:
        """Names, shapes, settings and elements that plans depend on; None where not all are arrays as declared."""
        dtypes = self._dtypes
        for name, x in given.items():
            if type(x) is not np.ndarray or x.dtype != dtypes.get(name):
                return None
        shapes = [x.shape for x in given.values()]
        if not self._assumed:
            return (*given, *shapes, config().code_settings)
        return (
            *given,
            *shapes,
            config().code_settings,
            *[given[name].tobytes() for name in sorted(self._assumed) if name in given],
        )

    def _remember_quick(self, arrays: Mapping[str, Any], plan: OnnxPlan) -> None:
        """Runs that need nothing but the compiled graph go there directly from then on."""
        compiled, key = plan.compiled, self._quick_key(arrays)
        if key is None or compiled is None or not compiled.inputs.keys() <= arrays.keys():
            return
        if all(type(x) is int and x == i for i, x in enumerate(plan.outputs)):
            names = None if len(compiled.inputs) == len(arrays) else tuple(compiled.inputs)
            self._quick.put(key, (compiled, names))

    def _checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        ports = {p.name: p for p in (*self.inputs, *self.optional_inputs)}
        for name in given:
            if name not in ports:
                raise UnknownNameError(
                    f"the model has no input {name!r}; it has {', '.join(ports)}{near(name, ports)}",
                    code="N501",
                    place=here(),
                )
        for port in self.inputs:
            if port.name not in given and port.kind != "optional":
                raise UnknownNameError(f"input {port} is missing", code="N501", place=here())
        return {name: self._as_input(ports[name], value) for name, value in given.items()}

    def _as_input(self, port: Port, value: Any) -> Any:
        if value is None or (isinstance(value, (list, tuple)) and port.kind != "tensor"):
            return value if value is None else [None if x is None else self._of_element(port, x) for x in value]
        if port.kind == "map" and isinstance(value, Mapping):
            return _held_map(port, value)
        array = _as_array(port, value)
        if array.dtype.kind in "USO":
            array = as_texts(array) if port.dtype == TEXT else array.astype(object)
        if port.kind == "optional":
            return self._of_element(port, array)
        if port.kind != "tensor":
            raise DTypeError(f"input {port}, got {array.dtype}{list(array.shape)}", code="D501", place=here())
        if port.dtype is not None and array.dtype != port.dtype:
            if not isinstance(value, (bool, int, float, list, tuple)):
                raise DTypeError(f"input {port}, got {array.dtype}{list(array.shape)}", code="D501", place=here())
            array = _converted(port, array)
        if port.shape == () and array.size == 1 and array.ndim:
            if port.name not in self._told:
                self._told.add(port.name)
                logger.warning("input %s, got %s%s: taken as a scalar", port, array.dtype, list(array.shape))
            array = array.reshape(())
        if port.shape is not None and not _fits(array.shape, port.shape):
            raise ShapeError(f"input {port}, got {array.dtype}{list(array.shape)}", code="S501", place=here())
        return array

    def _of_element(self, port: Port, value: Any) -> np.ndarray:
        """An element of a sequence, or what an optional holds: an array of the type that the file says."""
        array = _as_array(port, value)
        if port.dtype == TEXT:
            return as_texts(array)
        if port.dtype is not None and array.dtype != port.dtype and not _is_maps(port):
            if isinstance(value, np.ndarray):
                raise DTypeError(f"input {port}: {port.type_name}, got {array.dtype}", code="D501", place=here())
            array = _converted(port, array)
        return array

    # plans

    def graph(self, hints: Mapping[str, int] | None = None) -> Graph:
        """The model as one graph with symbolic sizes; `hints` decide where the graph depends on them."""
        return self._reading.graph(hints)

    def whole(self) -> tuple[Graph, dict[str, np.ndarray]]:
        """The model as one graph with symbolic sizes, and its parameters."""
        return self._reading.whole()

    @located
    def trainable(self, names: Iterable[str] | None = None) -> TrainableModel:
        """The model as a function of its float initializers, or of some of them, to fine-tune and write back."""
        from strata.io.onnx.training import TrainableModel

        return TrainableModel(self, names)

    @located
    def compiled(self, sizes: Mapping[str, int] | None = None) -> CompiledGraph:
        """The model as one compiled graph with its weights, which can be saved as a bundle.

        `sizes` fixes symbolic sizes; the others stay open.
        """
        known = {name for p in self.inputs for d in p.shape or () for name in symbols(d)}
        for name in sizes or {}:
            if name not in known:
                has = ", ".join(sorted(known)) or "none"
                raise UnknownNameError(f"the model has no symbolic size {name!r}; it has {has}", code="N113")
        return self._reading.compiled(sizes or {})

    @property
    def is_symbolic(self) -> bool:
        """Whether the runs so far were served by graphs with symbolic sizes."""
        return bool(self._plans)

    def _made(self, arrays: Mapping[str, Any]) -> OnnxPlan | None:
        """A plan for arrays that fit none so far: a stored one, or a new one with symbolic sizes, if there is one."""
        found = self._stored(arrays)
        if found is not None:
            self.why_not_symbolic += found.why_not_symbolic
            plan, is_symbolic = found.plan, found.is_symbolic
        else:
            if len(self._plans) >= SYMBOLIC_PLANS or not self._tries:
                return None
            later: list[Callable[[], None]] = []
            keep = partial(self._kept, arrays, time.perf_counter(), True, later=later)
            made = self._reading.symbolic_plan(arrays, keep, self.why_not_symbolic)
            if made is None:
                self._tries -= self._reading.needs_data
                return None
            if later:
                give_back()  # what was read, which nobody holds by now
            for finish in later:
                finish()
            plan, is_symbolic = made, True
        if is_symbolic:
            self._plans.append(plan)
            self._assumed |= set(plan.assumed)
        return plan

    def _stored(self, arrays: Mapping[str, Any]) -> StoredPlan | None:
        key = self._plan_key(arrays)
        if key is None or self._file is None:
            return None
        found = read_stored(key, self._file, self.session, self._again(arrays))
        return found if found is None or not found.is_symbolic or found.plan.fits(arrays) else None

    def _kept(
        self,
        arrays: Mapping[str, Any],
        start: float,
        is_symbolic: bool,
        plan: OnnxPlan,
        params: Mapping[str, np.ndarray],
        *,
        later: list[Callable[[], None]] | None = None,
    ) -> OnnxPlan:
        """The plan with its parameters, in the store as well; what is in the model's file is then read from there.

        `later` takes what is to be done once the caller holds nothing of what was read.
        """
        key = self._plan_key(arrays)
        found: Mapping[str, Any] | None = None
        is_worth_it = time.perf_counter() - start > WORTH_SECONDS and not self.program.has_read_others
        if key is not None and self._file is not None and is_worth_it:
            stored = StoredPlan(plan, is_symbolic, list(self.why_not_symbolic))
            found = write_stored(key, stored, params, self._file, self.program.places(self._file))
        if found is not None and self._file is not None:
            write_head(self._file, self.program.declared())
            self._read = None  # what was read takes several times the memory of the file
        if plan.compiled is not None:
            set_params = partial(plan.compiled.set_params, params if found is None else found)
            if found is None or later is None:
                set_params()
            else:
                later.append(set_params)
        return plan

    def _again(self, arrays: Mapping[str, Any]) -> Callable[[Shapes], Graph]:
        """Makes the graph of a stored plan, for whoever wants to see it."""
        kinds = {name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in arrays.items()} | samples(arrays)
        return lambda shapes: self._reading.graph_again(shapes, kinds)

    def _plan_key(self, arrays: Mapping[str, Any]) -> str | None:
        """Under which the store keeps the plan for inputs of these sizes."""
        if self._file is None or not self._is_kept or not all(isinstance(x, np.ndarray) for x in arrays.values()):
            return None
        elements = [f"{name} {x.tobytes().hex()}" for name, x in sorted(samples(arrays).items())]
        return plan_key(self._file, self.session, f"{_signature(arrays)} {elements}")

    def _signature(self, arrays: Mapping[str, Any]) -> Any:
        """What decides the plan of a run: shapes, settings, and the elements of inputs that a plan depends on."""
        elements = tuple(arrays[name].tobytes() for name in sorted(self._assumed) if name in arrays)
        return _signature(arrays), elements, config().code_settings


def _fits(shape: tuple[int, ...], declared: tuple[Dim, ...]) -> bool:
    """Whether sizes are those that the file declares, as far as it does."""
    return len(shape) == len(declared) and all(
        size == d for size, d in zip(shape, declared, strict=True) if isinstance(d, int)
    )


def _as_array(port: Port, value: Any) -> np.ndarray:
    """A value as an array of its own type. Lists whose parts differ in length are none."""
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ShapeError(f"input {port}: {error}", code="S501", place=here()) from None


def _converted(port: Port, array: np.ndarray) -> np.ndarray:
    """Numbers in the type that the file says."""
    assert port.dtype is not None
    if port.dtype == TEXT:
        return as_texts(array)
    if array.dtype.kind == "c" and port.dtype.kind != "c":
        raise DTypeError(f"input {port}, got {array.dtype}{list(array.shape)}", code="D501", place=here())
    try:
        return array.astype(port.dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise DTypeError(f"input {port}: {error}", code="D501", place=here()) from None


def _is_maps(port: Port) -> bool:
    return "map(" in port.type_name


def _held_map(port: Port, value: Mapping[Any, Any]) -> np.ndarray:
    """A map as one object, whose keys and values have the types that the file says."""
    keys = str if port.type_name.startswith("map(string") else (int, np.integer)
    for key in value:
        if not isinstance(key, keys):
            raise DTypeError(f"input {port.name}: {port.type_name}, got the key {key!r}", code="D501", place=here())
    kind = port.dtype
    convert: Callable[[Any], Any] = str if kind == TEXT else kind.type if kind is not None else lambda x: x
    held = np.empty((), object)
    try:
        held[()] = {key: convert(x) for key, x in value.items()}
    except (TypeError, ValueError) as error:
        raise DTypeError(f"input {port.name}: {port.type_name}: {error}", code="D501", place=here()) from None
    return held


def _signature(x: Any) -> Any:
    if isinstance(x, Mapping):
        return tuple((name, _signature(v)) for name, v in sorted(x.items()))
    if isinstance(x, list):
        return tuple(_signature(v) for v in x)
    return None if x is None else (x.dtype, x.shape)


@located
def load_onnx(
    source: Any, *, device: str | None = None, custom_ops: Mapping[str, Callable[..., Any]] | None = None
) -> OnnxModel:
    """An ONNX model from a path, bytes or a ModelProto. `custom_ops` maps op names to functions of a node."""
    try:
        return OnnxModel(source, device=device, custom_ops=custom_ops)
    except StrataError as error:
        if isinstance(source, (str, os.PathLike)) and os.path.basename(source) not in error.summary:
            error.summary = f"{os.path.basename(source)}: {error.summary}"
            error.args = (error.summary,)
        raise
