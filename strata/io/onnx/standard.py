"""The standard interface of ONNX runtimes: prepare, run_model, run_node, supports_device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep

from strata.core import located
from strata.errors import OptionError
from strata.io.onnx.dtypes import NUMBER
from strata.io.onnx.model import OnnxModel
from strata.kinds import counted, shown


class PreparedModel(BackendRep):
    """A model that is ready to run on a list of arrays, or a mapping by name."""

    def __init__(self, model: OnnxModel) -> None:
        self.model = model

    @located
    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        model = self.model
        if isinstance(inputs, Mapping):
            return model.run(inputs)
        given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        ports = model.inputs if len(given) <= len(model.inputs) else self._all_inputs()
        if len(given) > len(ports):
            raise OptionError(
                f"the model has {counted(len(ports), 'input')}, got {counted(len(given), 'array')}", code="O502"
            )
        return model.run({port.name: x for port, x in zip(ports, given, strict=False)})

    def _all_inputs(self) -> Sequence[Any]:
        ports = {p.name: p for p in (*self.model.inputs, *self.model.optional_inputs)}
        return [ports[x.name] for x in self.model.program.graph.input]


class StrataBackend(Backend):
    """ONNX models on a device of ours; `device` names it, and subclasses may name another."""

    device: ClassVar[str] = "cpu"

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **kwargs: Any) -> bool:
        return True

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        return PreparedModel(OnnxModel(model, device=cls._device(device), custom_ops=kwargs.get("custom_ops")))

    @classmethod
    def run_model(cls, model: Any, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls, node: Any, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """One node on arrays."""
        if not hasattr(node, "op_type") or not isinstance(inputs, (list, tuple)):
            raise OptionError(f"run_node takes a NodeProto and a list of arrays, got {shown(node)}", code="O412")
        arrays = [np.asarray(x) for x in inputs]
        named = [name for name in node.input if name]
        ports = [
            helper.make_tensor_value_info(name, NUMBER[a.dtype], a.shape)
            for name, a in zip(named, arrays, strict=False)
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = helper.make_graph([node], "node", ports, outputs)
        opset = kwargs.pop("opset_version", onnx.defs.onnx_opset_version())
        imports = [helper.make_opsetid("", opset)]
        if node.domain not in ("", "ai.onnx"):
            imports.append(helper.make_opsetid(node.domain, 1))
        return cls.run_model(helper.make_model(graph, opset_imports=imports), arrays, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.split(":", maxsplit=1)[0] == "CPU"

    @classmethod
    def _device(cls, device: str) -> str:
        kind = device.split(":", maxsplit=1)[0].lower()
        return cls.device if kind == "cpu" else device.lower()


class OnnxReferenceBackend(StrataBackend):
    """The same on the NumPy interpreter: tells a misread model from a wrong kernel."""

    device = "reference"
