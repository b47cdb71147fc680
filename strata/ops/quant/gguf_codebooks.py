"""Codebooks of GGUF's smallest quantised blocks: rows of 4 or 8 small whole numbers, named by their place.

A row is a number whose digits, the first one least, name its values. The rows of a book are in ascending order, and
kept as the distances between them, compressed.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np


@dataclass(frozen=True)
class Codebook:
    """`rows` rows of `width` values each."""

    values: tuple[int, ...]
    rows: int
    width: int
    distances: str


BOOKS: Final = {
    "iq2_xxs": Codebook(
        (8, 25, 43), 256, 8,
        "c-rMpL2AQ540OdJgb*f(Wm(L!7_$Upf-$BCQ+((lgyKU9Ig}jpk{t7ZzNK&Jd%D{`qdJVl%!rXH_$>re5KW#?2+-6~1T-~(TvW*@rPmhNgGM"
        "c0DSqeu!l&#bmAr?d#1qe16g#wCeFW6dnB#Z=bUT8XCOBuV?t{H~neNYj!AK^Ds0K2gJaI%xJICuKlV%<aFKrG*Na&mKbOyie2gY_?-%)++m"
        "zc~4jE`?X8-mE|Tlqp$+c~TI%XQ25kFI~2EnmM5pPh@_ji%~f*HiTadc+t6",
    ),
    "iq2_xs": Codebook(
        (8, 25, 43), 512, 8,
        "c-rld!D_=W42Fv^LI`7w5GD*$f+?Yl5K1XIj2?REX^fr6PCM<mXW1i9PM0q0D{KPW!m@sS{#URFcRg|19q>=_a)oG1E-3@LKzh>zj+ZZ(GGK"
        "6!n{OG1CgO!Gm5eIbJHC;?sd$wT55aPg&3xs+qshwX)6ROL*W`xt{Y+YWq;42nEseEA7&Es%9&I`&4G+HYorB-(Gu>jci)5t$<JAwNiGUt^r"
        "i4R%LR467((}TgT&;n_dS7WsSO|BxZ4>!OB{O_9RfxR8dsxTtB(8rs>`#Tt(ttFv31eqpk2p~ViMk%N%NP?wqPK#?b!3Q*=0{a`hj{9sf8BP"
        "+c2k*Y7_b<<X4z~%Rn5O0;s^tDarGa6I=%pq6B(f",
    ),
    "iq2_s": Codebook(
        (8, 25, 43), 1024, 8,
        "c-rk#QEJ053@t_o5sVQggb>0gVT4jfKT62QK6i$lVIRH!0Vc(<<D}^>un3aMmLk3Pq@GM>@brrSOAuoS!U5+Sq>$hMfM`=A8fG7+6xh_pVlE"
        "VX^r>SG1IUGXKp~NQVZ<#uyEKP2A6U0ulbqhHc!ZKXoOgZ!a(#h5L2e>9iorT%aaEvqmz<T9AS4KkR7nhF$SR!LaIW~anS)kN+y~5!fX2_tw"
        "$_w8M8gyi@=2PcNnT&C5f<<-HG7sq3HSwQg;B*hZu6*f@*4LSZ=T5?O0#MA!i(3cKw~;np<<1EEz^1gk}FK?1lO4$E8>YAe~G}C(l*~8G|vM"
        "tE+J0Kv%)Rtbh_f)B1qc9NTsHZVSqiEx*95DJ%xIh)1FeO7xxYu4X;3F?v(CeI(T^fBkDT!*j63NCcS|!68g>|{|tP;m8~fZyqBlL4m<4M+A"
        "m$;8KD",
    ),
    "iq3_xxs": Codebook(
        (4, 12, 20, 28, 36, 44, 52, 62), 256, 4,
        "c-rNSQBQ<05QMM8(gjMF3aveZcfg$_Xh@9s?3?;_@&ErDi+{sSCfS)xzBvFnNP)`-P<oj%u&Ij_GZ<89A+2DpozG1T(w%#co)E<C?Iaj=1T$"
        "WD&le3Ttuu68sO{>TjDID{$^l4d?nxEkgtW?frj;f+`l|neiI4kYu=$QK=#kstn)ajVw66Q14NLGwP}9vf%IUlFFq=ujErV<^7TU!@#^U*uw"
        "u|_)%H|-a@jO52?`eKpWCK*|*6O9t@2!N%4QM|P|NMRdlN}G4",
    ),
    "iq3_s": Codebook(
        (1, 3, 5, 7, 9, 11, 13, 15), 512, 4,
        "c-rle*-is73`NQHHsfqF?X+}Qq#}?Iyd(bq&v43TKwc6@_PxjUT}p(M5`e@ipm+$3X#8<vA_iM!(Zom;A+e66N|Q3dK+33K${bH6?T&)TXLQ"
        "Mgwsynqr}B2w99H3g2AVa6Ba4w5n!;&NC^`8+2))FzY7V3d3zE|<v%fP{JPy#pt4_a?7*e4;?iyVYlm>rPT!<WEaQ5hjcpjzNvd(10JDJQi<"
        "vKz9i8rpu@?b;I#xw}76JP<cI7bj2?#2>sGg#ZC!nP_`i#qpuJYEAgzeXqFZ??EZwMv8=MA)U178wluibGC&fxqnQc9EQQ*N}|5659yo`Kq&"
        "v)_Y04N{QhVFK^|D?<?B(nCxj;?D>4qEIJkGU#&OVx6|VXzL@4nD7skgcp96tb-z$M$Eq)%%k}>K?*IJh^8;e|55W",
    ),
    "iq1": Codebook(
        (-1, 0, 1), 2048, 8,
        "c-rk%Nn+bD3=9^6lq@g3_y6zg3_w~++8@-2BXPw#1AQsQn!2`79Xa5`1yhw4&IyP8+kT5^SjNwcuNyWa!d;$tsmQ>BVk#JG$!2_F`tU=k-oz"
        "D${dQ{gs|occF~l%9a6GQo4NgOHx=WtabXE*!o5eJWrGOU{OvZrW7XxV-mBVX#4wZ1!yjgmS2X?V)<vw<}@QwtdmKtR)N)2YT8GqXI+J;s!<"
        "tF^r;fIeX=V~8G*dLr)Pt&Q#eOT$(de=U~VaD9{$^;WosW_*Iw~I%4$v9D|cZvNvLy2Nks2Jd)*}>vf7O}cB{uEq-A>0)fVeFS0?O6e4(qNi"
        "{$P2h3Yby=6Yn2Z##V<F2BvX+I)9E;%H_Hb#a?2t?ll#{8IBbhmg?Wg_!enLC=bL%V)MMwJS!zbk&a0M{B%J9?+5!}Mo6wI82-^9V$Fi=4hD"
        "0Z;#b92nJ+>cv6o!%_UUowXzQp{*%k)a$(^8r@W5warPcF@kttD|biHdEJO6q?;(-AHs_T{WxA-k-}TXdPXHL-P4Cw$jwGr39;BuD1FM0RB4"
        "y_I*Rr)GZEDdO+Y4U#J{th+c9R|d0Iy_`A{yy26Qc27bfZEzHXfQ3jplf=N<O&mzKJCOGz(bZ2Tr#^I<<)?b}CVeafY1-@<TV6(d4FI3isRV"
        "($i|?lPL}*C`PzD_>CLc{?;@pio*sNUc6DVT6TQ#vFnEYsZg+(uu$Yrnxo(IrI&&eGvvy;S*ZW{@siaQx_b}}80YQk`hb+HybAy*xe=#K30<"
        "pa%*Sglp}{fC413&~N!NJ0-;zAwh{-J}3Lk~1^57}G0MS8tWl;bYbYKWy+;Oav8RME`{&^>wLw7@*k_Ohj@Z7H2^Sq@7LG6UMU9=W(KAIb7|"
        "-is9&i+cxU+auCG#Z&f-!Xh~0bYS9$E(oh+EO#Nq5{DtVl*2f}#&n(PF5R3i#Vi-0wNn*gZOCoQA=Jw6{KueFoCZe}?Kaae<{rbp9KJt-|eB"
        ">klo%{jaj~Sr",
    ),
}  # fmt: skip


@cache
def codebook(name: str) -> np.ndarray:
    """A book, i8[rows, width]."""
    book = BOOKS[name]
    low, high = np.frombuffer(zlib.decompress(base64.b85decode(book.distances)), np.uint8).reshape(2, -1)
    numbers = np.cumsum(low.astype(np.int64) + 256 * high.astype(np.int64))
    digits = numbers[:, None] // len(book.values) ** np.arange(book.width) % len(book.values)
    found = np.array(book.values, np.int8)[digits]
    found.flags.writeable = False
    return found
