"""The dispatch loop: native code that runs a program step by step, the same for every program."""

from __future__ import annotations

from typing import Final

from strata.backends.llvm.executor.interrupts import STEPS_BETWEEN

STEP_WORDS: Final = 6  # of a step in a program


def dispatch_loop_text(turn: int) -> str:
    """The dispatch loop as LLVM text; at `turn` in the pool's memory is whether the last step that may turn did."""
    return f"""
; where the next step that turns does so: about where caller and workers would meet, or 0 for one in plain order. Such
; steps read more than a cache holds, and what the one before read last is still there
define internal i64 @turn(ptr %pool, i64 %threads, i64 %points, i64 %grain) nounwind {{
entry:
  %pturn = getelementptr i8, ptr %pool, i64 {turn}
  %was = load atomic i64, ptr %pturn monotonic, align 8
  %is = xor i64 %was, 1
  store atomic i64 %is, ptr %pturn monotonic, align 8
  %more = add i64 %points, %grain
  %most = sub i64 %more, 1
  %chunks = udiv i64 %most, %grain
  %several = call i64 @llvm.umax.i64(i64 %threads, i64 1)
  %share = udiv i64 %chunks, %several
  %middle = call i64 @llvm.umax.i64(i64 %share, i64 1)
  %turned = icmp ne i64 %is, 0
  %where = select i1 %turned, i64 %middle, i64 0
  ret i64 %where
}}
declare i64 @llvm.umax.i64(i64, i64)

; a program: count of steps, then per step: kernel, points, grain, arguments, first argument (a word index), whether it
; turns; an argument is (region, offset): regions[region] + offset, or the offset alone where the region is negative
define void @program_run(ptr %program, ptr %regions, ptr %pool, i64 %threads, i64 %first, i64 %last) nounwind {{
entry:
  %pmost = getelementptr i64, ptr %program, i64 1
  %most = load i64, ptr %pmost, align 8
  %block = alloca i64, i64 %most, align 64
  call void @call_for_steps(ptr %pool, i64 %threads, ptr %program, i64 %first, i64 %last)
  br label %head
head:
  %s = phi i64 [ %first, %entry ], [ %s2, %all ], [ %s2, %ask ]
  %some = icmp slt i64 %s, %last
  br i1 %some, label %look, label %end
look:
  %over = call i1 @interrupted(ptr %pool)
  br i1 %over, label %end, label %step
step:
  %before = mul i64 %s, {STEP_WORDS}
  %at = add i64 %before, 2
  %row = getelementptr i64, ptr %program, i64 %at
  %kernel = load ptr, ptr %row, align 8
  %q1 = getelementptr i64, ptr %row, i64 1
  %points = load i64, ptr %q1, align 8
  %q2 = getelementptr i64, ptr %row, i64 2
  %grain = load i64, ptr %q2, align 8
  %q3 = getelementptr i64, ptr %row, i64 3
  %count = load i64, ptr %q3, align 8
  %q4 = getelementptr i64, ptr %row, i64 4
  %start = load i64, ptr %q4, align 8
  %q5 = getelementptr i64, ptr %row, i64 5
  %turns = load i64, ptr %q5, align 8
  %list = getelementptr i64, ptr %program, i64 %start
  br label %fill
fill:
  %i = phi i64 [ 0, %step ], [ %i2, %put ]
  %fewer = icmp slt i64 %i, %count
  br i1 %fewer, label %one, label %go
one:
  %i2x = mul i64 %i, 2
  %pr = getelementptr i64, ptr %list, i64 %i2x
  %region = load i64, ptr %pr, align 8
  %po = getelementptr i64, ptr %pr, i64 1
  %offset = load i64, ptr %po, align 8
  %literal = icmp slt i64 %region, 0
  br i1 %literal, label %put, label %read
read:
  %pb = getelementptr i64, ptr %regions, i64 %region
  %base = load i64, ptr %pb, align 8
  %sum = add i64 %base, %offset
  br label %put
put:
  %value = phi i64 [ %offset, %one ], [ %sum, %read ]
  %slot = getelementptr i64, ptr %block, i64 %i
  store i64 %value, ptr %slot, align 8
  %i2 = add i64 %i, 1
  br label %fill
go:
  %turning = icmp ne i64 %turns, 0
  br i1 %turning, label %choose, label %all
choose:
  %where = call i64 @turn(ptr %pool, i64 %threads, i64 %points, i64 %grain)
  br label %all
all:
  %middle = phi i64 [ 0, %go ], [ %where, %choose ]
  call void @pool_parallel(
    ptr %pool, i64 %threads, ptr %kernel, ptr %block, i64 %points, i64 %grain, i64 %middle
  )
  %s2 = add i64 %s, 1
  %low = and i64 %s, {STEPS_BETWEEN - 1}
  %asks = icmp eq i64 %low, {STEPS_BETWEEN - 1}
  br i1 %asks, label %ask, label %head
ask:
  %ends = call i1 @poll(ptr %pool)
  br label %head
end:
  ret void
}}

; a call in one block of words: program, regions, pool, threads, first step, last step, then twice (inputs, outputs):
; a list object, the number of its items, the offset of its item pointer; then the offset of the data pointer in an
; array object; last the regions that the data pointers go to. Gives whether something was raised meanwhile
define i32 @program_enter(ptr %call) nounwind {{
entry:
  %program = load ptr, ptr %call, align 8
  %c1 = getelementptr i64, ptr %call, i64 1
  %regions = load ptr, ptr %c1, align 8
  %c2 = getelementptr i64, ptr %call, i64 2
  %pool = load ptr, ptr %c2, align 8
  %c3 = getelementptr i64, ptr %call, i64 3
  %threads = load i64, ptr %c3, align 8
  %c4 = getelementptr i64, ptr %call, i64 4
  %first = load i64, ptr %c4, align 8
  %c5 = getelementptr i64, ptr %call, i64 5
  %last = load i64, ptr %c5, align 8
  %c6 = getelementptr i64, ptr %call, i64 6
  %c9 = getelementptr i64, ptr %call, i64 9
  %c12 = getelementptr i64, ptr %call, i64 12
  %offset = load i64, ptr %c12, align 8
  %where = getelementptr i64, ptr %call, i64 13
  %rest = call ptr @place_arrays(ptr %c6, i64 %offset, ptr %where, ptr %regions)
  %none = call ptr @place_arrays(ptr %c9, i64 %offset, ptr %rest, ptr %regions)
  call void @program_run(ptr %program, ptr %regions, ptr %pool, i64 %threads, i64 %first, i64 %last)
  %gone = call i1 @interrupted(ptr %pool)
  %told = zext i1 %gone to i32
  ret i32 %told
}}

define internal ptr @place_arrays(ptr %list, i64 %offset, ptr %where, ptr %regions) nounwind {{
entry:
  %object = load ptr, ptr %list, align 8
  %l1 = getelementptr i64, ptr %list, i64 1
  %count = load i64, ptr %l1, align 8
  %l2 = getelementptr i64, ptr %list, i64 2
  %inside = load i64, ptr %l2, align 8
  %pitems = getelementptr i8, ptr %object, i64 %inside
  %items = load ptr, ptr %pitems, align 8
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %i2, %array ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %array, label %done
array:
  %pr = getelementptr i64, ptr %where, i64 %i
  %region = load i64, ptr %pr, align 8
  %po = getelementptr ptr, ptr %items, i64 %i
  %one = load ptr, ptr %po, align 8
  %field = getelementptr i8, ptr %one, i64 %offset
  %data = load i64, ptr %field, align 8
  %slot = getelementptr i64, ptr %regions, i64 %region
  store i64 %data, ptr %slot, align 8
  %i2 = add i64 %i, 1
  br label %head
done:
  %rest = getelementptr i64, ptr %where, i64 %count
  ret ptr %rest
}}
"""
