"""A MiniLM as an ONNX file, fine-tuned beside torch: `python -m tests.onnx_finetune FOLDER`.

The folder has the model's config and weights. torch exports it with a head of two classes; both train it on the same
batches with the same optimiser; the file that is written back is run by onnxruntime. Exit code 1 where losses differ by
more than 1e-3, or the file by more than 1e-3 from torch.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

STEPS, BATCH, LENGTH, RATE = 10, 8, 24, 0.05


def network(sizes: Mapping[str, Any], weights: Mapping[str, np.ndarray] | None = None) -> Any:
    """BERT as its config says, the mean of its tokens, and two scores."""
    import torch
    from torch import nn

    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
            self.up, self.down = (
                nn.Linear(width, sizes["intermediate_size"]),
                nn.Linear(sizes["intermediate_size"], width),
            )
            self.first, self.second = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)

        def forward(self, x: Any, hidden: Any) -> Any:
            q, k, v = (
                f(x).reshape(*x.shape[:2], heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value)
            )
            scores = q @ k.transpose(2, 3) / (width // heads) ** 0.5 + hidden
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
            x = self.first(x + self.out(mixed))
            return self.second(x + self.down(nn.functional.gelu(self.up(x))))

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.kinds = (
                nn.Embedding(sizes[n], width) for n in ("vocab_size", "max_position_embeddings", "type_vocab_size")
            )
            self.norm = nn.LayerNorm(width, 1e-12)
            self.blocks = nn.ModuleList(Block() for _ in range(sizes["num_hidden_layers"]))
            self.head = nn.Linear(width, 2)

        def forward(self, ids: Any, mask: Any) -> Any:
            x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])) + self.kinds.weight[0])
            share = mask.to(x.dtype)
            for block in self.blocks:
                x = block(x, ((1 - share) * -1e4)[:, None, None])
            return self.head((x * share[:, :, None]).sum(1) / share.sum(1, keepdim=True))

    torch.manual_seed(0)
    made = Classifier().eval()
    for p in made.parameters():  # no two alike: torch's exporter writes equal ones once
        p.data += 0.02 * torch.randn_like(p)
    if weights is not None:
        found = {_renamed(name): torch.from_numpy(np.array(x)) for name, x in weights.items()}
        known = made.state_dict()
        assert not set(known) - set(found) - {"head.weight", "head.bias"}, set(known) - set(found)
        made.load_state_dict({**known, **{name: x for name, x in found.items() if name in known}})
    return made


def _renamed(name: str) -> str:
    """A weight of BERT by the name it has here."""
    for theirs, ours in (
        ("bert.", ""), ("encoder.layer.", "blocks."), ("attention.self.", ""), ("attention.output.dense", "out"),
        ("attention.output.LayerNorm", "first"), ("intermediate.dense", "up"), ("output.dense", "down"),
        ("output.LayerNorm", "second"), ("embeddings.word_embeddings", "words"), ("embeddings.LayerNorm", "norm"),
        ("embeddings.position_embeddings", "places"), ("embeddings.token_type_embeddings", "kinds"),
    ):  # fmt: skip
        name = name.replace(theirs, ours)
    return name


def written(net: Any, ids: np.ndarray, mask: np.ndarray, path: Path) -> Path:
    """The net as torch exports it, with open sizes."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, (torch.from_numpy(ids), torch.from_numpy(mask)), str(path), dynamo=False, opset_version=17,
            input_names=["ids", "mask"], output_names=["scores"], do_constant_folding=False,
            dynamic_axes={"ids": {0: "batch", 1: "length"}, "mask": {0: "batch", 1: "length"}},
        )  # fmt: skip
    return path


def batches(vocabulary: int, first: int = 1000, steps: int = STEPS) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(steps):
        ids = rng.integers(first, vocabulary, (BATCH, LENGTH))
        mask = (np.arange(LENGTH)[None] < rng.integers(8, LENGTH + 1, (BATCH, 1))).astype(np.int64)
        found.append((ids, mask, (ids[:, 0] % 2).astype(np.int64)))
    return found


def by_torch(net: Any, data: Any) -> list[float]:
    import torch

    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=RATE)
    losses = []
    for ids, mask, labels in data:
        loss = torch.nn.functional.cross_entropy(
            net(torch.from_numpy(ids), torch.from_numpy(mask)), torch.from_numpy(labels)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def by_strata(file: Path, data: Any, target: Path) -> list[float]:
    import strata as st

    def cross_entropy(scores: Any, labels: Any) -> Any:
        logs: Any = st.log_softmax(scores, axis=-1)
        return -st.mean(st.gather_elements(logs, labels.reshape((-1, 1)), 1))

    model = st.onnx.load(file).trainable()
    step = st.jit(st.value_and_grad(model.loss(cross_entropy)))
    params: dict[str, Any] = dict(model.params)
    losses = []
    for ids, mask, labels in data:
        value, slopes = step(params, (ids, mask), labels)
        params = {name: np.asarray(p) - np.float32(RATE) * np.asarray(slopes[name]) for name, p in params.items()}
        losses.append(float(value))
    model.save(target, params)
    return losses


def compare(net: Any, data: Any) -> tuple[list[float], list[float], float]:
    """Losses of both, and how far the written file is from torch after the last step."""
    import onnxruntime
    import torch

    ids, mask, _ = data[0]
    with tempfile.TemporaryDirectory() as folder:
        tuned = Path(folder) / "tuned.onnx"
        ours = by_strata(written(net, ids, mask, Path(folder) / "net.onnx"), data, tuned)
        theirs = by_torch(net, data)
        session = onnxruntime.InferenceSession(str(tuned), providers=["CPUExecutionProvider"])
        (got,) = session.run(None, {"ids": ids, "mask": mask})
    with torch.no_grad():
        want = net(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    return ours, theirs, float(abs(got - want).max())


def main(argv: list[str]) -> int:
    import strata as st

    folder = Path(argv[0])
    sizes = json.loads((folder / "config.json").read_text("utf-8"))
    weights = {name: np.asarray(x) for name, x in st.io.load_safetensors(folder / "model.safetensors").items()}
    ours, theirs, gap = compare(network(sizes, weights), batches(sizes["vocab_size"]))
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        print(f"step {i}: strata {a:.6f}, torch {b:.6f}, apart {abs(a - b):.1e}")
    most = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"losses apart {most:.1e} at most; the written file and torch {gap:.1e}")
    return int(most > 1e-3 or gap > 1e-3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
