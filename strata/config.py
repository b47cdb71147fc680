"""Settings: one frozen `Config`, the only place in strata that reads the environment.

`config()` is the current one: the process's, made from the environment on first use, or the one of the innermost
`using(...)` block. A field with `{"key": True}` changes generated code and is part of every cache key.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from strata.arguments import own_checks, public_names, untouched
from strata.errors import ConfigError, StrataError, UnknownNameError

logger = logging.getLogger("strata")
logger.addHandler(logging.NullHandler())  # silent unless the application, or STRATA_LOG, says otherwise

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_DEVICE = re.compile(r"[a-z][a-z0-9_]*(:[a-z0-9_]+)?")
_KEY = {"key": True}  # marks a field that changes generated code


def _default_cache_dir(environ: Mapping[str, str]) -> Path:
    """`strata` in the XDG cache directory; a relative XDG_CACHE_HOME counts as unset, as its specification says."""
    xdg = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg) / "strata"
    try:
        return Path.home() / ".cache" / "strata"
    except RuntimeError:  # a container whose user has neither HOME nor a passwd entry
        return _own_temporary_dir()


def api_key() -> str | None:
    """The API key that the environment has for a server, `STRATA_API_KEY`."""
    return os.environ.get("STRATA_API_KEY") or None


def default_cache_dir() -> Path:
    """Where compiled code is kept if nobody says where."""
    return _default_cache_dir(os.environ)


@functools.cache
def _own_temporary_dir() -> Path:
    """A folder of this user among the temporary files, where others may make folders of any name: a new one if the
    expected one is not private, since machine code from there would be run."""
    if not hasattr(os, "getuid"):
        return Path(tempfile.gettempdir()) / "strata-user"
    path = Path(tempfile.gettempdir()) / f"strata-{os.getuid()}"
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return path
    try:
        return Path(tempfile.mkdtemp(prefix="strata-"))
    except OSError:
        return path / "none"  # nothing can be written: the store is off


@own_checks()
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a process. Immutable: a change is a new value, from `using(...)` or `dataclasses.replace`."""

    cache_dir: Path = field(default_factory=lambda: _default_cache_dir({}))
    """Where compiled code is kept between runs. It is not used where another user owns it or could write to it."""
    cache_limit: int = 4 << 30
    """Bytes that the disk cache may hold before the least recently used entries go."""
    num_threads: int | None = None
    """Worker threads; None follows the affinity mask and the container's CPU quota. Never changes a result."""
    device: str = "cpu"
    """Where programs run that do not say: a backend's name, and `:index` for one of several devices, or `:avx2` and the
    like for code that needs no more than that instruction set."""
    log_level: str | None = None
    """Level of the "strata" logger; None leaves logging as the application set it up."""
    verify: bool = True
    """Check every graph, kernel and plan after each step that makes one."""
    deterministic: bool = field(default=True, metadata=_KEY)
    """Bit-equal results for any number of threads and any batch size."""
    check_indices: bool = field(default=False, metadata=_KEY)
    """Emit a range check at each gathered or scattered index."""
    memory_planner: str = field(default="arena", metadata=_KEY)
    """How scratch buffers share memory where a compile does not say: arena, remap or off."""
    tune: str = field(default="heuristic", metadata=_KEY)
    """How schedules are chosen where a compile does not say, for lazy tensors, too: heuristic, or beam."""
    beam_width: int = 4
    """Schedules whose changes a beam search tries next."""
    beam_seconds: float = 4.0
    """Seconds that a beam search may take for one kernel; then the best so far is kept."""
    beam_max_ops: int = 3000
    """Ops of a kernel beyond which it keeps the heuristic's schedule."""
    beam_log: bool = False
    """Log every kernel that is searched for, with its times, at the level info."""
    lazy_cache: bool = True
    """Keep the programs of lazy tensors by structure; False makes each anew, with the same bits."""
    lazy_cache_limit: int = 4096
    """Programs of lazy tensors that are kept."""
    concurrent: bool = True
    """Run parts of a lazy plan that do not depend on each other at the same time, where there are threads for it."""
    attention_mask_threshold: float = field(default=0.5, metadata=_KEY)
    """Keys are kept where a float mask of flags is at least this."""
    attention_score_skip: float = field(default=0.0, metadata=_KEY)
    """Weights of attention below this are 0: their values are not looked at. It is then taken apart; 0 skips none."""
    winograd: bool = field(default=True, metadata=_KEY)
    """Winograd convolution where that is faster; False multiplies every tap with every pixel."""
    max_nodes: int = 1 << 18
    """Nodes that an ONNX model may become, with every call of a function and every step of a loop that is written
    out."""
    max_depth: int = 32
    """Subgraphs and functions inside each other in a file or text."""
    max_folded_bytes: int = 128 << 20
    """Bytes of constants that are computed while an ONNX model is read, beyond four times those that it holds."""
    max_tensor_bytes: int = 8 << 30
    """Bytes of one tensor that an ONNX model computes; those that it holds do not count."""
    max_growth: int = 1 << 14
    """Elements of one tensor that an ONNX model computes for each one that it holds and is given; 16 million are always
    allowed."""
    max_unpacked_bytes: int = 192 << 20
    """Bytes that compressed data may become, beyond four times those that they have."""
    max_terms: int = 4096
    """Terms of a symbolic size that is multiplied out, and factors of one of them."""
    max_steps: int = 1 << 20
    """Steps of one loop that runs while an ONNX model is read, or of all loops of a template."""
    max_template_bytes: int = 64 << 20
    """Bytes of texts and lists that filling in a chat template may make, all steps together."""
    max_template_seconds: float = 3.0
    """Seconds of a core that filling in a chat template may take."""
    max_tokenizer_seconds: float = 4.0
    """Seconds that the regular expressions of a tokenizer may take for a text, and for each million characters."""
    max_seconds: float = 120.0
    """Seconds that reading an ONNX model may take; compiling and running do not count."""
    code_settings: tuple[Any, ...] = field(init=False, repr=False, compare=False, default=())
    """The values of all settings that change generated code: part of the key of a program in memory."""

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        object.__setattr__(self, "code_settings", tuple(value for _, value in self._marked()))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """The defaults overlaid with the STRATA_* variables; each one taken is logged. An empty variable is unset."""
        environ = os.environ if environ is None else environ
        changes: dict[str, Any] = {"cache_dir": _default_cache_dir(environ)}
        for variable in sorted(v for v in environ if v.startswith("STRATA_") and environ[v]):
            if variable in SECRETS:
                continue
            if variable not in _VARIABLES:
                logger.warning("%s is not a setting and has no effect%s", variable, _suggest(variable, _VARIABLES))
                continue
            name, read = _VARIABLES[variable]
            value = environ[variable]
            try:
                changes[name] = _CHECKS[name](name, read(value))
            except (StrataError, ValueError, RuntimeError) as error:
                reason = error.summary if isinstance(error, StrataError) else f"{name} cannot be {value!r}"
                raise ConfigError(f"{variable}={value!r}: {reason}", code="G101") from None
            logger.info("%s from the environment: %s=%s", name, variable, value)
        return cls(**changes)

    def key_fields(self) -> str:
        """The settings that change generated code, as text for a cache key."""
        return ", ".join(f"{name}={value!r}" for name, value in self._marked())

    def _marked(self) -> list[tuple[str, Any]]:
        return sorted((f.name, getattr(self, f.name)) for f in fields(self) if f.metadata.get("key"))


def _check_path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name} is a path, got {value!r}", code="G102")
    path = Path(os.fspath(value)).expanduser()
    if os.path.exists(path) and not os.path.isdir(path):  # False, not an error, for folders that may not be looked into
        raise ConfigError(f"{name} is a directory, and {str(path)!r} is not one", code="G102")
    return path


def _check_count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is a whole number of at least 1, got {value!r}", code="G102")
    return value


def _check_optional_count(name: str, value: object) -> int | None:
    return None if value is None else _check_count(name, value)


def _check_seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name} is a number of seconds above 0, got {value!r}", code="G102")
    return float(value)


def _check_device(name: str, value: object) -> str:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise ConfigError(
            f"{name} is a backend's name such as 'cpu', 'cpu:avx2' or 'cuda:0', got {value!r}", code="G102"
        )
    return value


def _check_level(name: str, value: object) -> str | None:
    level = value.lower() if isinstance(value, str) else value
    if level is not None and (not isinstance(level, str) or level not in LOG_LEVELS):
        raise ConfigError(f"{name} is one of {', '.join(LOG_LEVELS)}, got {value!r}", code="G102")
    return level


def _check_number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name} is a number from {low} to {high}, got {value!r}", code="G102")
    return float(value)


def _check_one_of(name: str, value: object, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{name} is one of {', '.join(known)}, got {value!r}", code="G102")
    return value


def _check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is True or False, got {value!r}", code="G102")
    return value


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "cache_dir": _check_path,
    "cache_limit": _check_count,
    "num_threads": _check_optional_count,
    "device": _check_device,
    "log_level": _check_level,
    "verify": _check_flag,
    "deterministic": _check_flag,
    "check_indices": _check_flag,
    "winograd": _check_flag,
    "attention_mask_threshold": lambda name, value: _check_number(name, value, -math.inf, math.inf),
    "attention_score_skip": lambda name, value: _check_number(name, value, 0.0, 1.0),
    "memory_planner": lambda name, value: _check_one_of(name, value, ("arena", "remap", "off")),
    "tune": lambda name, value: _check_one_of(name, value, ("heuristic", "beam")),
    "beam_width": _check_count,
    "beam_seconds": _check_seconds,
    "beam_max_ops": _check_count,
    "beam_log": _check_flag,
    "lazy_cache": _check_flag,
    "lazy_cache_limit": _check_count,
    "concurrent": _check_flag,
    "max_nodes": _check_count,
    "max_depth": _check_count,
    "max_folded_bytes": _check_count,
    "max_tensor_bytes": _check_count,
    "max_growth": _check_count,
    "max_unpacked_bytes": _check_count,
    "max_terms": _check_count,
    "max_steps": _check_count,
    "max_template_bytes": _check_count,
    "max_template_seconds": _check_seconds,
    "max_tokenizer_seconds": _check_seconds,
    "max_seconds": _check_seconds,
}


def _read_int(text: str) -> int | str:
    return int(text) if re.fullmatch(r"\s*\d+\s*", text, re.ASCII) else text  # the check then names what it was given


def _read_number(text: str) -> float | str:
    return float(text) if re.fullmatch(r"\s*\d+(\.\d*)?\s*", text, re.ASCII) else text


# variable -> field, and how its text is read before the field's own check
_VARIABLES: dict[str, tuple[str, Callable[[str], object]]] = {
    "STRATA_CACHE_DIR": ("cache_dir", str),
    "STRATA_NUM_THREADS": ("num_threads", _read_int),
    "STRATA_DEVICE": ("device", str),
    "STRATA_LOG": ("log_level", str),
    "STRATA_MAX_NODES": ("max_nodes", _read_int),
    "STRATA_MAX_DEPTH": ("max_depth", _read_int),
    "STRATA_MAX_FOLDED_BYTES": ("max_folded_bytes", _read_int),
    "STRATA_MAX_TENSOR_BYTES": ("max_tensor_bytes", _read_int),
    "STRATA_MAX_GROWTH": ("max_growth", _read_int),
    "STRATA_MAX_UNPACKED_BYTES": ("max_unpacked_bytes", _read_int),
    "STRATA_MAX_TERMS": ("max_terms", _read_int),
    "STRATA_MAX_STEPS": ("max_steps", _read_int),
    "STRATA_MAX_TEMPLATE_BYTES": ("max_template_bytes", _read_int),
    "STRATA_MAX_TEMPLATE_SECONDS": ("max_template_seconds", _read_number),
    "STRATA_MAX_TOKENIZER_SECONDS": ("max_tokenizer_seconds", _read_number),
    "STRATA_MAX_SECONDS": ("max_seconds", _read_number),
}

SECRETS = ("STRATA_API_KEY",)  # no settings: they are in no record of them, and are read where they are used

_current: ContextVar[Config | None] = ContextVar("strata_config", default=None)


@untouched
def config() -> Config:
    """The current settings."""
    return _current.get() or _process_config()


@contextlib.contextmanager
def using_config(settings: Config | None) -> Iterator[None]:
    """Given settings for the block, all of them; None leaves those that hold."""
    if settings is None:
        yield
        return
    token = _current.set(settings)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def using(**changes: object) -> Iterator[Config]:
    """Settings for the block: `with using(num_threads=1): ...`.

    They hold for this thread or task and what it awaits, not for threads started inside. `log_level` is the exception:
    a logger's level belongs to the process, so it is set on entry and put back on exit.
    """
    known = {f.name for f in fields(Config) if f.init}
    for name in changes:
        if name not in known:
            raise UnknownNameError(f"{name!r} is not a setting{_suggest(name, known)}", code="N110")
    settings = replace(config(), **changes)  # type: ignore[arg-type]  # Config checks each value itself
    level = logger.level
    token = _current.set(settings)
    if "log_level" in changes and settings.log_level is not None:
        logger.setLevel(settings.log_level.upper())
    try:
        yield settings
    finally:
        _current.reset(token)
        if "log_level" in changes:
            logger.setLevel(level)


class Settled:
    """Settings that were made before, for the block: what `using` does, for calls that come often."""

    __slots__ = ("_settings", "_token")

    def __init__(self, settings: Config) -> None:
        self._settings = settings

    def __enter__(self) -> None:
        self._token = _current.set(self._settings)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


@functools.cache
def _process_config() -> Config:
    """Made once. STRATA_LOG also asks for output, so it adds a handler; logging set up by the application stays."""
    level = os.environ.get("STRATA_LOG", "").upper()
    if level.lower() in LOG_LEVELS:  # before reading the rest, so that the overlay itself is logged
        logger.setLevel(level)
        if not logging.getLogger().handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
            logger.addHandler(handler)
    return Config.from_environment()


def child_environment(variable: str, folders: Sequence[str]) -> dict[str, str]:
    """The environment for a program that is started, with folders in front of those that a variable lists."""
    rest = os.environ.get(variable)
    return {**os.environ, variable: os.pathsep.join([*folders, *([rest] if rest else [])])}


def _suggest(name: str, known: Mapping[str, object] | set[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


public_names(globals())
