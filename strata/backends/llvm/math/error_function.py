"""erf and the functions made of it, as straight-line vector code.

Coefficients are Chebyshev interpolants (weighted least maximum for _ERF_LARGE) made with 50 digits."""

from __future__ import annotations

import math

from strata.backends.llvm.ir.float_ops import MAGIC, MANTISSA, TABLE, VectorMath, library
from strata.backends.llvm.math.exponentials import EXP_NEAR, LN2, POWERS, reduce_exp, scale_by

# (erf x - x) / x in x², |x| ≤ 0.96; and (-log erfc x - x) / x in x from there to 3.95
_ERF_SMALL = (
    0.12837916637039357, -0.37612631184221473, 0.1128365692376854, -0.026857301677163395, 0.005195947961834234,
    -0.000808645906432634, 8.138705363383426e-05,
)  # fmt: skip
_ERF_LARGE = (
    0.12867467507419805, 0.6350459689611178, 0.10640958958929196, -0.023909626347718822, 0.0037117058245622623,
    -0.0003397164438994981, 1.2910177266084781e-05,
)  # fmt: skip
# the same for f64: (erf x - x) / x in x², |x| ≤ 0.95; and -log erfc x in x from 0.9 to 6, least where it counts
_ERF_SMALL_64 = (
    0.1283791670955126, -0.37612638903183754, 0.11283791670955043, -0.02686617064511091, 0.005223977625183944,
    -0.0008548327003921653, 0.00012055332032749044, -1.4925619404959463e-05, 1.6461421673221431e-06,
    -1.635515932123828e-07, 1.4695095079863258e-08, -1.1520543420568624e-09, 6.227121087151807e-11,
)  # fmt: skip
_ERF_LARGE_64 = (
    7.164290077270523e-08, 1.1283784063503286, 0.6366234828716812, 0.1027616533463074, -0.01910688425741255,
    -0.00023829267396261133, 0.0017217187606663746, -0.0005998509328480272, 1.627312151499605e-05,
    8.60752052862903e-05, -5.193653540191467e-05, 1.8926735174903832e-05, -4.993942318849058e-06,
    9.94283008313981e-07, -1.493169894310235e-07, 1.6481102991502327e-08, -1.2647852792721743e-09,
    6.034310769880557e-11, -1.3480976185535314e-12,
)  # fmt: skip
# erf(c + r) in r for each c = 0, 1, 2 … 15 widths and |r| of half a width, a column a power; in the first place with
# erf x - x. The width is one at which erf c is near to a number of f32 for every c: 1.46 ulp at most, over all numbers
_ERF_WIDTH = 8720 / 32768
_ERF_TABLES = (
    (
        0.0, 0.2933366000652313, 0.5483589768409729, 0.7411118745803833, 0.8677694797515869,
        0.9401239156723022, 0.976057231426239, 0.9915710687637329, 0.997393786907196, 0.9992935657501221,
        0.9998323917388916, 0.999965250492096, 0.9999936819076538, 0.9999989867210388, 0.9999998807907104, 1.0,
    ),
    (
        0.12837916612625122, 1.051235318183899, 0.8500306606292725, 0.5965666770935059, 0.36339014768600464,
        0.19212199747562408, 0.08815983682870865, 0.035111889243125916, 0.012137449346482754,
        0.003641584888100624, 0.0009482944733463228, 0.00021433141955640167, 4.204538345220499e-05,
        7.1588078753848094e-06, 1.057920599123463e-06, 1.356924030915252e-07,
    ),
    (
        0.0, -0.27974027395248413, -0.4524003863334656, -0.47625932097435, -0.3868136703968048,
        -0.25563499331474304, -0.14076577126979828, -0.06540699303150177, -0.025839168578386307,
        -0.00872112438082695, -0.0025231714826077223, -0.0006272311438806355, -0.0001342057657893747,
        -2.4748564101173542e-05, -3.937382643925957e-06, -5.408712127064064e-07,
    ),
    (
        -0.3761216700077057, -0.30077943205833435, -0.12282224744558334, 0.0546208992600441,
        0.15336309373378754, 0.1627153754234314, 0.12045007944107056, 0.06952238082885742, 0.03262774646282196,
        0.012711809948086739, 0.004160760436207056, 0.001152843818999827, 0.0002717872557695955,
        5.471868280437775e-05, 9.43330906011397e-06, 1.395433514517208e-06,
    ),
    (
        0.0, 0.13215266168117523, 0.18220321834087372, 0.1364053338766098, 0.047597505152225494,
        -0.022450357675552368, -0.04882381111383438, -0.04282892122864723, -0.02616618387401104,
        -0.01239712256938219, -0.004750228952616453, -0.0015038116835057735, -0.00039830501191318035,
        -8.898371743271127e-05, -1.6862142729223706e-05, -2.7213534394832095e-06,
    ),
    (
        0.11212720721960068, 0.07565436512231827, -0.00200782623142004, -0.05961788073182106,
        -0.06582419574260712, -0.03654518723487854, -0.004846482537686825, 0.011012026108801365,
        0.012403547763824463, 0.007990136742591858, 0.003767601912841201, 0.001397583750076592,
        0.000421264412580058, 0.00010503563680686057, 2.190431405324489e-05, 3.849150743917562e-06,
    ),
)  # fmt: skip
# -Φ(-c - r) of the normal distribution, in r, around places c: for |r| of half a width at 0, 1 … 7 widths, and for |r|
# of a whole one at 8, 10, 12 … 22 widths. A column a power, first the eight places from 8 widths on. By linear programs
# that know the coefficients which are rounded already: x Φ(x) is off by 1.4 ulp at most
_NORMAL_WIDTH = 0.25  # a power of two: multiples of it are found by adding and subtracting alone
_NORMAL_NEAR = 8
_NORMAL_TABLES = (
    (
        -0.02275014854967594, -0.006209653802216053, -0.0013498940970748663, -0.00023262928880285472,
        -3.167925024172291e-05, -3.3978826650127303e-06, -2.866959221137222e-07, 0.0, -0.5, -0.40129366517066956,
        -0.3085375428199768, -0.22662734985351562, -0.15865525603294373, -0.10564976930618286, -0.06680720299482346,
        -0.040059156715869904,
    ),
    (
        0.05399119108915329, 0.01752752996981144, 0.0044305091723799706, 0.0008719750330783427,
        0.00013361504534259439, 1.5935298506519757e-05, 1.4792528872931143e-06, 1.0431765673502014e-07,
        0.39894214272499084, 0.3866676688194275, 0.3520650267601013, 0.30113741755485535, 0.24197101593017578,
        0.18264956772327423, 0.1295180320739746, 0.08627764135599136,
    ),
    (
        -0.053981635719537735, -0.021912502124905586, -0.006648149807006121, -0.0015269493451341987,
        -0.00026678681024350226, -3.5909142752643675e-05, -3.7061081457068212e-06, -2.9711779347962874e-07,
        1.1829113645944744e-05, -0.048335809260606766, -0.08801555633544922, -0.11292702704668045,
        -0.12098436057567596, -0.11415746062994003, -0.09713761508464813, -0.07549268007278442,
    ),
    (
        0.026959029957652092, 0.015387658961117268, 0.005995168350636959, 0.0016815726412460208,
        0.0003487238718662411, 5.436507854028605e-05, 6.420849331334466e-06, 4.7014242454679334e-07,
        -0.06679150462150574, -0.06026773899793625, -0.04392150044441223, -0.02195843681693077,
        -7.735322287771851e-05, 0.01700465753674507, 0.0268692709505558, 0.029574137181043625,
    ),
    (
        -0.004984603729099035, -0.0058697606436908245, -0.003324181539937854, -0.0011916804360225797,
        -0.00030790275195613503, -5.387897545006126e-05, -7.2242823989654426e-06, -1.0650946933310479e-06,
        0.002962603000923991, 0.011929563246667385, 0.020086245611310005, 0.022914625704288483, 0.02007312700152397,
        0.013773094862699509, 0.006047256290912628, -0.00037405735929496586,
    ),
)  # fmt: skip

# e^(x²) erfc x around sixteen places c, a column a power of x - c, by the last bit pairs of exponent and mantissa of
# x + 1; at c it is near to a number of f32
_ERFC_PLACES = (
    1.2496000528335571, 1.75068998336792, 2.2507400512695312, 2.749685049057007, 3.500380039215088,
    4.4994001388549805, 5.500269889831543, 6.50167989730835, 8.0, 10.001720428466797, 10.0, 10.0, 0.12493500113487244,
    0.3745400011539459, 0.6246525049209595, 0.8747624754905701,
)  # fmt: skip
_ERFC_TABLES = (
    (
        0.36790645122528076, 0.2848818898200989, 0.23102179169654846, 0.1936820149421692, 0.15527795255184174,
        0.12250041216611862, 0.10095741599798203, 0.08578399568796158, 0.06998516619205475, 0.056131429970264435, 0.0,
        0.0, 0.8732810020446777, 0.6861397624015808, 0.5569641590118408, 0.46438661217689514,
    ),
    (
        -0.2089073359966278, -0.13089942932128906, -0.08843916654586792, -0.0632500872015953, -0.041315481066703796,
        -0.026022424921393394, -0.017793096601963043, -0.012899006716907024, -0.008616508916020393,
        -0.0055574276484549046, 0.0, 0.0, -0.9101724624633789, -0.6144055724143982, -0.4325610399246216,
        -0.31592321395874023,
    ),
    (
        0.1068558543920517, 0.05571756511926651, 0.031968213617801666, 0.019764214754104614, 0.010658088140189648,
        0.005415113642811775, 0.0030905839521437883, 0.001918783294968307, 0.001053103362210095,
        0.0005475932266563177, 0.0, 0.0, 0.7595686316490173, 0.45602041482925415, 0.28676390647888184,
        0.18802876770496368,
    ),
    (
        -0.05025055631995201, -0.02223605290055275, -0.010991127230226994, -0.005936427041888237,
        -0.0026717877481132746, -0.0011050499742850661, -0.0005293530412018299, -0.000282455439446494,
        -0.00012777361553162336, -5.369899736251682e-05, 0.0, 0.0, -0.5435097813606262, -0.29573550820350647,
        -0.1689542680978775, -0.10096120089292526,
    ),
    (
        0.022028304636478424, 0.008394090458750725, 0.0036146449856460094, 0.001719704014249146,
        0.0006523077609017491, 0.00022138746862765402, 8.945774607127532e-05, 4.116400668863207e-05,
        1.5395584341604263e-05, 5.241823600954376e-06, 0.0, 0.0, 0.34582817554473877, 0.1726074516773224,
        0.09059703350067139, 0.04987074434757233,
    ),
    (
        -0.009215646423399448, -0.0030490835197269917, -0.0011518517276272178, -0.00048572500236332417,
        -0.00015851686475798488, -4.418956450535916e-05, -1.5074937437020708e-05, -5.984546532999957e-06,
        -1.8819838487615925e-06, -5.165198331269494e-07, 0.0, 0.0, -0.2013794332742691, -0.0929403305053711,
        -0.045157309621572495, -0.023034706711769104,
    ),
    (
        0.003602457931265235, 0.0010437683667987585, 0.0003515183925628662, 0.00013866742665413767,
        3.69106674042996e-05, 8.5452875282499e-06, 2.4848495741025545e-06, 8.444338845947641e-07,
        2.239129770487125e-07, 4.987225921126992e-08, 0.0, 0.0, 0.10754785686731339, 0.04699244722723961,
        0.021573524922132492, 0.009311667643487453,
    ),
)  # fmt: skip
# (1 + 2x) e^(x²) erfc x in (x - 4) / (x + 4), from 0 to 27.5
_ERFC_64 = (
    1.2329951186255526, -0.13962111684056286, 0.015379652102620996, 0.06809705425473468, -0.10103906603636773,
    0.0937328349968727, -0.06633036581115447, 0.03716751556148306, -0.016197734063710445, 0.005031969762284736,
    -0.0007577733091379332, -0.00019925552619520982, 0.00015062210715057866, -2.440316536962711e-05,
    -1.1224436722701745e-05, 5.718019430428633e-06, 3.00822697160671e-07, -8.355403600708081e-07,
    6.309931892048124e-08, 1.1579545491817747e-07, -7.770852409868655e-09, -1.387063343675277e-08,
    -1.8822551750393533e-09,
)  # fmt: skip


def erf(m: VectorMath, x: str) -> str:
    if m.bits == 64:
        return _erf_in_double(m, x)
    if m.has_tables:
        return _erf_by_table(m, x)
    a = m.at_most(m.abs(x), 3.95)
    z = m.mul(a, a)
    small = m.fma(m.polynomial(z, _ERF_SMALL), a, a)
    exponent = m.fma(m.polynomial(a, _ERF_LARGE), a, a)
    _, n, q = reduce_exp(m, m.neg(exponent))
    scale = m.power_of_two(n)  # at least e^-17: normal
    large = m.sub(m.c(1.0), m.fma(scale, q, scale))
    return m.copysign(m.select(m.test("olt", a, m.c(0.96)), small, large), x)


def _erf_in_double(m: VectorMath, x: str) -> str:
    a = m.at_most(m.abs(x), 6.0)  # of which it is 1
    small = m.fma(m.polynomial(m.mul(a, a), _ERF_SMALL_64), a, a)
    _, n, q = reduce_exp(m, m.neg(m.polynomial(a, _ERF_LARGE_64)))
    scale = m.power_of_two(n)  # at least e^-39: normal
    large = m.sub(m.c(1.0), m.fma(scale, q, scale))
    return m.copysign(m.select(m.test("olt", a, m.c(0.92)), small, large), x)


def _erf_by_table(m: VectorMath, x: str) -> str:
    """A short polynomial around the nearest of sixteen places."""
    a = m.at_most(m.abs(x), 4.0)
    shifted = m.fma(a, m.c(1 / _ERF_WIDTH), m.c(MAGIC[m.bits]))  # the number of the place is in the last bits
    place = m.as_bits(shifted)
    r = m.fma(m.sub(shifted, m.c(MAGIC[m.bits])), m.c(-_ERF_WIDTH), a)
    start, *rest = (m.look_up(place, column) for column in _ERF_TABLES)
    slope = rest.pop()
    while rest:
        slope = m.fma(slope, r, rest.pop())
    first = m.select(m.test("olt", a, m.c(_ERF_WIDTH / 2)), r, start)
    return m.copysign(m.at_most(m.fma(slope, r, first), 1.0), x)


def gelu(m: VectorMath, x: str) -> str:
    """x Φ(x). As 1 + erf does, Φ rounds to a part of 1, and not of itself where it is small."""
    if m.has_tables:
        return _gelu_by_table(m, x)
    return m.mul(m.mul(x, m.c(0.5)), m.add(erf(m, m.mul(x, m.c(math.sqrt(0.5)))), m.c(1.0)))


def _gelu_by_table(m: VectorMath, x: str) -> str:
    """max(x, 0) - |x| Φ(-|x|), Φ by a short polynomial around the nearest of sixteen places.

    A number just below a power of two is added to find it: what is then left in the last bits counts widths up to that
    power, and pairs of them after it. The last place stands for all that is further away, where Φ is 0."""
    last = _NORMAL_NEAR + 2 * (TABLE - 1 - _NORMAL_NEAR)
    a = m.magnitude_at_most(x, last * _NORMAL_WIDTH)  # which is a number for NaN, too: what is added below is not
    start = m.c(((2 << MANTISSA[m.bits]) - _NORMAL_NEAR) * _NORMAL_WIDTH)
    shifted = m.add(a, start)
    place = m.as_bits(shifted)
    r = m.sub(a, m.sub(shifted, start))
    *rest, value = (m.look_up(place, column) for column in _NORMAL_TABLES)
    while rest:
        value = m.fma(value, r, rest.pop())
    return m.fma(value, a, m.not_negative(x))  # NaN for -inf, as 0 times it is


def erfc(m: VectorMath, x: str) -> str:
    if m.has_tables:
        return _erfc_by_table(m, x)
    return _erfc_in_double(m, x) if m.bits == 64 and m.target.has_fma else library("erfc", m, x)


def _erfc_in_double(m: VectorMath, x: str) -> str:
    """e^(-x²), with what squaring lost, times a polynomial over 1 + 2x; near 0, 1 - erf x."""
    a = m.at_most(m.abs(x), 27.5)  # of which it is 0
    t = m.div(m.sub(a, m.c(4.0)), m.add(a, m.c(4.0)))
    near = m.div(m.polynomial(t, _ERFC_64), m.fma(a, m.c(2.0), m.c(1.0)))
    square = m.mul(a, a)
    lost = m.fma(a, a, m.neg(square))
    n, whole, q = reduce_exp(m, m.neg(square))
    more = m.fma(m.neg(lost), m.add(q, m.c(1.0)), q)
    made = scale_by(m, m.fma(near, more, near), n, whole)
    made = m.select(m.test("olt", x, m.c(0.0)), m.sub(m.c(2.0), made), made)
    small = m.sub(m.c(1.0), m.fma(m.polynomial(m.mul(x, x), _ERF_SMALL_64), x, x))
    return m.select(m.test("olt", a, m.c(0.5)), small, made)


def _erfc_by_table(m: VectorMath, x: str) -> str:
    """e^(-x²) as in exp, with what squaring lost, times a short polynomial around the nearest of sixteen places."""
    a = m.at_most(m.abs(x), 10.5)  # of which it is 0
    place = m.integer("lshr", m.as_bits(m.add(a, m.c(1.0))), m.i(MANTISSA[32] - 2))
    far = m.sub(a, m.look_up(place, _ERFC_PLACES))
    start, *rest = (m.look_up(place, column) for column in _ERFC_TABLES)
    near = rest.pop()
    while rest:
        near = m.fma(near, far, rest.pop())
    near = m.mul(near, far)
    square = m.mul(a, a)
    lost = m.fma(a, a, m.neg(square))
    magic = m.c(MAGIC[32] / len(POWERS))
    shifted = m.fma(square, m.c(-1 / math.log(2)), magic)
    n = m.sub(shifted, magic)
    high, low = LN2[32]
    r = m.sub(m.fma(n, m.c(-low), m.fma(n, m.c(-high), m.neg(square))), lost)
    power = m.look_up(m.as_bits(shifted), POWERS)
    more = m.mul(m.mul(power, r), m.polynomial(r, EXP_NEAR))
    made = m.scaled(m.fma(power, start, m.fma(power, near, m.mul(more, m.add(start, near)))), n)
    return m.select(m.test("olt", x, m.c(0.0)), m.sub(m.c(2.0), made), made)
