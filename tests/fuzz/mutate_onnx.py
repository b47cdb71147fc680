"""Mutated ONNX files: reading and running them may end in a StrataError, and in nothing worse.

No mutant may crash, take more than two seconds, more memory than four times the file and 64 MB, or open a file outside
its own folder and the cache. Run by hand for a long time: `python -m tests.fuzz.mutate_onnx 20000 --seed 0`. A unit
test runs a few hundred.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from strata.config import config, using
from strata.errors import StrataError
from strata.io.onnx import load
from tests.fuzz.mutate_files import MEMORY, SECONDS, mutate, peak_memory, resident_memory

HANGS = 20.0  # seconds of a core after which a mutant counts as hung: where is printed, and the run ends
NUMBERS = (0, 1, 2, 3, -1, -2, 7, 64, 2**31 - 1, 2**31, 2**40, -(2**40), 2**63 - 1, -(2**63))
OPS = tuple(sorted({s.name for s in onnx.defs.get_all_schemas() if not s.deprecated}))
_watched: list[Path] = []  # the folder that may be read, while a mutant runs
_outside: list[str] = []


def seed_models() -> list[Any]:
    """Small valid models: a conv net, branches and loops, a recurrent net, quantised ops, sequences, shapes as data."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    node, info = helper.make_node, helper.make_tensor_value_info
    flag = helper.make_tensor("flag", TensorProto.BOOL, [], [True])
    branch = [
        helper.make_graph([node(op, ["x"], ["b"])], op, [], [info("b", TensorProto.FLOAT, None)])
        for op in ("Relu", "Neg")
    ]
    loop = helper.make_graph(
        [node("Add", ["v", "w"], ["v2"]), node("Identity", ["c"], ["c2"])],
        "body",
        [info("i", TensorProto.INT64, []), info("c", TensorProto.BOOL, []), info("v", TensorProto.FLOAT, None)],
        [info("c2", TensorProto.BOOL, []), info("v2", TensorProto.FLOAT, None)],
    )
    conv = [
        node("Conv", ["x", "w"], ["h"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", ["h", "a", "b", "a", "b"], ["n"]),
        node("MaxPool", ["n"], ["p"], kernel_shape=[2, 2]),
        node("Resize", ["p", "", "scales"], ["z"], mode="linear"),
        node("Reshape", ["z", "s"], ["f"]),
        node("Gemm", ["f", "g"], ["q"], transB=1),
        node("Softmax", ["q"], ["y"], axis=1),
    ]
    control = [
        node("Constant", [], ["k"], value=flag),
        node("If", ["k"], ["t"], then_branch=branch[0], else_branch=branch[1]),
        node("Loop", ["m", "", "t"], ["y"], body=loop),
    ]
    recurrent = [
        node("LSTM", ["x", "w", "r"], ["h", "", "c"], hidden_size=3),
        node("Squeeze", ["h", "one"], ["q"]),
        node("TopK", ["q", "k"], ["y", "at"], axis=2),
    ]
    quantised = [
        node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        node("MatMulInteger", ["q", "w", "z"], ["i"]),
        node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        node("Mul", ["f", "s"], ["y"]),
    ]
    codes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("DequantizeLinear", ["w", "ws", "wz"], ["v"], axis=0),
        node("Conv", ["d", "v", "b"], ["h"], pads=[1, 1, 1, 1]),
        node("MaxPool", ["h"], ["p"], kernel_shape=[2, 2]),
        node("QuantizeLinear", ["p", "s", "z"], ["r"]),
        node("QLinearConv", ["r", "s", "z", "k", "one", "wz", "s", "z"], ["u"], strides=[2, 2]),
        node("DequantizeLinear", ["u", "s", "z"], ["y"]),
    ]
    shapes = [
        node("Shape", ["x"], ["d"]),
        node("Gather", ["d", "first"], ["n"]),
        node("Range", ["zero", "n", "step"], ["i"]),
        node("NonZero", ["x"], ["at"]),
        node("SplitToSequence", ["x"], ["list"], axis=1, keepdims=0),
        node("ConcatFromSequence", ["list"], ["y"], axis=0),
        node("Einsum", ["x", "x"], ["e"], equation="ij,kj->ik"),
    ]
    return [
        _model(conv, (2, 1, 8, 8), ["y"], {
            "w": normal(2, 1, 3, 3), "a": np.ones(2, np.float32), "b": np.ones(2, np.float32),
            "scales": np.array([1, 1, 2, 2], np.float32), "s": np.array([0, -1]), "g": normal(3, 32),
        }),
        _model(control, (2, 3), ["y"], {"w": normal(3), "m": np.array(3)}),
        _model(recurrent, (4, 2, 5), ["y", "at"], {
            "w": normal(1, 12, 5), "r": normal(1, 12, 3), "one": np.array([1]), "k": np.array([2]),
        }),
        _model(quantised, (3, 4), ["y"], {"w": rng.integers(-9, 9, (4, 5)).astype(np.int8)}),
        _model(codes, (2, 3, 6, 6), ["y"], {
            "s": np.float32(0.05), "z": np.uint8(100), "w": rng.integers(-9, 9, (4, 3, 3, 3)).astype(np.int8),
            "ws": np.full(4, 0.01, np.float32), "wz": np.zeros(4, np.int8), "b": normal(4), "one": np.float32(0.01),
            "k": rng.integers(-9, 9, (4, 4, 2, 2)).astype(np.int8),
        }),
        _model(shapes, (3, 4), ["y", "i", "at", "e"], {
            "first": np.array(0), "zero": np.array(0), "step": np.array(1),
        }),
    ]  # fmt: skip


def _model(nodes: Sequence[Any], shape: Sequence[int], outputs: Sequence[str], held: dict[str, np.ndarray]) -> Any:
    dims = ["n", *shape[1:]]
    graph = helper.make_graph(
        list(nodes),
        "seed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(a, name) for name, a in held.items()],
        doc_string=",".join(map(str, shape)),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def changed(proto: Any, rng: random.Random) -> bytes:
    """A mutant: fields changed within the format, then, now and then, bytes."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    graph = copy.graph
    names = [x for n in graph.node for x in (*n.input, *n.output)] + ["", "nothing"]
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        n = rng.choice(graph.node)
        t = rng.choice(graph.initializer)
        match rng.randrange(12):
            case 0:
                n.op_type = rng.choice(OPS)
            case 1 if n.input:
                n.input[rng.randrange(len(n.input))] = rng.choice(names)
            case 2 if n.output:
                n.output[rng.randrange(len(n.output))] = rng.choice(names)
            case 3 if n.attribute:
                a = rng.choice(n.attribute)
                a.i = rng.choice(NUMBERS)
                a.ints.append(rng.choice(NUMBERS))
            case 4 if t.dims:
                t.dims[rng.randrange(len(t.dims))] = rng.choice(NUMBERS)
            case 5:
                t.data_type = rng.randrange(32)
            case 6:
                a = n.attribute.add()
                a.name, a.type, a.i = (
                    rng.choice(("axis", "to", "group", "keepdims", "size", "mode")),
                    2,
                    rng.choice(NUMBERS),
                )
            case 7:
                t.ClearField("raw_data")
                t.data_location = TensorProto.EXTERNAL
                place = rng.choice(("/etc/passwd", "../x", "link", "data", "a/../../x", ".", "", "\0", "no"))
                for key, value in (("location", place), ("offset", str(rng.choice(NUMBERS)))):
                    entry = t.external_data.add()
                    entry.key, entry.value = key, value
            case 8:
                values = np.array([rng.choice(NUMBERS) for _ in range(rng.randrange(4))], np.int64)
                t.CopyFrom(numpy_helper.from_array(values, t.name))
            case 9:
                graph.node.append(n)
            case 10 if len(graph.node) > 1:
                del graph.node[rng.randrange(len(graph.node))]
            case 11:
                copy.opset_import[0].version = rng.choice((1, 5, 7, 13, 17, 22, 26, 99, -1))
    data = bytes(copy.SerializeToString())
    return mutate(data, rng) if rng.random() < 0.3 else data


def _hook(event: str, arguments: Any) -> None:
    if event != "open" or not _watched or not isinstance(arguments[0], (str, bytes)):
        return
    path = os.path.realpath(os.fsdecode(arguments[0]))
    own = (_watched[0], config().cache_dir, sys.prefix, sys.base_prefix, Path(__file__).parents[2])
    allowed = (*map(os.path.realpath, own), "/proc/", "/sys/", "/dev/")
    if not path.startswith(allowed):
        _outside.append(path)


@cache
def _watch() -> None:
    sys.addaudithook(_hook)  # for good: Python cannot take one away
    faulthandler.register(signal.SIGPROF, chain=True)


def run(count: int, seed: int = 0, device: str = "reference") -> int:
    """Read and run so many mutants; returns how many were refused. Whatever else happens raises, with its number."""
    rng = random.Random(seed)
    models = seed_models()
    _watch()
    _outside.clear()
    refused = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "data").write_bytes(bytes(64))
        (folder / "link").symlink_to("/etc/passwd")
        with using(cache_dir=folder / "cache"):  # all modules are there, and code was made, before memory is watched
            for proto in models:
                _attempt(folder, proto.SerializeToString(), proto, device)
        for number in range(count):
            proto = rng.choice(models)
            data = changed(proto, rng)
            refused += _checked(folder, data, proto, device, f"mutant {number} of seed {seed}")
    return refused


def _checked(folder: Path, data: bytes, proto: Any, device: str, name: str) -> bool:
    before, start = resident_memory(), time.process_time()
    try:
        was_refused = _attempt(folder, data, proto, device)
    except Exception as error:
        (Path(tempfile.gettempdir()) / "mutant.onnx").write_bytes(data)
        raise AssertionError(f"{name} ended in {type(error).__name__}: {error}") from error
    seconds = time.process_time() - start
    grown = peak_memory() - before
    assert seconds < SECONDS, f"{name} took {seconds:.1f} s"
    assert grown < 4 * len(data) + MEMORY, f"{name} took {grown >> 20} MB"
    assert not _outside, f"{name} opened {_outside}"
    return was_refused


def _attempt(folder: Path, data: bytes, proto: Any, device: str) -> bool:
    path = folder / "model.onnx"
    path.write_bytes(data)
    shape = [int(d) for d in proto.graph.doc_string.split(",")]
    _watched[:] = [folder]
    signal.setitimer(signal.ITIMER_PROF, HANGS)
    try:
        with np.errstate(all="ignore"):
            load(path, device=device).run(
                {"x": np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)}
            )
    except StrataError:
        return True
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _watched.clear()
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.mutate_onnx", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-going", action="store_true", help="count failures by kind instead of stopping at one")
    parser.add_argument("--device", default="reference", help="where mutants run: reference or cpu")
    options = parser.parse_args()
    if not options.keep_going:
        print(run(options.count, options.seed, options.device), "refused")
        return 0
    failures: dict[str, int] = {}
    for piece in range(-(-options.count // 100)):
        try:
            run(100, options.seed + piece, options.device)
        except AssertionError as error:
            last = traceback.extract_tb(error.__cause__.__traceback__)[-1] if error.__cause__ else None
            kind = f"{str(error)[:150]} at {last.filename}:{last.lineno}" if last else str(error)[:150]
            failures[kind] = failures.get(kind, 0) + 1
            print(kind, flush=True)
    print(f"{len(failures)} kinds of failures in {options.count} mutants")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
