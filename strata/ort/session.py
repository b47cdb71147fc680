"""InferenceSession: an ONNX model behind onnxruntime's interface."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from strata.config import Settled, config, logger
from strata.core import new_lock
from strata.errors import ArgumentError, StrataError
from strata.io import onnx
from strata.ort.binding import IOBinding
from strata.ort.checks import Sizes, require_fit
from strata.ort.exceptions import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    OrtError,
    RuntimeException,
    of_loading,
    of_running,
)
from strata.ort.options import RunOptions, SessionOptions, shared
from strata.ort.providers import available_providers, device_of, normalized
from strata.ort.values import CPU_MEMORY, OrtMemoryInfo, OrtValue, as_feed
from strata.places import here

NO_VERSION = (1 << 63) - 1  # of a file that says none


class NodeArg:
    """An input or output: its name, its type in ONNX's words, its sizes: numbers, names, or None."""

    def __init__(self, name: str, type: str, shape: Sequence[int | str | None]) -> None:
        self._name, self._type, self._shape = name, type, tuple(shape)

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def type(self) -> str:
        """Its type, such as `tensor(float)`."""
        return self._type

    @property
    def shape(self) -> Sizes:
        """Its sizes, in a list of the caller's own."""
        return list(self._shape)

    def __repr__(self) -> str:
        return f"NodeArg(name={self.name!r}, type={self.type!r}, shape={self.shape!r})"


@dataclass(frozen=True)
class ModelMetadata:
    """What a model's file says about itself."""

    custom_metadata_map: dict[str, str]
    description: str
    domain: str
    graph_description: str
    graph_name: str
    producer_name: str
    version: int


class InferenceSession:
    """A model to run: `session.run(None, {"x": array})` gives a list of arrays. Safe to call from many threads."""

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: SessionOptions | None = None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(path_or_bytes, (str, bytes, os.PathLike)):
            raise ArgumentError(f"Unable to load from type '{type(path_or_bytes)}'", code="O702", place=here())
        if sess_options is not None and not isinstance(sess_options, SessionOptions):
            raise ArgumentError(
                f"sess_options is a SessionOptions, got {type(sess_options).__name__}: incompatible constructor "
                "arguments", code="O702", place=here(),
            )  # fmt: skip
        for name in kwargs.keys() - {"enable_fallback", "read_config_from_model", "disabled_optimizers"}:
            logger.warning("InferenceSession has no argument %r; it has no effect", name)
        self._sess_options = SessionOptions() if sess_options is None else copy(sess_options)
        self._enable_fallback = int(kwargs.get("enable_fallback", 1)) == 1
        self._source = path_or_bytes
        self._model_bytes = path_or_bytes if isinstance(path_or_bytes, bytes) else None
        self._model_path = None if isinstance(path_or_bytes, bytes) else os.fspath(path_or_bytes)
        self._lock = new_lock()
        self._held: Any = None  # settings of the runs, and those that they were made from
        try:
            self._choose(providers, provider_options)
        except OrtError as error:
            if not self._enable_fallback:
                raise
            warnings.warn(f"EP Error {error.summary} when using {providers}: the CPU is used", stacklevel=2)
            self._choose(["CPUExecutionProvider"], None)
        self._load()
        self._profile: Any = None
        self._started = 0
        if self._sess_options.enable_profiling:
            self._profile_runs()

    def __repr__(self) -> str:
        return f"<strata.ort.InferenceSession of {self._model!r}>"

    # loading

    def _choose(self, providers: Any, provider_options: Any) -> None:
        if providers is None and self._sess_options.has_providers():
            providers = list(self._sess_options._providers)
        chosen = normalized(providers, provider_options)
        self._device = device_of(chosen)
        names = [name for name in chosen if name in available_providers()]
        self._provider_options = {name: chosen[name] for name in names}
        self._provider_options.setdefault("CPUExecutionProvider", {})

    def _load(self) -> None:
        source = self._source
        where = "" if isinstance(source, bytes) else os.fspath(source)
        if where.endswith(".ort") or (isinstance(source, bytes) and source[4:8] == b"ORTM"):
            raise Fail("models in onnxruntime's own format (.ort) are not read: give the ONNX file", code="L701")
        if isinstance(source, bytes) and not source:
            raise InvalidArgument("No graph was found in the protobuf.")
        given = self._replaced() if self._sess_options._initializers else source
        try:
            self._model = onnx.OnnxModel(given, device=self._device)
        except StrataError as error:
            raise of_loading(error, where) from error
        declared = self._model.declared
        free = self._fixed_sizes()
        self._inputs_meta = [_node_arg(p, free) for p in declared.inputs]
        self._outputs_meta = [_node_arg(p, free) for p in declared.outputs]
        self._overridable_initializers = [_node_arg(p, free) for p in declared.optional_inputs]
        self._expected = {x.name: x for x in (*self._inputs_meta, *self._overridable_initializers)}
        self._required = [x.name for x in self._inputs_meta if not x.type.startswith("optional")]
        self._places = {x.name: i for i, x in enumerate(self._outputs_meta)}
        self._is_bound = any(x.shape != list(p.dims) for x, p in zip(self._inputs_meta, declared.inputs, strict=True))
        if self._sess_options.optimized_model_filepath:
            self._write_optimized()

    def _fixed_sizes(self) -> Callable[[str, int, int | str | None], int | str | None]:
        """What the options make of an axis of a port: sizes by their labels, or by their names."""
        named, labelled = self._sess_options._free_sizes, self._sess_options._labelled_sizes
        labels: dict[tuple[str, int], str] = {}
        if labelled:
            graph = self._proto().graph
            for port in (*graph.input, *graph.output):
                labels |= {(port.name, i): d.denotation for i, d in enumerate(port.type.tensor_type.shape.dim)}

        def fixed(name: str, axis: int, dim: int | str | None) -> int | str | None:
            if isinstance(dim, int):
                return dim
            found = labelled.get(labels.get((name, axis), ""), -1)
            return found if found > 0 else named.get(dim, dim) if dim is not None else None

        return fixed

    def _proto(self) -> Any:
        """The file as it is, without the data outside it."""
        import onnx as standard

        if not isinstance(self._source, bytes):
            return standard.load(os.fspath(self._source), load_external_data=False)
        proto = standard.ModelProto()
        proto.ParseFromString(self._source)
        return proto

    def _replaced(self) -> Any:
        """The model with initializers of the caller's in place of its own."""
        import onnx as standard

        try:
            proto = self._proto()
            if not isinstance(self._source, bytes):
                base = os.path.dirname(os.path.abspath(os.fspath(self._source)))
                ours = [t for t in proto.graph.initializer if t.name not in self._sess_options._initializers]
                for tensor in ours:
                    if tensor.data_location == standard.TensorProto.EXTERNAL:
                        standard.external_data_helper.load_external_data_for_tensor(tensor, base)
                        tensor.data_location = standard.TensorProto.DEFAULT
        except FileNotFoundError:
            return self._source
        except Exception as error:
            raise InvalidGraph(f"the model cannot be read: {error}") from error
        held = {t.name: t for t in proto.graph.initializer}
        for name, value in self._sess_options._initializers.items():
            if name not in held:
                continue  # values may be shared by several models
            array = value.numpy()
            if tuple(held[name].dims) != array.shape:
                raise InvalidGraph(
                    f"initializer {name} has shape {list(held[name].dims)}, the value {list(array.shape)}", code="S701"
                )
            if held[name].data_type != value.element_type():
                raise InvalidGraph(
                    f"initializer {name} is {onnx.dtypes.NAMES.get(held[name].data_type)}, the value "
                    f"{onnx.dtypes.NAMES.get(value.element_type())}", code="D701",
                )  # fmt: skip
            held[name].CopyFrom(standard.numpy_helper.from_array(array, name))
        return proto

    def _write_optimized(self) -> None:
        try:
            onnx.export(self._model, self._sess_options.optimized_model_filepath)
        except StrataError as error:
            raise of_running(error) from error

    # what it says of itself

    @property
    def input_names(self) -> Mapping[str, NodeArg]:
        """Inputs and the initializers that a run may replace, by name."""
        return self._expected

    def get_inputs(self) -> list[NodeArg]:
        """The inputs of the model."""
        return list(self._inputs_meta)

    def get_outputs(self) -> list[NodeArg]:
        """The outputs of the model."""
        return list(self._outputs_meta)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Initializers that are inputs as well."""
        return list(self._overridable_initializers)

    def get_modelmeta(self) -> ModelMetadata:
        """What the file says about itself."""
        declared = self._model.declared
        about = declared.about
        return ModelMetadata(
            dict(about.properties), about.description, about.domain, about.graph_description, declared.name,
            about.producer, NO_VERSION if about.version is None else about.version,
        )  # fmt: skip

    def get_session_options(self) -> SessionOptions:
        """The settings of the session."""
        return self._sess_options

    def get_providers(self) -> list[str]:
        """Providers in the order of preference; those that cannot be had here are left out."""
        return list(self._provider_options)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options of each provider."""
        return {name: dict(options) for name, options in self._provider_options.items()}

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Load the model again, for these providers."""
        self._choose(providers, provider_options)
        self._load()

    def get_input_memory_infos(self) -> list[OrtMemoryInfo]:
        """Where inputs are taken from."""
        return [CPU_MEMORY for _ in self._inputs_meta]

    def get_output_memory_infos(self) -> list[OrtMemoryInfo]:
        """Where outputs are given."""
        return [CPU_MEMORY for _ in self._outputs_meta]

    def disable_fallback(self) -> None:
        """Let a provider that fails be an error."""
        self._enable_fallback = False

    def enable_fallback(self) -> None:
        """Use the CPU where a provider fails."""
        self._enable_fallback = True

    # running

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """The outputs of these names, or all of them, for arrays by input name."""
        feeds: Mapping[str, Any] = input_feed
        if type(input_feed) is not dict and not isinstance(input_feed, Mapping):
            raise ArgumentError(
                f"run(): input_feed maps names to arrays, got {type(input_feed).__name__}", code="O702", place=here()
            )
        for x in input_feed.values():
            if type(x) is not np.ndarray:
                feeds = {name: as_feed(name, x) for name, x in input_feed.items() if x is not None or self._needs(name)}
                self._require_values(feeds)
                break
        if run_options is not None:
            self._obey(run_options)
        self._require_inputs(feeds)
        if self._is_bound:
            self._check(feeds)
        try:
            with self._settings():
                found = self._model.run(feeds)
        except StrataError as error:
            self._check(feeds)
            raise of_running(error) from error
        if not output_names:
            return list(found)
        if isinstance(output_names, str):
            raise ArgumentError(
                f"run(): incompatible function arguments: output_names is a list of names, got {output_names!r}",
                code="O702", place=here(),
            )  # fmt: skip
        try:
            return [found[self._places[name]] for name in output_names]
        except KeyError as error:
            name = error.args[0]
            if not isinstance(name, str):
                raise ArgumentError(
                    f"run(): incompatible function arguments: the name of an output is a str, got {name!r}",
                    code="O702", place=here(),
                ) from None  # fmt: skip
            raise InvalidArgument(f"Invalid output name:{name}", code="N701") from None

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, OrtValue], run_options: Any = None
    ) -> list[OrtValue]:
        """The same with values in and out."""
        return [OrtValue(x) for x in self.run(output_names, input_dict_ort_values, run_options)]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[Any, Any, str], None],
        user_data: Any,
        run_options: Any = None,
    ) -> None:
        """Run in another thread, which then calls `callback(results, user_data, error)`."""
        if not callable(callback):
            raise ArgumentError(
                f"run_async(): callback is a function, got {type(callback).__name__}", code="O702", place=here()
            )

        self._require_inputs(input_feed)

        def work() -> None:
            try:
                found, error = self.run(output_names, input_feed, run_options), ""
            except Exception as reason:  # noqa: BLE001 - the callback is told
                found, error = [], reason.said if isinstance(reason, OrtError) else str(reason)
            callback(found, user_data, error)

        threading.Thread(target=work, name="strata-ort-run", daemon=True).start()

    def io_binding(self) -> IOBinding:
        """Buffers for inputs and outputs."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: Any = None) -> None:
        """Run on what is bound."""
        if iobinding._session is not self:
            raise InvalidArgument("IOBinding must be used with the session that created it.", plain=True)
        iobinding._run(lambda names, feeds: self.run(names, feeds, run_options))

    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: Any, device_type: str, device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """A value of a shape, whose elements are not set."""
        return OrtValue.ortvalue_from_shape_and_type(shape, element_type, device_type, device_id, vendor_id)

    def _obey(self, options: Any) -> None:
        if not isinstance(options, RunOptions):
            raise ArgumentError(
                f"run(): incompatible function arguments: run_options is a RunOptions, got {type(options).__name__}",
                code="O702", place=here(),
            )  # fmt: skip
        if options.terminate:
            raise Fail("Exiting due to terminate flag being set to true.")

    def _require_inputs(self, feeds: Mapping[str, Any]) -> None:
        for name in self._required:
            if name not in feeds:
                missing = [x for x in self._required if x not in feeds]
                raise InvalidArgument(
                    f"Required inputs ({missing}) are missing from input feed ({list(feeds)}).", code="N701", plain=True
                )

    def _needs(self, name: str) -> bool:
        """Whether None is not the same as nothing: it is for an initializer that the run may replace."""
        return all(x.name != name for x in self._overridable_initializers)

    def _require_values(self, feeds: Mapping[str, Any]) -> None:
        for name, x in feeds.items():
            port = self._expected.get(name)
            if x is None and port is not None and not port.type.startswith("optional"):
                raise Fail(f"Missing Input: {name}", code="O701")

    def _settings(self) -> Settled:
        """Ids out of range are errors, as in onnxruntime; so many threads as the options ask for, or the process's."""
        base = config()
        if self._held is None or self._held[0] is not base:
            own = self._sess_options
            threads = own.intra_op_num_threads if own.use_per_session_threads else shared.threads
            made = replace(base, check_indices=True)
            self._held = base, replace(made, num_threads=threads) if threads > 0 else made
        return Settled(self._held[1])

    def _check(self, feeds: Mapping[str, Any]) -> None:
        """Refuse inputs that are not those of the model, in onnxruntime's words."""
        for name, x in feeds.items():
            port = self._expected.get(name)
            if port is None:
                raise InvalidArgument(f"Invalid input name: {name}", code="N701")
            require_fit(name, x, port.type, port._shape)

    # profiling

    def _profile_runs(self) -> None:
        from strata.runtime import trace

        stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
        path = f"{self._sess_options.profile_file_prefix}_{stamp}.json"
        self._started = time.monotonic_ns()
        tracing = trace(path)
        self._profile = path, tracing, tracing.__enter__()

    def get_profiling_start_time_ns(self) -> int:
        """When profiling began, by the monotonic clock; 0 where it is off."""
        return self._started

    def end_profiling(self) -> str:
        """Write the trace of compiling and of all kernels, which Perfetto and Chrome show, and return its path.

        Events are called as onnxruntime calls them: those of kernels are of the category Node, with `op_name` among
        the arguments; all others of the category Session.
        """
        with self._lock:
            if self._profile is None:
                return ""
            (path, tracing, tracer), self._profile = self._profile, None
        for event in tracer.events:
            _rename(event)
        tracing.__exit__(None, None, None)
        return str(path)


def _rename(event: dict[str, Any]) -> None:
    """An event of a trace under the names that onnxruntime gives."""
    if event["cat"] in ("kernel", "op"):
        event["args"] = {**event["args"], "op_name": event["name"], "provider": "CPUExecutionProvider"}
        event["name"] += "_kernel_time"
        event["cat"] = "Node"
    else:
        event["name"] = "model_run" if event["cat"] == "run" else event["name"]
        event["cat"] = "Session"


def _node_arg(port: onnx.Port, fixed: Callable[[str, int, int | str | None], int | str | None]) -> NodeArg:
    return NodeArg(port.name, port.type_name, [fixed(port.name, i, d) for i, d in enumerate(port.dims)])


__all__ = ["InferenceSession", "ModelMetadata", "NodeArg", "RuntimeException"]
