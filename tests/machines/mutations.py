"""Defects put back on purpose: each must be found by the machine or test that is there to find it.

`python -m tests.machines.mutations` changes a copy of the package, one defect at a time, and runs what must fail there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 900


@dataclass(frozen=True)
class Mutation:
    """A defect: what the text of a file becomes, and the module and arguments of a check that fails then.

    The check ends with status 1, as `pytest` does for a failed test and `tests.machines` for a violation.
    """

    name: str
    file: str
    old: str
    new: str
    check: tuple[str, ...]
    also: tuple[tuple[str, str, str], ...] = ()  # more changes: file, old, new

    @property
    def changes(self) -> tuple[tuple[str, str, str], ...]:
        return ((self.file, self.old, self.new), *self.also)


def machine(name: str, count: int = 200, seed: int = 1) -> tuple[str, ...]:
    """Histories of a state machine, from a fixed seed: whether they find a defect must not be luck."""
    return ("tests.machines", "--machine", name, "--count", str(count), "--seed", str(seed), "--no-shrink")


def tests(*nodes: str) -> tuple[str, ...]:
    """Tests by their names."""
    return ("pytest", "-q", "-x", "-p", "no:cacheprovider", *nodes)


TEMPLATES, CACHES = "strata/runtime/cache/templates.py", "strata/runtime/cache/caches.py"
EXTENT, COMPILED = "strata/runtime/execute/extent.py", "strata/runtime/execute/compiled.py"


PROGRAMS = tests("tests/differential/test_differential.py", "-k", "once")  # the differential machine's own list

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "data-as-indices", "strata/kernel/algebra.py", "case ir.Scalar() if not node.is_index:",
        "case ir.Scalar() if node.dtype is not i64:", PROGRAMS,
    ),
    Mutation(
        "four-bits-in-the-order-of-bytes", "strata/backends/llvm/natives/radix_sort.py",
        '        raw = f.binary("and", type_, raw, constant(type_, 15))\n        sign = 8\n',
        '        raw = f.binary("and", type_, raw, constant(type_, 15))\n        sign = 0\n', PROGRAMS,
    ),
    Mutation(
        "four-bits-that-do-not-wrap", "strata/backends/llvm/math/convert.py",
        "if result.bits == 4:", "if result.bits == 3:", PROGRAMS,
    ),
    Mutation(
        "quotients-at-infinity", "strata/backends/llvm/math/exponentials.py",
        "quotient = m.select(lower, m.sub(quotient, m.c(1.0)), quotient)",
        "quotient = m.select(lower, m.sub(quotient, m.c(1.0)), quotient) if m.bits == 16 else quotient", PROGRAMS,
    ),
    Mutation(
        "short-sums-in-another-order", "strata/kernel/order.py", "    if order in REGISTERS:\n        single",
        "    if order in ():\n        single", PROGRAMS,
    ),
    Mutation(
        "shared-products-rounded-once", "strata/lir/fused.py",
        "if what.sums and self.is_shared(x) else", "if what.sums and not x.shape else", PROGRAMS,
    ),
    Mutation(
        "scales-that-depend-on-what-is-known", "strata/passes/pipeline.py",
        "Simplify(), Fold(sizes=False)]", "Simplify(), Fold()]", PROGRAMS,
    ),
    Mutation(
        "numbers-that-start-from-nothing", "strata/lir/fusion.py",
        "while x not in self.stored and x.node.inputs:",
        "while x not in self.stored and not isinstance(x.node.op, (Input, Param, Constant)):", PROGRAMS,
    ),
    Mutation(
        "running-gradients-the-same-way", "strata/ops/reduce/cumulative.py",
        "self.exclusive, not self.reverse)(ct)", "self.exclusive, self.reverse)(ct)", PROGRAMS,
    ),
    Mutation(
        "gradients-of-rows-not-taken", "strata/ops/control/branching.py",
        "where(lift(rows, x.ndim - 1), x, stop_gradient(x)) if x.dtype.is_inexact else x", "x",
        tests("tests/unit/tensor/test_functional.py", "-k", "no_part_in_its_gradient"),
    ),
    Mutation(
        "sizes-rounded-towards-zero", "strata/backends/llvm/loops/values.py",
        "if not known_le(0, atom.a):  # it has", "if known_le(1, 0):  # it has", PROGRAMS,
    ),
    Mutation(
        "products-of-codes-promoted", "strata/passes/fuse/share_matmul.py",
        "joined: Value = MatMul()(left, concat(", "joined: Value = (lambda a, b: a @ b)(left, concat(",
        tests("tests/unit/passes/test_verified.py"),
    ),
    Mutation(
        "template-of-another-component", TEMPLATES,
        "options or component.options, component.template_key(),", 'options or component.options, "default",',
        machine("PipelineMachine", 40),
    ),
    Mutation(
        "name-on-disk-without-a-template", TEMPLATES,
        "disk_base if model is None else model", "_DEFAULT if model is None else model", machine("PipelineMachine", 40),
    ),
    Mutation(
        "padding-checked-by-bucket", CACHES,
        "self.session.entry_key(self.session.options), tuple(sorted(padded.items()))",
        "self.session.entry_key(self.session.options), ()", machine("BucketMachine", 40),
    ),
    Mutation(
        "padding-cut-by-coincidence", "strata/runtime/execute/padding.py",
        "if not found and (asked or self._graph is None) and", "if not found and", machine("BucketMachine", 40),
    ),
    Mutation(
        "extent-of-zero-computes-nothing", EXTENT,
        "        if not left:\n            return\n", "        if not left or empty:\n            return\n",
        machine("CompiledGraphMachine"),
    ),
    Mutation(
        "tail-lost-at-fixed-sizes", EXTENT,
        "    if not graph._is_static or graph.options.dim_binding:\n        return True\n    return bool(sizes) and",
        "    if not graph._is_static:\n        return True\n    return False and",
        machine("CompiledGraphMachine"),
    ),
    Mutation(
        "result-is-what-is-kept", EXTENT, "return [a.copy() for a in shaped]", "return shaped",
        machine("CompiledGraphMachine"),
    ),
    Mutation(
        "clones-share-parameters", COMPILED, "            if sharers:\n", "            if not sharers:\n",
        machine("CompiledGraphMachine"),
    ),
    Mutation(
        "clones-share-packed-weights", "strata/backends/llvm/runtime/packed_weights.py",
        "[replace(weight) for weight in self._weights]", "self._weights", machine("CompiledGraphMachine", 400),
    ),
    Mutation(
        "clones-share-the-body-of-a-loop", "strata/backends/llvm/runtime/executable.py",
        "(op.again() if op.again else op, code)", "(op, code)", machine("CompiledGraphMachine", 400),
    ),
    Mutation(
        "extent-program-keeps-the-old-weight", EXTENT,
        "            program.set_param(name, array)", "            assert name in program.params and array is not None",
        machine("CompiledGraphMachine"),
    ),
    Mutation(
        "sizes-of-parameters-unchecked", "strata/runtime/execute/feeds.py",
        "binding = infer_binding({**shapes, **given})",
        "binding = {**infer_binding(given), **infer_binding(shapes)}",
        machine("CompiledGraphMachine", 400),
    ),
    Mutation(
        "threads-not-in-the-key", "strata/runtime/execute/session.py",
        'return f"{self.plan_key(options)}; threads={options.threads}"', "return self.plan_key(options)",
        machine("CompileCacheMachine", 40),
    ),
    Mutation(
        "settings-not-in-the-key", "strata/runtime/execute/session.py",
        '{self.backend.target.key}; {config().key_fields()}"\n\n    def entry_key',
        '{self.backend.target.key}"\n\n    def entry_key',
        machine("SizesCacheMachine", 40),
    ),
    Mutation(
        "forms-keep-the-old-weight", "strata/runtime/cache/contract.py", "            self._forms.add(made)\n", "",
        machine("VariantMachine", 60),
    ),
    Mutation(
        "the-largest-number-is-clipped", "strata/ops/quant/fake_quantize.py",
        "self.qmax * (1 + 2 * float(kind.eps))", "float(self.qmax)",
        tests("tests/ops/test_quantize.py::test_the_largest_number_is_not_clipped"),
    ),
    Mutation(
        "entry-under-another-name", "strata/cache/store.py",
        'return ("misplaced", f"it is the entry of {key[:12]}") if key != name else None', "return None",
        machine("StoreMachine", 60),
    ),
    Mutation(
        "entry-that-others-can-write", "strata/cache/store.py",
        "    if found.st_mode & 0o002 or (found.st_mode & 0o020 and not _is_own_group(found.st_gid)):\n",
        "    if found.st_mode & 0o000:\n", machine("StoreMachine", 60),
    ),
    Mutation(
        "equal-values-of-other-classes", "strata/core/tree.py",
        "        return (kind, *map(exact, x))\n", "        return x\n",
        machine("JitMachine", 60),
        also=(("strata/core/tree.py", "    return kind, x\n", "    return x\n"),),
    ),
    Mutation(
        "a-tensor-that-is-another", "strata/tensor/tensor.py",
        "            value = data_apart(value)\n", "            pass\n", machine("LazyMachine", 100),
    ),
)  # fmt: skip


def mutated(mutation: Mutation | None, root: Path) -> None:
    """Put a copy of the package and its tests into a folder, with the defect in it, if there is one."""
    for part in ("strata", "tests"):
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", root)
    if mutation is None:
        return
    for file, old, new in mutation.changes:
        path = root / file
        text = path.read_text()
        assert text.count(old) == 1, f"{mutation.name}: the text occurs {text.count(old)} times in {file}"
        path.write_text(text.replace(old, new))
        compile(path.read_text(), file, "exec")


def fails(check: tuple[str, ...], mutation: Mutation | None = None) -> tuple[bool, str]:
    """Whether a check fails on the package, with a defect or as it is, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        mutated(mutation, root)
        environment = {**os.environ, "PYTHONPATH": folder, "STRATA_CACHE_DIR": str(root / "cache")}
        done = subprocess.run(
            [sys.executable, "-m", *check], cwd=root, env=environment, timeout=MOST_SECONDS,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    told = check[0] != "tests.machines" or "violation: " in done.stdout
    if mutation is None:
        return done.returncode != 0, done.stdout + done.stderr
    return done.returncode == 1 and told, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machines.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help="of mutations; all by default")
    parser.add_argument("--list", action="store_true", help="show the names")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.names or m.name in options.names]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name}: {mutation.file}, found by {' '.join(mutation.check)}")
        return 0
    missed = 0
    for check in dict.fromkeys(m.check for m in chosen):  # what fails without a defect finds none
        is_broken, output = fails(check)
        missed += is_broken
        print(f"{' '.join(check)}: {'FAILS without a defect' if is_broken else 'passes without a defect'}", flush=True)
        if is_broken:
            print(output[-4000:], flush=True)
    for mutation in chosen:
        start = time.monotonic()
        is_found, output = fails(mutation.check, mutation)
        missed += not is_found
        print(f"{mutation.name}: {'found' if is_found else 'MISSED'} in {time.monotonic() - start:.0f} s", flush=True)
        if not is_found:
            print(output[-4000:], flush=True)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
