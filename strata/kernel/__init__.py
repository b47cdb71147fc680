"""Kernel IR: scalar expressions over index spaces, with a builder, a verifier, text and a NumPy interpreter."""

from strata.modules import deferred

with deferred(globals()):
    from strata.kernel.access import NOT_READ, check_access, contained, is_plain, numbered_reads
    from strata.kernel.algebra import LinearIndex, interval, linear
    from strata.kernel.build import Index, KernelBuilder, View
    from strata.kernel.choose import choose_schedule
    from strata.kernel.contraction import (
        ContractionForm,
        MatrixView,
        SumOfProducts,
        axis_roles,
        find_contraction,
        matrix_view,
        sum_of_products,
    )
    from strata.kernel.inline import element, with_batch, with_names, with_sizes
    from strata.kernel.interp import identity, interpret
    from strata.kernel.ir import (
        REDUCTIONS,
        Axis,
        Buffer,
        Const,
        Expr,
        Kernel,
        Load,
        Reduce,
        Scalar,
        Scan,
        Size,
        Store,
        all_axes,
        apply,
        describe,
        postorder,
        size,
    )
    from strata.kernel.legal import check_own_schedule, check_schedule
    from strata.kernel.nans import is_below, need_no_nan
    from strata.kernel.nest import Compute, LoopBlock, MapLoop, ReduceLoop, StoreStep, make_nest
    from strata.kernel.order import (
        PRODUCTS,
        REGISTERS,
        STEPS,
        Machine,
        ProductBlocks,
        block_terms,
        groups_of,
        sum_bytes,
    )
    from strata.kernel.passes.interleave import SPREADS, combs
    from strata.kernel.passes.normalize import address, normalize, ordered
    from strata.kernel.passes.pipeline import device_form, loops_of, processor_phases
    from strata.kernel.passes.quant_rounding import QuantCode, code_of
    from strata.kernel.passes.split import Phases, SplitLimits, split_reductions, split_terms
    from strata.kernel.rewrite import as_stored, rebuild, replaced, rewritten, substitute_axes, with_nodes
    from strata.kernel.scalars import SCALARS, ScalarFunction
    from strata.kernel.schedule import (
        Delay,
        Exchange,
        MatmulTiles,
        NonTemporal,
        Parallel,
        PoolTiles,
        Prefetch,
        Schedule,
        Stage,
        Stagger,
        Template,
        Tile,
        Vectorise,
        followed_place,
        number_loops,
        parallel_chain,
        parse_schedule,
        row_values,
        template_in,
        turns,
        walk_loops,
    )
    from strata.kernel.search import Changes, SearchLimits, Trial, search
    from strata.kernel.text import StoredKernel, parse_kernel, show_kernel
    from strata.kernel.verify import verify_kernel
