"""Every case of onnx.backend.test: loaded, exported again, and run by onnxruntime: `python -m tests.onnx_export`.

A case agrees where the exported model passes onnx's checker and gives the numbers that the suite expects, those that
the original gives in the same runtime, or, of random draws, those that it gives with strata. Where onnxruntime does not
run a model, onnx's own evaluator is asked. `--only REGEX` picks cases, `--reasons` counts what stands in the way.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

AGREES = "agrees"
KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")


@dataclass(frozen=True)
class Case:
    """A model of the suite with arrays for it."""

    name: str
    model: Any
    data: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float
    atol: float


@cache
def cases() -> dict[str, Case]:
    """All cases by name; the node cases come as values, the others as files."""
    import onnx
    from onnx import numpy_helper
    from onnx.backend.test.loader import load_model_tests

    def read(path: Path, kind: Any) -> Any:
        proto = (onnx.SequenceProto if kind == "sequence_type" else onnx.TensorProto)()
        proto.ParseFromString(path.read_bytes())
        return numpy_helper.to_list(proto) if kind == "sequence_type" else numpy_helper.to_array(proto)

    def files(folder: Path, name: str, ports: Any) -> list[Any]:
        return [
            read(folder / f"{name}_{i}.pb", p.type.WhichOneof("value"))
            for i, p in enumerate(ports)
            if (folder / f"{name}_{i}.pb").exists()
        ]

    found = {}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for kind in KINDS:
            for test in load_model_tests(kind=kind):
                model, data = test.model, test.data_sets or ()
                if model is None:
                    folder = Path(str(test.model_dir))
                    model = onnx.load(folder / "model.onnx")
                    data = [
                        (files(at, "input", model.graph.input), files(at, "output", model.graph.output))
                        for at in sorted(folder.glob("test_data_set_*"))
                    ]
                pairs = [([_array(x) for x in ins], [_array(x) for x in outs]) for ins, outs in data]
                found[test.name] = Case(test.name, model, pairs, test.rtol, test.atol)
    return found


def _array(x: Any) -> Any:
    """A value of the suite as an array, or a list of arrays."""
    from onnx import numpy_helper

    if hasattr(x, "data_type"):
        return numpy_helper.to_array(x)
    if isinstance(x, (list, tuple)):
        return [_array(y) for y in x]
    return x if x is None or isinstance(x, dict) or hasattr(x, "SerializeToString") else np.asarray(x)


@dataclass(frozen=True)
class Verdict:
    """How a case fared: `agrees`, `differs`, or where it stopped."""

    name: str
    stage: str
    reason: str = ""


def run(case: Case) -> Verdict:
    """Load, export, check, run, compare."""
    import onnx

    import strata as st
    from strata.errors import StrataError

    try:
        model = st.onnx.load(case.model, device="reference")
        made = st.onnx.export(model)
    except StrataError as error:
        return Verdict(case.name, "not exported", error.summary)
    try:
        onnx.checker.check_model(made, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return Verdict(case.name, "not valid", str(error))
    ours = {p.name for p in made.graph.input}
    names = [p.name for p in case.model.graph.input]
    how = "the file's nodes" if made.graph.node == case.model.graph.node else "a graph"
    for inputs, wanted in case.data:
        feeds = dict(zip(names, inputs, strict=False))
        reason, got = _ran(made, {name: x for name, x in feeds.items() if name in ours})
        if got is None:
            return Verdict(case.name, "not run", reason)
        if not all(_same(want, have, case) for want, have in zip(wanted, got, strict=False)):
            _, theirs = _ran(case.model, feeds)
            mine = model.run(feeds)  # of draws, which are ours
            if not any(x is not None and all(map(_same, x, got, [case] * len(got))) for x in (theirs, mine)):
                return Verdict(case.name, "differs", f"as {how}")
    return Verdict(case.name, AGREES, how)


def _ran(model: Any, feeds: dict[str, Any]) -> tuple[str, Any]:
    import onnxruntime
    from onnx.reference import ReferenceEvaluator

    onnxruntime.set_default_logger_severity(4)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
            return "", session.run(None, feeds)
        except Exception as first:  # noqa: BLE001 - onnxruntime's classes are many
            try:
                return "", ReferenceEvaluator(model).run(None, feeds)
            except Exception as second:  # noqa: BLE001 - whatever the evaluator raises
                return f"{' '.join(str(first).split())[:120]} | {' '.join(str(second).split())[:120]}", None


def _same(want: Any, have: Any, case: Case) -> bool:
    if isinstance(want, list) or isinstance(have, list):
        return len(want) == len(have) and all(_same(a, b, case) for a, b in zip(want, have, strict=True))
    if want is None or have is None:
        return want is have
    want, have = np.asarray(want), np.asarray(have)
    if want.shape != have.shape:
        return False
    if want.dtype.kind in "OUS":
        return bool(np.array_equal(want.astype(str), have.astype(str)))
    if have.dtype == np.uint8 and want.dtype.name.startswith("float8"):
        have = have.view(want.dtype)  # how onnxruntime hands them out
    if want.dtype.kind not in "fc":
        want, have = want.astype(np.float64), have.astype(np.float64)
    finite = abs(want[np.isfinite(want)])
    noise = 1e-6 * max(1.0, float(finite.max())) if finite.size else 0.0  # of sums that cancel
    return bool(np.allclose(have, want, rtol=case.rtol, atol=max(case.atol, noise), equal_nan=True))


def chosen(pattern: str) -> Iterator[Case]:
    return (case for name, case in sorted(cases().items()) if re.search(pattern, name))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="regular expression of case names")
    parser.add_argument("--reasons", action="store_true", help="count what stands in the way, in place of each case")
    options = parser.parse_args(argv)
    verdicts = [run(case) for case in chosen(options.only)]
    bad = [v for v in verdicts if v.stage != AGREES]
    if options.reasons:
        for (stage, reason), count in Counter((v.stage, v.reason) for v in bad).most_common():
            print(f"{count:4} {stage}: {reason[:240]}")
    else:
        for v in bad:
            print(f"{v.name}: {v.stage}: {v.reason[:300]}")
    others = dict(Counter(v.stage for v in bad))
    print(f"{len(verdicts) - len(bad)} of {len(verdicts)} agree when exported again; the others: {others}")
    print(f"written as {dict(Counter(v.reason for v in verdicts if v.stage == AGREES))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
