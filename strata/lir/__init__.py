"""The plan (LIR): grouping into kernels, schedule, buffers, memory; verified and printed like every other stage."""

from strata.lir.group import Cut, Group, Grouping, group_graph
from strata.lir.ir import Buffer, Io, Lir, Placement, Step
from strata.lir.memory import check_limit, memory_report, memory_svg, pack
from strata.lir.plan import plan
from strata.lir.text import show
from strata.lir.views import Spacing
