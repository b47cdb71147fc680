"""The tensor graph (MIR): ops, values, graphs, their text, verifier, interpreter and derivative drivers."""

from strata.arguments import public
from strata.mir.batching import batch, batch_values
from strata.mir.deferred import BINARY, COMPARISONS, METHODS, Deferred, Operators
from strata.mir.differentiate import pullback, pullback_once, pushforward
from strata.mir.fields import require_fields
from strata.mir.functions import function, is_operation
from strata.mir.graph import Graph, Nested, fixed_values, substitute_values, toposort
from strata.mir.interp import (
    Evaluation,
    as_array,
    computed_in,
    evaluate,
    evaluate_values,
    infer_binding,
    run_node,
    run_op,
)
from strata.mir.ir import (
    Leaf,
    Node,
    Op,
    UnaryOp,
    Value,
    arity,
    as_tuple,
    describe_operand,
    field_symbols,
    make_node,
    next_serial,
    op,
)
from strata.mir.leaves import Constant, Input, Literal, Param, constant, fresh_scope, leaf_name, placeholder
from strata.mir.origin import Origin, current_origin, origin, origin_of
from strata.mir.registry import REGISTRY, Registry, near, some_of
from strata.mir.sample import Draw, Sample, draw
from strata.mir.text import FIELD_ERRORS, VALUE_TYPES, Parser, parse, show, show_field, show_name, show_where
from strata.mir.verify import verify

public(Graph)
evaluate = public(evaluate)
