"""Model files and traces as data for the page: facts, tensors, spans."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strata.core import read_text
from strata.errors import FileError
from strata.modules import imported
from strata.viewer.program import FileNode, ProgramData

LONGEST_FACT = 200  # characters
MOST_SPANS = 200_000  # of a trace in a page


def onnx_data(path: Path, model: Any) -> dict[str, Any]:
    """What an ONNX file declares: inputs, outputs, weights, ops."""
    proto = model.program.graph
    return {
        "kind": "onnx", "name": path.stem,
        "facts": _facts({
            "inputs": ", ".join(map(str, model.inputs)), "outputs": ", ".join(map(str, model.outputs)),
            "nodes": len(proto.node), "ops": _counted(Counter(n.op_type for n in proto.node)),
        }),
        "tensors": [[x.name, _element(x), list(x.dims), None] for x in proto.initializer],
    }  # fmt: skip


def onnx_stage(model: Any) -> ProgramData:
    """The nodes of an ONNX file as the first stage, whether or not they are one graph to us."""
    made = ProgramData()
    proto = model.program.graph
    types = {p.name: str(p).removeprefix(f"{p.name}: ") for p in (*model.inputs, *model.outputs)}
    types |= {x.name: f"{_element(x)}{list(x.dims)}" for x in proto.initializer}
    weights = [x.name for x in proto.initializer]
    inputs = [p.name for p in model.inputs if p.name not in weights]
    rows = [FileNode("input", name, (), (name,), (types.get(name, ""),), None) for name in inputs]
    rows += [FileNode("param", name, (), (name,), (types[name],), None) for name in weights]
    rows += _nodes_of(proto, {x: x for row in rows for x in row.outputs}, types, "")
    made.file("ONNX", rows, [x.name for x in proto.output], "nodes of the file")
    return made


def _nodes_of(graph: Any, seen: dict[str, str], types: Mapping[str, str], path: str) -> list[FileNode]:
    """The nodes of a graph; those in the body of an `If`, `Loop` or `Scan` come before it, and it reads their results.

    `seen` is the unique name of each value by the name that it has here, and `path` is what makes a name unique.
    """
    rows = []
    for at, node in enumerate(graph.node):
        read = [seen.get(x, x) for x in node.input]
        for attribute in node.attribute:
            bodies = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
            for body in bodies:
                below, inside = f"{path}{node.name or f'{node.op_type}_{at}'}/{attribute.name}/", dict(seen)
                for op, name in [("input", x.name) for x in body.input] + [("param", x.name) for x in body.initializer]:
                    inside[name] = below + name
                    rows.append(FileNode(op, name, (), (below + name,), ("",), below + name))
                rows += _nodes_of(body, inside, types, below)
                read += [inside.get(x.name, x.name) for x in body.output]
        seen.update({x: path + x for x in node.output})
        fields = ", ".join(f"{a.name} = {_attribute(a)}" for a in node.attribute)
        kinds = tuple(types.get(path + x, "") for x in node.output)
        made = tuple(path + x for x in node.output)
        name = path + node.name if node.name else None
        rows.append(FileNode(node.op_type, fields, tuple(read), made, kinds if any(kinds) else ("",), name))
    return rows


def _element(tensor: Any) -> str:
    return str(tensor.DataType.Name(tensor.data_type).lower())


def _attribute(attribute: Any) -> str:
    """An attribute in few words."""
    if attribute.HasField("g"):
        return f"graph of {len(attribute.g.node)} nodes"
    if attribute.HasField("t"):
        return f"{_element(attribute.t)}{list(attribute.t.dims)}"
    found = [f for f in ("i", "f", "s") if attribute.HasField(f)]
    value = getattr(attribute, found[0]) if found else [*attribute.ints, *attribute.floats, *attribute.strings]
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= LONGEST_FACT else f"{text[: LONGEST_FACT - 1]}…"


def gguf_data(path: Path) -> dict[str, Any]:
    """Metadata and tensors of a GGUF file."""
    file = imported("strata.io").load_gguf(path)
    tensors = [[name, t.kind, list(t.shape), int(getattr(t, "nbytes", 0)) or None] for name, t in file.tensors.items()]
    shown = {k: v if isinstance(v, (int, float, str, bool)) else f"{len(v)} values" for k, v in file.metadata.items()}
    formats = _counted(Counter(t.kind for t in file.tensors.values()))
    return {"kind": "gguf", "name": path.stem, "facts": _facts({"formats": formats, **shown}), "tensors": tensors}


def safetensors_data(path: Path) -> dict[str, Any]:
    """The arrays of a safetensors file."""
    file = imported("strata.io").load_safetensors(path)
    tensors = [[name, str(file[name].dtype), list(file[name].shape), int(file[name].nbytes)] for name in file]
    facts = _facts({"tensors": len(tensors), "bytes": sum(t[3] for t in tensors)})
    return {"kind": "safetensors", "name": path.stem, "facts": facts, "tensors": tensors}


def folder_data(path: Path) -> dict[str, Any]:
    """The settings and files of a model's folder."""
    settings = imported("strata.models").read_json(path / "config.json")
    files = {p.name: f"{p.stat().st_size:,} bytes" for p in sorted(path.iterdir()) if p.is_file()}
    plain = {k: v for k, v in settings.items() if isinstance(v, (int, float, str, bool))}
    found = [safetensors_data(p)["tensors"] for p in sorted(path.glob("*.safetensors"))]
    tensors = [row for rows in found for row in rows]
    return {"kind": "folder", "name": path.resolve().name, "facts": _facts({**plain, **files}), "tensors": tensors}


def bundle_data(path: Path, program: Mapping[str, Any]) -> dict[str, Any]:
    """A bundle: its parts, its weights, and the program in it."""
    about = imported("strata.runtime").inspect_bundle(path)
    parts, weights = about.pop("parts"), about.pop("weights")
    sizes = Counter[str]()
    for name, count in parts.items():
        sizes[name.partition(" ")[0]] += count
    facts = {k: str(v) for k, v in about.items()} | {f"{k} bytes": v for k, v in sizes.items()}
    tensors = [[name, str(dtype), list(shape), None] for name, (dtype, shape) in weights.items()]
    return {**program, "kind": "bundle", "name": path.stem, "facts": _facts(facts), "tensors": tensors}


def _facts(found: Mapping[str, Any]) -> list[list[str]]:
    shown = []
    for key, value in found.items():
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        shown.append([key, text if len(text) <= LONGEST_FACT else f"{text[: LONGEST_FACT - 1]}…"])
    return shown


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


# --------------------------------------------------------------------------------------------------------------- traces


def trace_data(name: str, source: Path | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The spans of a trace: ours, or any file in the trace event format."""
    events = _read_events(source) if isinstance(source, Path) else list(source)
    threads = {
        str(e.get("tid", 0)): str(e.get("args", {}).get("name", e.get("tid", 0)))
        for e in events
        if e.get("ph") == "M" and e.get("name") == "thread_name"
    }
    spans = [
        [str(e.get("name", "")), str(e.get("cat", "")), float(e["ts"]), float(e.get("dur", 0)), str(e.get("tid", 0)),
         e.get("args", {})]
        for e in events
        if e.get("ph") == "X"
    ]  # fmt: skip
    left_out = max(0, len(spans) - MOST_SPANS)
    if left_out:  # the longest say most
        spans = sorted(sorted(spans, key=lambda s: -s[3])[:MOST_SPANS], key=lambda s: s[2])
    facts = _facts({"spans": len(spans), "left out": left_out}) if left_out else _facts({"spans": len(spans)})
    return {"kind": "trace", "name": name, "facts": facts, "spans": spans, "threads": threads}


def _read_events(path: Path) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(read_text(path))
        events = found.get("traceEvents") if isinstance(found, dict) else found
        if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
            raise ValueError("it has no list of events")  # noqa: TRY301 - one message for all that is wrong with the file
    except ValueError as error:
        raise FileError(f"view: {path.name} is not a trace: {error}", code="F156") from None
    return events
