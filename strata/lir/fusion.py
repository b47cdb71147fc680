"""Fusion: which values of a graph are stored, and which are computed inside the kernels that read them.

Every stored value is the root of a kernel, which pulls in its producers until it reaches other stored values:
- results of the graph, operands and results of host ops, operands of contractions that are more than a view are stored;
- a value that several kernels need is stored, unless computing it again is as cheap as loading it;
- a reduction is computed inside its reader only once per row: where its axes are not the leading axes of the reader's
  index space, it is stored; so is anything costly that its reader would repeat along a broadcast axis;
- a contraction takes the element-wise ops after it as its epilogue, and a kernel has at most one contraction; where
  the two halves of its columns meet element by element, as in a gated layer, only what they become is stored;
- a stored value and a reader over the same index space share one kernel when nothing has to happen in between.
Decisions that cut an edge are kept with their reason, for `explain`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.kernel import Kernel
from strata.lir.fused import MAX_DEPTH, MOST_OPS, FusionGroup, KernelOf, Recipes, beyond_limits, typical
from strata.lir.merge import Cut, Merger
from strata.lir.order import Costs, best_order
from strata.lir.siblings import join_siblings
from strata.lir.traits import (
    STEP,
    Traits,
    has_kernel,
    is_generated,
    is_inline_constant,
    is_leaf,
    learned_numbers,
    traits,
)
from strata.lir.views import VIEWS, has_runs, keeps_runs, turns, view_strides
from strata.mir import Constant, Graph, Input, Node, Param, Value, fixed_values

if TYPE_CHECKING:
    from strata.passes import FusionLimits

CHEAP = 6  # cost of scalar functions below which computing again beats a store and a load
_MANY_TIMES = 16  # that an element is read, so that reading it costs nothing
MANY = 1 << 14  # elements of a reduction's result from which computing them in another order costs more than a copy


@dataclass
class Grouping:
    groups: list[FusionGroup]
    cuts: list[Cut]
    fixed: frozenset[Value] = frozenset()


def group_graph(
    graph: Graph,
    whole: Callable[[Node], bool] | None = None,
    views: Callable[[Node], bool] | None = None,
    *,
    limits: FusionLimits | None = None,
    again: int = CHEAP,
) -> Grouping:
    """Split a graph into kernels and steps of one op, in an order in which they can run.

    `whole` says of a node that has a lowering whether it is better as a separate step; `views`, of a separate step,
    whether it reads evenly spaced elements in place. `limits` bound the ops and inputs of each kernel. A value whose
    scalar functions cost no more than `again` is computed again rather than stored and loaded.
    """
    return _Grouper(graph, whole, views, limits, again).run()


class _Grouper:
    def __init__(
        self,
        graph: Graph,
        whole: Callable[[Node], bool] | None,
        views: Callable[[Node], bool] | None,
        limits: FusionLimits | None,
        again: int,
    ) -> None:
        self.graph, self.limits, self.again = graph, limits, again
        self.most_ops = MOST_OPS if limits is None else min(MOST_OPS, limits.max_steps)
        self.fuse = self.most_ops > 1
        self.order = graph.nodes()
        self.reads_views = {id(n) for n in self.order if views is not None and views(n)}
        self.known: dict[int, Traits] = {}  # by node
        self.recipes = Recipes(self._is_shared)
        self.whole = {id(n) for n in self.order if whole is not None and has_kernel(n.op) and whole(n)}
        self.users: dict[Value, list[Node]] = defaultdict(list)
        for node in self.order:
            for x in node.inputs:
                self.users[x].append(node)
        self.results = set(graph.results)
        self.stored: set[Value] = learned_numbers(self.users)
        self.sizes: dict[Value, int] = {}  # ops of the kernel of each stored value
        self.cuts: list[Cut] = []
        self.fixed = fixed_values(self.order)  # computed once
        self.matrix_reader: dict[Value, Node] = {}  # of views: the contraction that reads through them
        self.begins: dict[
            Value, set[Value | None]
        ] = {}  # and what readers see them as views of; None: a leaf, or an op's
        self.position = {id(node): i for i, node in enumerate(self.order)}
        self.sliding: set[Value] = set()  # values that the epilogue of a convolution may compute
        for node in self.order:
            ends = [x for x in node.inputs if x in self.sliding and _stays_in_place(node, x)]
            ends = [] if self._is_widened_for_readers(node) else ends
            if ends or (node.inputs and self._traits(node).slides):
                self.sliding.update(node.outputs)
        self.halves: set[int] = set()  # slices: the two halves of a matmul, where they meet element by element
        self.products = self._find_products()

    def _traits(self, node: Node) -> Traits:
        found = self.known.get(id(node))
        if found is None:
            found = self.known[id(node)] = STEP if id(node) in self.whole else traits(node)
        return found

    def run(self) -> Grouping:
        self._choose_stored()
        groups: dict[Value, FusionGroup] = {}
        pending = [n for n in self.order if not is_leaf(n) and any(v in self.stored for v in n.outputs)]
        while pending:
            node = pending.pop()
            group, wrong = self._build([v for v in node.outputs if v in self.stored], node)
            if wrong:
                for value, reason in wrong.items():
                    self._store(value, reason)
                    pending.append(value.node)
                pending.append(node)
                continue
            for root in group.roots:
                groups[root] = group
        distinct = list(dict.fromkeys(groups.values()))
        if self.fuse:
            merger = Merger(self.stored, self.fixed, self.position, self._traits, self.recipes, self.limits)
            distinct, self.cuts = merger.run(groups, self.cuts, self.results)
        for group in distinct:
            group.build()
        return Grouping(self._schedule(distinct), self.cuts, frozenset(self.fixed))

    # which values are stored

    def _store(self, value: Value, reason: str, consumer: Node | None = None) -> None:
        if value not in self.stored:
            self.stored.add(value)
            if consumer is None and self.users[value]:
                consumer = self.users[value][0]
            self.cuts.append(Cut(value.node, consumer, reason))

    def _choose_stored(self) -> None:
        """One walk from the results backwards. `roots` are the stored values whose kernels need a value."""
        roots: dict[Value, set[Value]] = {}
        contraction_of: dict[Value, Node] = {}
        depth: dict[Value, int] = {}
        for node in reversed(self.order):
            if isinstance(node.op, (Input, Param, Constant)):
                continue
            what = self._traits(node)
            for value in node.outputs:
                reason = self._reason_to_store(node, value, what, roots, contraction_of, depth)
                if reason is not None:
                    self._store(value, reason)
                    self.matrix_reader.pop(value, None)  # it is read in place, not through what it is a view of
                if value in self.stored:
                    roots[value], depth[value] = {value}, 0
                    self.sizes[value] = 1
                else:
                    roots[value] = set().union(*(roots[v] for u in self.users[value] for v in u.outputs if v in roots))
                    depth[value] = 1 + max(
                        (depth[v] for u in self.users[value] for v in u.outputs if v in depth), default=0
                    )
                    for root in roots[value]:
                        self.sizes[root] += 1
                if what.contracts:
                    for root in roots[value]:
                        contraction_of[root] = node

    def _reason_to_store(
        self,
        node: Node,
        value: Value,
        what: Traits,
        roots: dict[Value, set[Value]],
        contraction_of: dict[Value, Node],
        depth: dict[Value, int],
    ) -> str | None:
        """Why a value goes through memory: for its own sake, for a reader's, or for the kernels that would hold it."""
        users = self.users[value]
        if value in self.results:
            return "it is a result of the graph"
        if not users:
            return None if len(node.types) > 1 else "nothing reads it"
        if not what.lowers:
            return "it is a separate step"
        if not self.fuse:
            return "fusion is switched off"
        if value in self.fixed and not what.moves and self._is_read_each_run(value):
            return "it depends on parameters only: computed once, when they are set"
        if len(node.types) > 1:
            return "its op has several outputs"
        if what.updates:
            return "it is changed in place"
        for user in users:
            reason = self._reason_of_reader(user, node, value, what)
            if reason is not None:
                return reason
        several = len(set(map(id, users))) > 1
        joined = node.op.name == "concat" or (what.moves and several and self._is_put_together(value, summed=False))
        if joined and several and self._cost(node) > 0:
            return "several ops read what is put together from computed parts"
        needed = {r for u in users for v in u.outputs if v in roots for r in roots[v]}
        if len(needed) > 1 and not (what.moves or (self._cost(node) <= self.again and self._loads(node) <= 1)):
            return f"{len(needed)} kernels need it"
        if what.contracts and any(r in contraction_of for r in needed):
            return "its reader has a contraction already"
        if what.scans and len(users) > 1:
            return "a scan is computed once"
        if max((depth[v] for u in users for v in u.outputs if v in depth), default=0) >= MAX_DEPTH:
            return f"the kernel would be more than {MAX_DEPTH} ops deep"
        if any(self.sizes[r] >= self.most_ops for r in needed):
            why = "" if self.most_ops == MOST_OPS else ", the most that the fusion limits allow"
            return f"the kernel has {self.most_ops} ops already{why}"
        return None

    def _reason_of_reader(self, user: Node, node: Node, value: Value, what: Traits) -> str | None:
        """Why a reader of a value needs it in memory."""
        reading = self._traits(user)
        if not reading.lowers and id(user) not in self.reads_views:
            return f"{user.op.called} is a separate step"
        if reading.updates and user.inputs[0] == value:
            return f"{user.op.name} changes it in place"
        if (reading.reduces or reading.scans) and is_generated(value):
            return f"{user.op.name} sums it up in the order in which it lies"
        in_place = reading.contracts or id(user) in self.reads_views
        matrix = user if in_place else self.matrix_reader.get(user.outputs[0]) if reading.moves else None
        if matrix is not None:
            reason = self._reason_of_matrix(matrix, user, value, what)
            if reason is not None:
                return reason
            self.matrix_reader[value] = matrix
            if not reading.lowers:
                return None
        is_sum = value in self.products or value in self.sliding
        if is_sum and matrix is None and not self._is_epilogue(user, value):
            return f"{user.op.name} cannot be an epilogue of {self.products.get(value, node).op.name}"
        across = matrix is None and turns(user)
        summed = across and self._is_summed(user)
        across = across and ((what.reduces and not what.contracts) or self._is_put_together(value, summed=summed))
        if across and (summed or typical(value.type.size) >= MANY):
            return f"{user.op.name} reads it across its rows"
        again = not reading.reduces and not reading.updates and self._repeats(value, user)
        again = again and not (user.op.name == "concat" and len(self.users[value]) == 1 and self._is_only_moved(user))
        if again and self._cost(node) > CHEAP and not what.reduces:
            return f"{user.op.name} would compute it again for each element it is broadcast to"
        return None

    def _reason_of_matrix(self, matrix: Node, user: Node, value: Value, what: Traits) -> str | None:
        """Why a value cannot be a view that a matmul or a convolution reads in place, through `user`."""
        if not what.moves:
            return f"{matrix.op.name} reads it as a matrix"
        reading = self._traits(user)
        strict = not reading.lowers or id(user) in self.reads_views
        if matrix is not user:
            begins = self.begins[user.outputs[0]]
        else:
            begins = {None if strict or reading.slides else self._first_spaced(value)}
        for begin in begins:
            spacing = None if begin == value else view_strides(value, begin)
            if spacing is None:
                return f"{matrix.op.name} cannot read it in place: its elements are not evenly spaced"
            if matrix is user and strict and spacing.strides and spacing.strides[-1] != 1:
                return f"{matrix.op.name} cannot read it in place: its rows are not contiguous"
        if reading.slides and user.inputs[0] == value and not has_runs(value):
            return f"{matrix.op.name} reads runs along its last axis"
        if reading.slides and len({self._base(x) for x in user.inputs[:2]}) < len(user.inputs[:2]):
            return f"{matrix.op.name} reads images and weights from separate buffers"
        self.begins.setdefault(value, set()).update(begins)
        return None

    def _first_spaced(self, value: Value) -> Value:
        """The first of a chain of movements that a matmul can read a value in place from. That is stored, not what it
        is turned to afterwards: so the same elements lie side by side where a size of 1 makes a view of the chain."""
        chain = [value]
        while chain[-1].node.op.name in VIEWS and chain[-1] not in self.stored:
            chain.append(chain[-1].node.inputs[0])
        return next(x for x in reversed(chain) if x == value or view_strides(value, x) is not None)

    def _is_read_each_run(self, value: Value) -> bool:
        """Whether a value that depends on parameters only has a reader that does not, movements of it left out."""
        stack = [value]
        while stack:
            for user in self.users[stack.pop()]:
                if any(v not in self.fixed for v in user.outputs):
                    return True
                stack += user.outputs if self._traits(user).moves else ()
        return False

    def _is_shared(self, value: Value) -> bool:
        """Whether a sum of a value is not all that its elements are for, each of them once. If it is all, they are
        computed inside the sum, whatever their number."""
        while value not in self.results and len(self.users[value]) == 1:
            if is_leaf(value.node) or not self._traits(value.node).moves:
                return False
            if value.node.op.name == "broadcast_to":
                break
            value = value.node.inputs[0]
        return True

    def _is_put_together(self, value: Value, *, summed: bool) -> bool:
        """Whether the rows of a value come from several places, or are spaced unevenly: they cannot be turned there.
        Sums follow what they read, and where a size is 1, rows that are merged with it are spaced evenly: what is
        summed is put together by concat alone, which no size decides."""
        stack, seen = [value], 0
        while stack and seen < 32:
            x = stack.pop()
            seen += 1
            moves = not is_leaf(x.node) and self._traits(x.node).moves
            if x.node.op.name == "concat" or (moves and not summed and view_strides(x) is None):
                return True
            if moves or x.node.op.elementwise:
                stack += [y for y in x.node.inputs if y.type.size == x.type.size or moves]
        return False

    def _is_summed(self, node: Node) -> bool:
        """Whether floats are summed up after a node before they are stored. The order of the sum follows from what it
        reads, so that no size may decide whether that is stored."""
        stack, seen = [node], 0
        while stack and seen < 32:
            value, seen = Value(stack.pop(), 0), seen + 1
            readers = self.users[value] if value not in self.stored and value.dtype.is_inexact else []
            if any(what.reduces or what.scans or what.contracts for what in map(self._traits, readers)):
                return True
            stack += readers
        return False

    def _is_only_moved(self, node: Node) -> bool:
        """Whether nothing is summed up after a node before it is stored: loops over it can be cut into parts."""
        for _ in range(8):
            (value,) = node.outputs
            if value in self.stored:
                return True
            users = self.users[value]
            if len(users) != 1 or not (users[0].op.elementwise or self._traits(users[0]).moves):
                return False
            node = users[0]
        return False

    def _repeats(self, value: Value, user: Node) -> bool:
        """Whether a reader computes the value again; a trailing broadcast does not count, as rows keep scalars."""
        out = user.types[0]
        if typical(out.size) <= typical(value.type.size):
            return False
        if not (user.op.elementwise or user.op.name == "broadcast_to"):
            return True
        padded = (1,) * (out.ndim - value.ndim) + value.shape
        spread = [i for i, (a, b) in enumerate(zip(padded, out.shape, strict=True)) if a != b]
        return any(padded[i] != 1 for i in range(spread[0], out.ndim)) if spread else False

    def _cost(self, node: Node) -> int:
        """Scalar cost of one element, producers that would be inlined included, as far as it matters."""
        total, stack, seen = 0, [node], 0
        while stack and total <= self.again and seen < 32:
            current = stack.pop()
            seen += 1
            if isinstance(current.op, (Input, Param, Constant)):
                continue
            what = self._traits(current)
            total += what.cost + (100 if what.reduces or what.scans or not what.lowers else 0)
            stack += [x.node for x in current.inputs if x not in self.stored and not self._stores_product(x, current)
                      and not self._is_read_often(x, node)]  # fmt: skip
        return total

    def _is_read_often(self, x: Value, node: Node) -> bool:
        """Whether x is a number of a whole row, or of more: where arithmetic is nearly free, it is what is stored."""
        return self.again > CHEAP and _MANY_TIMES * typical(x.type.size) <= typical(node.types[0].size)

    def _stores_product(self, x: Value, reader: Node) -> bool:
        """Whether x is a matmul that the reader cannot be an epilogue of: it is stored, or will be."""
        behind = self._traits(x.node).contracts or (self.again > CHEAP and x in self.products)
        return behind and not self._is_epilogue(reader, x)

    def _find_products(self) -> dict[Value, Node]:
        """Contractions, and what is computed from them element by element: the contraction of each such value.

        What also reads the result of a step that is after the contraction is computed after it, and is none of these.
        """
        found: dict[Value, Node] = {}
        numbers: dict[int, int] = {}  # of contractions, a bit each
        behind: dict[int, int] = {}  # by node: the contractions that it is computed from
        whole: dict[int, int] = {}  # and those that are whole before it is computed
        for node in self.order:
            made, what = Value(node, 0), self._traits(node)
            all_of = after = 0
            for x in node.inputs:
                all_of |= behind.get(id(x.node), 0)
                after |= whole.get(id(x.node), 0)
            if what.contracts:
                numbers[id(node)] = 1 << len(numbers)
                found[made], after = node, all_of
                all_of |= numbers[id(node)]
            elif not what.lowers:
                after = all_of
            elif len(node.types) == 1:
                ends = (found[x] for x in node.inputs if x in found and self._is_epilogue(node, x, found))
                product = next((p for p in ends if not after & numbers[id(p)]), None)
                if product is not None:
                    found[made] = product
            if all_of:
                behind[id(node)], whole[id(node)] = all_of, after
            if made in found and found[made].op.name == "matmul" and found[made].inputs[1].ndim == 2:
                self.halves |= {id(n) for n in self._meeting_halves(made)}
        return found

    def _meeting_halves(self, x: Value) -> list[Node]:
        """The two slices that are all that reads x, if they are the halves of its last axis and meet again."""
        halves = self.users[x]
        width = x.shape[-1] if x.ndim else 1
        if len(halves) != 2 or x in self.results or not isinstance(width, int) or width % 2:
            return []
        starts = []
        for node in halves:
            if node.op.name != "slice" or node.types[0].shape != (*x.shape[:-1], width // 2):
                return []
            if any(s != 1 for s in node.op.step):  # type: ignore[attr-defined]
                return []
            starts.append(node.op.start[-1])  # type: ignore[attr-defined]
        if sorted(starts) != [0, width // 2]:
            return []
        first, second = (self._element_by_element(node) for node in halves)
        return halves if first & second else []

    def _element_by_element(self, node: Node) -> set[int]:
        """The nodes after a value that read it, one after the other, element by element and alone."""
        found: set[int] = set()
        value = Value(node, 0)
        while len(self.users[value]) == 1 and value not in self.results and len(found) < MAX_DEPTH:
            (user,) = self.users[value]
            if not user.op.elementwise or user.types[0].shape != value.shape:
                break
            found.add(id(user))
            value = Value(user, 0)
        return found

    def _is_epilogue(self, reader: Node, x: Value, products: Mapping[Value, Node] | None = None) -> bool:
        out = reader.types[0]
        if self._is_widened_for_readers(reader):
            return False
        if reader.op.elementwise:
            return out.shape == x.shape and out.dtype.is_complex == x.dtype.is_complex
        if id(reader) in self.halves or (x in self.sliding and _stays_in_place(reader, x)):
            return True
        if not self._traits(reader).moves or out.size != x.type.size or x in self.sliding:
            return False
        return keeps_runs(Value(reader, 0), self.products if products is None else products)

    def _is_widened_for_readers(self, node: Node) -> bool:
        """Whether a node does no more than make floats wider, for readers that will load them: those can do it, too."""
        if self.again <= CHEAP or node.op.name != "cast" or node.types[0].dtype.bits <= node.inputs[0].dtype.bits:
            return False
        (value,) = node.outputs
        users: list[Node] = []
        stack = [value]
        while stack and len(users) < MAX_DEPTH:
            if (x := stack.pop()) in self.results:
                return False
            for user in self.users[x]:
                if user.op.name == "reshape":
                    stack += user.outputs
                else:
                    users.append(user)
        alone = len(users) == 1 and users[0].op.elementwise and users[0].types[0].size == value.type.size
        return not alone and all(u.op.elementwise or self._traits(u).reduces for u in users)

    def _loads(self, node: Node) -> int:
        """What is read for one element; where arithmetic is nearly free, numbers of a whole row are not counted."""
        return len({x for x in node.inputs if not is_inline_constant(x.node) and not self._is_read_often(x, node)})

    # one kernel

    def _build(self, roots: list[Value], node: Node) -> tuple[FusionGroup, dict[Value, str]]:
        """The kernel of some roots, or the values that must be stored for it to be sound."""
        group = FusionGroup(list(roots))
        if not self._traits(node).lowers:
            group.nodes = [node]
            group.kernel = self._own_kernel(node)
            if group.kernel is not None:
                group.is_closed = True
                group.reads, group.roots = list(node.inputs), list(node.outputs)
                self.stored.update(node.outputs)
                return group, {}
            group.sources = [self._base(x) if id(node) in self.reads_views else x for x in node.inputs]
            group.reads = list(dict.fromkeys(group.sources))
            group.roots = list(node.outputs)
            self.stored.update(node.outputs)
            return group, {}
        group.maker = builder = KernelOf(self.stored, group, self.recipes)
        if self._traits(node).updates:
            builder.add_update(roots[0])
        else:
            builder.add(roots)
        return group, builder.problems() or beyond_limits(group, self.limits)

    def _own_kernel(self, node: Node) -> Kernel | None:
        return None if id(node) in self.whole else node.op.own_kernel(*(x.type for x in node.inputs))

    def _base(self, x: Value) -> Value:
        """The stored value or leaf that a view starts from."""
        while x not in self.stored and x.node.inputs:
            x = x.node.inputs[0]
        return x

    # the order of kernels

    def _needs(self, groups: list[FusionGroup], maker: dict[Value, FusionGroup]) -> dict[int, list[Value]]:
        """What must be there before each group: what it reads, and for an update all other readers of the old value.

        A reader that itself waits for the update cannot come first; the update copies then.
        """
        needs = {id(g): list(g.read_values if g.updates else g.reads) for g in groups}
        readers: dict[Value, list[FusionGroup]] = defaultdict(list)
        for g in groups:
            for x in g.reads:
                readers[x].append(g)

        def waits(group: FusionGroup, end: FusionGroup) -> bool:
            stack, seen = [group], {id(group)}
            while stack:
                for before in (maker[x] for x in needs[id(stack.pop())] if x in maker):
                    if before is end:
                        return True
                    if id(before) not in seen:
                        seen.add(id(before))
                        stack.append(before)
            return False

        for g in groups:
            for other in (other for x in g.updates.values() for other in readers[x] if other is not g):
                if not waits(other, g):
                    needs[id(g)] += other.roots
        return needs

    def _schedule(self, groups: list[FusionGroup]) -> list[FusionGroup]:
        """Groups in an order where every read is written before; ties keep the order of the graph."""
        maker = {root: g for g in groups for root in g.roots}
        needs = self._needs(groups, maker)
        done: set[int] = set()
        order: list[FusionGroup] = []
        for start in sorted(groups, key=lambda g: max(self.position[id(r.node)] for r in g.roots)):
            stack = [start]
            while stack:
                group = stack[-1]
                if id(group) in done:
                    stack.pop()
                    continue
                waiting = [
                    maker[x]
                    for x in needs[id(group)]
                    if x in maker and id(maker[x]) not in done and maker[x] is not group
                ]
                if waiting:
                    stack += waiting
                else:
                    done.add(id(group))
                    order.append(group)
                    stack.pop()
        costs = Costs(frozenset(self.results | self.fixed))
        best = best_order(order, lambda group: needs[id(group)], costs)
        return join_siblings(best, self.stored, self.fixed, self.recipes, self.limits) if self.fuse else best


def _stays_in_place(node: Node, x: Value) -> bool:
    """Whether a node computes from x element by element, or only adds and drops axes of size 1."""
    out = node.types[0].shape
    if node.op.elementwise:
        return x.shape == out
    return node.op.name == "reshape" and [d for d in x.shape if d != 1] == [d for d in out if d != 1]
