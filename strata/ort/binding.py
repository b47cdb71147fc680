"""IOBinding: inputs and outputs of a session in buffers of the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import ArgumentError
from strata.ort.exceptions import InvalidArgument, OrtError, RuntimeException
from strata.ort.values import (
    OrtDevice,
    OrtValue,
    OrtValueVector,
    as_feed,
    at_address,
    element_dtype,
    require_host,
    type_of,
)
from strata.places import here

if TYPE_CHECKING:
    from strata.ort.session import InferenceSession


class IOBinding:
    """Inputs that stay bound over runs, and outputs that are written into buffers or allocated."""

    def __init__(self, session: InferenceSession) -> None:
        self._session = session
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, np.ndarray | None] = {}
        self._results: list[OrtValue] = []

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Use an array as an input."""
        self._input(name)
        if isinstance(arr_on_cpu, np.ndarray) and arr_on_cpu.dtype.kind in "OUS":
            raise RuntimeException("Only binding non-string Tensors is currently supported", code="O701", plain=True)
        if not isinstance(arr_on_cpu, (np.ndarray, OrtValue)) and not hasattr(arr_on_cpu, "__dlpack__"):
            raise RuntimeException("Unable to create OrtValue from the given python object", code="O701", plain=True)
        self._inputs[name] = as_feed(name, arr_on_cpu)

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Use a value as an input."""
        if name not in self._session.input_names:
            raise RuntimeException(
                f"Error when binding input: Failed to find input name in the mapping: {name}", code="N701", plain=True
            )
        self._inputs[name] = as_feed(name, ortvalue)

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Use the memory at an address as an input."""
        self._input(name)
        require_host(device_type)
        self._inputs[name] = at_address(buffer_ptr, element_dtype(element_type), shape)

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Ask for an output: in new memory, or in that at an address."""
        OrtDevice.make(device_type, device_id)
        require_host(device_type)
        if buffer_ptr is None:
            self._outputs[name] = None
            return
        if element_type is None or shape is None:
            raise InvalidArgument(
                "`element_type` and `shape` are to be provided if pre-allocated memory is provided", plain=True
            )
        self._outputs[name] = at_address(buffer_ptr, element_dtype(element_type), shape)

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Ask for an output in the memory of a value."""
        if not isinstance(ortvalue, OrtValue):
            raise ArgumentError(f"an output is an OrtValue, got {type(ortvalue).__name__}", code="O702", place=here())
        self._outputs[name] = ortvalue.numpy()

    def _input(self, name: str) -> None:
        if name not in self._session.input_names:
            raise RuntimeException(f"Failed to find NodeArg with name: {name} in the def list", code="N701", plain=True)

    def synchronize_inputs(self) -> None:
        """Inputs of the host are there already."""

    def synchronize_outputs(self) -> None:
        """Outputs of the host are there already."""

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget the outputs."""
        self._outputs.clear()
        self._results = []

    def get_outputs(self) -> list[OrtValue]:
        """The outputs of the last run, in the order in which they were bound."""
        return list(self._results)

    def get_outputs_as_ortvaluevector(self) -> OrtValueVector:
        """The same, as a vector."""
        return OrtValueVector(self._results)

    def copy_outputs_to_cpu(self) -> list[Any]:
        """The outputs of the last run as arrays."""
        return [x._value for x in self._results]

    def _run(self, run: Any) -> None:
        """Run on what is bound; `run` takes names and feeds."""
        if not self._outputs:
            raise RuntimeException(
                "Error in execution: At least one output should be requested.", code="O701", plain=True
            )
        names = list(self._outputs)
        try:
            found = dict(zip(names, run(names, self._inputs), strict=True))
            self._results = [OrtValue(_placed(name, found[name], self._outputs)) for name in names]
        except OrtError as error:
            raise RuntimeException(f"Error in execution: {error.said}", code=error.code, plain=True) from error


def _placed(name: str, value: Any, buffers: Mapping[str, np.ndarray | None]) -> Any:
    """A result in the buffer that was bound for it."""
    buffer = buffers[name]
    if buffer is None:
        return value
    if isinstance(value, np.ndarray) and buffer.dtype != value.dtype:
        raise InvalidArgument(
            f"Unexpected output data type. Actual: ({type_of(buffer)}) , expected: ({type_of(value)})", code="D701"
        )
    if not isinstance(value, np.ndarray) or buffer.shape != value.shape:
        raise InvalidArgument(
            f"output {name}: the buffer is {type_of(buffer)}{list(buffer.shape)}, the result "
            f"{type_of(value)}{list(getattr(value, 'shape', ()))}", code="S701",
        )  # fmt: skip
    np.copyto(buffer, value)
    return buffer


SessionIOBinding = IOBinding
