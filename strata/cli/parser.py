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
            hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
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
    _embed(command("embed", "text:embed", "compute text embeddings, or their similarity"))
    _generate(command("generate", "text:generate", "generate text from a prompt, streamed"))
    _chat(command("chat", "chat:chat", "chat with a language model in the terminal"))
    _search(command("search", "search:search", "search the text files of a folder by meaning"))
    _transcribe(command("transcribe", "speech:transcribe", "transcribe sound files, with timestamps or as subtitles"))
    _serve(command("serve", "serve:serve", "serve models over HTTP (OpenAI API): continuous batching, paged KV cache"))
    _compile(command("compile", "compile:compile_", "compile ahead of time, to a bundle that runs without compiling"))
    _quantize(
        command("quantize", "quantize:quantize", "quantise a model (GGUF, int8, AWQ, GPTQ, fp8) and report the error")
    )
    _perplexity(
        command("perplexity", "quantize:perplexity", "measure the perplexity of a language model on a text file")
    )
    _finetune(command("finetune", "quantize:finetune", "train a LoRA adapter, also over quantised weights (QLoRA)"))
    _tune(
        command(
            "tune", "tune:tune", "search for schedules of a model's kernels by measuring; winners stay in the cache"
        )
    )
    _inspect(command("inspect", "stages:inspect", "show what is in a file, or the text of every stage of a program"))
    _opt(command("opt", "stages:opt", "run passes on a graph as text"))
    _explain(
        command(
            "explain", "stages:explain", "explain what was fused, what was not and why; the memory plan; an error code"
        )
    )
    _bench(command("bench", "bench:bench", "time a model, or run the suite of the source tree"))
    _trace(command("trace", "trace:trace", "record a timeline of a compile and runs, for Perfetto or Chrome"))
    _exec(
        command("exec", "exec:exec_", "run a program with strata in place of onnxruntime: strata exec -- python app.py")
    )
    _view(
        command("view", "view:view_", "write a web page that shows a program at every stage, a model file or a trace")
    )
    _cache(command("cache", "cache:listing", "manage the disk cache of compiled code: ls, why, verify, prune, export"))
    doctor = command(
        "doctor", "doctor:doctor", "show what this machine offers: instruction set, threads, limits, devices, cache"
    )
    _json(doctor)
    _demo(command("demo", "demo:demo", "run the tour or an example, from a menu"))
    command("manual", "shell:manual", "print the manual page, for man")
    completion = command("completion", "shell:completion", "print a completion script for your shell")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def _exec(parser: CommandParser) -> None:
    parser.add_argument("program", nargs="...", metavar="-- PROGRAM", help="the program and its arguments")


# -------------------------------------------------------------------------------------------------- arguments in common


def _json(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _model(
    parser: CommandParser,
    kinds: str = "model.onnx, .gguf, .pt2, a folder with config.json, a bundle (.strata), or a graph as text (.mir)",
) -> None:
    parser.add_argument("model", metavar="MODEL", help=kinds)
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")


def _threads(parser: CommandParser) -> None:
    parser.add_argument("--threads", type=_count, metavar="N", help="number of threads (results do not depend on it)")


def _arrays(parser: CommandParser) -> None:
    parser.add_argument(
        "-i", "--input", action="append", default=[], metavar="[NAME=]FILE",
        help="an array in .npy, or named arrays in .npz or .safetensors; other inputs are filled with random numbers",
    )  # fmt: skip
    parser.add_argument(
        "--params", metavar="FILE", help="parameters of a graph in text: .npz or .safetensors (default: random)"
    )
    parser.add_argument(
        "--size", action="append", default=[], metavar="NAME=N", help="value of a symbolic size, for random inputs"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of random arrays (default: 0)")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _bytes(text: str) -> int:
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper(), 1)
    number = text if scale == 1 else text[:-1]
    try:
        found = int(float(number) * scale)
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 500M or 2G")
    return found


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction, such as 0.1")
    return value


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
    parser.add_argument(
        "texts", nargs="*", metavar="TEXT", help="texts to embed (default: read from standard input, one per line)"
    )
    _threads(parser)
    parser.add_argument("-o", "--output", metavar="FILE.npy", help="where to write the vectors")
    parser.add_argument("--similarity", action="store_true", help="print the cosine of each pair instead of vectors")
    _json(parser)


def _transcribe(parser: CommandParser) -> None:
    _model(parser, "a folder with config.json, weights and a tokenizer of a speech model, such as Whisper")
    parser.add_argument("files", nargs="+", metavar="FILE.wav", help="sound files, of any length")
    parser.add_argument("--language", metavar="NAME", help="language code or English name (default: detected)")
    parser.add_argument("--translate", action="store_true", help="translate to English")
    parser.add_argument("--beams", type=_count, metavar="N", help="width of the beam search")
    parser.add_argument("--timestamps", action="store_true", help="print the time of each segment")
    parser.add_argument("--srt", action="store_true", help="print subtitles")
    _threads(parser)
    _json(parser)


def _generate(parser: CommandParser) -> None:
    _model(parser, "model.gguf, or a folder with config.json, weights and a tokenizer")
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads standard input")
    parser.add_argument(
        "--chat", action="store_true", help="use the model's chat template, with the prompt as the user's message"
    )
    _sampling(parser, 128)
    parser.add_argument(
        "--draft", metavar="MODEL", help="a smaller model with the same tokenizer, for speculative decoding"
    )
    _threads(parser)
    _json(parser)


def _sampling(parser: CommandParser, max_tokens: int) -> None:
    parser.add_argument("--max-tokens", type=_count, default=max_tokens, metavar="N", help=f"default: {max_tokens}")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token (default)")
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens; 0 for no limit (default)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens whose probabilities sum to P; 1 for no limit (default)",
    )
    parser.add_argument("--seed", type=int, help="seed of the sampling, at a temperature above 0")
    parser.add_argument("--context", type=_count, metavar="N", help="context length to plan for, in tokens")


def _chat(parser: CommandParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="model.gguf, or a folder with config.json, weights and a tokenizer (default: SmolLM2, if installed)",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--image", metavar="FILE", action="append", help="send an image with the first message; may be repeated"
    )
    _sampling(parser, 512)
    _threads(parser)
    _json(parser)


def _search(parser: CommandParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="folder to search, including its subfolders")
    parser.add_argument("query", nargs="+", metavar="QUERY", help="what to look for, in your own words")
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="embedding model: a folder with config.json (default: MiniLM, if installed)",
    )
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--top", type=_count, default=5, metavar="N", help="passages to show (default: 5)")
    parser.add_argument("--glob", metavar="PATTERN", help="which files to read, such as *.md (default: text and code)")
    _threads(parser)
    _json(parser)


def _serve(parser: CommandParser) -> None:
    parser.add_argument(
        "models", nargs="+", metavar="MODEL",
        help="model.gguf or a folder with config.json: a text generator, an embedding model, or one of each",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 picks a free one (default: 8000)")
    parser.add_argument("--name", help="name of the model in the API (default: the name of its file)")
    parser.add_argument(
        "--context", type=_count, metavar="N", help="most tokens of a request, prompt and answer together"
    )
    parser.add_argument(
        "--cache-tokens",
        type=_count,
        metavar="N",
        help="size of the KV cache in tokens (default: 4 contexts; more on a GPU)",
    )
    parser.add_argument(
        "--memory", type=_bytes, metavar="N", help="limit on weights and KV caches together, such as 2G (default: none)"
    )
    parser.add_argument(
        "--kv-bits",
        type=int,
        choices=(8, 16, 32),
        help="bits per number in the KV cache (default: 32; 16 for bf16 models on a GPU)",
    )
    parser.add_argument(
        "--max-requests", type=_count, metavar="N", help="most requests in one batch (default: 16; 256 on a GPU)"
    )
    parser.add_argument(
        "--queue", type=int, default=256, metavar="N", help="most requests that may wait (default: 256)"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a LoRA adapter that requests can select by name; may be repeated",
    )
    parser.add_argument(
        "--exact", action="store_true", help="make answers independent of other requests with quantised weights, too"
    )
    parser.add_argument("--record", metavar="FILE.jsonl", help="append requests and answers to a file")
    parser.add_argument(
        "--no-prefix-cache", action="store_true", help="do not reuse the KV cache of prompts with a common prefix"
    )
    parser.add_argument("--no-speculation", action="store_true", help="do not draft tokens from earlier text")
    http = parser.add_argument_group("access and TLS")
    http.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="API key that requests must send; may be repeated (STRATA_API_KEY keeps it out of process lists)",
    )  # fmt: skip
    http.add_argument("--api-key-file", metavar="FILE", help="file with an API key on each line")
    http.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name that requests may use for this server; may be repeated",
    )
    http.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin of web pages that may send requests, such as https://a.org",
    )
    http.add_argument("--tls-certificate", metavar="FILE.pem", help="serve https, with this certificate")
    http.add_argument("--tls-key", metavar="FILE.pem", help="the private key of the certificate")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--answer-tokens",
        type=_count,
        metavar="N",
        help="most tokens of an answer whose request sets no limit (default: none)",
    )
    limits.add_argument(
        "--max-body", type=_count, default=8 << 20, metavar="N", help="most bytes of a request (default: 8 MiB)"
    )
    limits.add_argument(
        "--max-connections", type=_count, default=2048, metavar="N", help="most open connections (default: 2048)"
    )
    limits.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that a client has to send a request (default: 30)",
    )
    limits.add_argument(
        "--drain", type=float, default=30.0, metavar="S",
        help="seconds to finish requests after a stop signal; a second signal stops at once (default: 30)",
    )  # fmt: skip
    parser.add_argument(
        "--log", choices=("none", "text", "json"), default="text", help="log format, a line per request"
    )
    _threads(parser)
    _json(parser)


def _quantize(parser: CommandParser) -> None:
    _model(parser, "model.gguf, a folder with config.json, weights and a tokenizer, or model.onnx (int8)")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="a file named .gguf or .onnx, or a folder")
    parser.add_argument(
        "--format", default="q4_k",
        help="GGUF: q2_k … q6_k, q4_0 … q8_0, iq4_nl, iq4_xs, mxfp4; folder: int8, int4-awq, gptq, fp8 (default: q4_k)",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate",
        metavar="TEXTS",
        help="text file for importance matrices and for the perplexity before and after; for ONNX models, arrays.npz",
    )
    parser.add_argument("--context", type=_count, default=512, metavar="N", help="tokens per window (default: 512)")
    parser.add_argument(
        "--group-size",
        type=_count,
        default=128,
        metavar="N",
        help="weights per scale, for int4-awq and gptq (default: 128)",
    )
    _threads(parser)
    _json(parser)


def _finetune(parser: CommandParser) -> None:
    _model(parser, "model.gguf, or a folder with config.json, weights and a tokenizer")
    parser.add_argument("texts", metavar="TEXTS", help="a file of texts, one per line or separated by empty lines")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="where to write the PEFT adapter")
    parser.add_argument("--rank", type=_count, default=8, metavar="R", help="rank of the adapter (default: 8)")
    parser.add_argument("--alpha", type=float, default=16.0, help="changes are scaled by alpha / rank (default: 16)")
    parser.add_argument(
        "--targets", default="q_proj,v_proj", metavar="NAMES", help="matmuls to change (default: q_proj,v_proj)"
    )
    parser.add_argument("--steps", type=_count, default=100, metavar="N", help="optimiser steps (default: 100)")
    parser.add_argument("--batch", type=_count, default=4, metavar="N", help="rows per step (default: 4)")
    parser.add_argument("--length", type=_count, default=128, metavar="N", help="tokens per row (default: 128)")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="default: 2e-4")
    parser.add_argument(
        "--memory-limit", metavar="SIZE", help="refuse to start if more memory is needed, such as 500MB or 2GB"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the initial adapter and the order of rows (default: 0)"
    )
    _threads(parser)
    _json(parser)


def _perplexity(parser: CommandParser) -> None:
    _model(parser, "model.gguf, or a folder with config.json, weights and a tokenizer")
    parser.add_argument("texts", metavar="TEXTS", help="a file of texts, one per line or separated by empty lines")
    parser.add_argument("--context", type=_count, default=512, metavar="N", help="tokens per window (default: 512)")
    parser.add_argument("--max-tokens", type=_count, metavar="N", help="stop after N tokens (default: all)")
    _threads(parser)
    _json(parser)


def _compile(parser: CommandParser) -> None:
    _model(parser, "model.onnx, model.pt2, a folder with config.json, model.gguf, or a graph as text (.mir)")
    parser.add_argument("-o", "--output", required=True, metavar="X.strata", help="where to write the bundle")
    parser.add_argument("--params", metavar="FILE", help="parameters of a graph in text: .npz or .safetensors")
    parser.add_argument(
        "--no-weights", action="store_true", help="leave out the weights; set them later with set_params"
    )
    parser.add_argument(
        "--size", action="append", default=[], metavar="NAME=N", help="fix a symbolic size of an ONNX model"
    )
    parser.add_argument(
        "--level",
        action="append",
        metavar="NAME",
        help="instruction set to generate code for; may be repeated (default: all)",
    )
    _json(parser)


def _trace(parser: CommandParser) -> None:
    _model(parser)
    _arrays(parser)
    _threads(parser)
    parser.add_argument("-o", "--output", default="trace.json", metavar="FILE.json", help="default: trace.json")
    parser.add_argument("--repeat", type=_count, default=3, metavar="N", help="runs after the compile (default: 3)")
    _json(parser)


def _view(parser: CommandParser) -> None:
    _model(
        parser, "a graph as text (.mir), model.onnx, model.gguf, .safetensors, .pt2, a folder, a bundle, or trace.json"
    )
    parser.add_argument("-o", "--output", metavar="FILE.html", help="output file (default: named after the program)")
    parser.add_argument(
        "--size", action="append", default=[], metavar="NAME=N", help="a symbolic size to show memory for"
    )
    parser.add_argument(
        "--serve", nargs="?", const=0, type=int, metavar="PORT",
        help="serve the page on this machine, and update it when the file changes",
    )  # fmt: skip
    _json(parser)


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
        "file", nargs="?", default="-", metavar="X.mir", help="a graph as text; - for standard input (default)"
    )
    parser.add_argument(
        "--passes", metavar="P1,P2{option=1}", help="passes to run, in order (default: those of the device)"
    )
    parser.add_argument("--device", default="cpu", help="device to run the passes for (default: cpu)")
    parser.add_argument("--inexact", action="store_true", help="also use rules that change rounding")
    parser.add_argument("--stats", action="store_true", help="print the nodes and time of each pass to standard error")
    parser.add_argument("--list", action="store_true", help="list the passes and exit")


def _tune(parser: CommandParser) -> None:
    _model(parser)
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N", help="fix a symbolic size")
    _json(parser)


def _explain(parser: CommandParser) -> None:
    _model(parser, "as for run; or the code of an error, such as S102")
    parser.add_argument(
        "--memory", nargs="?", const="-", metavar="FILE.svg",
        help="draw the memory plan; without a file, plot memory use by step in the terminal",
    )  # fmt: skip
    parser.add_argument(
        "--size", action="append", default=[], metavar="NAME=N", help="fix a symbolic size before compiling"
    )
    _json(parser)


def _bench(parser: CommandParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="as for run; the word serve load-tests a server; without MODEL, run the suite in benchmarks/",
    )
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    _arrays(parser)
    _threads(parser)
    parser.add_argument(
        "--seconds", type=float, default=3.0, metavar="S", help="time to spend on each measurement (default: 3)"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only the workloads of the suite whose names contain TEXT"
    )
    parser.add_argument("--full", action="store_true", help="run the suite in its long form")
    parser.add_argument(
        "--compare", nargs=2, metavar=("OLD.json", "NEW.json"),
        help="compare two files written with --json, without measuring; exit code 1 if a time grew beyond the noise",
    )  # fmt: skip
    parser.add_argument(
        "--noise",
        type=_share,
        default=0.1,
        metavar="PART",
        help="with --compare, the relative change to ignore (default: 0.1)",
    )
    parser.add_argument(
        "--check", action="store_true", help="run the suite and fail if a stored ratio is missed by more than noise"
    )
    load = parser.add_argument_group("strata bench serve: a load test of a server")
    load.add_argument(
        "--url", default="http://127.0.0.1:8000", help="address of the server (default: http://127.0.0.1:8000)"
    )
    load.add_argument("--requests", type=_count, default=64, metavar="N", help="total number of requests (default: 64)")
    load.add_argument("--clients", type=_count, default=16, metavar="N", help="concurrent clients (default: 16)")
    load.add_argument(
        "--rate", type=float, metavar="R", help="send R requests per second at random times instead of using clients"
    )
    load.add_argument(
        "--prompt-tokens", type=_count, default=64, metavar="N", help="approximate tokens per prompt (default: 64)"
    )
    load.add_argument("--max-tokens", type=_count, default=64, metavar="N", help="most tokens per answer (default: 64)")
    load.add_argument("--shared", type=int, default=0, metavar="N", help="tokens of the prefix that all prompts share")
    load.add_argument("--model-name", metavar="NAME", help="model to request")
    load.add_argument("--api-key", metavar="KEY", help="API key of the server (or set STRATA_API_KEY)")
    load.add_argument("--plot", metavar="FILE.svg", help="write a plot of the percentiles")
    _json(parser)


def _cache(parser: CommandParser) -> None:
    _json(parser)
    parts = parser.add_subparsers(dest="part", metavar="PART")

    def part(name: str, handler: str, about: str) -> CommandParser:
        made: CommandParser = parts.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        made.set_defaults(handler=handler)
        made.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
        return made

    ls = part("ls", "cache:listing", "entries, most recently used first (the default)")
    ls.add_argument("--limit", type=_count, default=20, metavar="N", help="how many to show (default: 20)")
    parser.set_defaults(limit=20)
    why = part("why", "cache:why", "why something is, or is not, taken from the cache")
    why.add_argument("what", metavar="WHAT", help="a key or its beginning, or the name of a kernel or plan")
    part("verify", "cache:verify", "read every entry and remove damaged ones; exit code 1 if there were any")
    prune = part("prune", "cache:prune", "remove entries, least recently used first")
    prune.add_argument(
        "--to", default="0", metavar="SIZE", help="size to shrink the cache to, such as 500MB or 2GB (default: 0)"
    )
    export = part("export", "cache:export", "copy all entries into a folder for another machine or image")
    export.add_argument("folder", metavar="FOLDER")


def _demo(parser: CommandParser) -> None:
    parser.add_argument(
        "parts", nargs="*", metavar="PART",
        help="compile, train, embed, generate, read, or an example (default: a menu, or the tour if not on a terminal)",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    parser.add_argument("--tour", action="store_true", help="compile, train, embed, generate, read; no menu")
    parser.add_argument(
        "-o", "--output", default="strata-demo", metavar="FOLDER", help="folder for pictures (default: strata-demo)"
    )
    _threads(parser)
