"""Exceptions of onnxruntime's `capi` module: each is a StrataError, and the classic Python error that it stands for."""

# ruff: noqa: N818 - their names are onnxruntime's

from __future__ import annotations

import re
from typing import ClassVar

from strata.errors import (
    BudgetError,
    DTypeError,
    FileAccessError,
    FileError,
    IndexRangeError,
    LowerError,
    MissingFileError,
    MissingRuleError,
    RunError,
    ShapeError,
    StrataError,
    UnknownNameError,
)
from strata.places import here


class OrtError(StrataError):
    """Base of what a session raises. Messages begin as onnxruntime's do, with the number and name of a status."""

    default_code = "X701"
    status: ClassVar[tuple[int, str]] = (1, "FAIL")

    def __init__(self, message: str, *, code: str | None = None, plain: bool = False) -> None:
        number, name = self.status
        self.said = message  # without the number and name of the status
        super().__init__(
            message if plain else f"[ONNXRuntimeError] : {number} : {name} : {message}", code=code, place=here()
        )


class Fail(OrtError, RuntimeError):
    """What has no class of its own."""


class InvalidArgument(OrtError, ValueError):
    """Inputs that do not fit the model, names that it does not have, a model that contradicts itself."""

    default_code = "O701"
    status = (2, "INVALID_ARGUMENT")


class NoSuchFile(OrtError, FileNotFoundError):
    """A model file that does not exist."""

    default_code = "F701"
    status = (3, "NO_SUCHFILE")


class NoModel(OrtError, RuntimeError):
    """A session without a model."""

    status = (4, "NO_MODEL")


class EngineError(OrtError, RuntimeError):
    """A failure of the engine."""

    status = (5, "ENGINE_ERROR")


class RuntimeException(OrtError, RuntimeError):
    """A failure while the model runs."""

    status = (6, "RUNTIME_EXCEPTION")


class InvalidProtobuf(OrtError, ValueError):
    """A file that is not an ONNX model."""

    default_code = "F701"
    status = (7, "INVALID_PROTOBUF")


class ModelLoaded(OrtError, RuntimeError):
    """A session that has a model already."""

    status = (8, "MODEL_LOADED")


class NotOffered(OrtError, NotImplementedError):
    """Something that onnxruntime has, and strata has not: onnxruntime's NotImplemented."""

    default_code = "L701"
    status = (9, "NOT_IMPLEMENTED")


class InvalidGraph(OrtError, ValueError):
    """A model with an op that nobody knows, or with nodes that do not fit together."""

    default_code = "F701"
    status = (10, "INVALID_GRAPH")


class EPFail(OrtError, RuntimeError):
    """An execution provider that failed."""

    status = (11, "EP_FAIL")


class ModelLoadCanceled(OrtError, RuntimeError):
    """Loading that was called off."""

    status = (12, "MODEL_LOAD_CANCELED")


class ModelRequiresCompilation(OrtError, RuntimeError):
    """A model that an execution provider wants compiled before."""

    status = (13, "MODEL_REQUIRES_COMPILATION")


class NotFound(OrtError, KeyError):
    """A name that does not exist."""

    status = (14, "NOT_FOUND")


class DeviceReset(OrtError, RuntimeError):
    """A device that was reset."""

    status = (15, "DEVICE_RESET")


NotOffered.__name__ = "NotImplemented"
ALL = (
    DeviceReset, EPFail, EngineError, Fail, InvalidArgument, InvalidGraph, InvalidProtobuf, ModelLoadCanceled,
    ModelLoaded, ModelRequiresCompilation, NoModel, NoSuchFile, NotFound, NotOffered, RuntimeException,
)  # fmt: skip


def of_loading(error: StrataError, where: str) -> OrtError:
    """What onnxruntime raises where a model cannot be loaded, and what strata says of it."""
    if isinstance(error, MissingFileError):
        return NoSuchFile(f"Load model from {where} failed:Load model {where} failed. File doesn't exist")
    if isinstance(error, FileAccessError):
        return InvalidProtobuf(f"Load model from {where} failed:{error.summary}", code=error.code)
    if isinstance(error, UnknownNameError):
        return _of_unknown(error)
    if isinstance(error, FileError) and "not an ONNX model" in error.summary:
        if where:
            return InvalidProtobuf(f"Load model from {where} failed:Protobuf parsing failed.")
        return InvalidProtobuf("Failed to load model because protobuf parsing failed.")
    if isinstance(error, FileError) and "no graph" in error.summary:
        at = f"Load model from {where} failed:" if where else ""
        return InvalidArgument(f"{at}No graph was found in the protobuf.", code=error.code)
    if isinstance(error, FileError) and "of a previous node" in error.summary:
        return InvalidArgument(f"Invalid model. {error.summary}", code=error.code)
    if isinstance(error, FileError) and any(x in error.summary for x in _NOT_WHOLE):
        return Fail(f"This is an invalid model. Error: {error.summary}", code=error.code)
    if isinstance(error, (FileError, BudgetError)):
        return InvalidGraph(error.summary, code=error.code)
    return of_running(error)


_NOT_WHOLE = ("both give", "or output of a node", "is the newest known")  # which have no status of their own
_OF_STANDARD = ("", "ai", "com")  # first words of domains whose ops are registered
_UNKNOWN = re.compile(r"at these nodes: (?:(?P<domain>[\w.]+)\.)?(?P<op>\w+) \(")
_AT_NODE = re.compile(r"node '(?P<name>[^']*)' \((?P<op>\w+)\): (?P<why>.*)", re.DOTALL)


def _of_unknown(error: StrataError) -> OrtError:
    found = _UNKNOWN.search(error.summary)
    if found is None:
        return InvalidGraph(f"This is an invalid model. {error.summary}", code=error.code)
    domain, op = found["domain"] or "", found["op"]
    if domain.split(".")[0] not in _OF_STANDARD:
        return Fail(f"Fatal error: {domain}:{op}(-1) is not a registered function/op: {error.summary}", code=error.code)
    return InvalidGraph(f"This is an invalid model. Error No Op registered for {op}: {error.summary}", code=error.code)


def of_running(error: StrataError) -> OrtError:
    """What onnxruntime raises where a run fails."""
    at = _AT_NODE.match(error.summary)
    if at is not None and isinstance(error, (ShapeError, RunError)):
        kind = InvalidArgument if isinstance(error, RunError) else Fail
        return kind(
            f"Non-zero status code returned while running {at['op']} node. Name:'{at['name']}' Status Message: "
            f"{at['why']}", code=error.code,
        )  # fmt: skip
    if isinstance(error, (ShapeError, DTypeError, UnknownNameError, IndexRangeError)):
        return InvalidArgument(error.summary, code=error.code)
    if isinstance(error, (LowerError, MissingRuleError)):
        return NotOffered(error.summary, code=error.code)
    return RuntimeException(error.summary, code=error.code)
