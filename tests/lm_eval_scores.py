"""lm-evaluation-harness asks `strata serve` and Hugging Face the same questions: the scores are the same.

pip install lm_eval transformers torch && python -m tests.lm_eval_scores --count 40

A model of random weights is served from a folder; three local tasks are made of the pages of this repository: choose
how a sentence goes on (loglikelihood), how likely a paragraph is (loglikelihood_rolling), and go on (generate_until).
The harness runs each with `--model hf` on the folder and with `--model local-completions` on the server. Nothing is
downloaded. `--model FOLDER` takes another model, with its tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

CLOSE = 2e-3  # of logarithms of probabilities: both sides round f32 numbers in their own order
TASKS = {
    "strata_choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{start}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "strata_paragraphs": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "strata_words": {
        "output_type": "generate_until", "doc_to_text": "{{start}}", "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def questions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sentences of the documentation: how each begins, how it goes on, and how three others do."""
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    text = "\n".join(page.read_text("utf-8") for page in pages)
    found = [s.strip() for s in re.findall(r"[A-Z][^.|`\n#*<>]{60,200}\.", text)]
    rng = random.Random(seed)
    chosen = rng.sample(sorted(set(found)), count)
    made = []
    for sentence in chosen:
        at = len(sentence) - len(_rest(sentence))
        others = [_rest(s) for s in rng.sample(chosen, 4) if s != sentence][:3]
        answer = rng.randrange(4)
        choices = [*others[:answer], _rest(sentence), *others[answer:]]
        row = {"start": sentence[:at], "choices": choices, "answer": choices.index(_rest(sentence)), "text": sentence}
        made.append(row)
    return made


def _rest(sentence: str) -> str:
    """From a word in the middle on."""
    return sentence[sentence.rindex(" ", 0, len(sentence) // 2) :]


def write_tasks(folder: Path, count: int) -> None:
    """The tasks as files that the harness reads."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(q) + "\n" for q in questions(count)), "utf-8")
    for name, about in TASKS.items():
        whole = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
                 "test_split": "test", **about}  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(whole), "utf-8")  # JSON is YAML


def random_folder(folder: Path) -> Path:
    """A small model, in the form that both sides read."""
    from tests.unit.serving.conftest import chat_folder

    chat_folder(folder)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), "utf-8")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def scores(tasks: Path, kind: str, /, **arguments: Any) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """What the harness finds: the metrics of each task, and what the model said to each question."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=list(TASKS), task_manager=manager, num_fewshot=0, batch_size=4,
        log_samples=True, bootstrap_iters=0,
    )  # fmt: skip
    said = {name: [s["resps"] for s in sorted(rows, key=lambda s: s["doc_id"])]
            for name, rows in found["samples"].items()}  # fmt: skip
    return found["results"], said


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Where two nested answers differ: numbers by more than rounding, anything else at all."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        return [
            d for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) for d in differences(a, b, f"{where}[{i}]")
        ]
    numbers = [x for x in (ours, theirs) if isinstance(x, int | float) and not isinstance(x, bool)]
    is_close = len(numbers) == 2 and abs(ours - theirs) <= CLOSE * max(1.0, abs(theirs))
    return [] if is_close or ours == theirs else [f"{where}: {ours!r} of strata, {theirs!r} of Hugging Face"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as place:
        os.environ["HF_HOME"] = f"{place}/home"
        from strata.models import load
        from strata.serving import Server, Service

        folder = options.model or random_folder(Path(place) / "tiny")
        tasks = Path(place) / "tasks"
        tasks.mkdir()
        write_tasks(tasks, options.count)
        with Server(Service(load(folder, context=1024), name="model"), port=0) as server:
            ours, said = scores(
                tasks, "local-completions", base_url=f"{server.url}/v1/completions", model="model",
                tokenizer=str(folder), tokenizer_backend="huggingface", num_concurrent=4, max_length=1024,
            )  # fmt: skip
        theirs, told = scores(tasks, "hf", pretrained=str(folder), dtype="float32", device="cpu", max_length=1024)
    wrong = []
    for name in TASKS:
        shown = {k: v for k, v in ours[name].items() if isinstance(v, float)}
        print(name, shown, {k: theirs[name][k] for k in shown})
        wrong += [d for key, v in shown.items() for d in differences(v, theirs[name][key], f"{name} {key}")]
        wrong += differences(said[name], told[name], name)
    print(
        "\n".join(wrong) or f"the same scores, and the same answers to {options.count} questions of {len(TASKS)} tasks"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
