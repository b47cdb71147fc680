"""The `cuda` backend: plans as Triton kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from strata.backends.base import Capabilities
from strata.backends.checks import CHECKS
from strata.backends.driver import DeviceDriver, Launchable, OpenStep
from strata.backends.offload import OffloadBackend, OffloadExecutable
from strata.backends.ordering import is_own, own_phases
from strata.backends.triton.codegen.attention import render_attention, takes_attention
from strata.backends.triton.codegen.attention_backward import BESIDE, render_backward, takes_backward
from strata.backends.triton.codegen.dequant import render_dequant, takes_dequant
from strata.backends.triton.codegen.paged import render_paged, takes_paged
from strata.backends.triton.codegen.pairs import takes_pairs
from strata.backends.triton.codegen.render import Rendered, render, render_phases
from strata.backends.triton.launch.cuda import CudaDriver, count
from strata.backends.triton.launch.workers import compile_ahead
from strata.backends.triton.target import Gpu
from strata.core import Target, TensorType
from strata.errors import DeviceError
from strata.lir import Lir, Step
from strata.mir import Node, Op
from strata.ops import CheckedIds


class TritonBackend(OffloadBackend):
    """Plans over a driver that runs Triton kernels. Convolutions have their channels last: as matmuls of gathered
    windows, whose rows are then whole lines of memory."""

    capabilities = Capabilities(
        claims=frozenset({"conv_last", "conv_gathered", "expand", "loops"}),
        narrow_matmuls=frozenset({"f16", "bf16"}),
        recompute_cost=64,
        runs_bodies=True,
        keeps_plans=True,
    )

    def __init__(self, name: str, gpu: Gpu, driver: DeviceDriver, home: str | None = None) -> None:
        super().__init__(driver, home or name)
        self.name, self.gpu = name, gpu

    @property
    def target(self) -> Target:
        return self.gpu.target

    def takes(self, op: Op, types: Sequence[TensorType] = ()) -> bool:
        own = takes_attention(op, types) or takes_backward(op, types) or takes_paged(op, types)
        own = own or takes_dequant(op, types) or is_own(op) or op.name in CHECKS or self.takes_bodies(op)
        if isinstance(op, CheckedIds):  # taken apart: a kernel would leave the check out
            return False
        return own or (super().takes(op, types) and takes_pairs(op.name, [t.dtype for t in types]))

    def reads_views(self, node: Node) -> bool:
        """Attention reads strided rows; convolutions want weights whose outputs lie side by side."""
        types = [x.type for x in node.inputs]
        return node.op.name == "conv_last" or takes_attention(node.op, types) or takes_backward(node.op, types)

    def launchable(self, step: Step) -> Launchable | None:
        """What runs a step of one op; attention is kernels of its own."""
        rendered = rendered_step(step, self.gpu)
        if rendered is None and is_own(step.nodes[0].op):
            return OpenStep(lambda sizes: self._rendered(_own(step, self.gpu, sizes)))
        return None if rendered is None else self._rendered(rendered)

    def _rendered(self, rendered: Rendered | None) -> Launchable:
        made: Launchable = self.driver.make_rendered(rendered)  # type: ignore[attr-defined]
        return made

    def runs_whole(self, node: Node) -> bool:
        return not takes_pairs(node.op.name, [x.type.dtype for x in node.inputs])

    def sources(self, lir: Lir) -> dict[str, str]:
        found = {name: str(render(kernel, self.gpu)) for name, kernel in lir.kernels.items()}
        for step in lir.schedule:
            rendered = rendered_step(step, self.gpu) if step.kernel is None else None
            if rendered is not None:
                found[step.name] = str(rendered)
        return found


def rendered_step(step: Step, gpu: Gpu) -> Rendered | None:
    """The kernels of a step of one op, where it has some."""
    (node,) = step.nodes
    types = [x.type for x in node.inputs]
    if step.views is not None and takes_backward(node.op, types):
        return render_backward(node, step.views, gpu, step.schedule.split(BESIDE))
    if step.views is not None and takes_attention(node.op, types):
        return render_attention(node, step.views, gpu, step.schedule)
    if takes_paged(node.op, types):
        return render_paged(node)
    if takes_dequant(node.op, types):
        return render_dequant(node, gpu)
    return _own(step, gpu, {})


def _own(step: Step, gpu: Gpu, sizes: Mapping[str, int]) -> Rendered | None:
    """The kernels of a sort or a running extreme; None where that takes sizes that are not known."""
    (node,) = step.nodes
    phases = own_phases(node.op.bind(sizes), tuple(x.type.bind(sizes) for x in node.inputs))
    return None if phases is None else render_phases(step.name, phases, gpu)


def _all_rendered(lir: Lir, gpu: Gpu, *, behind: bool = False) -> Iterator[Rendered]:
    """All that a plan runs, bodies included; what is behind a flag is."""
    for kernel in lir.kernels.values():
        yield render(kernel, gpu).guarded() if behind else render(kernel, gpu)
    for step in lir.schedule:
        rendered = rendered_step(step, gpu) if step.kernel is None else None
        if rendered is not None:
            yield rendered.guarded() if behind else rendered
        for body in step.bodies:
            yield from _all_rendered(body, gpu, behind=behind or step.name != "scan")


class CudaBackend(TritonBackend):
    """NVIDIA GPUs, by number."""

    capabilities = replace(TritonBackend.capabilities, searches=True)
    driver: CudaDriver

    def __init__(self, number: int = 0) -> None:
        driver = CudaDriver(number)
        super().__init__("cuda", driver.gpu, driver, f"cuda:{number}")

    def compile(self, lir: Lir) -> OffloadExecutable:
        """Kernels are compiled on all cores before they are loaded one by one; what fails is told then."""
        compile_ahead((p for r in _all_rendered(lir, self.gpu) for p in r.all_programs), self.gpu)
        return super().compile(lir)

    def tune(self, lir: Lir, progress: Callable[[int, int], None] | None = None) -> Lir:
        from strata.backends.triton.tuning.tune import tuned  # only those who search need it

        with self.driver.lock:
            return tuned(lir, self.driver, self.gpu, self.driver.device.name, progress)

    @property
    def description(self) -> str:
        return self.driver.description

    @property
    def count(self) -> int:
        return count()


def interpreted() -> TritonBackend:
    """A backend whose kernels run in Triton's interpreter, for tests."""
    from strata.backends.triton.launch.interpreter import InterpreterDriver

    gpu = replace(Gpu.named("sm_90"), is_real=False)
    return TritonBackend("triton_interpreter", gpu, InterpreterDriver())


class PlannedBackend(TritonBackend):
    """A backend that only plans: for looking at kernels, and compiling them, where there is no GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.name, self.gpu = "triton_planned", gpu

    def compile(self, lir: Lir) -> OffloadExecutable:
        raise DeviceError("these plans are only looked at: there is no device", code="E101")
