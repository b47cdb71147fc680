"""Valid ONNX models to mutate: functions, sequences, texts, signals, generators, loops that data end, scans, boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

node, info = helper.make_node, helper.make_tensor_value_info
FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def model(
    nodes: Sequence[Any], shape: Sequence[int], outputs: Sequence[str], held: dict[str, Any], functions: Any = ()
) -> Any:
    """A model of one input, `x`, whose first axis is open; its shape is kept in the graph's text."""
    graph = helper.make_graph(
        list(nodes), "seed", [info("x", FLOAT, ["n", *shape[1:]])],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(a), name) for name, a in held.items()],
        doc_string=",".join(map(str, shape)),
    )  # fmt: skip
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions))


def more_models() -> list[Any]:
    return [
        _functions(), _sequences(), _texts(), _signals(), _generators(),
        _while(), _scan(), _places(), _boxes(), _norms(),
    ]  # fmt: skip


def _functions() -> Any:
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    first = helper.make_function("own", "twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], imports)
    scaled = node("LeakyRelu", ["t"], ["b"])
    scaled.attribute.add(name="alpha", ref_attr_name="slope", type=1)
    second = helper.make_function(
        "own", "more", ["a"], ["b"], [node("twice", ["a"], ["t"], domain="own"), scaled], imports, ["slope"]
    )
    nodes = [node("more", ["x"], ["h"], domain="own", slope=0.1), node("Gelu", ["h"], ["g"]),
             node("Celu", ["g"], ["y"], alpha=2.0)]  # fmt: skip
    return model(nodes, (2, 3), ["y"], {"unused": np.zeros(1, np.float32)}, [first, second])


def _sequences() -> Any:
    body = helper.make_graph(
        [node("SequenceInsert", ["s", "x"], ["s2"]), node("Identity", ["c"], ["c2"])], "body",
        [info("i", INT, []), info("c", BOOL, []), helper.make_tensor_sequence_value_info("s", FLOAT, None)],
        [info("c2", BOOL, []), helper.make_tensor_sequence_value_info("s2", FLOAT, None)],
    )  # fmt: skip
    nodes = [
        node("SequenceEmpty", [], ["e"]), node("Loop", ["m", "", "e"], ["s"], body=body),
        node("SequenceConstruct", ["x", "x"], ["t"]), node("SequenceAt", ["t", "at"], ["u"]),
        node("SequenceErase", ["s", "at"], ["r"]), node("ConcatFromSequence", ["r"], ["y"], axis=0),
        node("SequenceLength", ["s"], ["k"]), node("SplitToSequence", ["x", "part"], ["p"], axis=1),
        node("SequenceAt", ["p", "at"], ["z"]),
    ]  # fmt: skip
    return model(nodes, (2, 4), ["y", "u", "k", "z"], {"m": np.array(4), "at": np.array(-1), "part": np.array(2)})


def _texts() -> Any:
    nodes = [
        node("StringConcat", ["s", "t"], ["c"]), node("RegexFullMatch", ["c"], ["m"], pattern=r"(a+|b)*\d?$"),
        node("StringSplit", ["s"], ["p", "k"], delimiter="b", maxsplit=2),
        node("StringNormalizer", ["s"], ["u"], case_change_action="UPPER", stopwords=["ab"]),
        node("Cast", ["x"], ["v"], to=TensorProto.STRING), node("Cast", ["v"], ["y"], to=FLOAT),
        node("TfIdfVectorizer", ["ids"], ["f"], mode="TF", min_gram_length=1, max_gram_length=2, max_skip_count=1,
             ngram_counts=[0, 2], ngram_indexes=[0, 1, 2], pool_int64s=[1, 2, 1, 2]),
        node("LabelEncoder", ["ids"], ["l"], domain="ai.onnx.ml", keys_int64s=[1, 2], values_floats=[0.5, 1.5]),
        node("Unique", ["ids"], ["q", "w", "e", "r"], axis=0), node("Reshape", ["s", "shape"], ["z"]),
    ]  # fmt: skip
    held = {"s": np.array(["aab", "ab"], object), "t": np.array(["1"], object), "ids": np.array([1, 2, 1]),
            "shape": np.array([1, -1])}  # fmt: skip
    return model(nodes, (2, 2), ["m", "p", "k", "u", "y", "f", "l", "q", "z"], held)


def _signals() -> Any:
    nodes = [
        node("HannWindow", ["n"], ["w"]), node("BlackmanWindow", ["n"], ["b"], periodic=0),
        node("STFT", ["x", "hop", "w"], ["f"]), node("DFT", ["x", "", "axis"], ["d"], onesided=1),
        node("MelWeightMatrix", ["bins", "n", "rate", "low", "high"], ["mel"]), node("ReduceSumSquare", ["f"], ["y"]),
    ]  # fmt: skip
    held = {"n": np.array(8), "hop": np.array(4), "axis": np.array(1), "bins": np.array(4), "rate": np.array(100),
            "low": np.float32(1), "high": np.float32(50)}  # fmt: skip
    return model(nodes, (2, 16, 1), ["y", "d", "mel", "b"], held)


def _generators() -> Any:
    nodes = [
        node("ConstantOfShape", ["s"], ["c"], value=helper.make_tensor("v", FLOAT, [1], [2.0])),
        node("Range", ["zero", "four", "one"], ["r"]), node("EyeLike", ["c"], ["e"], k=1),
        node("Expand", ["one", "s"], ["ex"]), node("Tile", ["c", "s"], ["t"]), node("Pad", ["c", "pads"], ["p"]),
        node("OneHot", ["r", "four", "pair"], ["o"]), node("Trilu", ["e", "zero"], ["l"], upper=0),
        node("CumSum", ["t", "zero"], ["cs"], reverse=1), node("Compress", ["r", "flags"], ["k"]),
        node("RandomNormalLike", ["x"], ["g"], seed=1.0), node("Multinomial", ["x"], ["m"], sample_size=3),
        node("CenterCropPad", ["x", "s"], ["y"]), node("BitShift", ["u", "u"], ["h"], direction="LEFT"),
    ]  # fmt: skip
    held = {"s": np.array([2, 3]), "zero": np.array(0), "four": np.array(4), "one": np.array(1),
            "u": np.array([1, 3], np.uint8), "pads": np.array([0, 1, 2, 0]), "pair": np.array([0, 1], np.float32),
            "flags": np.array([True, False, True, True])}  # fmt: skip
    return model(nodes, (2, 4), ["y", "o", "l", "cs", "k", "g", "m", "p", "ex", "h"], held)


def _while() -> Any:
    body = helper.make_graph(
        [node("Mul", ["v", "half"], ["v2"]), node("ReduceMax", ["v2"], ["top"], keepdims=0),
         node("Greater", ["top", "least"], ["c2"]), node("NonZero", ["v2"], ["at"]), node("Shape", ["at"], ["row"])],
        "body", [info("i", INT, []), info("c", BOOL, []), info("v", FLOAT, None)],
        [info("c2", BOOL, []), info("v2", FLOAT, None), info("row", INT, None)],
    )  # fmt: skip
    nodes = [
        node("Abs", ["x"], ["a"]), node("Loop", ["m", "go", "a"], ["y", "rows"], body=body),
        node("NonZero", ["x"], ["at"]), node("Transpose", ["at"], ["places"]),
        node("GatherND", ["x", "places"], ["picked"]),
    ]  # fmt: skip
    held = {"m": np.array(20), "go": np.array(True), "half": np.float32(0.5), "least": np.float32(0.1)}
    return model(nodes, (2, 3), ["y", "rows", "picked"], held)


def _scan() -> Any:
    body = helper.make_graph(
        [node("Add", ["s", "r"], ["s2"]), node("Tanh", ["s2"], ["o"])], "body",
        [info("s", FLOAT, [3]), info("r", FLOAT, [3])], [info("s2", FLOAT, [3]), info("o", FLOAT, [3])],
    )  # fmt: skip
    nodes = [
        node("Scan", ["start", "x"], ["last", "y"], body=body, num_scan_inputs=1, scan_input_directions=[1]),
        node("GRU", ["seq", "w", "r"], ["", "h"], hidden_size=2),
    ]  # fmt: skip
    rng = np.random.default_rng(1)
    held = {"start": np.zeros(3, np.float32), "seq": np.ones((4, 1, 3), np.float32),
            "w": rng.standard_normal((1, 6, 3)).astype(np.float32),
            "r": rng.standard_normal((1, 6, 2)).astype(np.float32)}  # fmt: skip
    return model(nodes, (4, 3), ["last", "y", "h"], held)


def _places() -> Any:
    nodes = [
        node("GatherElements", ["x", "i"], ["a"], axis=1), node("ScatterElements", ["x", "i", "a"], ["b"], axis=1),
        node("ScatterND", ["b", "p", "v"], ["c"]), node("TopK", ["c", "k"], ["t", "at"], largest=0),
        node("ArgMax", ["c"], ["m"], axis=1), node("Slice", ["c", "from", "to", "axes", "steps"], ["s"]),
        node("ReverseSequence", ["c", "lengths"], ["r"], batch_axis=0, time_axis=1), node("Mod", ["i", "two"], ["d"]),
        node("Gather", ["x", "two"], ["y"], axis=1), node("Where", ["w", "x", "c"], ["z"]),
    ]  # fmt: skip
    held = {"i": np.array([[0, 1], [2, 0]]), "p": np.array([[1, 2]]), "v": np.ones(1, np.float32), "k": np.array([2]),
            "from": np.array([3]), "to": np.array([-9]), "axes": np.array([1]), "steps": np.array([-2]),
            "lengths": np.array([1, 3]), "two": np.array(2), "w": np.array([True, False, True, False])}  # fmt: skip
    return model(nodes, (2, 4), ["t", "at", "m", "s", "r", "d", "y", "z"], held)


def _boxes() -> Any:
    nodes = [
        node("NonMaxSuppression", ["boxes", "scores", "most"], ["kept"]),
        node("RoiAlign", ["x", "rois", "which"], ["a"], output_height=2, output_width=2, sampling_ratio=2),
        node("GridSample", ["x", "grid"], ["g"]), node("MaxPool", ["x"], ["p", "at"], kernel_shape=[2, 2]),
        node("MaxUnpool", ["p", "at"], ["u"], kernel_shape=[2, 2]),
        node("AveragePool", ["x"], ["v"], kernel_shape=[3, 3]),
        node("ConvTranspose", ["x", "w"], ["t"], strides=[2, 2]),
        node("Resize", ["x", "", "", "s"], ["y"], mode="cubic"),
        node("DepthToSpace", ["t"], ["z"], blocksize=2), node("Col2Im", ["cols", "size", "block"], ["c"]),
    ]  # fmt: skip
    rng = np.random.default_rng(2)
    held = {"boxes": np.array([[[0, 0, 1, 1], [0, 0, 1, 0.9], [2, 2, 3, 3]]], np.float32), "most": np.array([2]),
            "scores": np.array([[[0.9, 0.8, 0.7]]], np.float32), "rois": np.array([[0, 0, 3, 3]], np.float32),
            "which": np.array([0]), "grid": rng.uniform(-1, 1, (1, 2, 2, 2)).astype(np.float32),
            "w": rng.standard_normal((1, 4, 3, 3)).astype(np.float32), "s": np.array([1, 1, 6, 5]),
            "cols": np.ones((1, 4, 4), np.float32), "size": np.array([3, 3]), "block": np.array([2, 2])}  # fmt: skip
    return model(nodes, (1, 1, 4, 4), ["kept", "a", "g", "u", "v", "y", "z", "c"], held)


def _norms() -> Any:
    nodes = [
        node("LayerNormalization", ["x", "g", "b"], ["l"]), node("InstanceNormalization", ["x", "c", "c"], ["i"]),
        node("GroupNormalization", ["x", "c", "c"], ["n"], num_groups=2), node("LpNormalization", ["x"], ["p"], axis=1),
        node("Einsum", ["x", "x"], ["e"], equation="bij,bkj->bik"), node("Hardmax", ["e"], ["h"]),
        node("LRN", ["x4"], ["r"], size=3), node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]), node("Clip", ["d", "low", "high"], ["y"]),
        node("Det", ["e"], ["t"]), node("BitwiseAnd", ["k", "k"], ["m"]),
    ]  # fmt: skip
    held = {"g": np.ones(3, np.float32), "b": np.zeros(3, np.float32), "c": np.ones(4, np.float32),
            "x4": np.ones((1, 3, 2, 2), np.float32), "s": np.float32(0.1), "z": np.uint8(3), "low": np.float32(-1),
            "high": np.float32(1), "k": np.array([1, 2])}  # fmt: skip
    return model(nodes, (2, 4, 3), ["l", "i", "n", "p", "h", "r", "y", "t", "m"], held)
