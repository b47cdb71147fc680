"""The plan (LIR): grouping into kernels, schedule, buffers, memory; verified and printed like every other stage."""

from strata.modules import deferred

with deferred(globals()):
    from strata.lir.donation import may_take_over
    from strata.lir.fusion import Cut, FusionGroup, Grouping, group_graph
    from strata.lir.ir import ALIGNMENT, KEPT, PLANNERS, Io, Lir, LirBuffer, MemoryPlanOptions, Placement, Step
    from strata.lir.manifest import Binding, BindingManifest, manifest
    from strata.lir.memory import ArenaBlock, SizeClasses, byte_size, check_limit, memory_report, memory_svg, pack
    from strata.lir.plan import plan
    from strata.lir.sizes import (
        RuleCheck,
        SizeCheck,
        Spread,
        check_sizes,
        node_text,
        read_checks,
        size_checks,
        write_checks,
    )
    from strata.lir.stages import PlanStage, plan_stages, stages_of
    from strata.lir.text import parse_module, show, show_module
    from strata.lir.traits import Traits, has_kernel, traits
    from strata.lir.verify import unproven_views, verify_plan
    from strata.lir.views import Spacing, view_strides
