"""The native code of a fast call: checks arrays, finds free result memory, runs the program, returns a tuple.

Its first argument is a tuple that owns all it needs, whose first item is an array of words, the block:

    regions, program, pool, threads, steps    what a program is run with
    status                                    where it tells what went wrong, or 0 where nothing can
    busy, hits                                whether somebody is inside, and how often it came to an end
    inputs, outputs                           how many
    dict, ndarray, list, tuple, None          objects of Python, then functions of it
    for each input                            name, dtype, axes, where its address goes, where its sizes are, its bytes
    for each output                           dtype, axes, where its address goes, where its sizes are, its flags, its
                                              bytes, then for each kept result the object and the address of its data

Its second argument is a dict of arrays, or a list; or a tuple of either and a list of arrays that results go into.
"""

from __future__ import annotations

from typing import Final

from strata.backends.llvm.executor import python_objects as objects
from strata.backends.llvm.executor.arena import DATA_FIELD

FUNCTIONS: Final = (
    "PyDict_GetItem", "PyDict_Size", "Py_IncRef", "Py_DecRef", "PyEval_SaveThread", "PyEval_RestoreThread",
    "PyTuple_New", "PyTuple_SetItem",
)  # fmt: skip
FIELDS: Final = (
    "regions", "program", "pool", "threads", "steps", "status", "busy", "hits", "inputs", "outputs", "dict", "ndarray",
    "list", "tuple", "none", *FUNCTIONS,
)  # fmt: skip  # words of a block
HITS: Final = FIELDS.index("hits")
USABLE: Final = 0x101  # flags of an array whose elements lie one after the other, each at a multiple of its size
WRITABLE: Final = USABLE | 0x400
MOST_ARRAYS: Final = 16  # inputs, and outputs
TURNS: Final = 2  # results that are kept of each kind: callers often drop the last one when they have the next
INPUT_WORDS: Final = 6
KEPT_AT: Final = 6  # words of an output before those of kept results
OUTPUT_WORDS: Final = KEPT_AT + 2 * TURNS


def fast_call_text() -> str:
    """It as LLVM text, to stand beside `program_run`."""
    numbers = {name.upper(): 8 * i for i, name in enumerate(FIELDS)} | {
        "ITEMS": objects.TUPLE_ITEMS, "DATA": DATA_FIELD, "NDIM": objects.NDIM, "DIMS": objects.DIMS,
        "DTYPE": objects.DTYPE, "FLAGS": objects.FLAGS, "WATCHERS": objects.WATCHERS, "COUNT": objects.COUNT,
        "LISTED": objects.LIST_ITEMS, "USABLE": USABLE, "WRITABLE": WRITABLE, "BYTES": 40, "MOST": MOST_ARRAYS,
        "SECOND": objects.TUPLE_ITEMS + objects.WORD, "RECORDS": 8 * len(FIELDS), "INSIZE": 8 * INPUT_WORDS,
        "OUTSIZE": 8 * OUTPUT_WORDS, "KEPT": 8 * KEPT_AT,
    }  # fmt: skip
    text = _TEXT
    for name, value in numbers.items():
        text = text.replace(f"<{name}>", str(value))
    return text


_TEXT: Final = """
define internal ptr @field(ptr %object, i64 %at) alwaysinline nounwind {
  %p = getelementptr i8, ptr %object, i64 %at
  %v = load ptr, ptr %p, align 8
  ret ptr %v
}
define internal i64 @number(ptr %object, i64 %at) alwaysinline nounwind {
  %p = getelementptr i8, ptr %object, i64 %at
  %v = load i64, ptr %p, align 8
  ret i64 %v
}
define internal i64 @half(ptr %object, i64 %at) alwaysinline nounwind {
  %p = getelementptr i8, ptr %object, i64 %at
  %v = load i32, ptr %p, align 4
  %w = sext i32 %v to i64
  ret i64 %w
}
; whether an array object has a dtype, a number of axes and sizes
define internal i1 @fits(ptr %array, ptr %dtype, i64 %axes, ptr %sizes) nounwind {
entry:
  %d = call ptr @field(ptr %array, i64 <DTYPE>)
  %n = call i64 @half(ptr %array, i64 <NDIM>)
  %same = icmp eq ptr %d, %dtype
  %many = icmp eq i64 %n, %axes
  %both = and i1 %same, %many
  br i1 %both, label %start, label %no
start:
  %dims = call ptr @field(ptr %array, i64 <DIMS>)
  br label %head
head:
  %i = phi i64 [ 0, %start ], [ %i2, %next ]
  %more = icmp slt i64 %i, %axes
  br i1 %more, label %look, label %yes
look:
  %pa = getelementptr i64, ptr %dims, i64 %i
  %a = load i64, ptr %pa, align 8
  %pb = getelementptr i64, ptr %sizes, i64 %i
  %b = load i64, ptr %pb, align 8
  %equal = icmp eq i64 %a, %b
  br i1 %equal, label %next, label %no
next:
  %i2 = add i64 %i, 1
  br label %head
yes:
  ret i1 true
no:
  ret i1 false
}
; a kept result that nobody refers to any more, as it was when it was made; its place in the record, or 0
define internal i64 @free_result(ptr %record) nounwind {
entry:
  %dtype = call ptr @field(ptr %record, i64 0)
  %axes = call i64 @number(ptr %record, i64 8)
  %sizes = call ptr @field(ptr %record, i64 24)
  %flags = call i64 @number(ptr %record, i64 32)
  br label %head
head:
  %at = phi i64 [ <KEPT>, %entry ], [ %at2, %next ]
  %more = icmp slt i64 %at, <OUTSIZE>
  br i1 %more, label %look, label %none
look:
  %object = call ptr @field(ptr %record, i64 %at)
  %there = icmp ne ptr %object, null
  br i1 %there, label %count, label %next
count:
  %refs = call i64 @half(ptr %object, i64 0)
  %alone = icmp eq i64 %refs, 1
  br i1 %alone, label %same, label %next
same:
  %d = add i64 %at, 8
  %was = call ptr @field(ptr %record, i64 %d)
  %data = call ptr @field(ptr %object, i64 <DATA>)
  %a = icmp eq ptr %was, %data
  %now = call i64 @half(ptr %object, i64 <FLAGS>)
  %b = icmp eq i64 %now, %flags
  %watched = call ptr @field(ptr %object, i64 <WATCHERS>)
  %c = icmp eq ptr %watched, null
  %ab = and i1 %a, %b
  %abc = and i1 %ab, %c
  br i1 %abc, label %shape, label %next
shape:
  %fit = call i1 @fits(ptr %object, ptr %dtype, i64 %axes, ptr %sizes)
  br i1 %fit, label %found, label %next
next:
  %at2 = add i64 %at, 16
  br label %head
found:
  ret i64 %at
none:
  ret i64 0
}
; whether memory lies outside of that of arrays, whose bytes are in records
define internal i1 @apart(ptr %data, i64 %bytes, ptr %arrays, i64 %count, ptr %records, i64 %step) nounwind {
entry:
  %begin = ptrtoint ptr %data to i64
  %end = add i64 %begin, %bytes
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %i2, %look ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %yes
look:
  %p = getelementptr ptr, ptr %arrays, i64 %i
  %array = load ptr, ptr %p, align 8
  %other = call ptr @field(ptr %array, i64 <DATA>)
  %moved = mul i64 %i, %step
  %record = getelementptr i8, ptr %records, i64 %moved
  %length = call i64 @number(ptr %record, i64 <BYTES>)
  %from = ptrtoint ptr %other to i64
  %to = add i64 %from, %length
  %i2 = add i64 %i, 1
  %before = icmp sle i64 %end, %from
  %behind = icmp sle i64 %to, %begin
  %clear = or i1 %before, %behind
  br i1 %clear, label %head, label %no
yes:
  ret i1 true
no:
  ret i1 false
}
define ptr @quick_call(ptr %self, ptr %argument) nounwind {
entry:
  %held = alloca ptr, i64 <MOST>, align 8
  %made = alloca ptr, i64 <MOST>, align 8
  %block = call ptr @field(ptr %self, i64 <ITEMS>)
  %w = call ptr @field(ptr %block, i64 <DATA>)
  %pbusy = getelementptr i8, ptr %w, i64 <BUSY>
  %busy = load i64, ptr %pbusy, align 8
  %inputs = call i64 @number(ptr %w, i64 <INPUTS>)
  %outputs = call i64 @number(ptr %w, i64 <OUTPUTS>)
  %dict = call ptr @field(ptr %w, i64 <DICT>)
  %list = call ptr @field(ptr %w, i64 <LIST>)
  %ndarray = call ptr @field(ptr %w, i64 <NDARRAY>)
  %find = call ptr @field(ptr %w, i64 <PYDICT_GETITEM>)
  %hold = call ptr @field(ptr %w, i64 <PY_INCREF>)
  %drop = call ptr @field(ptr %w, i64 <PY_DECREF>)
  %records = getelementptr i8, ptr %w, i64 <RECORDS>
  %inbytes = mul i64 %inputs, <INSIZE>
  %results = getelementptr i8, ptr %records, i64 %inbytes
  %tuple_type = call ptr @field(ptr %w, i64 <TUPLE>)
  %idle = icmp eq i64 %busy, 0
  br i1 %idle, label %whole, label %long
whole:
  %argument_type = call ptr @field(ptr %argument, i64 8)
  %is_pair = icmp eq ptr %argument_type, %tuple_type
  br i1 %is_pair, label %pair, label %kind
pair:
  %pair_size = call i64 @number(ptr %argument, i64 <COUNT>)
  %is_two = icmp eq i64 %pair_size, 2
  br i1 %is_two, label %halves, label %long
halves:
  %feeds = call ptr @field(ptr %argument, i64 <ITEMS>)
  %second = call ptr @field(ptr %argument, i64 <SECOND>)
  %second_type = call ptr @field(ptr %second, i64 8)
  %is_list = icmp eq ptr %second_type, %list
  br i1 %is_list, label %kind, label %long
kind:
  %given = phi ptr [ %argument, %whole ], [ %feeds, %halves ]
  %into = phi ptr [ null, %whole ], [ %second, %halves ]
  %type = call ptr @field(ptr %given, i64 8)
  %named = icmp eq ptr %type, %dict
  br i1 %named, label %size_named, label %kind2
kind2:
  %listed = icmp eq ptr %type, %list
  br i1 %listed, label %size_listed, label %long
size_named:
  %measure = call ptr @field(ptr %w, i64 <PYDICT_SIZE>)
  %size1 = call i64 %measure(ptr %given)
  br label %size
size_listed:
  %size2 = call i64 @number(ptr %given, i64 <COUNT>)
  br label %size
size:
  %given_size = phi i64 [ %size1, %size_named ], [ %size2, %size_listed ]
  %enough = icmp eq i64 %given_size, %inputs
  br i1 %enough, label %arrays, label %long

arrays:
  %i = phi i64 [ 0, %size ], [ %i2, %take ]
  %some = icmp slt i64 %i, %inputs
  br i1 %some, label %one, label %look_at
one:
  br i1 %named, label %by_name, label %by_place
by_name:
  %moved = mul i64 %i, <INSIZE>
  %named_record = getelementptr i8, ptr %records, i64 %moved
  %name = call ptr @field(ptr %named_record, i64 0)
  %found = call ptr %find(ptr %given, ptr %name)
  br label %value
by_place:
  %items = call ptr @field(ptr %given, i64 <LISTED>)
  %pitem = getelementptr ptr, ptr %items, i64 %i
  %item = load ptr, ptr %pitem, align 8
  br label %value
value:
  %array = phi ptr [ %found, %by_name ], [ %item, %by_place ]
  %is = icmp ne ptr %array, null
  br i1 %is, label %take, label %undo
take:
  call void %hold(ptr %array)
  %pheld = getelementptr ptr, ptr %held, i64 %i
  store ptr %array, ptr %pheld, align 8
  %i2 = add i64 %i, 1
  br label %arrays

; from here on nobody else can come in between: nothing that is called runs code of others
look_at:
  %again = load i64, ptr %pbusy, align 8
  %still = icmp eq i64 %again, 0
  br i1 %still, label %checks, label %undo
checks:
  %k = phi i64 [ 0, %look_at ], [ %k2, %placed ]
  %known = icmp slt i64 %k, %inputs
  br i1 %known, label %check, label %places
check:
  %kmoved = mul i64 %k, <INSIZE>
  %record = getelementptr i8, ptr %records, i64 %kmoved
  %pk = getelementptr ptr, ptr %held, i64 %k
  %input = load ptr, ptr %pk, align 8
  %class = call ptr @field(ptr %input, i64 8)
  %plain = icmp eq ptr %class, %ndarray
  br i1 %plain, label %laid, label %undo
laid:
  %flags = call i64 @half(ptr %input, i64 <FLAGS>)
  %usable = and i64 %flags, <USABLE>
  %good = icmp eq i64 %usable, <USABLE>
  br i1 %good, label %typed, label %undo
typed:
  %dtype = call ptr @field(ptr %record, i64 8)
  %axes = call i64 @number(ptr %record, i64 16)
  %sizes = call ptr @field(ptr %record, i64 32)
  %fit = call i1 @fits(ptr %input, ptr %dtype, i64 %axes, ptr %sizes)
  br i1 %fit, label %placed, label %undo
placed:
  %place = call ptr @field(ptr %record, i64 24)
  %data = call ptr @field(ptr %input, i64 <DATA>)
  store ptr %data, ptr %place, align 8
  %k2 = add i64 %k, 1
  br label %checks

places:
  %theirs = icmp ne ptr %into, null
  br i1 %theirs, label %count_theirs, label %results_of
count_theirs:
  %theirs_size = call i64 @number(ptr %into, i64 <COUNT>)
  %all_there = icmp eq i64 %theirs_size, %outputs
  br i1 %all_there, label %results_of, label %undo
results_of:
  %j = phi i64 [ 0, %places ], [ 0, %count_theirs ], [ %j2, %chosen ]
  %rmoved = mul i64 %j, <OUTSIZE>
  %result = getelementptr i8, ptr %results, i64 %rmoved
  %left = icmp slt i64 %j, %outputs
  br i1 %left, label %result_of, label %gather
result_of:
  br i1 %theirs, label %their, label %kept
kept:
  %at = call i64 @free_result(ptr %result)
  %have = icmp ne i64 %at, 0
  %kept_object = call ptr @field(ptr %result, i64 %at)
  br i1 %have, label %chosen, label %unmake
their:
  %their_items = call ptr @field(ptr %into, i64 <LISTED>)
  %ptheir = getelementptr ptr, ptr %their_items, i64 %j
  %their_object = load ptr, ptr %ptheir, align 8
  %their_class = call ptr @field(ptr %their_object, i64 8)
  %their_plain = icmp eq ptr %their_class, %ndarray
  br i1 %their_plain, label %their_flags, label %unmake
their_flags:
  %their_bits = call i64 @half(ptr %their_object, i64 <FLAGS>)
  %their_laid = and i64 %their_bits, <WRITABLE>
  %their_good = icmp eq i64 %their_laid, <WRITABLE>
  br i1 %their_good, label %their_type, label %unmake
their_type:
  %their_dtype = call ptr @field(ptr %result, i64 0)
  %their_axes = call i64 @number(ptr %result, i64 8)
  %their_sizes = call ptr @field(ptr %result, i64 24)
  %their_fit = call i1 @fits(ptr %their_object, ptr %their_dtype, i64 %their_axes, ptr %their_sizes)
  br i1 %their_fit, label %their_place, label %unmake
their_place:
  %their_data = call ptr @field(ptr %their_object, i64 <DATA>)
  %their_bytes = call i64 @number(ptr %result, i64 <BYTES>)
  %off_inputs = call i1 @apart(ptr %their_data, i64 %their_bytes, ptr %held, i64 %inputs, ptr %records, i64 <INSIZE>)
  %off_others = call i1 @apart(ptr %their_data, i64 %their_bytes, ptr %made, i64 %j, ptr %results, i64 <OUTSIZE>)
  %off_all = and i1 %off_inputs, %off_others
  br i1 %off_all, label %chosen, label %unmake
chosen:
  %object = phi ptr [ %kept_object, %kept ], [ %their_object, %their_place ]
  call void %hold(ptr %object)
  %pmade = getelementptr ptr, ptr %made, i64 %j
  store ptr %object, ptr %pmade, align 8
  %rplace = call ptr @field(ptr %result, i64 16)
  %rdata = call ptr @field(ptr %object, i64 <DATA>)
  store ptr %rdata, ptr %rplace, align 8
  %j2 = add i64 %j, 1
  br label %results_of

gather:
  store i64 1, ptr %pbusy, align 8
  %new = call ptr @field(ptr %w, i64 <PYTUPLE_NEW>)
  %put = call ptr @field(ptr %w, i64 <PYTUPLE_SETITEM>)
  %tuple = call ptr %new(i64 %outputs)
  %ready = icmp ne ptr %tuple, null
  br i1 %ready, label %fill, label %no_memory
fill:
  %t = phi i64 [ 0, %gather ], [ %t2, %fill_one ]
  %unfilled = icmp slt i64 %t, %outputs
  br i1 %unfilled, label %fill_one, label %run
fill_one:
  %pt = getelementptr ptr, ptr %made, i64 %t
  %mine = load ptr, ptr %pt, align 8
  %ok = call i32 %put(ptr %tuple, i64 %t, ptr %mine)
  %t2 = add i64 %t, 1
  br label %fill
run:
  %phits = getelementptr i8, ptr %w, i64 <HITS>
  %hits = load i64, ptr %phits, align 8
  %hits2 = add i64 %hits, 1
  store i64 %hits2, ptr %phits, align 8
  %program = call ptr @field(ptr %w, i64 <PROGRAM>)
  %regions = call ptr @field(ptr %w, i64 <REGIONS>)
  %pool = call ptr @field(ptr %w, i64 <POOL>)
  %threads = call i64 @number(ptr %w, i64 <THREADS>)
  %steps = call i64 @number(ptr %w, i64 <STEPS>)
  %save = call ptr @field(ptr %w, i64 <PYEVAL_SAVETHREAD>)
  %restore = call ptr @field(ptr %w, i64 <PYEVAL_RESTORETHREAD>)
  %state = call ptr %save()
  call void @program_run(ptr %program, ptr %regions, ptr %pool, i64 %threads, i64 0, i64 %steps)
  call void %restore(ptr %state)
  store i64 0, ptr %pbusy, align 8
  %gone = call i1 @interrupted(ptr %pool)
  br i1 %gone, label %raise, label %whether
raise:
  %pmarked = call ptr @field(ptr %w, i64 <STATUS>)
  %marked = icmp ne ptr %pmarked, null
  br i1 %marked, label %unmark, label %end
unmark:
  store i64 0, ptr %pmarked, align 8
  br label %end
end:
  call void %drop(ptr %tuple)
  call void @let_go(ptr %held, i64 %inputs, ptr %drop)
  call void @raise_kept(ptr %pool)
  ret ptr null
whether:
  %pstatus = call ptr @field(ptr %w, i64 <STATUS>)
  %told = icmp ne ptr %pstatus, null
  br i1 %told, label %look, label %done
look:
  %status = load i64, ptr %pstatus, align 8
  %wrong = icmp ne i64 %status, 0
  br i1 %wrong, label %refuse, label %done
refuse:
  store i64 0, ptr %pstatus, align 8
  call void %drop(ptr %tuple)
  br label %undo
done:
  call void @let_go(ptr %held, i64 %inputs, ptr %drop)
  ret ptr %tuple

no_memory:
  store i64 0, ptr %pbusy, align 8
  call void @let_go(ptr %made, i64 %outputs, ptr %drop)
  call void @let_go(ptr %held, i64 %inputs, ptr %drop)
  ret ptr null
unmake:
  call void @let_go(ptr %made, i64 %j, ptr %drop)
  br label %undo
undo:
  %taken = phi i64 [ %i, %value ], [ %inputs, %look_at ], [ %inputs, %check ], [ %inputs, %laid ], [ %inputs, %typed ],
                   [ %inputs, %count_theirs ], [ %inputs, %unmake ], [ %inputs, %refuse ]
  call void @let_go(ptr %held, i64 %taken, ptr %drop)
  br label %long
long:
  %none = call ptr @field(ptr %w, i64 <NONE>)
  call void %hold(ptr %none)
  ret ptr %none
}
define internal void @let_go(ptr %objects, i64 %count, ptr %drop) nounwind {
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %i2, %one ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %one, label %out
one:
  %p = getelementptr ptr, ptr %objects, i64 %i
  %object = load ptr, ptr %p, align 8
  call void %drop(ptr %object)
  %i2 = add i64 %i, 1
  br label %head
out:
  ret void
}
"""
