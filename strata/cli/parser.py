"""The argument parser. A handler is `module:function` of this folder, imported when its command runs."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from typing import Any, NoReturn


class Mistake(Exception):  # noqa: N818 - it is the user's, and it is told as one
    """Something on the command line that cannot be done."""


class CommandParser(argparse.ArgumentParser):
    """Tells a mistake in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(c) for c in action.choices]
            close = get_close_matches(str(value), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
            what = "command" if isinstance(action, argparse._SubParsersAction) else "value"
            raise argparse.ArgumentError(None, f"no {what} is named {value!r}{hint}")


def make_parser() -> CommandParser:
    """The whole command line."""
    parser = CommandParser(prog="strata", description="Compile and run tensor programs and models.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(handler=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, handler: str, about: str, **more: Any) -> CommandParser:
        made: CommandParser = commands.add_parser(
            name, help=about, description=more.pop("description", about[0].upper() + about[1:] + "."), **more
        )
        made.set_defaults(handler=handler)
        return made

    _run(command("run", "run:run", "run a model or a graph on arrays"))
    _embed(command("embed", "text:embed", "text embeddings, or their similarity"))
    _generate(command("generate", "text:generate", "generate text from a prompt, streamed"))
    _serve(command("serve", "serve:serve", "serve models over HTTP (OpenAI API): continuous batching, paged KV cache"))
    _compile(command("compile", "compile:compile_", "compile ahead of time, to a bundle that runs without compiling"))
    _inspect(command("inspect", "stages:inspect", "what is in a file; the text of every stage of a program"))
    _opt(command("opt", "stages:opt", "run passes on a graph as text"))
    _explain(command("explain", "stages:explain", "what was fused, what was not and why; memory plan and times"))
    _bench(command("bench", "bench:bench", "time a model, or run the suite of the source tree"))
    _trace(command("trace", "trace:trace", "a timeline of a compile and of runs, for Perfetto or Chrome"))
    _cache(command("cache", "cache:listing", "the disk cache of compiled code: ls, why, verify, prune, export"))
    doctor = command("doctor", "doctor:doctor", "what this machine has: ISA, threads and limits, devices, cache")
    _json(doctor)
    _demo(command("demo", "demo:demo", "a tour: compile, training, and models that are installed"))
    completion = command("completion", "completion:completion", "a script that completes commands in your shell")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


# -------------------------------------------------------------------------------------------------- arguments in common


def _json(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for a program to read")


def _model(
    parser: CommandParser,
    kinds: str = "model.onnx, model.gguf, a folder with config.json, a bundle (.strata), or a graph as text (.mir)",
) -> None:
    parser.add_argument("model", metavar="MODEL", help=kinds)
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")


def _threads(parser: CommandParser) -> None:
    parser.add_argument("--threads", type=_count, metavar="N", help="threads to use; results do not depend on it")


def _arrays(parser: CommandParser) -> None:
    parser.add_argument(
        "-i", "--input", action="append", default=[], metavar="[NAME=]FILE",
        help="an array from .npy, or arrays by name from .npz or .safetensors; inputs that are not given are random",
    )  # fmt: skip
    parser.add_argument(
        "--params", metavar="FILE", help="parameters of a graph in text: .npz or .safetensors (default: random)"
    )
    parser.add_argument(
        "--size", action="append", default=[], metavar="NAME=N", help="a symbolic size of random inputs"
    )
    parser.add_argument("--seed", type=int, default=0, help="of random arrays (default: 0)")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count")
    return int(text)


# ------------------------------------------------------------------------------------------------------------- commands


def _run(parser: CommandParser) -> None:
    _model(parser)
    _arrays(parser)
    _threads(parser)
    parser.add_argument("-o", "--output", metavar="FILE.npz", help="where to write the results")
    parser.add_argument(
        "--repeat", type=_count, default=1, metavar="N", help="run N times and show the best and the median"
    )
    _json(parser)


def _embed(parser: CommandParser) -> None:
    _model(parser, "a folder with config.json, weights and a tokenizer")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts; none reads one a line from standard input")
    _threads(parser)
    parser.add_argument("-o", "--output", metavar="FILE.npy", help="where to write the vectors")
    parser.add_argument("--similarity", action="store_true", help="print the cosine of each pair instead of vectors")
    _json(parser)


def _generate(parser: CommandParser) -> None:
    _model(parser, "model.gguf, or a folder with config.json, weights and a tokenizer")
    parser.add_argument("prompt", metavar="PROMPT", help="a text; - reads standard input")
    parser.add_argument(
        "--chat", action="store_true", help="put the prompt as a user's message into the model's chat template"
    )
    parser.add_argument("--max-tokens", type=_count, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token (default)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is no limit (default)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is no limit (default)")
    parser.add_argument("--seed", type=int, help="of the choices at a temperature above 0")
    parser.add_argument("--context", type=_count, metavar="N", help="tokens to plan for")
    parser.add_argument(
        "--draft", metavar="MODEL", help="a smaller model with the same tokenizer, for speculative decoding"
    )
    _threads(parser)
    _json(parser)


def _serve(parser: CommandParser) -> None:
    parser.add_argument(
        "models", nargs="+", metavar="MODEL",
        help="model.gguf or a folder with config.json: one that generates, one that embeds, or one of each",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--name", help="what the model is called in answers (default: the name of its file)")
    parser.add_argument("--context", type=_count, metavar="N", help="longest request: tokens of prompt and answer")
    parser.add_argument(
        "--cache-tokens", type=_count, metavar="N", help="KV cache of all requests (default: 4 contexts)"
    )
    parser.add_argument("--max-requests", type=_count, default=16, metavar="N", help="in one batch (default: 16)")
    parser.add_argument("--queue", type=int, default=256, metavar="N", help="that may wait (default: 256)")
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=FOLDER", help="a LoRA adapter that requests may name"
    )
    parser.add_argument(
        "--exact", action="store_true", help="answers never depend on other requests, with quantised weights either"
    )
    parser.add_argument("--record", metavar="FILE.jsonl", help="append requests and answers to a file")
    _threads(parser)
    _json(parser)


def _compile(parser: CommandParser) -> None:
    _model(parser, "model.onnx, a folder with config.json, model.gguf, or a graph as text (.mir)")
    parser.add_argument("-o", "--output", required=True, metavar="X.strata", help="where to write the bundle")
    parser.add_argument("--params", metavar="FILE", help="parameters of a graph in text: .npz or .safetensors")
    parser.add_argument("--no-weights", action="store_true", help="leave the weights out; set_params gives them later")
    parser.add_argument(
        "--size", action="append", default=[], metavar="NAME=N", help="fix a symbolic size of an ONNX model"
    )
    parser.add_argument(
        "--level", action="append", metavar="NAME", help="an instruction set to make code for (default: all)"
    )
    _json(parser)


def _trace(parser: CommandParser) -> None:
    _model(parser)
    _arrays(parser)
    _threads(parser)
    parser.add_argument("-o", "--output", default="trace.json", metavar="FILE.json", help="default: trace.json")
    parser.add_argument("--repeat", type=_count, default=3, metavar="N", help="runs after the compile (default: 3)")


def _inspect(parser: CommandParser) -> None:
    _model(parser, "a graph as text (.mir, - for standard input), model.onnx, model.gguf, .safetensors, or a folder")
    parser.add_argument(
        "--stage", choices=("summary", "graph", "passes", "optimized", "plan", "kernels", "memory", "stablehlo", "all"),
        help="default: all stages of a graph in text, a summary of a file",
    )  # fmt: skip
    parser.add_argument("--passes", metavar="P1,P2", help="passes to run instead of the default ones")
    _json(parser)


def _opt(parser: CommandParser) -> None:
    parser.add_argument(
        "file", nargs="?", default="-", metavar="X.mir", help="graph in text; - is standard input (default)"
    )
    parser.add_argument(
        "--passes", metavar="P1,P2{option=1}", help="passes in order; the default ones of the device if left out"
    )
    parser.add_argument(
        "--device", default="cpu", help="whose default passes, and what decompose leaves (default: cpu)"
    )
    parser.add_argument("--inexact", action="store_true", help="also use rules that change rounding")
    parser.add_argument("--stats", action="store_true", help="nodes and time of each pass, on standard error")
    parser.add_argument("--list", action="store_true", help="list the passes and exit")


def _explain(parser: CommandParser) -> None:
    _model(parser)
    parser.add_argument("--memory", metavar="FILE.svg", help="draw the plan of memory")
    parser.add_argument(
        "--size", action="append", default=[], metavar="NAME=N", help="fix a symbolic size before compiling"
    )
    _json(parser)


def _bench(parser: CommandParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="as for run; without one, the suite in benchmarks/ is run"
    )
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    _arrays(parser)
    _threads(parser)
    parser.add_argument(
        "--seconds", type=float, default=3.0, metavar="S", help="time to spend for each way (default: 3)"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="of the suite, workloads whose names contain the text"
    )
    parser.add_argument("--full", action="store_true", help="of the suite, the long form")
    parser.add_argument(
        "--check", action="store_true", help="of the suite, fail where a stored ratio is missed beyond noise"
    )
    _json(parser)


def _cache(parser: CommandParser) -> None:
    _json(parser)
    parts = parser.add_subparsers(dest="part", metavar="PART")

    def part(name: str, handler: str, about: str) -> CommandParser:
        made: CommandParser = parts.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        made.set_defaults(handler=handler)
        made.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON for a program to read"
        )
        return made

    ls = part("ls", "cache:listing", "entries, most recently used first (the default)")
    ls.add_argument("--limit", type=_count, default=20, metavar="N", help="how many to show (default: 20)")
    parser.set_defaults(limit=20)
    why = part("why", "cache:why", "why something is, or is not, taken from the cache")
    why.add_argument("what", metavar="WHAT", help="a key or the beginning of one, or the name of a kernel or plan")
    part("verify", "cache:verify", "read every entry and remove damaged ones; exit code 1 if there were any")
    prune = part("prune", "cache:prune", "remove entries, least recently used first")
    prune.add_argument("--to", default="0", metavar="SIZE", help="what may stay: 500MB, 2GB, 0 (default)")
    export = part("export", "cache:export", "copy all entries into a folder for another machine or image")
    export.add_argument("folder", metavar="FOLDER")


def _demo(parser: CommandParser) -> None:
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="compile, train, embed, generate, read; all if left out"
    )
    _threads(parser)
