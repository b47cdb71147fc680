"""The page docs/onnx.md from the results of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tests.conformance.onnx_expected import reason
from tests.conformance.onnx_suite import Outcome

HEAD = """# ONNX

```python
import strata as st

model = st.load("model.onnx")            # or st.onnx.load(path | bytes | ModelProto, custom_ops={{...}})
model.inputs, model.outputs              # names, element types, shapes; sizes that vary are symbolic and named
(scores,) = model.run(image=array)       # any batch and size that the model allows
st.onnx.backend                          # onnx.backend.base.Backend: prepare, run_model, run_node
```

A model is read into one graph whose varying sizes stay symbolic, compiled once, and run at any size. Where a branch
depends on a size, the sizes of the first run decide and a guard is kept: a run that breaks it gets a plan of its own.
Shapes that depend on data (NonZero, Unique, NonMaxSuppression, loops with a computed end) split the model into compiled
segments.

## Conformance

`make onnx` runs every CPU case of `onnx.backend.test` on the compiled `cpu` backend: **{passed} of {total} pass**
({share:.1%}). These fail:

| case | reason |
|---|---|
"""


def page(outcomes: Sequence[Outcome]) -> str:
    passed = sum(o.passed for o in outcomes)
    text = HEAD.format(passed=passed, total=len(outcomes), share=passed / max(len(outcomes), 1))
    for o in outcomes:
        if not o.passed:
            text += f"| `{o.name}` | {reason(o.name) or o.message[:160].replace('|', '/')} |\n"
    by_op: dict[str, list[Outcome]] = defaultdict(list)
    for o in outcomes:
        by_op[o.op].append(o)
    text += "\n## By op\n\nCases that pass, of all, by the first word of their names.\n\n"
    text += "| op | pass | of |\n|---|---|---|\n"
    for op, group in sorted(by_op.items()):
        text += f"| {op} | {sum(o.passed for o in group)} | {len(group)} |\n"
    return text
