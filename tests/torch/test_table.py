"""The table of ATen: its page, and a slice of torch's own samples (all of them: `python -m tests.torch_opinfo`)."""

from __future__ import annotations

import torch

from tests import torch_opinfo, torch_table

SLICE = (
    "add", "sub", "div", "remainder", "where", "clamp", "sum", "var", "cumsum", "gather", "scatter_add", "index_put",
    "softmax", "nn.functional.gelu", "nn.functional.conv2d", "nn.functional.avg_pool2d", "cat", "masked_scatter",
)  # fmt: skip


def test_the_page_lists_the_table() -> None:
    assert torch_table.PAGE.read_text("utf-8") == torch_table.page(), "run python -m tests.torch_table"


def test_samples_of_torch() -> None:
    found = torch_opinfo.run_all(list(SLICE), 2, (torch.float32, torch.int64), (0, 1))
    assert found["differs"] == {}
    assert found["counts"]["equal"] > 40
