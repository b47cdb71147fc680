"""The page docs/onnx.md from the results of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from strata.io.onnx import known_ops
from tests.conformance.onnx_expected import reason
from tests.conformance.onnx_suite import Outcome

HEAD = """# ONNX

```python
import numpy as np
import strata as st

g = st.Graph("scores")
x = g.input("x", (st.sym("batch"), 4))
g.outputs(st.ops.softmax(x, 1))
st.onnx.export(g, "scores.onnx")

model = st.load("scores.onnx")
print(model)
for batch in (1, 3):
    (scores,) = model.run(x=np.zeros((batch, 4), np.float32))
    print(scores.shape)
```

```text
<OnnxModel (x: float32[batch, 4]) -> output_0: float32[batch, 4]>
(1, 4)
(3, 4)
```

`st.onnx.load` also takes bytes and a `ModelProto`, and `custom_ops={{"Name": function}}` for your own ops: the
function gets the node (`node[0]` is its first input, `node.attr("alpha", 1.0)` an attribute) and returns values.
`st.onnx.backend` is the standard interface: prepare, run_model, run_node.

A model is read into one graph whose varying sizes stay symbolic, compiled once, and run at any size. Where a branch
depends on a size, the sizes of the first run decide and a guard is kept: a run that breaks it gets its own plan.
Shapes that depend on data (NonZero, Unique, NonMaxSuppression, loops with a computed end) split the model into compiled
segments.

## Conformance

`make onnx` runs every CPU case of `onnx.backend.test` on the compiled `cpu` backend: **{passed} of {total} pass**
({share:.1%}). These fail because of the suite itself, as `tests/conformance/test_expected.py` shows:

| case | reason |
|---|---|
"""

EXTRA = """
## com.microsoft

ONNX Runtime's own operators that are read, {count}, each with a test beside its kernel or, where it has none for the
CPU, beside NumPy. Any other is refused by its name when the file is loaded.

{names}.
"""


def page(outcomes: Sequence[Outcome]) -> str:
    passed = sum(o.passed for o in outcomes)
    text = HEAD.format(passed=passed, total=len(outcomes), share=passed / max(len(outcomes), 1))
    for o in outcomes:
        if not o.passed:
            text += f"| `{o.name}` | {reason(o.name) or o.message[:160].replace('|', '/')} |\n"
    extra = known_ops("com.microsoft")
    text += EXTRA.format(count=len(extra), names=", ".join(f"`{name}`" for name in extra))
    by_op: dict[str, list[Outcome]] = defaultdict(list)
    for o in outcomes:
        by_op[o.op].append(o)
    text += "\n## By op\n\nCases that pass, of all, by the first word of their names.\n\n"
    text += "| op | pass | of |\n|---|---|---|\n"
    for op, group in sorted(by_op.items()):
        text += f"| {op} | {sum(o.passed for o in group)} | {len(group)} |\n"
    return text
