"""The other direction: compiled graphs as modules of torch, tensors as tensors of torch and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from strata.core import here
from strata.errors import DTypeError, OptionError
from strata.runtime import CompiledGraph, Session
from strata.tensor import Tensor, asarray
from strata.torch.kinds import to_array, to_tensor
from strata.transforms import promote_params, vjp


class StrataModule(torch.nn.Module):
    """A compiled graph as a module: parameters are torch's, inputs come in their order, and gradients flow through."""

    def __init__(self, compiled: CompiledGraph) -> None:
        super().__init__()
        self.names = list(compiled.inputs)
        session = Session(compiled.device, compiled.options)
        source = compiled.source
        self._fields: dict[str, str] = {}
        for name in compiled.params:
            given = compiled._param_values.get(name)
            if given is None:
                raise OptionError(
                    f"wrap: parameter {name!r} has no value yet: use set_param", code="O662", place=here()
                )
            t = to_tensor(np.array(given))
            field = name.replace(".", "_")
            while hasattr(self, field):  # another parameter's, or a method's
                field += "_"
            self._fields[name] = field
            self.register_parameter(self._fields[name], torch.nn.Parameter(t, requires_grad=t.is_floating_point()))
        open_graph = promote_params(source, list(compiled.params)) if compiled.params else source
        self._call = _Differentiable(open_graph, session)

    def forward(self, *args: torch.Tensor, **named: torch.Tensor) -> Any:
        """The results of the graph: one, or a tuple."""
        given = dict(zip(self.names, args, strict=False)) | named
        missing = [n for n in self.names if n not in given]
        if missing or len(args) > len(self.names) or len(given) > len(self.names):
            raise OptionError(f"wrap: the inputs are {', '.join(self.names)}", code="O662", place=here())
        tensors = [given[n] if n in given else getattr(self, self._fields[n]) for n in self._call.names]
        made = _Function.apply(self._call, *tensors)  # type: ignore[no-untyped-call]
        return made[0] if len(made) == 1 else made


class _Differentiable:
    """The graph with its parameters as inputs, and its derivative, compiled when it is first asked for."""

    def __init__(self, graph: Any, session: Session) -> None:
        self.graph, self.session = graph, session
        self.names = list(graph.input_names)
        self.run = session.compile(graph)
        self._derivatives: dict[tuple[str, ...], _Differentiable] = {}

    def __deepcopy__(self, memo: Any) -> _Differentiable:
        return self  # it holds no values

    def derivative(self, wrt: tuple[str, ...]) -> _Differentiable:
        """The cotangents of some inputs, as a graph that can be differentiated again."""
        if wrt not in self._derivatives:
            whole = vjp(self.graph, list(wrt))
            self._derivatives[wrt] = _Differentiable(whole.returning(*whole.results[-len(wrt) :]), self.session)
        return self._derivatives[wrt]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Differentiable, *tensors: torch.Tensor) -> Any:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        feeds = {name: to_array(t.detach().contiguous()) for name, t in zip(call.names, tensors, strict=True)}
        made = tuple(to_tensor(a) for a in call.run.run(feeds))
        ctx.mark_non_differentiable(*(t for t in made if not (t.is_floating_point() or t.is_complex())))
        return made

    @staticmethod
    def backward(ctx: Any, *cts: torch.Tensor) -> Any:
        call, tensors = ctx.call, ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        wrt = tuple(name for name, w in zip(call.names, wanted, strict=True) if w)
        derivative = call.derivative(wrt)
        given = dict(zip(call.names, tensors, strict=True))
        inexact = iter([ct for ct in cts if ct.is_floating_point() or ct.is_complex()])
        operands = [given[name] if name in given else next(inexact) for name in derivative.names]
        found = iter(_Function.apply(derivative, *operands))  # type: ignore[no-untyped-call]
        return (None, *(next(found) if w else None for w in wanted))


def wrap(compiled: CompiledGraph) -> StrataModule:
    """A compiled graph as an `nn.Module` with autograd."""
    return StrataModule(compiled)


def to_torch(x: Any) -> torch.Tensor:
    """A tensor, or an array, as a tensor of torch: the same memory."""
    if isinstance(x, Tensor):
        if x.__dlpack_device__()[0] != 1:
            return torch.from_dlpack(x)
        return to_tensor(x._for_writing())  # torch knows no memory that is only read
    array = np.asarray(x)
    return to_tensor(array if array.flags.writeable else array.copy())


def from_torch(t: torch.Tensor) -> Tensor:
    """A tensor of torch as a tensor of ours: the same memory."""
    if not isinstance(t, torch.Tensor):
        raise DTypeError(f"from_torch takes a tensor of torch, got {type(t).__name__}", code="T207", place=here())
    if t.layout is not torch.strided or t.is_quantized or t.is_meta:
        raise DTypeError(
            f"from_torch takes a dense tensor, got {t.dtype}, {t.layout}, {t.device}", code="T207", place=here()
        )
    if t.is_cuda:
        return asarray(t.detach())  # by DLPack, in the order of its stream
    return asarray(to_array(t.detach().cpu()))
