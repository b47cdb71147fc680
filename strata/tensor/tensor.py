"""The lazy tensor: an expression that becomes an array when its elements are needed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from html import escape
from typing import Any, ClassVar

import numpy as np

import strata.ops  # noqa: F401 - fills METHODS
from strata.arguments import hot, own_checks, untouched
from strata.backends import HOMES, DeviceArray
from strata.config import Config, using_config
from strata.core import Dim, DType, TensorType, check_unmasked, f32, flatten, here, tree_map
from strata.errors import DeviceError, OptionError, ShapeError, SymbolError, TraceError
from strata.kinds import with_article
from strata.mir import BINARY, COMPARISONS, METHODS, REGISTRY, Operators, Value, constant, near
from strata.tensor.data import Data, Handle, LooseHandle, apart, data_apart, handle_of, handle_value
from strata.tensor.placement import HOST, device_of
from strata.tensor.plan import Plan
from strata.tensor.realize import realize_value, realize_values
from strata.tensor.residence import Residence
from strata.tensor.storage import bound_view
from strata.tensor.structure_key import is_traced


class Tensor(Residence, Operators):
    """A lazy array. Operators and methods record a graph; `numpy()` and its like compute it.

    Shapes and dtypes are checked when an operation is recorded. Expressions never change: `x[i] = v` makes the name `x`
    stand for an updated array, and what was built on `x` before keeps the value that it was built on.
    """

    __slots__ = ("__weakref__", "_handle", "_value")
    __mir_value__: ClassVar[bool] = True

    _value: Value | None
    _handle: Handle | None  # of a result whose value nobody has asked for yet

    @untouched
    def __init__(self, value: Value) -> None:
        if not isinstance(value, Value):
            raise OptionError(
                f"Tensor wraps a graph value, got {type(value).__name__}", code="O268", fix="st.tensor(data)"
            )
        if type(value.node.op) is Data:  # of another tensor, which is one of its own
            value = data_apart(value)
        elif HOMES:
            device_of(value)  # operands on two devices are an error here
        self._value, self._handle = value, None

    @classmethod
    @untouched
    def of(cls, handle: Handle) -> Tensor:
        """A tensor that is what a handle holds. It becomes a value of graphs when it is used in one."""
        made = cls.__new__(cls)
        made._value, made._handle = None, handle
        return made

    @classmethod
    @hot
    def results(cls, arrays: Iterable[np.ndarray], kinds: Iterable[TensorType]) -> list[Tensor]:
        """Tensors of arrays that nobody has seen yet."""
        return fresh_tensors(arrays, kinds)

    @property
    def value(self) -> Value:
        """The tensor's value in graphs."""
        if self._value is None:
            assert self._handle is not None
            self._value = handle_value(self._handle)
        return self._value

    @value.setter
    def value(self, value: Value) -> None:
        self._value, self._handle = value, None

    @property
    def _held(self) -> Handle | None:
        """Where its elements are, if they are kept for this tensor; those of an expression are for all equal ones."""
        if self._handle is not None:
            return self._handle
        op = self.value.node.op
        return op.handle if type(op) is Data else None

    def _hold(self, handle: Handle) -> Handle:
        """Be what the handle of the tensor's value holds; the expression can be forgotten."""
        if self._held is None:
            self.value = handle_value(apart(handle))
        held = self._held
        assert held is not None
        return held

    # ------------------------------------------------------------------------------------------------------------ type

    @property
    def type(self) -> TensorType:
        return self.value.type if self._handle is None else self._handle.type

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def size(self) -> Dim:
        return self.type.size

    @property
    def nbytes(self) -> Dim:
        return self.value.type.nbytes

    @property
    def T(self) -> Tensor:
        return Tensor(METHODS["transpose"](self.value))

    @property
    def mT(self) -> Tensor:
        """Each matrix of the last two axes transposed."""
        return Tensor(METHODS["swapaxes"](self.value, -1, -2))

    @property
    def is_realized(self) -> bool:
        return self._held is not None or handle_of(self.value) is not None

    # ---------------------------------------------------------------------------------------------------------- values

    def realize(self) -> Tensor:
        """Compute now; the tensor itself is returned."""
        realize(self)
        return self

    def realize_with(self, settings: Config) -> Tensor:
        """Compute now, under given settings; the tensor itself is returned."""
        with using_config(settings):
            realize(self)
        return self

    def prepare(self) -> Plan:
        """Compile now, run later and often: `plan.execute()`. The tensor shows what the plan computed last."""
        return Plan([self])

    def prepare_with(self, settings: Config) -> Plan:
        """The same under given settings, which hold for every run of the plan."""
        return Plan([self], settings)

    def data(self, **sizes: int) -> np.ndarray:
        """The memory of a realized tensor, for writing; of a tensor with symbolic sizes, the part that `sizes` use."""
        if not self.is_realized:
            raise OptionError(f"data: {self.type} has no memory yet", code="T222", place=here(), fix="x.realize()")
        handle = self._hold(realize_value(self.value))
        array = handle.for_writing()
        if type(array) is DeviceArray:
            raise DeviceError(
                f"data: {self.type} is on {str(array.device)!r}, where Python does not write", code="E104",
                place=here(), fix="x.to('cpu'), or x[i] = v",
            )  # fmt: skip
        if handle.type.is_static:
            return array
        return bound_view(handle.storage, handle.type, {**(handle.binding or {}), **sizes})

    def numpy(self) -> np.ndarray:
        """The elements as an array that shares the tensor's memory and cannot be written to."""
        view = self._array().view()
        view.flags.writeable = False
        return view

    def item(self) -> Any:
        """The one element as a Python number."""
        if self.size != 1:
            raise ShapeError(f"item: {self.type} has {self.size} elements, not one", code="S354", place=here())
        return self._array().reshape(()).item()

    def tolist(self) -> Any:
        return self._array().tolist()

    def _array(self) -> np.ndarray:
        handle = self._handle
        if handle is None:
            handle = self._hold(realize_value(self.value))
        if handle.binding is None and not handle.type.is_static:
            raise SymbolError(
                f"the tensor cannot be computed while its size {next(iter(handle.type.symbols()))} has no value",
                code="S353", place=here(),
            )  # fmt: skip
        if type(handle.array) is DeviceArray:
            return handle.hosted
        handle.is_own = False
        array: np.ndarray = handle.array
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __buffer__(self, flags: int) -> memoryview:
        """The buffer protocol (Python 3.12 and newer)."""
        return memoryview(self.numpy())  # type: ignore[arg-type]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """NumPy's functions compute tensors and give arrays."""
        given, named = tree_map(lambda x: x.numpy() if isinstance(x, Tensor) else x, [list(args), kwargs])
        return function(*given, **named)

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12", "2025.12"):
            raise OptionError(f"there is no Array API {api_version!r} here", code="O381", place=here())
        from strata.tensor import xp

        return xp

    def __bool__(self) -> bool:
        self._need_number("bool()", "where(condition, a, b), or cond(condition, f, g)")
        return bool(self._array().reshape(()))

    def __float__(self) -> float:
        self._need_number("float()")
        return float(self._array().reshape(()))

    def __int__(self) -> int:
        self._need_number("int()")
        return int(self._array().reshape(()))

    def __complex__(self) -> complex:
        self._need_number("complex()")
        return complex(self._array().reshape(()))

    def __index__(self) -> int:
        if not (self.dtype.is_int or self.dtype.is_bool):
            raise OptionError(f"a {self.type} tensor is not an index", code="O269", place=here())
        return int(self)

    def _need_value(self, what: str, fix: str | None = None) -> None:
        if is_traced(self.value):
            raise TraceError(
                f"{what} of a {self.type} tensor that has no value while its function is traced",
                code="T206", place=here(), fix=fix,
            )  # fmt: skip

    def _need_number(self, what: str, fix: str | None = None) -> None:
        self._need_value(what, fix)
        if self.size != 1:
            raise ShapeError(f"{what} needs one element, {self.type} has {self.size}", code="S354", place=here())

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("a rank-0 tensor has no length", code="S105", place=here())
        return self.shape[0].__index__()

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and self.size == 1 else format(str(self), spec)

    def __copy__(self) -> Tensor:
        """A tensor that is the same now; what is written to one of them is not written to the other."""
        held = self._held
        return Tensor(self.value) if held is None else Tensor.of(held.copied())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.__copy__()

    def __reduce__(self) -> Any:
        """Pickles hold the elements, not the expression."""
        self._need_value("pickle")
        self._array()
        held = self._hold(realize_value(self.value))
        return _restored, (held.hosted, held.type, held.binding)

    def __repr__(self) -> str:
        if self.is_realized:
            text = np.array2string(self._array(), separator=", ", prefix="Tensor(", threshold=100, edgeitems=3)
            where = "" if self.device == HOST else f", {str(self.device)!r}"
            return f"Tensor({text}, {self.type}{where})"
        if is_traced(self.value):
            return f"Tensor({self.type}, traced)"
        return f"Tensor({self.type}, {self.value.node.op.name} not computed yet)"

    def _repr_html_(self) -> str:
        """For notebooks: the type, and the elements of what is computed."""
        head = f"<code>{self.type}</code>"
        if not self.is_realized or not self.type.is_static:
            return f"{head} <i>{'traced' if is_traced(self.value) else 'not computed yet'}</i>"
        array = self._array()
        if array.ndim != 2 or array.shape[0] > 30 or array.shape[1] > 20:
            text = np.array2string(array, separator=", ", threshold=100, edgeitems=3)
            return f"{head}<pre>{escape(text)}</pre>"
        form = "{:.5g}" if array.dtype.kind == "f" else "{}"
        cells = ["".join(f"<td>{form.format(v)}</td>" for v in row) for row in array]
        return f"{head}<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"

    # ------------------------------------------------------------------------------------------------------ operations

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in METHODS:
            raise AttributeError(f"a tensor has no method {name!r}{near(name, METHODS)}")
        method = wrapped(name)
        return lambda *args, **kwargs: method(self, *args, **kwargs)

    def __getitem__(self, index: Any) -> Tensor:
        if _is_flag(index):  # selects all of the array or nothing, along a new axis
            return Tensor(METHODS["getitem"](METHODS["expand_dims"](self.value, 0), np.array([bool(index)])))
        return Tensor(METHODS["getitem"](self.value, unwrap(_concrete_masks(index))))

    def __setitem__(self, index: Any, value: Any) -> None:
        """From here on this tensor is the updated array; what was built on it before is not affected."""
        if _is_flag(index):
            if bool(index):
                self.assign(value)
            return
        made = METHODS["setitem"](self.value, unwrap(_concrete_masks(index)), unwrap(operand(value)))
        self.value = Tensor(made).value

    def assign(self, value: Any) -> Tensor:
        """Make this tensor stand for `value`, of the same type, from now on."""
        made = METHODS["broadcast_to"](METHODS["cast"](_as_value(unwrap(operand(value))), self.dtype), self.shape)
        self.value = Tensor(made).value
        return self

    def _call(self, function: str, *args: Any) -> Any:
        return call(function, *args)

    def __eq__(self, other: object) -> Any:
        """Element by element, as in NumPy."""
        return call("equal", self, other) if is_operand(other) else NotImplemented

    def __ne__(self, other: object) -> Any:
        return call("not_equal", self, other) if is_operand(other) else NotImplemented

    def __hash__(self) -> int:
        return id(self)

    def __pos__(self) -> Tensor:
        return self.__copy__()


def _restored(array: np.ndarray, kind: TensorType, binding: Mapping[str, int] | None) -> Tensor:
    """A tensor out of a pickle."""
    return Tensor.of(Handle(array, kind, binding))


def fresh_tensors(arrays: Iterable[Any], kinds: Iterable[TensorType]) -> list[Tensor]:
    """What `Tensor.results` gives: in every call of a jitted function, so all in one loop."""
    new: Any = object.__new__
    made = []
    for array, kind in zip(arrays, kinds, strict=True):
        handle, tensor = new(Handle), new(Tensor)
        handle._array, handle.type, handle.binding, handle.is_own = array, kind, None, True
        handle.is_open = handle.is_shared = False
        tensor._value, tensor._handle = None, handle
        made.append(tensor)
    return made


def realize(*trees: Any) -> Any:
    """Compute tensors (any pytrees of them) together, in place. Returns its arguments."""
    leaves = flatten(list(trees))[0]
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if leaves and not tensors:
        raise OptionError(f"realize: {with_article(type(leaves[0]))} is not a tensor", code="T208", place=here())
    realize_tensors(tensors)
    return trees[0] if len(trees) == 1 else trees


def realize_tensors(tensors: Sequence[Tensor]) -> list[Handle]:
    """Compute tensors together: each has its array from here on, in its own handle."""
    return [t._hold(h) for t, h in zip(tensors, realize_values([t.value for t in tensors]), strict=True)]


def _as_value(x: Any) -> Value:
    return x if isinstance(x, Value) else constant(x)


def realize_with(settings: Config, *trees: Any) -> Any:
    """Compute tensors together under given settings, as `realize` does."""
    with using_config(settings):
        return realize(*trees)


@own_checks()
def prepare(*tensors: Tensor) -> Plan:
    """One plan for several tensors: what they share is computed once."""
    return Plan(_only_tensors("prepare", tensors))


@own_checks("tensors")
def prepare_with(settings: Config, *tensors: Tensor) -> Plan:
    """One plan for several tensors under given settings, which hold for every run of it."""
    return Plan(_only_tensors("prepare_with", tensors), settings)


def _only_tensors(what: str, tensors: Sequence[Any]) -> Sequence[Tensor]:
    for t in tensors:
        if not isinstance(t, Tensor):
            raise OptionError(f"{what}: {with_article(type(t))} is not a tensor", code="T208", place=here())
    return tensors


def is_operand(x: object) -> bool:
    """Whether operators take it: a tensor, a value, a number or something that NumPy reads."""
    return isinstance(x, (Tensor, Value, bool, int, float, complex, np.ndarray, np.generic, list, tuple))


PLAIN = {n: REGISTRY[n]() for n in ("add", "subtract", "multiply")}  # nothing to convert between equal types


def _operator(dunder: str, method: str) -> None:
    plain = PLAIN.get(method)

    def forward(self: Tensor, other: Any) -> Any:
        if plain is not None and type(other) is Tensor and self.value.dtype is other.value.dtype is f32:
            return Tensor(plain(self.value, other.value))
        return call(method, self, operand(other)) if is_operand(other) else NotImplemented

    def reflected(self: Tensor, other: Any) -> Any:
        return call(method, operand(other), self) if is_operand(other) else NotImplemented

    setattr(Tensor, f"__{dunder}__", forward)
    if dunder in BINARY:
        setattr(Tensor, f"__r{dunder}__", reflected)


for _dunder, _method in (BINARY | COMPARISONS).items():
    _operator(_dunder, _method)


# ------------------------------------------------------------------------------------------- between tensors and values

LARGE = 64  # arrays with more elements become data, which is not compared


def operand(x: Any) -> Any:
    """A large array as data rather than as a constant of the graph; like one, it is what the array is now."""
    if not isinstance(x, np.ndarray) or x.size <= LARGE:
        return x
    check_unmasked(x)
    return Tensor.of(LooseHandle(np.array(x)))


def unwrap(x: Any) -> Any:
    """Tensors as graph values, also inside lists, tuples, generators, dicts and slices."""
    match x:
        case Tensor():
            return x.value
        case list() | tuple() if any(isinstance(v, (Tensor, list, tuple, slice)) for v in x):
            items = [unwrap(v) for v in x]
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        case dict():
            return {k: unwrap(v) for k, v in x.items()}
        case Generator():
            return [unwrap(v) for v in x]
        case slice():
            return slice(*(int(v) if isinstance(v, Tensor) else v for v in (x.start, x.stop, x.step)))
    return x


def wrap(x: Any) -> Any:
    """Graph values as tensors, also inside lists, tuples and dicts."""
    match x:
        case Value():
            return Tensor(x)
        case list() | tuple():
            items = [wrap(v) for v in x]
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        case dict():
            return {k: wrap(v) for k, v in x.items()}
    return x


def lifted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of graph values as a function of tensors."""

    @wraps(fn)
    def apply(*args: Any, **kwargs: Any) -> Any:
        return wrap(fn(*(unwrap(a) for a in args), **{k: unwrap(v) for k, v in kwargs.items()}))

    return apply


def lowered(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors as a function of graph values, pytrees included."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        given = tree_map(lambda v: Tensor(v) if isinstance(v, Value) else v, list(args))
        return tree_map(lambda t: t.value if isinstance(t, Tensor) else t, fn(*given, **kwargs))

    return apply


@cache
def wrapped(name: str) -> Callable[..., Any]:
    """The front-end function of that name on tensors."""
    return lifted(METHODS[name])


def call(name: str, *args: Any) -> Any:
    return wrap(METHODS[name](*(unwrap(a) for a in args)))


def _is_flag(index: Any) -> bool:
    """Whether an index is a single truth value with a known value."""
    return isinstance(index, Tensor) and index.dtype.is_bool and not index.ndim and not is_traced(index.value)


def _concrete_masks(index: Any) -> Any:
    """Boolean masks with their values: the shape of what they select depends on them."""
    if isinstance(index, tuple):
        return tuple(_concrete_masks(i) for i in index)
    if isinstance(index, Tensor) and index.dtype.is_bool and index.ndim and not is_traced(index.value):
        return index.numpy()
    return index
