"""`strata inspect`, `opt`, `explain`: a program as text at each stage, and what the compiler did to it."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from typing import Any

from strata.cli import show
from strata.cli.arrays import read_sizes
from strata.cli.errors import CODE, explain_code
from strata.cli.parser import Mistake
from strata.cli.programs import graph_of, kind_of, open_program, read_graph
from strata.mir import Graph


def opt(options: Namespace) -> None:
    """Passes over a graph in text."""
    from strata.passes import PASSES, run_passes
    from strata.runtime import CompileOptions, CompilePipeline

    if options.list:
        rows = [(name, (cls.__doc__ or "").strip().split("\n")[0]) for name, cls in sorted(PASSES.items())]
        show.table(("pass", "what it does"), rows)
        return
    graph = read_graph(options.file)
    pipe = CompilePipeline(options.device, CompileOptions(passes=options.passes, exact=not options.inexact))
    made, records = run_passes(pipe.passes, graph, pipe.context)
    print(made)
    if options.stats:
        for r in records:
            state = "" if r.changed else "   (no change)"
            print(f"# {r.name}: {r.before} -> {r.after} nodes, {r.seconds * 1e3:.2f} ms{state}", file=sys.stderr)


def inspect(options: Namespace) -> None:
    """What is in a file, without running it."""
    kind = kind_of(options.model)
    stage = options.stage or ("all" if kind == "graph" else "summary")
    if stage == "summary":
        facts = _SUMMARIES[kind](options.model)
        if options.json:
            show.as_json(facts)
        else:
            _print_summary(facts)
        return
    graph = graph_of(options.model, options.device)
    text = _stage(graph, stage, options.device, options.passes)
    if options.json:
        show.as_json({"stage": stage, "text": text})
    else:
        print(text)


def _stage(graph: Graph, stage: str, device: str, passes: str | None) -> str:
    from strata.kernel import show_kernel
    from strata.passes import run_passes
    from strata.runtime import CompileOptions, CompilePipeline

    pipe = CompilePipeline(device, CompileOptions(passes=passes))
    if stage == "all":
        return pipe.inspect(graph)
    if stage == "graph":
        return str(graph)
    if stage == "stablehlo":
        from strata.io import stablehlo

        return stablehlo.export(graph)
    if stage == "passes":
        _, records = run_passes(pipe.passes, graph, pipe.context)
        return "\n".join(f"{r.name}: {r.before} → {r.after} nodes, {r.seconds * 1e3:.2f} ms" for r in records)
    optimized, _ = pipe.optimize(graph)
    if stage == "optimized":
        return str(optimized)
    lir = pipe.plan(optimized)
    if stage == "plan":
        return lir.summary()
    return "\n".join(show_kernel(k) for k in lir.kernels.values()) if stage == "kernels" else lir.memory_report()


def explain(options: Namespace) -> None:
    """The report of a compile, or what the code of an error means."""
    if CODE.fullmatch(options.model) and not os.path.exists(options.model):
        explain_code(options.model, as_json=options.json)
        return
    kind = kind_of(options.model)
    sizes = read_sizes(options.size)
    if kind in ("graph", "onnx"):
        from strata.runtime import CompileOptions, CompilePipeline

        graph = graph_of(options.model, options.device)
        unknown = sorted(set(sizes) - set(graph.symbols()))
        if unknown:
            raise Mistake(f"--size {unknown[0]}: the sizes are {', '.join(graph.symbols()) or 'all fixed'}")
        result: Any = CompilePipeline(options.device, CompileOptions(dim_binding=sizes or None)).compile(graph)
    else:
        if sizes:
            raise Mistake("--size: goes with a graph in text or an ONNX model")
        source = open_program(options.model, options.device).source
        result = getattr(
            source, "graph", source
        )  # a model has a compiled graph, a bundle or an exported program is one
    if options.memory and options.memory != "-":
        from strata.viewer import likely_sizes

        with open(options.memory, "w", encoding="utf-8") as file:
            file.write(result.lir.memory_svg(likely_sizes(result.lir, sizes)))
    found = result.explain()
    if not options.json:
        print(found)
        if options.memory == "-":
            print(f"\n{_memory_plot(result.lir, sizes or None)}")
        return

    def parts(things: Iterable[Any], *names: str) -> list[dict[str, Any]]:
        return [{name: getattr(thing, name) for name in names} for thing in things]

    show.as_json({
        "name": found.name,
        "steps": parts(found.steps, "number", "kernel", "label", "phase", "ops"),
        "cuts": parts(found.cuts, "producer", "consumer", "reason"),
        "passes": parts(found.fusion.passes, "name", "before", "after", "seconds"),
        "missed": [str(m) for m in found.fusion.missed],
        "arena_bytes": result.lir.arena_size if all(s.hi is not None for s in result.lir.symbols.values()) else None,
    })  # fmt: skip


def _memory_plot(lir: Any, sizes: dict[str, int] | None) -> Any:
    """Bytes of scratch buffers that hold something, at each step: stairs, in the unit of the largest."""
    from strata.lir import byte_size
    from strata.viewer import likely_sizes, plot

    at = likely_sizes(lir, sizes)
    steps = max(len(lir.schedule), 1)
    used = [0.0] * steps
    for buffer in lir.buffers:
        if buffer.role == "scratch":
            for i in range(buffer.birth, min(buffer.death + 1, steps)):
                used[i] += byte_size(buffer, at)
    shown = "".join(f", {name}={value}" for name, value in at.items())
    if not any(used):
        return f"scratch memory{shown}: none is needed"
    unit, scale = show.unit(max(used))
    x = [0, *(i + side for i in range(steps) for side in (0, 1)), steps]
    y = [0.0, *(count / scale for count in used for _ in (0, 1)), 0.0]
    return plot({f"{unit} in use": (x, y)}, title=f"scratch memory{shown}", x="step")


# ------------------------------------------------------------------------------------------------------------ summaries


def _graph_summary(path: str) -> dict[str, Any]:
    graph = read_graph(path)
    ops = Counter(n.op.name for n in graph.nodes())
    return {"file": path, "kind": "graph", "inputs": _leaves(graph), "ops": dict(ops.most_common())}


def _exported_summary(path: str) -> dict[str, Any]:
    from strata.torch import load

    graph = load(path).program
    ops = Counter(n.op.name for n in graph.nodes())
    return {"file": path, "kind": "exported program", "inputs": _leaves(graph), "ops": dict(ops.most_common())}


def _leaves(graph: Graph) -> list[str]:
    from strata.mir import leaf_name

    return [f"{leaf_name(x)}: {x.type}" for x in (*graph.inputs, *graph.params)]


def _onnx_summary(path: str) -> dict[str, Any]:
    from strata.io import onnx

    model = onnx.load(path)
    proto = model.program.graph
    return {
        "file": path, "kind": "onnx", "name": proto.name,
        "inputs": [str(p) for p in model.inputs], "outputs": [str(p) for p in model.outputs],
        "weights": len(proto.initializer), "nodes": len(proto.node),
        "ops": dict(Counter(n.op_type for n in proto.node).most_common()),
    }  # fmt: skip


def _gguf_summary(path: str) -> dict[str, Any]:
    from strata.io import load_gguf

    file = load_gguf(path)
    metadata = {
        k: v if isinstance(v, (int, float, str, bool)) else f"{len(v)} values" for k, v in file.metadata.items()
    }
    metadata = {
        k: v if not isinstance(v, str) or len(v) < 80 else v[:77].replace("\n", " ") + "…" for k, v in metadata.items()
    }
    kinds = Counter(t.kind for t in file.tensors.values())
    return {"file": path, "kind": "gguf", "metadata": metadata, "tensors": len(file.tensors), "formats": dict(kinds)}


def _safetensors_summary(path: str) -> dict[str, Any]:
    from strata.io import load_safetensors

    file = load_safetensors(path)
    arrays = {name: file[name] for name in file}
    total = sum(a.nbytes for a in arrays.values())
    return {
        "file": path, "kind": "safetensors", "tensors": len(arrays), "size": show.size(total),
        "arrays": [f"{n}: {a.dtype}{list(a.shape)}" for n, a in arrays.items()],
    }  # fmt: skip


def _folder_summary(path: str) -> dict[str, Any]:
    from pathlib import Path

    from strata.models import read_json

    folder = Path(path)
    if not (folder / "config.json").exists():
        raise Mistake(f"{path} has no config.json")
    files = {p.name: show.size(p.stat().st_size) for p in sorted(folder.iterdir()) if p.is_file()}
    settings = read_json(folder / "config.json")
    shown = {k: v for k, v in settings.items() if isinstance(v, (int, float, str, bool))}
    return {"file": path, "kind": "folder", "files": files, "config": shown}


def _bundle_summary(path: str) -> dict[str, Any]:
    from strata.runtime import inspect_bundle

    about = inspect_bundle(path)
    sizes = Counter[str]()
    for name, count in about.pop("parts").items():
        sizes[name.partition(" ")[0]] += count
    weights = {name: f"{dtype}{shape}" for name, (dtype, shape) in about.pop("weights").items()}
    return {
        "file": path,
        "kind": "bundle",
        **about,
        "sizes": {k: show.size(v) for k, v in sizes.items()},
        "weights": weights,
    }


_SUMMARIES = {
    "graph": _graph_summary, "onnx": _onnx_summary, "gguf": _gguf_summary, "safetensors": _safetensors_summary,
    "folder": _folder_summary, "bundle": _bundle_summary, "exported": _exported_summary,
}  # fmt: skip


def _print_summary(facts: dict[str, Any]) -> None:
    width = max(map(len, facts))
    for name, value in facts.items():
        if isinstance(value, dict):
            print(name)
            inner = max((len(str(k)) for k in value), default=0)
            for k, v in value.items():
                print(f"  {k:<{inner}}  {v}")
        elif isinstance(value, list):
            print(name)
            for v in value:
                print(f"  {v}")
        else:
            print(f"{name:<{width}}  {value}")
