"""Special functions in terms of simpler operators: lgamma, digamma, erfinv.

A row of `decompose.py` each: Exprs in, an Expr of the same dtype out, without branches.  A function is a quotient of polynomials on each of a few
intervals (`Pieces`; all of one length, so that lanes differ in their coefficients only), and an asymptotic series beyond; the numbers were fitted at
Chebyshev nodes to 50 digits.  Zeros are factors, so that values near them have all their digits.  `digits` says which numbers: those of "f32"
serve for arithmetic in f64 whose result is rounded to f32.  Arguments of logarithms are never 0, negative or infinite where the logarithm is
not used: vector libraries are slow for those.

    lgamma(x)       # where(isinf(x), inf, ...)
"""
from __future__ import annotations

import math

from firesteel.loops.scalars import S, literal
from firesteel.sym.expr import Expr

Row = tuple[float, ...]             # coefficients, the highest power's first
Pieces = tuple[tuple[float, float, Row, Row], ...]      # (end of the interval, a place to start from, coefficients above, coefficients below)


def polynomial(x: Expr, coefficients: Row | list[Expr]) -> Expr:
    """Horner's scheme."""
    result, *rest = (c if isinstance(c, Expr) else literal(c, x.dtype) for c in coefficients)
    for c in rest:
        result = S.muladd(result, x, c)
    return result


def _pick(at: Expr, ends: Row, values: Row, dtype: str) -> Expr:
    """The value of the interval in which `at` lies."""
    found = literal(values[-1], dtype)
    for end, value in zip(ends[-2::-1], values[-2::-1]):
        found = S.where(S.lt(at, end), literal(value, dtype), found)
    return found


def quotient(at: Expr, x: Expr, pieces: Pieces) -> tuple[Expr, Expr]:
    """(above, below) of the fit at x on the interval in which `at` lies."""
    ends, starts, above, below = zip(*pieces)
    near = S.sub(x, _pick(at, ends, starts, x.dtype))
    top, bottom = (polynomial(near, [_pick(at, ends, values, x.dtype) for values in zip(*rows)]) for rows in (above, below))
    return top, bottom


def _log_gamma(x: Expr, digits: str) -> Expr:
    """For x >= 3/4: with factors of the zeros 1 and 2, or Stirling's series."""
    pieces, series = _LGAMMA[digits]
    end = pieces[-1][0]
    near = S.lt(x, end)
    top, bottom = quotient(x, S.min(x, literal(end, x.dtype)), pieces)
    zeros = S.muladd(S.sub(x, 1), S.sub(x, 2), literal(0, x.dtype))      # 0, and not -0, at 1
    if end > 3:
        zeros = S.where(S.lt(x, 3), zeros, 1)
    ratio = S.div(S.where(near, S.mul(zeros, top), 1), S.where(near, bottom, x))
    rest = S.muladd(ratio, polynomial(S.mul(ratio, ratio), series), literal(0.5 * math.log(2 * math.pi) - 0.5, x.dtype))
    return S.where(near, ratio, S.muladd(S.sub(x, 0.5), S.sub(S.log(S.max(x, literal(end, x.dtype))), 1), rest))


def lgamma(x: Expr, digits: str | None = None) -> Expr:
    """gamma(1 + a) * gamma(-a) = pi / sin(pi a) below 0; gamma(a) = gamma(1 + a) / a close to 0."""
    digits = digits or x.dtype
    a, negative, close = S.abs(x), S.lt(x, 0), S.lt(x, 0.75)
    value = _log_gamma(S.where(close, S.add(a, 1), a), digits)
    rest = S.sub(a, S.round(a))
    sine = S.mul(S.abs(rest), polynomial(S.mul(rest, rest), _SINE[digits]))
    more = S.log(S.where(negative, sine, S.where(close, a, 1)))
    pole = S.or_(S.isinf(x), S.and_(negative, S.eq(rest, 0)))
    return S.where(pole, literal(math.inf, x.dtype), S.sub(S.where(negative, S.neg(value), value), more))


def digamma(x: Expr, digits: str | None = None) -> Expr:
    """digamma(-a) = digamma(1 + a) + pi / tan(pi a) below 0; digamma(a) = digamma(1 + a) - 1/a close to 0."""
    digits = digits or x.dtype
    a, negative, close = S.abs(x), S.lt(x, 0), S.lt(x, 1)
    value = _positive_digamma(S.where(close, S.add(a, 1), a), digits)
    rest = S.sub(a, S.round(a))
    square = S.mul(rest, rest)
    above, below = (polynomial(square, row) for row in _COTANGENT[digits])
    above = S.mul(above, S.muladd(square, literal(-4, x.dtype), literal(1, x.dtype)))
    more = S.div(S.where(negative, above, -1), S.where(negative, S.mul(rest, below), x))
    pole = S.and_(negative, S.eq(rest, 0))
    return S.where(pole, math.nan, S.where(close, S.add(value, more), value))


def _positive_digamma(x: Expr, digits: str) -> Expr:
    """For x >= 1: with a factor of the zero, or an asymptotic series."""
    pieces, series = _DIGAMMA[digits]
    end = pieces[-1][0]
    near = S.lt(x, end)
    top, bottom = quotient(x, S.min(x, literal(end, x.dtype)), pieces)
    ratio = S.div(S.where(near, top, 1), S.where(near, bottom, x))
    square = S.mul(ratio, ratio)
    rest = S.muladd(square, polynomial(square, series), S.mul(ratio, 0.5))
    high = literal(_ROOT, x.dtype)
    zero = S.sub(S.sub(x, high), _ROOT - high.attr + _ROOT_LOW)
    return S.where(near, S.mul(zero, ratio), S.sub(S.log(x), rest))


def erfinv(x: Expr) -> Expr:
    """x times a function of w = -log(1 - x*x), of its root where it is large."""
    a = S.abs(x)
    inside = S.lt(a, 1)
    w = S.neg(S.log(S.where(inside, S.mul(S.sub(1.0, a), S.add(a, 1)), 0.5)))
    pieces = _ERFINV[x.dtype]
    central = S.lt(w, pieces[0][0])
    at = S.where(central, w, S.sqrt(w))
    top, bottom = quotient(w, at, pieces)
    slope = top if len(pieces[0][3]) == 1 else S.div(top, bottom)
    value = S.mul(x, S.muladd(at, slope, S.where(central, literal(math.sqrt(math.pi) / 2, x.dtype), 0)))
    edge = S.where(S.eq(a, 1), S.mul(x, math.inf), literal(math.nan, x.dtype))
    return S.where(inside, value, edge)


# ---------------------------------------------------------------- fitted numbers

_LGAMMA: dict[str, tuple[Pieces, Row]] = {          # up to the last end, and Stirling's series behind it
    "f32": ((
        (3.0, 1.5,
         (2.4585769934600345e-06, 0.0008026308879902366, 0.01989735520322062, 0.1605196383721972, 0.5544810063339748, 0.8545515319312618,
          0.4831289505410065),
         (0.00022118948749146844, 0.00920034216671278, 0.11511510443564851, 0.6237967594174483, 1.6431179655133068, 2.0708993462830327, 1.0)),
        ), (-0.004880263138745836, 0.003700375394820536, -0.0017174074866606365, 0.0008326101535475611, -0.0005949985453807092,
            0.000793647610824745, -0.0027777777613134805, 0.0833333333333191)),
    "f64": ((
        (1.5, 1.0,
         (-2.7992343062470545e-06, 0.00018760863396173334, 0.01773756102486198, 0.20872135543085155, 0.9087148544799718, 1.8067559062420113,
          1.6652527841302724, 0.5772156649015329),
         (0.006239028982016454, 0.1258184433387989, 0.8583096132089612, 2.69556355190382, 4.267156900358715, 3.3098619265275233, 1.0)),
        (3.0, 1.75,
         (-2.1598694635470592e-08, 2.7875099675877454e-06, 0.0005851435165732075, 0.01347451966747758, 0.11167845172058509, 0.4156987843632324,
          0.7086382831032791, 0.4501393121092563),
         (0.00017057405148267587, 0.006367217215986572, 0.07975099076900274, 0.4569601923464357, 1.3129007365820673, 1.8396968392921067, 1.0)),
        (6.0, 3.0,
         (1.6550150026988871e-06, 0.00020157390771408015, 0.006129129716726522, 0.0742425066896151, 0.42297544116753055, 1.1815944304094101,
          1.520079466183536, 0.6931471805599453),
         (3.017918387050393e-07, 5.851625843317332e-05, 0.0024679323257428974, 0.03888300185303017, 0.27259801966547953, 0.8617147235635397, 1.0)),
        ), (0.004298394281325464, -0.0018449995052567591, 0.0008404447851602169, -0.0005952257418022643, 0.0007936507373369848,
            -0.0027777777776807643, 0.0833333333333333)),
}
_SINE = {      # sin(pi r) / (pi r) in r*r, |r| <= 1/2
    "f32": (-6.7270425170826265e-06, 0.00014832827396380304, -0.002346059829910968, 0.026147845336487233, -0.19075182396433998,
            0.8117424252784269, -1.6449340668481678, 0.9999999999999999),
    "f64": (2.4502943624559793e-07, -6.972099660851199e-06, 0.0001484278414189103, -0.0023460808954639607, 0.02614784780555096,
            -0.19075182412149616, 0.8117424252833393, -1.6449340668482264, 1.0),
}
_ROOT, _ROOT_LOW = 1.4616321449683622, 9.549995429965697e-17       # where digamma is 0
_DIGAMMA: dict[str, tuple[Pieces, Row]] = {
    "f32": ((
        (3.0, 2.0,
         (2.329028309543755e-06, 0.0009148797784072046, 0.024875239833477458, 0.2127165097534526, 0.7045538252708203, 0.7853075386041053),
         (0.0001992545790545064, 0.008258766804154308, 0.10351728083707425, 0.5401890202061775, 1.229190772407176, 1.0)),
        ), (0.21708035399145625, -0.1575276605485407, 0.06111954781502217, -0.019905394305932675, 0.007535250429675628, -0.0041658535277135375,
            0.0039682455481728504, -0.008333333299043224, 0.08333333333330992)),
    "f64": ((
        (3.0, 2.0,
         (1.3160110372948454e-07, 8.350460164355932e-05, 0.0035602592654380267, 0.049925515622579957, 0.3010671327531236, 0.8070847671460344,
          0.7853075386041053),
         (1.6731621002717405e-05, 0.0010382504212581001, 0.019988392430420495, 0.16904093016360716, 0.6960427334217013, 1.3597522872722025, 1.0)),
        ), (-21.29861333701341, 17.261883761190983, -6.706334097588544, 1.7458633558768843, -0.37430045081725144, 0.08064047398067098,
            -0.02101916489697652, 0.00757443060881869, -0.004166652178650307, 0.003968253884920039, -0.008333333333142599, 0.08333333333333326)),
}
_COTANGENT = {     # pi r / tan(pi r) / (1 - 4 r*r) in r*r, |r| <= 1/2: above and below
    "f32": ((-0.001222375897012083, 0.07547583258611017, -0.6079988915722839, 1.0000000000000027),
            (-0.017510427366686388, 0.3356414898522388, -1.3181307578748171, 1.0)),
    "f64": ((3.699615619207746e-05, -0.005448833773817454, 0.11503503652484373, -0.6761096738563748, 1.0),
            (0.0008149644281946897, -0.03814175488262544, 0.4235683307942, -1.386241540159922, 1.0)),
}
_ERFINV: dict[str, Pieces] = {
    "f32": (
        (5.0, 2.0,
         (6.719421663212117e-11, -9.40228548666907e-09, 8.204023033737971e-08, 1.3351141015557712e-07, -5.1130565631158075e-06,
          1.785924326262285e-05, 0.00018016553604836152, -0.002052542793502157, 0.0021369756512491875, 0.24549414156899235),
         (1.0,)),
        (math.inf, 3.0,
         (1.7388565889610894e-05, 2.4093347266863545e-05, -0.0003868532173109598, 0.0011590385795687205, -0.0020039889649154487,
          0.0023877017051464793, -0.001469393393627544, -0.003223997291095137, 0.01911636009665587, 0.9443256061343406),
         (1.0,)),
    ),
    "f64": (
        (6.25, 1.5,
         (6.581598500952461e-12, 4.608543078730803e-10, 3.325443731519082e-08, 1.0601340645134452e-06, 2.0682917253801952e-05,
          0.00027253445719346175, 0.002434640538013055, 0.01706312254044098, 0.0689620557920009, 0.24389127675378935),
         (8.597203024508374e-11, 4.3051390630462835e-09, 2.492638436263434e-07, 6.5447249264744835e-06, 0.00010711545481710089,
          0.001361503044182073, 0.010611061954070833, 0.0746609380373613, 0.26506869888922396, 1.0)),
        (16.0, 2.75,
         (0.00046342923340773754, 0.004289362396588284, 0.022399870173931878, 0.08393943708952642, 0.24211728115557157, 0.5569916025376025,
          1.0068941639768494, 1.433616158364094, 1.4147289503780471, 0.9393795667121085),
         (0.0004629038172734404, 0.004311233171917488, 0.02289986746673537, 0.08553495903565331, 0.2498773317441562, 0.5738282678542215,
          1.046832535762011, 1.4950113984006372, 1.484460837344264, 1.0)),
        (math.inf, 4.0,
         (0.0, 0.00029132218948057923, 0.007274435110088066, 0.06548483417817726, 0.302226441587553, 0.8371996805429439, 1.6128735901556657,
          2.191442309695771, 1.9642404998405667, 0.9599459493528885),
         (0.0, 0.00029128417160560825, 0.007278320075459946, 0.06601936987954558, 0.3075651962305983, 0.8563341630739914, 1.6564088434815354,
          2.259541779077516, 2.033295390415684, 1.0)),
    ),
}
