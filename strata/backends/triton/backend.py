"""The `cuda` backend: plans as Triton kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from strata.backends.base import Capabilities
from strata.backends.driver import DeviceDriver, Launchable
from strata.backends.offload import OffloadBackend, OffloadExecutable
from strata.backends.triton.codegen.attention import render_attention, takes_attention
from strata.backends.triton.codegen.attention_backward import render_backward, takes_backward
from strata.backends.triton.codegen.dequant import render_dequant, takes_dequant
from strata.backends.triton.codegen.paged import render_paged, takes_paged
from strata.backends.triton.codegen.pairs import takes_pairs
from strata.backends.triton.codegen.render import Rendered, render
from strata.backends.triton.launch.cuda import CudaDriver, count
from strata.backends.triton.launch.workers import compile_ahead
from strata.backends.triton.target import Gpu
from strata.core import Target, TensorType
from strata.errors import DeviceError
from strata.lir import Lir, Step
from strata.mir import Node, Op


class TritonBackend(OffloadBackend):
    """Plans over a driver that runs Triton kernels. Convolutions have their channels last: as matmuls of gathered
    windows, whose rows are then whole lines of memory."""

    capabilities = Capabilities(
        claims=frozenset({"conv_last", "conv_gathered"}), narrow_matmuls=frozenset({"f16", "bf16"}), keeps_plans=True
    )

    def __init__(self, name: str, gpu: Gpu, driver: DeviceDriver, home: str | None = None) -> None:
        super().__init__(driver, home or name)
        self.name, self.gpu = name, gpu

    @property
    def target(self) -> Target:
        return self.gpu.target

    def takes(self, op: Op, types: Sequence[TensorType] = ()) -> bool:
        own = takes_attention(op, types) or takes_backward(op, types) or takes_paged(op, types)
        return own or takes_dequant(op, types) or super().takes(op, types)

    def reads_views(self, node: Node) -> bool:
        """Attention reads strided rows; convolutions want weights whose outputs lie side by side."""
        types = [x.type for x in node.inputs]
        return node.op.name == "conv_last" or takes_attention(node.op, types) or takes_backward(node.op, types)

    def launchable(self, step: Step) -> Launchable | None:
        """What runs a step of one op; attention is kernels of its own."""
        rendered = rendered_step(step, self.gpu)
        return None if rendered is None else self.driver.make_rendered(rendered)  # type: ignore[attr-defined]

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
        return render_backward(node, step.views)
    if step.views is not None and takes_attention(node.op, types):
        return render_attention(node, step.views, gpu)
    if takes_paged(node.op, types):
        return render_paged(node)
    return render_dequant(node, gpu) if takes_dequant(node.op, types) else None


class CudaBackend(TritonBackend):
    """NVIDIA GPUs, by number."""

    capabilities = replace(TritonBackend.capabilities, searches=True)
    driver: CudaDriver

    def __init__(self, number: int = 0) -> None:
        driver = CudaDriver(number)
        super().__init__("cuda", driver.gpu, driver, f"cuda:{number}")

    def compile(self, lir: Lir) -> OffloadExecutable:
        """Kernels are compiled on all cores before they are loaded one by one; what fails is told then."""
        rendered = [render(kernel, self.gpu) for kernel in lir.kernels.values()]
        rendered += [r for s in lir.schedule if s.kernel is None and (r := rendered_step(s, self.gpu)) is not None]
        compile_ahead([p for r in rendered for p in r.all_programs], self.gpu)
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

    return TritonBackend("triton_interpreter", Gpu.named("sm_90"), InterpreterDriver())


class PlannedBackend(TritonBackend):
    """A backend that only plans: for looking at kernels, and compiling them, where there is no GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.name, self.gpu = "triton_planned", gpu

    def compile(self, lir: Lir) -> OffloadExecutable:
        raise DeviceError("these plans are only looked at: there is no device", code="E101")
