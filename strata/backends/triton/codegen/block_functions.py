"""Functions of the prelude for quantised blocks: instructions of NVIDIA's GPUs, and what they do."""

from __future__ import annotations


def block_functions(interpreted: bool) -> list[str]:
    """Texts of functions; Triton's interpreter knows no instructions."""
    return [*_nibbles(interpreted), *_fragments(interpreted)]


def _nibbles(interpreted: bool) -> list[str]:
    """Bytes that the four lowest nibbles of a word name, of sixteen in four words; the halves of a word as f16."""
    plain = """(code, t0, t1, t2, t3):
    found = tl.zeros_like(code)
    for at in tl.static_range(4):
        nibble = (code >> (4 * at)) & 15
        low = tl.where((nibble & 4) != 0, t1, t0)
        high = tl.where((nibble & 4) != 0, t3, t2)
        word = tl.where((nibble & 8) != 0, high, low).to(tl.uint32)
        found = found | (((word >> ((nibble & 3) << 3)) & 255) << (8 * at))
    return found
"""
    permuted = """(code, t0, t1, t2, t3):
    return tl.inline_asm_elementwise(
        \"\"\"{
        .reg .b32 at, low, high, half;
        and.b32 at, $1, 0x7777;
        prmt.b32 low, $2, $3, at;
        prmt.b32 high, $4, $5, at;
        and.b32 half, $1, 0x8888;
        shr.u32 half, half, 1;
        or.b32 half, half, 0x3210;
        prmt.b32 $0, low, high, half;
        }\"\"\",
        "=r,r,r,r,r,r", [code, t0, t1, t2, t3], dtype=tl.uint32, is_pure=True, pack=1,
    )
"""
    plain_halves = """(code, mask):
    found = code & mask
    low = (found & 65535).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (found >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
"""
    halves = """(code, mask):
    return tl.inline_asm_elementwise(
        \"\"\"{
        .reg .b32 both;
        .reg .b16 low, high;
        and.b32 both, $2, $3;
        mov.b32 {low, high}, both;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
        }\"\"\",
        "=r,=r,r,r", [code, mask], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
    )
"""
    return [
        f"def bytes_of_nibbles_plain{plain}",
        f"def bytes_of_nibbles{plain if interpreted else permuted}",
        f"def halves_plain{plain_halves}",
        f"def halves{plain_halves if interpreted else halves}",
    ]


def _fragments(interpreted: bool) -> list[str]:
    """Products of tiles that the lanes of a warp hold, as tensor cores want them; bytes picked of two words.

    An instruction has room for one constant: another one is in a register if the compiler cannot know it.
    """
    if not interpreted:
        texts = [
            """def picked(low, high, which):
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, which], dtype=tl.uint32, is_pure=True, pack=1
    )
""",
            """def carried(word, mask, carrier):
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [word, mask, carrier], dtype=tl.uint32, is_pure=True, pack=1
    )
""",
            """def unknown(number):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 no; mov.u32 no, %lanemask_lt; shr.u32 no, no, 31; or.b32 $0, no, $1; }", "=r,r", [number],
        dtype=tl.uint32, is_pure=True, pack=1,
    )
""",
        ]
    else:
        texts = [
            """def picked(low, high, which):
    both = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    found = low.to(tl.uint64) * 0
    for at in tl.static_range(4):
        found = found | (((both >> (8 * ((which >> (4 * at)) & 7))) & 255) << (8 * at))
    return found.to(tl.uint32)
""",
            """def carried(word, mask, carrier):
    return (word & mask) | carrier
""",
            """def unknown(number):
    return number
""",
        ]
    tables = "l0, l1, l2, l3, h0, h1, h2, h3"
    if interpreted:
        texts.append(f"""def halves_of_nibbles(code, {tables}):
    low = bytes_of_nibbles_plain(code, l0, l1, l2, l3)
    high = bytes_of_nibbles_plain(code, h0, h1, h2, h3)
    return picked(low, high, 0x6240), picked(low, high, 0x7351)
""")
    else:
        texts.append(f"""def halves_of_nibbles(code, {tables}):
    return tl.inline_asm_elementwise(
        \"\"\"{{
        .reg .b32 at, half, a, b, low, high;
        and.b32 at, $2, 0x7777;
        shr.u32 half, $2, 1;
        lop3.b32 half, half, 0x4444, 0x3210, 0xEA;
        prmt.b32 a, $3, $4, at;
        prmt.b32 b, $5, $6, at;
        prmt.b32 low, a, b, half;
        prmt.b32 a, $7, $8, at;
        prmt.b32 b, $9, $10, at;
        prmt.b32 high, a, b, half;
        prmt.b32 $0, low, high, 0x6240;
        prmt.b32 $1, low, high, 0x7351;
        }}\"\"\",
        "=r,=r,r,r,r,r,r,r,r,r,r", [code, {tables}], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
    )
""")
    texts.append("""def byte_number(word, whole, which):
    return picked(word, whole, which).to(tl.float32, bitcast=True)
""")
    names = "a0, a1, a2, a3, b0, b1, c0, c1, c2, c3"
    for kind in ("bf16", "f16"):
        if not interpreted:
            asm = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
            operands = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}"
            texts.append(f"""def mma_{kind}({names}):
    return tl.inline_asm_elementwise(
        "{asm} {operands};", "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [{names}],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )
""")
            continue
        shift = "(pair >> (16 * half))" if kind == "f16" else "((pair >> (16 * half)) << 16)"
        value = f"{shift}.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)" if kind == "f16" else (
            f"{shift}.to(tl.uint32).to(tl.float32, bitcast=True)")  # fmt: skip
        texts.append(f"""def half_{kind}(pair, half):
    return {value}
""")
        texts.append(f"""def tile_{kind}(first, b0, second, b1):
    warps: tl.constexpr = first.shape[0] // 32
    found = tl.full([warps, 8, 8], 0.0, tl.float32)
    for half in tl.static_range(2):
        a = tl.reshape(half_{kind}(first, half), [warps, 8, 1, 4])
        found = found + tl.sum(a * tl.reshape(half_{kind}(b0, half), [warps, 1, 8, 4]), axis=3)
        a = tl.reshape(half_{kind}(second, half), [warps, 8, 1, 4])
        found = found + tl.sum(a * tl.reshape(half_{kind}(b1, half), [warps, 1, 8, 4]), axis=3)
    even, odd = tl.split(tl.reshape(found, [warps, 8, 4, 2]))
    return tl.reshape(even, [warps * 32]), tl.reshape(odd, [warps * 32])
""")
        texts.append(f"""def mma_{kind}({names}):
    d0, d1 = tile_{kind}(a0, b0, a2, b1)
    d2, d3 = tile_{kind}(a1, b0, a3, b1)
    return c0 + d0, c1 + d1, c2 + d2, c3 + d3
""")
    return texts
