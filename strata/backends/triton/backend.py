"""The `cuda` backend: plans as Triton kernels on a GPU."""

from __future__ import annotations

from strata.backends.offload import DeviceDriver, OffloadBackend, OffloadExecutable
from strata.backends.triton.cuda import CudaDriver, count
from strata.backends.triton.pairs import takes_pairs
from strata.backends.triton.render import render
from strata.backends.triton.target import Gpu
from strata.core import Target
from strata.errors import DeviceError
from strata.lir import Lir
from strata.mir import Node


class TritonBackend(OffloadBackend):
    """Plans over a driver that runs Triton kernels."""

    def __init__(self, name: str, gpu: Gpu, driver: DeviceDriver) -> None:
        super().__init__(driver)
        self.name, self.gpu = name, gpu

    @property
    def target(self) -> Target:
        return self.gpu.target

    def runs_whole(self, node: Node) -> bool:
        return not takes_pairs(node.op.name, [x.type.dtype for x in node.inputs])

    def sources(self, lir: Lir) -> dict[str, str]:
        return {name: str(render(kernel)) for name, kernel in lir.kernels.items()}


class CudaBackend(TritonBackend):
    """NVIDIA GPUs, by number."""

    def __init__(self, number: int = 0) -> None:
        driver = CudaDriver(number)
        super().__init__("cuda", driver.gpu, driver)

    @property
    def count(self) -> int:
        return count()


def interpreted() -> TritonBackend:
    """A backend whose kernels run in Triton's interpreter, for tests."""
    from strata.backends.triton.interpreter import InterpreterDriver

    return TritonBackend("triton_interpreter", Gpu.named("sm_90"), InterpreterDriver())


class PlannedBackend(TritonBackend):
    """A backend that only plans: for looking at kernels, and compiling them, where there is no GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.name, self.gpu = "triton_planned", gpu

    def compile(self, lir: Lir) -> OffloadExecutable:
        raise DeviceError("these plans are only looked at: there is no device", code="E101")
