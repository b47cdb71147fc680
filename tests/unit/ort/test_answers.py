"""strata.ort beside onnxruntime, call by call: texts, sequences, maps, options, values, bindings, mistakes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import strata.ort as ours
import strata.ort.backend as our_backend
from strata.errors import StrataError

theirs = pytest.importorskip("onnxruntime", reason="the session is compared with onnxruntime's")
their_backend = pytest.importorskip("onnxruntime.backend", reason="its backend is compared, too")
theirs.set_default_logger_severity(4)

FLOAT, TEXT, INT64 = TensorProto.FLOAT, TensorProto.STRING, TensorProto.INT64
X = np.arange(6, dtype=np.float32).reshape(2, 3)
tensor, tensor_type, node = helper.make_tensor_value_info, helper.make_tensor_type_proto, helper.make_node


def model(nodes: list[Any], inputs: list[Any], outputs: list[Any], initializers: tuple[Any, ...] = ()) -> bytes:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    sets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    return bytes(helper.make_model(graph, opset_imports=sets, ir_version=8).SerializeToString())


def of(name: str, proto: Any) -> Any:
    return helper.make_value_info(name, proto)


ADD = model([node("Add", ["x", "y"], ["z"])], [tensor("x", FLOAT, ["N", 3]), tensor("y", FLOAT, ["N", 3])],
            [tensor("z", FLOAT, ["N", 3])])  # fmt: skip
TEXTS = model([node("Identity", ["x"], ["y"])], [tensor("x", TEXT, ["N"])], [tensor("y", TEXT, ["N"])])
SEQUENCE = model(
    [node("SequenceAt", ["s", "i"], ["a"]), node("SequenceLength", ["s"], ["n"])],
    [of("s", helper.make_sequence_type_proto(tensor_type(FLOAT, None))), tensor("i", INT64, [])],
    [tensor("a", FLOAT, ["K"]), tensor("n", INT64, [])],
)
OPTIONAL = model(
    [node("OptionalHasElement", ["o"], ["h"])], [of("o", helper.make_optional_type_proto(tensor_type(FLOAT, ["N"])))],
    [tensor("h", TensorProto.BOOL, [])],
)  # fmt: skip
MAP = model(
    [node("DictVectorizer", ["d"], ["y"], domain="ai.onnx.ml", string_vocabulary=["a", "b", "c"])],
    [of("d", helper.make_map_type_proto(TEXT, tensor_type(FLOAT, [])))], [tensor("y", FLOAT, [1, 3])],
)  # fmt: skip
WEIGHTS = model(
    [node("Add", ["x", "w"], ["y"])], [tensor("x", FLOAT, ["N", 3]), tensor("w", FLOAT, [3])],
    [tensor("y", FLOAT, ["N", 3])], (numpy_helper.from_array(np.arange(3, dtype=np.float32), "w"),),
)  # fmt: skip
GATHER = model(
    [node("Gather", ["x", "i"], ["y"])], [tensor("x", FLOAT, ["N", 3]), tensor("i", INT64, ["k"])],
    [tensor("y", FLOAT, ["k", 3])],
)  # fmt: skip
UNSIZED = model([node("Relu", ["x"], ["y"])], [tensor("x", FLOAT, [None, 0, -1])], [of("y", tensor_type(FLOAT, None))])


def session(o: Any, file: bytes = ADD, options: Any = None) -> Any:
    return o.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def value(o: Any, x: np.ndarray = X) -> Any:
    return o.OrtValue.ortvalue_from_numpy(x)


def changed(o: Any, name: str, new: Any) -> Any:
    options = o.SessionOptions()
    setattr(options, name, new)
    return getattr(options, name)


def bound(o: Any, **inputs: Any) -> Any:
    s = session(o)
    binding = s.io_binding()
    for name, x in inputs.items():
        binding.bind_cpu_input(name, x)
    binding.bind_output("z")
    s.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()


def bound_to(o: Any, buffer: np.ndarray) -> None:
    s = session(o)
    binding = s.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_cpu_input("y", X)
    binding.bind_output("z", "cpu", 0, buffer.dtype, buffer.shape, buffer.ctypes.data)
    s.run_with_iobinding(binding)


def unknown_initializer(o: Any) -> Any:
    options, held = o.SessionOptions(), value(o, np.ones(3, np.float32))
    options.add_initializer("nowhere", held)
    return session(o, WEIGHTS, options).run(None, {"x": X})


def called_back(o: Any, feeds: dict[str, Any]) -> Any:
    done, heard = threading.Event(), []

    def hear(results: Any, data: Any, error: str) -> None:
        heard.append((results, data, error))
        done.set()

    session(o).run_async(None, feeds, hear, 7)
    assert done.wait(60)
    return heard


def updated(o: Any, x: np.ndarray) -> Any:
    held = value(o, np.zeros(3, np.float32))
    held.update_inplace(x)
    return held.numpy()


ANSWERS: dict[str, Callable[[Any], Any]] = {
    "objects that are no texts": lambda o: session(o, TEXTS).run(None, {"x": np.array(["a", 3, None], object)}),
    "bytes as objects": lambda o: session(o, TEXTS).run(None, {"x": np.array([b"ab"], object)}),
    "numbers for texts": lambda o: session(o, TEXTS).run(None, {"x": [1, 2]}),
    "no texts": lambda o: session(o, TEXTS).run(None, {"x": np.array([], object)}),
    "a sequence": lambda o: session(o, SEQUENCE).run(None, {"s": [X[0], X[1]], "i": np.array(1)}),
    "a map of integers": lambda o: session(o, MAP).run(None, {"d": {"a": 1}}),
    "a map of other keys": lambda o: session(o, MAP).run(None, {"d": {"q": 1.0}}),
    "sizes of an optional": lambda o: str(session(o, OPTIONAL).get_inputs()[0]),
    "sizes that are none": lambda o: session(o, UNSIZED).get_inputs()[0].shape,
    "ids from the end": lambda o: session(o, GATHER).run(None, {"x": X, "i": np.array([-2, 1])}),
    "None for an initializer": lambda o: session(o, WEIGHTS).run(None, {"x": X, "w": None}),
    "an initializer of another model": unknown_initializer,
    "one for true": lambda o: changed(o, "enable_profiling", 1),
    "None for false": lambda o: changed(o, "enable_mem_pattern", None),
    "fields of the classes": lambda o: [hasattr(o.SessionOptions, "logid"), hasattr(o.RunOptions, "terminate")],
    "no such field": lambda o: hasattr(o.SessionOptions, "zork"),
    "options of the CPU": lambda o: o.InferenceSession(
        ADD, providers=[("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})]
    ).get_provider_options(),
    "ports are keys": lambda o: len({*session(o).get_inputs()}),
    "the path of a session": lambda o: session(o)._model_path,
    "elements of another shape": lambda o: updated(o, np.ones((3, 1), np.float32)),
    "the maker of a device": lambda o: o.OrtDevice.make("cuda", 1).device_vendor_id(),
    "numbers of devices": lambda o: [
        getattr(o.capi.onnxruntime_pybind11_state.OrtDevice, n)() for n in ("cpu", "cuda", "default_memory")
    ],
    "an error is called back": lambda o: called_back(o, {"x": X[:, :1], "y": X}),
    "a binding": lambda o: bound(o, x=X, y=X),
}


def plain(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return str(x.dtype), x.shape, x.tolist()
    if isinstance(x, (list, tuple)):
        return [plain(y) for y in x]
    return x


@pytest.mark.parametrize("name", ANSWERS)
def test_the_same_answer(name: str) -> None:
    mine, real = (plain(ANSWERS[name](o)) for o in (ours, theirs))
    assert mine == real


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "ragged": lambda o: session(o).run(None, {"x": [[1, 2], [3]], "y": X}),
    "an empty list": lambda o: session(o).run(None, {"x": [], "y": X}),
    "a set": lambda o: session(o).run(None, {"x": {1}, "y": X}),
    "bytes": lambda o: session(o).run(None, {"x": b"abc", "y": X}),
    "dates": lambda o: session(o).run(None, {"x": X.astype("datetime64[s]"), "y": X}),
    "a map for a tensor": lambda o: session(o).run(None, {"x": {"a": 1.0}, "y": X}),
    "an array for a sequence": lambda o: session(o, SEQUENCE).run(None, {"s": X, "i": np.array(0)}),
    "an array for a map": lambda o: session(o, MAP).run(None, {"d": X}),
    "an empty map": lambda o: session(o, MAP).run(None, {"d": {}}),
    "keys of a map": lambda o: session(o, MAP).run(None, {"d": {1: 1.0}}),
    "an optional of another type": lambda o: session(o, OPTIONAL).run(None, {"o": X[0].astype(np.float64)}),
    "no key": lambda o: o.SessionOptions().add_session_config_entry("", "v"),
    "no such provider": lambda o: session(o).set_providers(["Zork"]),
    "no such provider of options": lambda o: o.SessionOptions().add_provider("Zork", {}),
    "values of texts": lambda o: o.OrtValue.ortvalue_from_shape_and_type([2], str),
    "no such element type": lambda o: o.OrtValue.ortvalue_from_shape_and_type([2], 999),
    "data of another size": lambda o: updated(o, np.ones(4, np.float32)),
    "binding a list": lambda o: session(o).io_binding().bind_cpu_input("x", [1.0]),
    "binding texts": lambda o: session(o, TEXTS).io_binding().bind_cpu_input("x", np.array(["a"], object)),
    "binding no such input": lambda o: session(o).io_binding().bind_ortvalue_input("q", value(o)),
    "binding another type": lambda o: bound(o, x=X.astype(np.float64), y=X),
    "binding another size": lambda o: bound(o, x=X[:, :2], y=X),
    "an output of another type": lambda o: bound_to(o, np.zeros((2, 3))),
    "a missing input, later": lambda o: called_back(o, {"x": X}),
}


@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.parametrize("name", MISTAKES)
def test_the_same_mistake(name: str) -> None:
    with pytest.raises(Exception) as real:
        MISTAKES[name](theirs)
    with pytest.raises(Exception) as mine:
        MISTAKES[name](ours)
    assert isinstance(mine.value, StrataError)
    assert mine.value.summary == str(real.value).strip()
    kind = type(real.value)
    assert isinstance(mine.value, kind) if kind.__module__ == "builtins" else type(mine.value).__name__ == kind.__name__


CLASSES: dict[str, Callable[[Any], Any]] = {  # whose words onnxruntime takes from its source files
    "sizes that do not meet": lambda o: session(o).run(None, {"x": X, "y": np.ones((3, 3), np.float32)}),
    "ids out of range": lambda o: session(o, GATHER).run(None, {"x": X, "i": np.array([0, 2])}),
    "ids far below zero": lambda o: session(o, GATHER).run(None, {"x": X, "i": np.array([-3])}),
    "a negative size": lambda o: o.OrtValue.ortvalue_from_shape_and_type([-1], np.float32),
    "a missing input to bind": lambda o: bound(o, x=X),
    "an unknown op": lambda o: session(o, model([node("Zork", ["x"], ["y"])], [tensor("x", FLOAT, [1])],
                                                [tensor("y", FLOAT, [1])])),
    "an output that nothing gives": lambda o: session(o, model([node("Relu", ["x"], ["y"])], [tensor("x", FLOAT, [1])],
                                                               [tensor("q", FLOAT, [1])])),
    "two nodes that give one name": lambda o: session(o, model(
        [node("Relu", ["x"], ["y"]), node("Abs", ["x"], ["y"])], [tensor("x", FLOAT, [1])], [tensor("y", FLOAT, [1])])),
    "a severity that is text": lambda o: o.set_default_logger_severity("loud"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_the_same_class_of_mistake(name: str) -> None:
    with pytest.raises(Exception) as real:
        CLASSES[name](theirs)
    with pytest.raises(Exception) as mine:
        CLASSES[name](ours)
    assert isinstance(mine.value, StrataError)
    kind = type(real.value)
    assert isinstance(mine.value, kind) if kind.__module__ == "builtins" else type(mine.value).__name__ == kind.__name__


def test_bytes_are_utf8() -> None:
    (found,) = session(ours, TEXTS).run(None, {"x": np.array(["é".encode(), b"a"])})
    assert found.tolist() == ["é", "a"]


def test_elements_of_a_sequence_have_its_type() -> None:
    with pytest.raises(ours.capi.onnxruntime_pybind11_state.InvalidArgument, match="float64"):
        session(ours, SEQUENCE).run(None, {"s": [X[0].astype(np.float64)], "i": np.array(0)})


def test_options_are_copied() -> None:
    options = ours.SessionOptions()
    options.logid = "a"
    options.add_session_config_entry("k", "v")
    for made in (copy.copy(options), copy.deepcopy(options)):
        assert (made.logid, made.get_session_config_entry("k")) == ("a", "v")


def test_sessions_share_threads() -> None:
    ours.set_global_thread_pool_sizes(1, 1)
    options = ours.SessionOptions()
    options.use_per_session_threads = False
    (found,) = session(ours, ADD, options).run(None, {"x": X, "y": X})
    ours.set_global_thread_pool_sizes()
    np.testing.assert_array_equal(found, X + X)


def test_the_backend_interface() -> None:
    for backend in (our_backend, their_backend):
        prepared = backend.prepare(ADD, "CPU", intra_op_num_threads=1)
        np.testing.assert_array_equal(prepared.run([X, X])[0], X + X)
        np.testing.assert_array_equal(backend.run(onnx.load_from_string(ADD), [X, X])[0], X + X)
        assert backend.supports_device("CPU")
        assert backend.is_compatible(ADD, "CPU")
        with pytest.raises(RuntimeError, match="Model expect 2 inputs"):
            prepared.run(X)
        with pytest.raises(RuntimeError, match="Incompatible device expected 'ZORK'"):
            backend.prepare(ADD, "ZORK")
        with pytest.raises(RuntimeError, match="'enable_profiling' is not permitted"):
            backend.prepare(ADD, enable_profiling=True)
    with pytest.raises(StrataError, match="no field 'zork'"):
        our_backend.prepare(ADD, zork=1)
