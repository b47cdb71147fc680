"""`strata quantize`, `strata perplexity` and `strata finetune`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strata.cli import show
from strata.cli.cache import read_size
from strata.cli.parser import Mistake
from strata.cli.programs import kind_of
from strata.config import using
from strata.core import read_text


def quantize(options: Namespace) -> None:
    """Quantise a model into a file or a folder, and say what it cost."""
    from strata.io import load_npz
    from strata.models import load
    from strata.quantizing import quantize as work

    kind_of(options.model)
    if Path(options.model).suffix == ".onnx":
        if not options.calibrate:
            raise Mistake(f"{options.model}: an ONNX model needs --calibrate ARRAYS.npz, inputs by name")
        feeds = [dict(load_npz(options.calibrate))]
        _tell(work(options.model, format=options.format, calibration=feeds, output=options.output).report, options.json)
        return
    texts = read_lines(options.calibrate) if options.calibrate else None
    model = load(options.model, device=options.device, context=options.context)
    with using(**({"num_threads": options.threads} if options.threads else {})), progress_bar() as tell:
        made = work(
            model, format=options.format, calibration=texts, output=options.output, context=options.context,
            group_size=options.group_size, progress=tell,
        )  # fmt: skip
    _tell(made.report, options.json)


def _tell(report: Any, as_json: bool) -> None:
    if as_json:
        show.as_json(report.as_dict())
        return
    print(report)
    if report.output:
        print(f"written to {report.output}")


def perplexity(options: Namespace) -> None:
    """The perplexity of a model on the texts of a file."""
    from strata.models import load
    from strata.quantizing import perplexity as measure

    kind_of(options.model)
    texts = read_lines(options.texts)
    model = load(options.model, device=options.device, context=options.context)
    if not hasattr(model, "generate"):
        raise Mistake(f"{options.model}: {type(model).__name__} does not generate text")
    with using(**({"num_threads": options.threads} if options.threads else {})), progress_bar() as tell:
        found = measure(
            model, texts, context=options.context, max_tokens=options.max_tokens,
            progress=lambda done, total: tell("perplexity", done, total),
        )  # fmt: skip
    rate = found.tokens / found.seconds
    if options.json:
        show.as_json({"perplexity": found.value, "loss": found.loss, "tokens": found.tokens, "seconds": found.seconds})
    else:
        print(f"perplexity {found.value:.4f} on {found.tokens} tokens ({rate:.0f} tokens a second)")


def finetune(options: Namespace) -> None:
    """Train a LoRA adapter, and say how the loss fell and what memory a step takes."""
    from strata.finetuning import LoraOptions
    from strata.finetuning import finetune as work
    from strata.models import load

    kind_of(options.model)
    texts = read_lines(options.texts)
    chosen = LoraOptions(
        rank=options.rank, alpha=options.alpha, targets=tuple(options.targets.split(",")), steps=options.steps,
        batch=options.batch, length=options.length, learning_rate=options.learning_rate, seed=options.seed,
        memory_limit=read_size(options.memory_limit) if options.memory_limit else None,
    )  # fmt: skip
    model = load(options.model, device=options.device, context=options.length)
    with using(**({"num_threads": options.threads} if options.threads else {})), progress_bar() as tell:
        found = work(
            model, texts, options=chosen, output=options.output,
            progress=lambda done, total, loss: tell("train", done, total),
        )  # fmt: skip
    if options.json:
        show.as_json({
            "losses": found.losses, "planned_bytes": found.planned_bytes, "weight_bytes": found.weight_bytes,
            "activation_bytes": found.activation_bytes, "output": options.output,
        })  # fmt: skip
        return
    print(f"loss {found.losses[0]:.4f} -> {found.losses[-1]:.4f} in {len(found.losses)} steps")
    parts = f"weights {show.size(found.weight_bytes)}, activations {show.size(found.activation_bytes)}"
    print(f"memory planned: {show.size(found.planned_bytes)} ({parts})")
    print(f"adapter written to {options.output}")


def read_lines(path: str) -> list[str]:
    """Texts of a file: paragraphs apart by an empty line, or one to a line where there is none."""
    try:
        whole = read_text(Path(path))
    except (OSError, ValueError) as error:
        raise Mistake(f"{path}: {error}") from None
    parts = whole.split("\n\n") if "\n\n" in whole else whole.splitlines()
    texts = [part.strip() for part in parts if part.strip()]
    if not texts:
        raise Mistake(f"{path}: there is no text in it")
    return ["\n\n".join(texts)] if "\n\n" in whole else texts


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each stage on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield tell
