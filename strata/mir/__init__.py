"""The tensor graph (MIR): ops, values, graphs, their text, verifier, interpreter and derivative drivers."""

from strata.mir.batching import batch, batch_values
from strata.mir.differentiate import pullback, pullback_once, pushforward
from strata.mir.interp import as_array, evaluate, evaluate_values, infer_binding, run_node, run_op
from strata.mir.ir import (
    METHODS,
    REGISTRY,
    Constant,
    Graph,
    Input,
    Leaf,
    Literal,
    Node,
    Op,
    Origin,
    Param,
    Registry,
    UnaryOp,
    Value,
    arity,
    as_tuple,
    constant,
    describe_operand,
    fresh_scope,
    function,
    leaf_name,
    make_node,
    near,
    next_serial,
    op,
    origin,
    origin_of,
    placeholder,
    substitute_values,
    toposort,
)
from strata.mir.sample import Draw, Sample, draw
from strata.mir.text import VALUE_TYPES, Parser, parse, show, show_field, show_name, show_where
from strata.mir.verify import verify
