"""CompiledGraph: a graph ready to run, with its parameters. One may be called from many threads at once."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from strata.arguments import hot, public, refused, signed, too_many, untouched
from strata.backends import DeviceHome, Executable, FastCall
from strata.config import config
from strata.core import SharedThreads, Table, folded, here, new_rlock
from strata.errors import OptionError, UnknownNameError
from strata.kinds import with_article
from strata.lir import Lir, RuleCheck, SizeCheck, Spread
from strata.mir import Graph, infer_binding, leaf_name, near, some_of
from strata.runtime.compile.options import CompileOptions
from strata.runtime.execute import on_device
from strata.runtime.execute.arrays import USABLE, StoredArray, kept_apart, signature
from strata.runtime.execute.extent import Extents, is_remembered
from strata.runtime.execute.feeds import by_name, check_outputs, check_params, read_input, refuse_extra, sizes, together
from strata.runtime.execute.foreign import like_first, read_param
from strata.runtime.execute.memory import MemoryReport, makers_of
from strata.runtime.execute.state import GraphState, updates_in_place
from strata.runtime.report.observe import OBSERVERS, run_observed

if TYPE_CHECKING:
    from strata.runtime.report.profile import Profile

MOST_FORMS = 8  # other programs for calls where a symbol is 1 and broadcast

_ABSENT: Any = None
_background = SharedThreads(4, "strata-submit")


@public
@hot
class CompiledGraph:
    """Made by `Session.compile`. `run(x=array)` gives a tuple of arrays, one for each output.

    Arrays that are contiguous and of the declared type are read in place; results are new arrays. Parameters are
    kept until they are set again; they are not copied, so an array given as a parameter must not be changed afterwards.
    """

    def __init__(
        self,
        lir: Lir,
        executable: Executable,
        options: CompileOptions,
        recompile: Callable[[Graph, CompileOptions], CompiledGraph],
        *,
        source: Graph | None = None,
        device: str = "cpu",
        replan: Callable[[], Lir] | None = None,
        checks: tuple[SizeCheck | RuleCheck, ...] | None = None,
        again: Callable[[Mapping[str, int]], CompiledGraph] | None = None,
    ) -> None:
        """`recompile` compiles programs that are like this one; `replan` makes the whole plan where `lir`, read from a
        cache, has only what running needs.

        `checks` are those of the source, where they are known without it; `again` compiles it with symbols as numbers.
        """
        self.options, self.device = options, device
        self.source = source if source is not None else lir.graph
        self._lir, self._replan = lir, replan
        self._inputs = tuple((leaf_name(x), x.type) for x in lir.graph.inputs)
        self._params = {leaf_name(x): x.type for x in lir.graph.params}
        self._outputs = tuple(lir.buffer(name).type for name in lir.io.outputs)
        self._missing = set(self._params)
        self._is_static = not lir.symbols
        self._param_shapes: dict[str, tuple[int, ...]] = {}  # of those with symbols in their types
        self._checks = checks  # made when sizes are first met
        self._param_values: dict[str, np.ndarray | StoredArray] = {}
        # sizes that are symbols are checked when they are first met, in `_sized`
        self._fast = tuple((name, t.dtype.np, t.shape if t.is_static else None) for name, t in self._inputs)
        self._sizes: Table[Any, tuple[dict[str, int], tuple[Any, ...]]] = Table("sizes")
        self._makers = makers_of(self._outputs) if self._is_static else ()
        self._threads_option = options.threads
        self._state: GraphState | None = None
        self._extents: Extents | None = None
        self._is_special = False  # has state, an active extent, or memory of a device
        # what the last run gave, for extents that are set later; None where it is not kept
        self._last: Sequence[np.ndarray] | None = () if is_remembered(self) else None
        self._use(executable)
        self._sharers: weakref.WeakSet[CompiledGraph] | None = None  # that use the same executable
        self._in_place: dict[tuple[int, int], bool] = {}  # by input and output
        self._lock = new_rlock()
        self._remakers = recompile, again
        self._forms: dict[tuple[tuple[str, int], ...], CompiledGraph] = {}  # by symbols that are numbers in them

    def _use(self, executable: Executable) -> None:
        if not isinstance(executable, Executable):
            given = f"{self.device} compiles to {with_article(type(executable))}"
            raise OptionError(f"{given}, which is not a strata.backends.Executable", code="O413", place=here())
        self._fast_call: FastCall | None = executable.fast_call
        self._executable, self._run = executable, executable.run  # behind it: see `_teach`
        self._note_special()

    @property
    def _home(self) -> DeviceHome | None:
        return self._executable.home

    # signature

    @property
    def lir(self) -> Lir:
        """The plan."""
        if self._replan is not None:
            with self._lock:
                if self._replan is not None:
                    self._lir = self._replan()
                    self._replan = None
        return self._lir

    @property
    def name(self) -> str:
        return self._lir.name

    @property
    def inputs(self) -> dict[str, Any]:
        """Types of the inputs, by name."""
        return dict(self._inputs)

    @property
    def params(self) -> dict[str, Any]:
        """Types of the parameters, by name."""
        return dict(self._params)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Types of the outputs."""
        return self._outputs

    @property
    def signature(self) -> str:
        """Inputs, parameters and outputs with their types."""
        return signature(self, sys.maxsize)

    def __repr__(self) -> str:
        return f"<CompiledGraph {self.name}{signature(self)}>"

    def _repr_html_(self) -> str:
        return folded(f"compiled {self.name}{signature(self)} on {self.device}", self.lir.summary())

    # parameters

    def set_param(self, name: str, value: Any) -> None:
        """Give a parameter its value; it is kept until set again, and packed once where kernels want it packed."""
        if name not in self._params:
            raise UnknownNameError(
                f"{self.name!r} has no parameter {name!r}; it has {some_of(self._params)}{near(name, self._params)}",
                code="N115",
                place=here(),
            )
        array = read_param(name, self._params[name], value, self._home)
        with self._lock:
            if not self._params[name].is_static:
                infer_binding({self._lir.graph.leaf(name): array.shape})  # refuses sizes out of bounds
                self._param_shapes[name] = array.shape
                self._sizes.clear()
            self._part()
            self._executable.set_param(name, array)
            self._param_values[name] = value if isinstance(value, StoredArray) else array
            self._missing.discard(name)
            for form in self._forms.values():
                form.set_param(name, array)
            if self._extents is not None:
                self._extents.set_param(name, array)

    def set_params(self, values: Mapping[str, Any]) -> None:
        """Set several parameters."""
        if not hasattr(values, "items"):
            raise OptionError(
                f"{self.name!r} takes its parameters by name, got {type(values).__name__}", code="O152", place=here()
            )
        for name, value in values.items():
            self.set_param(name, value)

    # running

    @untouched
    def run(self, feeds: Mapping[str, Any] | None = None, /, *surplus: Any, **named: Any) -> tuple[np.ndarray, ...]:
        """Run on arrays by input name; returns new arrays: of PyTorch, JAX or CuPy where such an array is given."""
        given = named if feeds is None else together(self, feeds, named) if named else feeds
        if surplus:
            raise too_many("CompiledGraph.run", 1, 1 + len(surplus))
        if self._is_special:
            return self._run_specially(given)
        fast_call, threads = self._fast_call, self._threads_option or config().num_threads
        if fast_call is not None and fast_call.asked == threads and type(given) is dict and not OBSERVERS:
            made = fast_call.enter(given)
            if made is not None:
                if self._last is not None:
                    self._last = made
                return made
        others: list[Any] = []
        arrays = self._arrays(given, others)
        if self._is_static:
            outputs = [make(shape, dtype) for make, shape, dtype in self._makers]
            binding: Mapping[str, int] = _NO_SIZES
            if self._last is not None:
                self._last = outputs
        else:
            try:
                binding, makers = self._sized(arrays)
            except Spread as spread:
                results = self._last = self._form(spread).run(given)
                return results
            outputs = self._last = [make(shape, dtype) for make, shape, dtype in makers]
        if OBSERVERS:
            run_observed(self, arrays, outputs, binding, threads)
        else:
            self._run(arrays, outputs, binding, threads)
            if fast_call is not None and self._is_static:
                self._teach(fast_call, outputs, threads)
        return ((others and like_first(others)) or tuple)(outputs)

    __call__ = run

    def run_over(self, feeds: Mapping[str, Any], over: Mapping[int, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Run with some outputs, by number, in arrays of the caller: inputs, too, that the plan may write over.

        The caller knows that they have the types of the outputs, and are contiguous.
        """
        if self._is_special and self._state is None and self._extents is None:
            return on_device.run_on_device(self, feeds, over)
        if not over or self._is_special:
            return self.run(feeds)
        arrays = self._arrays(feeds)
        try:
            binding, makers = (_NO_SIZES, self._makers) if self._is_static else self._sized(arrays)
        except Spread as spread:
            return self._form(spread).run_over(feeds, over)
        outputs = [over[i] if i in over else make(shape, dtype) for i, (make, shape, dtype) in enumerate(makers)]
        if OBSERVERS:
            run_observed(self, arrays, outputs, binding, self._threads_option or config().num_threads)
        else:
            self._run(arrays, outputs, binding, self._threads_option or config().num_threads)
        return tuple(outputs)

    def run_resident(self, feeds: Mapping[str, Any], over: Mapping[int, Any] | None = None) -> list[Any]:
        """Run, and leave the results in the device's memory, wherever the inputs are."""
        return on_device.run_resident(self, feeds, over)

    def forget_weights(self) -> None:
        """Give up memory of what was computed from parameters and constants only: the next run computes it again."""
        with self._executable.lock:
            self._executable.forget()

    def _enter(self, arrays: Sequence[Any]) -> list[Any] | None:
        """The short way of a program with arrays on its device; None where there is none now."""
        enter = None if OBSERVERS or self._missing else self._executable.resident_entry
        return None if enter is None else enter(arrays, None)

    def takes_over(self, name: str, output: int) -> bool:
        """Whether an output may be written where an input lies, which the caller gives up."""
        return self._executable.takes_over(name, output)

    def run_ready(
        self, arrays: list[Any], over: Mapping[int, Any] | None = None, *, resident: bool = False
    ) -> Sequence[Any]:
        """`run_over` for a caller who knows the arrays: in the order of the inputs, contiguous, of their types.

        Results that are to be `resident` stay in the device's memory.
        """
        if not self._is_static or self._is_special or self._missing or OBSERVERS:
            if resident and not self._missing:
                return on_device.run_arrays(self, arrays, over, resident=True)
            return self.run_over(dict(zip(self.inputs, arrays, strict=True)), over or {})
        fast_call, threads = self._fast_call, self._threads_option or config().num_threads
        if over:
            outputs = [
                over[i] if i in over else make(shape, dtype) for i, (make, shape, dtype) in enumerate(self._makers)
            ]
            self._run(arrays, outputs, _NO_SIZES, threads)
            return outputs
        if fast_call is not None and fast_call.asked == threads:
            made = fast_call.enter(arrays)
            if made is not None:
                return made
        outputs = [make(shape, dtype) for make, shape, dtype in self._makers]
        self._run(arrays, outputs, _NO_SIZES, threads)
        if fast_call is not None:
            self._teach(fast_call, outputs, threads)
        return outputs

    @signed(lambda self, feeds, out: None)
    def run_into(
        self, feeds: Mapping[str, Any] = _ABSENT, out: Sequence[np.ndarray] = _ABSENT, *surplus: Any, **named: Any
    ) -> None:
        """Run into arrays of the caller: contiguous, of the outputs' types.

        Nothing is allocated, except for inputs that an output lies over: they are copied first, unless the plan makes
        that output by changing that input, such as a cache.
        """
        if surplus or named:
            raise refused(CompiledGraph.run_into, "CompiledGraph.run_into", (self, feeds, out, *surplus), named)
        if type(out) is not list and not isinstance(out, Sequence):
            raise OptionError(f"run_into: out is a list of arrays, got {type(out).__name__}", code="O150", place=here())
        if self._is_special:
            with self._lock:
                if self._home is not None and self._extents is None:
                    on_device.run_into(self, feeds, out)
                    return
                arrays = self._filled(feeds)
                binding, makers = (_NO_SIZES, self._makers) if self._is_static else self.sized(arrays)
                outputs = list(out)
                check_outputs(self, outputs, binding, makers)
                self._execute(kept_apart(arrays, outputs, self._updates), outputs, binding)
                if self._state is not None:
                    self._state.copy_from(outputs)
            return
        fast_call, threads = self._fast_call, self._threads_option or config().num_threads
        is_fast = fast_call is not None and fast_call.asked == threads and type(feeds) is dict and not OBSERVERS
        if is_fast and fast_call.enter((feeds, out)) is not None:  # type: ignore[union-attr]
            return
        arrays = self._arrays(feeds)
        outputs = list(out)
        try:
            binding, makers = (_NO_SIZES, self._makers) if self._is_static else self._sized(arrays)
        except Spread as spread:
            self._form(spread).run_into(feeds, out)
            return
        if len(outputs) != len(makers):
            check_outputs(self, outputs, binding, makers)
        for array, (_, shape, dtype) in zip(outputs, makers):
            is_array = type(array) is np.ndarray and array.flags.carray
            # of complex numbers NumPy says that they lie well at multiples of half their size
            if is_array and array.dtype == dtype and array.shape == shape and dtype.kind != "c":
                continue
            check_outputs(self, outputs, binding, makers)
        arrays = kept_apart(arrays, outputs, self._updates)
        if OBSERVERS:
            run_observed(self, arrays, outputs, binding, threads)
            return
        self._run(arrays, outputs, binding, threads)
        if fast_call is not None and self._is_static and fast_call.wants(threads):
            self._teach(fast_call, [make(shape, dtype) for make, shape, dtype in makers], threads)

    def _teach(self, fast_call: FastCall, outputs: list[np.ndarray], threads: int | None) -> None:
        """Tell the fast call of a run on the general path, unless the executable has changed meanwhile."""
        executable = self._executable
        if self._fast_call is fast_call:
            fast_call.learn(executable, self._fast, outputs, threads)

    def _updates(self, at: int, output: int) -> bool:
        """Whether the plan makes an output by changing an input in place."""
        found = self._in_place.get((at, output))
        if found is None:
            found = self._in_place[at, output] = updates_in_place(self._lir, self._inputs[at][0], output)
        return found

    def submit(self, feeds: Mapping[str, Any] | None = None, /, **named: Any) -> Future[tuple[np.ndarray, ...]]:
        """Run in the background; the arrays must not change until the result is there."""
        return _background.submit(self.run, feeds, **named)

    def run_pipelined(self, sets: Iterable[Mapping[str, Any]]) -> list[tuple[np.ndarray, ...]]:
        """Several runs, as many at a time as there are threads; results in the order of the sets."""
        if self._is_special:
            return [self.run(feeds) for feeds in sets]
        return [future.result() for future in [self.submit(feeds) for feeds in sets]]

    def _arrays(self, given: Mapping[str, Any], others: list[Any] | None = None) -> list[np.ndarray]:
        """Arrays in the order of the inputs; `others` gets those that are not NumPy's as they should be."""
        if self._missing:
            check_params(self)
        arrays: list[np.ndarray] = []
        try:
            find = given.get
        except AttributeError:
            find = by_name(self, given).get
        for name, dtype, shape in self._fast:
            value = find(name)
            if (
                type(value) is np.ndarray
                and value.dtype == dtype
                and (shape is None or value.shape == shape)
                and value.flags.num & USABLE == USABLE
            ):
                arrays.append(value)
            else:
                arrays.append(read_input(self, name, value, len(arrays)))
                if others is not None:
                    others.append(value)
        if len(given) != len(arrays):
            refuse_extra(self, given)
        return arrays

    def _sized(self, arrays: Sequence[np.ndarray]) -> tuple[dict[str, int], tuple[Any, ...]]:
        """Sizes of the symbols, and the outputs that they give."""
        key = tuple([a.shape for a in arrays])
        found = self._sizes.peek(key)
        if found is None:
            found = sizes(self, arrays)
            self._sizes.put(key, found)
        return found

    def sized(self, arrays: Sequence[np.ndarray]) -> tuple[dict[str, int], tuple[Any, ...]]:
        """The same for runs that keep something between them, which only this program can."""
        try:
            return self._sized(arrays)
        except Spread as spread:
            raise spread.error from None

    def _form(self, spread: Spread) -> CompiledGraph:
        """The program where some symbols are numbers; there are few, and none where there is nothing to compile."""
        key = tuple(sorted(spread.ones.items()))
        with self._lock:
            form = self._forms.get(key)
            if form is None:
                if (again := self._remakers[1]) is None or len(self._forms) >= MOST_FORMS:
                    raise spread.error from None
                form = again(spread.ones)
                form.set_params(self._param_values)
                self._forms[key] = form
        return form

    # state and extents

    def _run_specially(self, given: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        if self._home is not None and self._state is None and self._extents is None:
            return on_device.run_on_device(self, given)
        with self._lock:
            if self._home is not None and self._extents is None:
                return on_device.run_with_state(self, given)
            arrays = self._filled(given)
            binding, makers = (_NO_SIZES, self._makers) if self._is_static else self.sized(arrays)
            if self._extents is not None and self._extents.is_used:
                outputs = self._extents.run_kept(arrays, makers, self._threads_option or config().num_threads)
            else:
                outputs = [make(shape, dtype) for make, shape, dtype in makers]
                if self._state is not None:
                    outputs = self._state.place(arrays, outputs)
                self._execute(arrays, outputs, binding)
                self._last = outputs
            wrap = like_first(by_name(self, given).values()) or tuple
            return wrap(self._state.take(outputs) if self._state is not None else outputs)

    def _filled(self, given: Mapping[str, Any]) -> list[np.ndarray]:
        """Arrays for all inputs, on the host: what is not given comes from the state."""
        found = self._arrays(given if self._state is None else {**self._state.values, **by_name(self, given)})
        return found if self._home is None else [np.asarray(a) for a in found]

    def _execute(self, arrays: list[np.ndarray], outputs: list[np.ndarray], binding: Mapping[str, int]) -> None:
        if self._extents is not None and self._extents.is_used:
            self._extents.run(arrays, outputs, self._threads_option or config().num_threads)
            return
        if OBSERVERS:
            run_observed(self, arrays, outputs, binding, self._threads_option or config().num_threads)
        else:
            self._run(arrays, outputs, binding, self._threads_option or config().num_threads)

    def bind(self, name: str, value: Any) -> None:
        """Keep a value for an input: runs that do not give the input use it. None forgets it."""
        with self._lock:
            self._own_state().bind(name, value)
            self._note_special()

    def read(self, name: str) -> np.ndarray:
        """A copy of the value that is kept for an input."""
        with self._lock:
            return self._own_state().read(name)

    def feed(self, name: str, output: int | None) -> None:
        """After each run, an output becomes the kept value of an input: in place, where the plan updates it so.

        A run then returns that output as an array that cannot be written: it shows what is kept, and changes with it
        where a later run updates that in place. None stops it.
        """
        with self._lock:
            self._own_state().feed(name, output)
            self._note_special()

    def set_active_extent(self, axis: str | tuple[int, int] | None, actual: int | None = None) -> bool:
        """Process only the first `actual` places along an axis, given by the name of its symbolic size; None ends it.

        A graph of plain sizes takes `(actual, upper)`: the first axes that have `upper` places. `None` ends all.
        The rest of the outputs is left as the last run, or the caller of `run_into`, had it. Returns whether the graph
        can be run so: one that mixes places along the axis is run in full, never in part.
        """
        with self._lock:
            if self._extents is None:
                self._extents = Extents(self)
            is_safe = self._extents.choose(axis, actual)
            self._note_special()
            return is_safe

    def explain_extent(self, axis: str) -> list[str]:
        """Why an active extent along an axis is not used: the steps that mix places of it. Empty where it is used."""
        with self._lock:
            return (self._extents or Extents(self)).reasons(axis)

    def _own_state(self) -> GraphState:
        if self._state is None:
            self._state = GraphState(self._lir, dict(self._inputs), self._outputs, self._executable)
        return self._state

    def _note_special(self) -> None:
        has_state = self._state is not None and self._state.is_used
        has_extent = self._extents is not None and bool(self._extents.active)
        self._is_special = has_state or has_extent or self._executable.home is not None

    # copies

    def clone(self) -> CompiledGraph:
        """Another one with the same code and the same parameters, and its own state; no extent is active in it.

        What is set, bound or fed on one of them later is not seen by the other.
        """
        made = object.__new__(type(self))
        with self._lock, _SHARING:
            made.__dict__.update(self.__dict__)
            made._param_values, made._param_shapes = dict(self._param_values), dict(self._param_shapes)
            made._missing, made._sizes = set(self._missing), Table("sizes")
            made._forms = {key: form.clone() for key, form in self._forms.items()}
            made._state = self._state.copy() if self._state is not None else None
            if self._sharers is None:
                self._sharers = weakref.WeakSet([self])
            made._sharers = self._sharers
            made._sharers.add(made)
        made._extents, made._last = None, () if is_remembered(made) else None
        made._lock = new_rlock()
        made._use(made._executable)
        made._note_special()
        return made

    def _part(self) -> None:
        """Before a parameter is set: have an executable that no clone uses."""
        with _SHARING:
            sharers, self._sharers = self._sharers, None
            if sharers is None:
                return
            sharers.discard(self)
            if sharers:
                self._use(self._executable.clone())

    __copy__ = clone

    def __reduce__(self) -> NoReturn:
        """Deep copies and pickles: code, memory and threads are of this process."""
        raise OptionError(
            f"{self.name!r} is a compiled graph, which cannot be pickled or copied deeply", code="O153", place=here(),
            fix="compiled.save(path) and st.load_compiled(path), or compiled.clone()",
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str], *, weights: bool = True, levels: Sequence[str] | None = None) -> None:
        """Write an ahead-of-time bundle; `strata.load_compiled` reads it without compiling.

        `levels` names instruction sets to hold code for: by default baseline, avx2 and avx512 (or neon). Code for
        another kind of processor can be made, too: it is for one that runs the same system.
        """
        from strata.runtime.storage.save_bundle import save

        save(self, path, weights=weights, levels=levels)

    # seeing

    @property
    def host_steps(self) -> list[str]:
        """Ops that run in Python rather than natively."""
        return self._executable.host_steps

    def stablehlo(self, **sizes: int) -> str:
        """The StableHLO text that runs, on devices of that kind, for given sizes of the symbols."""
        text = self._executable.stablehlo(sizes)
        if text is None:
            raise OptionError(
                f"{self.device} does not run StableHLO", code="O154", place=here(),
                fix="st.stablehlo.export(graph), which is for any device",
            )  # fmt: skip
        return text

    @property
    def memory(self) -> MemoryReport:
        """What the plan needs, and what is held now; `str` is the whole report."""
        return MemoryReport.of(self._lir, self._executable)

    def profile(self, feeds: Mapping[str, Any] | None = None, /, *, repeats: int = 10, **named: Any) -> Profile:
        """Time each step on given arrays, or on random ones; `print` shows a table."""
        from strata.runtime.report.profile import profile

        return profile(self, {**(feeds or {}), **named}, repeats)

    def explain(self) -> Any:
        """What was fused and what was not, and why."""
        from strata.runtime.compile.pipeline import CompilePipeline

        return CompilePipeline(self.device, self.options).compile(self.source).explain()


_NO_SIZES: Mapping[str, int] = {}
_SHARING = new_rlock()  # held while clones come and part
