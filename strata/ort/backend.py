"""ONNX's backend interface over sessions, as `onnxruntime.backend` has it: prepare, run, supports_device."""

from __future__ import annotations

import os
from typing import Any

from strata.errors import ArgumentError
from strata.ort.exceptions import RuntimeException
from strata.ort.options import RunOptions, SessionOptions
from strata.ort.process import get_available_providers, get_device
from strata.ort.session import InferenceSession
from strata.places import here

_NOT_OF_SESSIONS = {"enable_profiling", "optimized_model_filepath", "profile_file_prefix"}
_NOT_OF_RUNS = {"terminate"}


class PreparedSession:
    """A session that takes a list of arrays, one an input, or the array of a single input."""

    def __init__(self, session: InferenceSession) -> None:
        self._session = session

    def run(self, inputs: Any, **kwargs: Any) -> list[Any]:
        """The outputs; `kwargs` are fields of RunOptions."""
        ports = self._session.get_inputs()
        given = inputs if isinstance(inputs, list) else [inputs]
        if len(given) != len(ports):
            raise RuntimeException(f"Model expect {len(ports)} inputs", code="O701", plain=True)
        options = RunOptions()
        _set(options, kwargs, _NOT_OF_RUNS)
        return self._session.run(None, {p.name: x for p, x in zip(ports, given, strict=True)}, options)


def _set(options: Any, given: dict[str, Any], refused: set[str]) -> None:
    kind = type(options).__name__
    for name, value in given.items():
        if name in refused:
            raise RuntimeException(
                f"{kind} attribute '{name}' is not permitted via the backend API.", code="O701", plain=True
            )
        if not hasattr(type(options), name):
            raise ArgumentError(f"{kind} has no field {name!r}", code="O702", place=here())
        setattr(options, name, value)


def supports_device(device: str) -> bool:
    """Whether models run on a kind of device: CPU, GPU or CUDA."""
    return device == "CPU" or ("GPU" if device == "CUDA" else device) == get_device()


def is_compatible(model: Any, device: str | None = None, **kwargs: Any) -> bool:
    """Whether the device of a model is here."""
    return device is None or supports_device(device)


def prepare(model: Any, device: str | None = None, **kwargs: Any) -> PreparedSession:
    """A path, bytes, a ModelProto or a session, ready to run; `kwargs` are fields of SessionOptions."""
    if isinstance(model, PreparedSession):
        return model
    if device is not None and not supports_device(device):
        raise RuntimeException(
            f"Incompatible device expected '{device}', got '{get_device()}'", code="O701", plain=True
        )
    if isinstance(model, InferenceSession):
        return PreparedSession(model)
    options = SessionOptions()
    _set(options, kwargs, _NOT_OF_SESSIONS)
    source = model if isinstance(model, (str, bytes, os.PathLike)) else model.SerializeToString()
    providers = ["CPUExecutionProvider"] if device == "CPU" else get_available_providers()
    return PreparedSession(InferenceSession(source, options, providers))


def run_model(model: Any, inputs: Any, device: str | None = None, **kwargs: Any) -> list[Any]:
    """The outputs of a model that is prepared for this run."""
    return prepare(model, device, **kwargs).run(inputs)


run = run_model
