"""Every exception that strata raises on purpose, and the layout of its message.

    StrataError
    ├── ShapeError (ValueError)          S  sizes, ranks and axes that disagree
    │   └── SymbolError                  S  a symbolic size that is unbound, in conflict or out of range
    ├── DTypeError (TypeError)           D  an element type that an operation does not take
    │   └── BufferTypeError (BufferError)   elements that DLPack does not pass on
    ├── IndexRangeError (IndexError)     I  an index outside its axis
    ├── UnknownNameError (KeyError)      N  an op, input, parameter, pass or option that does not exist
    │   └── UnknownMethodError (AttributeError)  a model that does not do what it is asked for
    ├── OptionError (ValueError)         O  an option or argument whose value makes no sense
    │   ├── ArgumentError (TypeError)    O  an argument that is unknown, missing or of another kind
    │   └── RequestError                 O  a request to a server that cannot be answered
    ├── ParseError (ValueError)          P  IR text that cannot be read
    ├── VerifyError (ValueError)         V  a graph, kernel or plan that breaks its own rules
    ├── MissingRuleError (NotImplementedError)  R  an op without the rule that a transform needs
    ├── TraceError (TypeError)           T  a traced function that leaks values or mixes graphs
    ├── LowerError (ValueError)          L  a block or op that cannot be lowered
    ├── CompileError (RuntimeError)      C  a program that a backend refuses
    │   └── MemoryLimitError (MemoryError)  the plan does not fit the stated limit
    ├── DeviceError (RuntimeError)       E  a device that is missing or misused
    │   └── UnknownDeviceError (ValueError)  E  a name that no device has
    ├── RunError (RuntimeError)          X  a failure while a program runs (singular matrix, bad index)
    │   └── OutOfMemoryError (MemoryError)  the system has no memory for an array or a run
    ├── FileError (ValueError)           F  a file that is malformed, unsafe or of an unknown kind
    │   └── FileAccessError (OSError)    F  a file that cannot be opened, read or written
    │       ├── MissingFileError (FileNotFoundError)
    │       ├── FolderError (IsADirectoryError)
    │       └── NoPermissionError (PermissionError)
    ├── BudgetError (ValueError)         B  something that needs more nodes, bytes or time than a setting allows
    └── ConfigError (ValueError)         G  a setting that cannot be used

A message says, in this order: what is wrong with both values that disagree, and a code; the user's line; where each
operand came from; a fix, only when it is sure to work. A traceback ends with the code's page: the command that prints
it, and its address on the site, the one that `make site` writes to build/site, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from strata.places import Place, passed


class StrataError(Exception):
    """Base of all errors that strata raises; `code` names the section of docs/errors that explains it."""

    default_code: ClassVar[str] = "Z000"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        place: Place | None = None,
        operands: Sequence[str] = (),
        fix: str | None = None,
    ) -> None:
        super().__init__(message)
        self.summary = message
        self.code = code or self.default_code
        self.place = place
        self.operands = tuple(operands)
        self.fix = fix
        self.applied: tuple[Any, Any] | None = None  # the op that refused its inputs, and their types
        # the last line of a traceback, and no part of the message
        self.add_note(f"more: strata explain {self.code}, or errors/{self.code}.html on the site")

    def rename(self, operation: str, is_operation: Callable[[str], bool]) -> None:
        """Let the message name the operation that the user called, rather than the one it became."""
        named, colon, rest = self.summary.partition(": ")
        if colon and named != operation and is_operation(named):
            self.summary = f"{operation}: {rest}"
            self.args = (self.summary,)

    def __str__(self) -> str:
        lines = [f"{self.summary}   [{self.code}]"]
        place = self.place or passed(self.__traceback__)
        if place is not None:
            lines.append(f"  {place.describe()}")
        lines += [f"    {operand}" for operand in self.operands]
        if self.fix:
            lines.append(f"  try: {self.fix}")
        return "\n".join(lines)


class ShapeError(StrataError, ValueError):
    default_code = "S100"


class SymbolError(ShapeError):
    default_code = "S150"


class DTypeError(StrataError, TypeError):
    default_code = "D100"


class BufferTypeError(DTypeError, BufferError):
    """Elements that DLPack does not pass on."""


class IndexRangeError(StrataError, IndexError):
    default_code = "I100"


class UnknownNameError(StrataError, KeyError):
    default_code = "N100"


class UnknownMethodError(UnknownNameError, AttributeError):
    default_code = "N100"


class OptionError(StrataError, ValueError):
    default_code = "O100"


class ArgumentError(OptionError, TypeError):
    default_code = "O101"


class RequestError(OptionError):
    default_code = "O620"
    field: str | None = None  # of the request, that is to blame
    reason: str | None = None  # the word that the protocol has for it


class ParseError(StrataError, ValueError):
    default_code = "P100"


class VerifyError(StrataError, ValueError):
    default_code = "V100"


class MissingRuleError(StrataError, NotImplementedError):
    default_code = "R100"


class TraceError(StrataError, TypeError):
    default_code = "T100"


class LowerError(StrataError, ValueError):
    default_code = "L100"


class CompileError(StrataError, RuntimeError):
    default_code = "C100"


class MemoryLimitError(CompileError, MemoryError):
    default_code = "C200"


class DeviceError(StrataError, RuntimeError):
    default_code = "E100"


class UnknownDeviceError(DeviceError, ValueError):
    default_code = "E101"


class RunError(StrataError, RuntimeError):
    default_code = "X100"


class OutOfMemoryError(RunError, MemoryError):
    default_code = "X121"


class FileError(StrataError, ValueError):
    default_code = "F100"


class FileAccessError(FileError, OSError):
    """`errno`, `strerror` and `filename` are those of the system's error."""


class MissingFileError(FileAccessError, FileNotFoundError):
    pass


class FolderError(FileAccessError, IsADirectoryError):
    pass


class NoPermissionError(FileAccessError, PermissionError):
    pass


def file_error(
    path: object,
    error: OSError,
    *,
    code: str,
    what: str = "cannot be opened",
    who: str = "",
    place: Place | None = None,
) -> FileAccessError:
    """What the system says about a file, as the class that is also the system's; `who` begins the message."""
    kinds = (MissingFileError, FolderError, NoPermissionError)
    kind = next((k for k in kinds if isinstance(error, k.__bases__[1])), FileAccessError)
    made = kind(f"{f'{who}: ' if who else ''}{str(path)!r} {what}: {error.strerror or error}", code=code, place=place)
    made.errno, made.strerror, made.filename = error.errno, error.strerror, str(path)
    return made


class BudgetError(StrataError, ValueError):
    """`setting` is the budget's name in `Config`, `limit` its value, `needed` what would have been needed at least."""

    default_code = "B100"

    def __init__(self, message: str, *, setting: str, limit: float, needed: float, **details: Any) -> None:
        super().__init__(message, **details)
        self.setting, self.limit, self.needed = setting, limit, needed


class ConfigError(StrataError, ValueError):
    default_code = "G100"
