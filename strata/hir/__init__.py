"""Blocks (HIR): modules of linear, attention, swiglu_ffn, decoder layers, … and their lowering to the tensor graph."""

from strata.arguments import public_names
from strata.hir.blocks import MTP_INPUTS
from strata.hir.build import HirModule
from strata.hir.build import HirModule as Module
from strata.hir.ir import BLOCKS, Block, HirNode, HirValue, block
from strata.hir.lower import lower, lower_for_autodiff, wrap_mir_graph
from strata.hir.reflect import Reflection, reflect
from strata.hir.text import parse, show

public_names(globals(), of_values=True)
