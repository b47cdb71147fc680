"""strata.ort beside the real onnxruntime: names, defaults, what is said of a model, results, mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import strata as st
import strata.ort as ours
from strata.errors import StrataError
from strata.ort.capi import onnxruntime_pybind11_state as our_state

theirs = pytest.importorskip("onnxruntime", reason="the session is compared with onnxruntime's")
their_state = theirs.capi.onnxruntime_pybind11_state

X, K = np.ones((2, 3), np.float32), np.array([1, 2])


def model_bytes() -> bytes:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])
    k = helper.make_tensor_value_info("k", TensorProto.INT64, [2])
    w = helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2])
    z = helper.make_tensor_value_info("z", TensorProto.INT64, [2])
    weight = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(3, 2), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product"), helper.make_node("Identity", ["k"], ["z"])]
    graph = helper.make_graph(nodes, "small", [x, k, w], [y, z], [weight], doc_string="of the graph")
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="a test", doc_string="of all",
        domain="some.where", model_version=7,
    )  # fmt: skip
    helper.set_model_props(model, {"labels": "a b"})
    return bytes(model.SerializeToString())


MODEL = model_bytes()


@pytest.fixture(scope="module")
def sessions() -> tuple[Any, Any]:
    quiet = theirs.SessionOptions()
    quiet.log_severity_level = 3
    return ours.InferenceSession(MODEL), theirs.InferenceSession(MODEL, quiet, providers=["CPUExecutionProvider"])


def test_ports_and_metadata(sessions: tuple[Any, Any]) -> None:
    a, b = sessions
    for method in ("get_inputs", "get_outputs", "get_overridable_initializers"):
        rows = [[(x.name, x.type, x.shape, str(x)) for x in getattr(s, method)()] for s in (a, b)]
        assert rows[0] == rows[1]
    fields = (
        "custom_metadata_map", "description", "domain", "graph_description", "graph_name", "producer_name", "version",
    )  # fmt: skip
    said = [[getattr(s.get_modelmeta(), f) for f in fields] for s in (a, b)]
    assert said[0] == said[1]
    assert a.get_providers() == b.get_providers() == ["CPUExecutionProvider"]


@pytest.mark.parametrize("version", [None, 0, 7])
def test_the_version_of_a_file(version: int | None) -> None:
    proto = onnx.load_from_string(MODEL)
    proto.ClearField("model_version")
    if version is not None:
        proto.model_version = version
    quiet = theirs.SessionOptions()
    quiet.log_severity_level = 3
    wanted = theirs.InferenceSession(proto.SerializeToString(), quiet).get_modelmeta().version
    assert ours.InferenceSession(proto.SerializeToString()).get_modelmeta().version == wanted


@pytest.mark.parametrize("kind", ["SessionOptions", "RunOptions"])
def test_options_have_the_same_names_and_defaults(kind: str) -> None:
    a, b = getattr(ours, kind)(), getattr(theirs, kind)()
    names = [n for n in dir(b) if not n.startswith("_") and not callable(getattr(b, n))]
    assert {n: str(getattr(a, n)) for n in names} == {n: str(getattr(b, n)) for n in names}
    with pytest.raises(AttributeError):
        a.no_such_option = 3
    with pytest.raises(TypeError):
        a.log_severity_level = "loud"


def test_enumerations_have_the_same_members() -> None:
    for name in ours.__all__:
        their: Any = getattr(theirs, name, None)
        if hasattr(their, "__members__"):
            members = {k: int(v) for k, v in their.__members__.items()}
            assert {k: int(v) for k, v in getattr(ours, name).__members__.items()} == members, name


def test_every_exception_is_there_and_a_strata_error() -> None:
    names = [n for n, c in vars(their_state).items() if isinstance(c, type) and issubclass(c, Exception)]
    assert names
    for name in names:
        found = getattr(our_state, name)
        assert issubclass(found, StrataError)
        assert found.__name__ == name


FEEDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"x": X, "k": K},
    "other size": lambda: {"x": np.ones((5, 3), np.float32), "k": K},
    "replaced": lambda: {"x": X, "k": K, "w": np.ones((3, 2), np.float32)},
    "lists": lambda: {"x": X.tolist(), "k": [1, 2]},
    "strided": lambda: {"x": np.ones((3, 2), np.float32).T, "k": K},
}


@pytest.mark.parametrize("feeds", FEEDS)
@pytest.mark.parametrize("names", [None, ["z"], ["z", "y"]])
def test_runs(sessions: tuple[Any, Any], feeds: str, names: list[str] | None) -> None:
    found, expected = (s.run(names, FEEDS[feeds]()) for s in sessions)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6)


MISTAKES: dict[str, Callable[[Any, Any], Any]] = {
    "no such output": lambda o, s: s.run(["nope"], {"x": X, "k": K}),
    "missing": lambda o, s: s.run(None, {"x": X}),
    "no such input": lambda o, s: s.run(None, {"x": X, "k": K, "bad": K}),
    "type": lambda o, s: s.run(None, {"x": X.astype(np.float64), "k": K}),
    "size": lambda o, s: s.run(None, {"x": np.ones((2, 4), np.float32), "k": K}),
    "rank": lambda o, s: s.run(None, {"x": np.ones(3, np.float32), "k": K}),
    "text": lambda o, s: s.run(None, {"x": "zork", "k": K}),
    "number": lambda o, s: s.run(None, {"x": X, "k": 3}),
    "no file": lambda o, s: o.InferenceSession("/no/such.onnx"),
    "no model": lambda o, s: o.InferenceSession(b"garbage"),
    "nothing": lambda o, s: o.InferenceSession(b""),
    "a number for a model": lambda o, s: o.InferenceSession(3),
    "no entry": lambda o, s: o.SessionOptions().get_session_config_entry("zork"),
    "text for a value": lambda o, s: o.OrtValue.ortvalue_from_numpy([1, 2]),
    "no outputs bound": lambda o, s: s.run_with_iobinding(s.io_binding()),
    "no such input to bind": lambda o, s: s.io_binding().bind_cpu_input("nope", X),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_in_the_same_words(sessions: tuple[Any, Any], mistake: str) -> None:
    with pytest.raises(Exception) as mine:
        MISTAKES[mistake](ours, sessions[0])
    with pytest.raises(Exception) as real:
        MISTAKES[mistake](theirs, sessions[1])
    assert isinstance(mine.value, StrataError)
    assert mine.value.summary == str(real.value).strip()
    kind = type(real.value)
    if kind.__module__ == "builtins":
        assert isinstance(mine.value, kind)
    else:
        assert type(mine.value).__name__ == kind.__name__


def test_free_sizes_are_fixed() -> None:
    shapes = []
    for o in (ours, theirs):
        options = o.SessionOptions()
        options.log_severity_level = 3
        options.add_free_dimension_override_by_name("N", 4)
        session = o.InferenceSession(MODEL, options)
        shapes.append([x.shape for x in (*session.get_inputs(), *session.get_outputs())])
        with pytest.raises(Exception, match="Got: 2 Expected: 4"):
            session.run(None, {"x": X, "k": K})
    assert shapes[0] == shapes[1]


def test_sizes_are_fixed_by_their_labels() -> None:
    proto = onnx.load_from_string(MODEL)
    proto.graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    made = []
    for lib in (ours, theirs):
        options = lib.SessionOptions()
        options.add_free_dimension_override_by_denotation("DATA_BATCH", 2)
        options.add_free_dimension_override_by_denotation("DATA_CHANNEL", 5)  # which no size is
        session = lib.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        made.append([x.shape for x in session.get_inputs()])
        with pytest.raises(Exception, match="index: 0 Got: 3 Expected: 2"):
            session.run(None, {"x": np.ones((3, 3), np.float32), "k": K})
    assert made[0] == made[1]
    with pytest.raises(TypeError):
        ours.SessionOptions().add_free_dimension_override_by_denotation(3, 2)


def test_an_initializer_of_another_type_is_refused() -> None:
    options = ours.SessionOptions()
    options.add_initializer("w", ours.OrtValue.ortvalue_from_numpy(np.ones((3, 2))))
    with pytest.raises(StrataError, match="initializer w is float, the value double"):
        ours.InferenceSession(MODEL, options)


@pytest.mark.parametrize("numbers", [[2**70, 1], ["a", "b"], [None, 1], [1j, 2], [[1], [2, 3]], [object(), 1]])
def test_lists_that_are_no_numbers_of_the_type(sessions: tuple[Any, Any], numbers: Any) -> None:
    for session, kind in zip(sessions, ((StrataError,), (RuntimeError,)), strict=True):
        with pytest.raises(kind):
            session.run(None, {"x": X, "k": numbers})
    with pytest.raises(StrataError):
        st.onnx.load(MODEL).run(x=X, k=numbers)


def test_initializers_of_the_caller() -> None:
    options = ours.SessionOptions()
    options.add_initializer("w", ours.OrtValue.ortvalue_from_numpy(np.full((3, 2), 2, np.float32)))
    np.testing.assert_array_equal(
        ours.InferenceSession(MODEL, options).run(["y"], {"x": X, "k": K})[0], np.full((2, 2), 6)
    )


def test_threads_of_a_session_do_not_change_results() -> None:
    options = ours.SessionOptions()
    options.intra_op_num_threads = 1
    a, b = (ours.InferenceSession(MODEL, o).run(["y"], {"x": X, "k": K})[0] for o in (options, None))
    np.testing.assert_array_equal(a, b)


def test_values_and_bindings(sessions: tuple[Any, Any]) -> None:
    rows = []
    for o, session in zip((ours, theirs), sessions, strict=True):
        value = o.OrtValue.ortvalue_from_numpy(X)
        row: list[Any] = [
            value.shape(),
            value.data_type(),
            value.device_name(),
            value.element_type(),
            value.is_tensor(),
        ]
        row += [value.tensor_size_in_bytes(), value.has_value(), value.is_tensor_sequence()]
        out = np.zeros((2, 2), np.float32)
        binding = session.io_binding()
        binding.bind_input("x", "cpu", 0, np.float32, X.shape, X.ctypes.data)
        binding.bind_ortvalue_input("k", o.OrtValue.ortvalue_from_numpy(K))
        binding.bind_output("y", "cpu", 0, np.float32, out.shape, out.ctypes.data)
        binding.bind_output("z")
        session.run_with_iobinding(binding)
        row += [out.tolist(), [x.numpy().tolist() for x in binding.get_outputs()]]
        row += [
            [
                x.numpy().tolist()
                for x in session.run_with_ort_values(["z"], {"x": value, "k": o.OrtValue.ortvalue_from_numpy(K)})
            ]
        ]
        fresh = o.OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32)
        fresh.update_inplace(X)
        row += [fresh.numpy().tolist()]
        rows.append(row)
    assert rows[0] == rows[1]


def test_profiling_writes_a_trace_in_onnxruntimes_words(tmp_path: Path) -> None:
    found = []
    for o in (theirs, ours):
        options = o.SessionOptions()
        options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
        session = o.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])
        session.run(None, {"x": X, "k": K})
        path = session.end_profiling()
        assert path.startswith(str(tmp_path / "profile"))
        events = [e for e in json.loads(Path(path).read_text("utf-8")) if e["cat"] != "__metadata"]
        nodes = [e for e in events if e["cat"] == "Node"]
        assert nodes
        assert all(e["args"]["op_name"] and e["name"].endswith("_kernel_time") and e["dur"] >= 0 for e in nodes)
        assert {e["args"]["provider"] for e in nodes} == {"CPUExecutionProvider"}
        found.append(
            ({e["cat"] for e in events}, [e["name"] for e in events].count("model_run"), {*nodes[0]} - {"args"})
        )
    assert found[0] == found[1]
    assert any(e["args"].get("step") == "k0" for e in nodes)


def test_a_shape_is_the_callers_own() -> None:
    for o in (theirs, ours):
        session = o.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
        declared = list(session.get_inputs()[0].shape)
        session.get_inputs()[0].shape[0] = 99
        assert session.get_inputs()[0].shape == declared
        session.run(None, {"x": X, "k": K})


def test_outputs_of_a_binding_as_a_vector() -> None:
    rows = []
    for o in (theirs, ours):
        session = o.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_cpu_input("k", K)
        binding.bind_output("z")
        session.run_with_iobinding(binding)
        made = binding.get_outputs_as_ortvaluevector()
        made.push_back(made[0])
        rows.append(([x.numpy().tolist() for x in made], made.element_type_at(0), list(made.bool_tensor_indices())))
    assert rows[0] == rows[1]


def test_names_that_are_not_offered_raise() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ours.no_such_name
    with pytest.raises(AttributeError, match="quantise"):
        _ = ours.quantization


PROGRAM = """
import sys
import onnxruntime
from importlib.metadata import version
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
print(onnxruntime.__name__, version("onnxruntime") == onnxruntime.__version__, InvalidArgument.__module__, sys.argv[1:])
try:
    import onnxruntime.quantization
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_unmodified_programs(tmp_path: Path) -> None:
    path = tmp_path / "app.py"
    path.write_text(PROGRAM, "utf-8")
    command = [sys.executable, "-m", "strata.cli", "exec", "--", sys.executable, str(path), "--flag", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "strata.ort True strata.ort.exceptions ['--flag', '3']\nonnxruntime.quantization\n"


def test_install_and_uninstall() -> None:
    ours.install()
    try:
        import onnxruntime

        assert onnxruntime is ours
    finally:
        ours.uninstall()
    import onnxruntime as again

    assert again is theirs


def test_the_model_of_the_tests_is_valid() -> None:
    onnx.checker.check_model(onnx.load_from_string(MODEL))
