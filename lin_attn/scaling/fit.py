"""What measured curves say: the exponent of their growth, and where one passes below another.

    values ≈ c + a·N^p,   c ≥ 0, a ≥ 0, with errors in proportion to the values

c is what a call costs at any length; a plain regression of log values on log N would mistake it for a lower exponent.
For a given p the least relative error

    S(p) = min over c, a of Σ ((c + a·N^p) / value − 1)²

has a closed form, so the exponent is the minimum of a curve, and its 95 % interval is where that curve stays below
S(p̂)·(1 + t²/(n − 3)), t being Student's for n − 3 degrees of freedom: the profile interval of Bates and Watts
(Nonlinear Regression Analysis and Its Applications, 1988, ch. 6). It widens by itself where c and p can hardly be told
apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FEWEST_POINTS = 4  # three parameters and one degree of freedom
LEAST, MOST = 0.01, 5.0  # the exponents looked at
# 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom.
STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


@dataclass(frozen=True)
class Fit:
    """How values grow with length.

    Attributes:
        exponent: p; None where there are too few points to tell.
        low: lower end of its 95 % interval.
        high: upper end; infinite where the points put no bound on it.
        r_squared: part of the variance of log values that the fit explains; 1 for equal values.
        intercept: c, in the unit of the values.
        n_points: points fitted.
        first_length: the shortest length fitted.
    """

    exponent: float | None
    low: float | None
    high: float | None
    r_squared: float | None
    intercept: float | None
    n_points: int
    first_length: int | None


def fit(lengths: Sequence[int], values: Sequence[float], *, tail: int | None = 6) -> Fit:
    """The exponent p of values ≈ c + a·N^p at the longest lengths.

    Values that do not grow beyond their noise (by neither an F-test of the curve against a constant nor a t-test of the
    slope, 5 % each) have no intercept to remove: they get the plain slope of log values on log N, about 0, with its
    interval. Zeros among other values, such as a peak below the size of a page, say nothing about growth and are left
    out; zeros alone are a constant. Fewer than 4 lengths give a Fit without an exponent.

    Args:
        lengths: N, in any order.
        values: seconds or bytes, one a length.
        tail: how many of the longest lengths to use, None for all. At the short ones lower-order terms show.

    Raises:
        ValueError: for lengths and values that differ in number, lengths below 1 or equal, a tail below 4, or values
            that are negative or not finite.
    """
    if tail is not None and tail < FEWEST_POINTS:
        raise ValueError(f"tail is {tail}; wanted {FEWEST_POINTS} points or more, or None for all")
    if len(lengths) != len(values):
        raise ValueError(f"there are {len(lengths)} lengths and {len(values)} values; wanted one value a length")
    n, y = np.asarray(lengths, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(np.unique(n)) < len(n) or (n < 1).any():
        raise ValueError(f"lengths are {list(lengths)}; wanted different ones from 1 on")
    if not (np.isfinite(y) & (y >= 0)).all():
        raise ValueError(f"values are {list(values)}; wanted finite ones from 0 on")
    order = np.argsort(n)
    n, y = n[order], y[order]
    if y.any():
        n, y = n[y > 0], y[y > 0]
    if tail is not None:
        n, y = n[-tail:], y[-tail:]
    first = int(n[0]) if len(n) else None
    if len(n) < FEWEST_POINTS:
        return Fit(None, None, None, None, None, len(n), first)
    if y.min() == y.max():
        return Fit(0.0, 0.0, 0.0, 1.0, 0.0, len(n), first)

    scale, n = float(np.exp(np.log(y).mean())), n / n[-1]
    y = y / scale
    freedom = len(n) - 3
    exponent = _lowest(n, y)
    least, c, a = (float(column[0]) for column in _profile(exponent, n, y))
    inverse = 1 / y
    constant = inverse * inverse.sum() / (inverse @ inverse)
    slope, error, predicted = _slope(n, y)
    width = _student(len(n) - 2) * error
    # The quantile of F for 2 and m degrees of freedom has a closed form: the curve explains more than a constant when S
    # falls below 0.05^(2/m) of what it was. With few points the slope, one parameter less, sees growth that F does not.
    if least >= 0.05 ** (2 / freedom) * float(((constant - 1) ** 2).sum()) and slope - width <= 0:
        return Fit(slope, slope - width, slope + width, _r_squared(y, predicted), 0.0, len(n), first)
    bound = least * (1 + _student(freedom) ** 2 / freedom)
    low, high = _edge(exponent, LEAST, bound, n, y), _edge(exponent, MOST, bound, n, y)
    # An edge of the exponents looked at is no bound.
    low, high = low if low > LEAST else 0.0, high if high < MOST else float("inf")
    return Fit(exponent, low, high, _r_squared(y, c + a * n**exponent), c * scale, len(n), first)


def crossover(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """The length from which our values are lower than theirs and stay so, as far as both were measured.

    Between two measured lengths it is where the lines through them cross in log-log. The shortest common length means
    that ours are lower everywhere; None, that at the longest they are not.

    Args:
        ours: length → value above 0.
        theirs: the same of the other curve.
    """
    lengths = sorted(set(ours) & set(theirs))
    gaps = [float(np.log(ours[length] / theirs[length])) for length in lengths]
    if not gaps or gaps[-1] >= 0:
        return None
    last = max((i for i, gap in enumerate(gaps) if gap >= 0), default=None)
    if last is None:
        return float(lengths[0])
    part = gaps[last] / (gaps[last] - gaps[last + 1])
    return float(lengths[last] * (lengths[last + 1] / lengths[last]) ** part)


def _profile(p: float | Floats, n: Floats, y: Floats) -> tuple[Floats, Floats, Floats]:
    """S, c and a for each exponent: least squares in two columns, 1/y and N^p/y, with neither coefficient below 0."""
    p = np.atleast_1d(np.asarray(p, dtype=np.float64))
    u, v = 1 / y, n ** p[:, None] / y
    uu, uv, vv = u @ u, v @ u, (v * v).sum(1)
    across = v - (uv / uu)[:, None] * u
    a = across.sum(1) / (across * across).sum(1)
    c = (u.sum() - a * uv) / uu
    # With two columns the bounded minimum lies on the bound that the free one breaks.
    a, c = np.where(c < 0, v.sum(1) / vv, a), np.maximum(c, 0)
    a, c = np.maximum(a, 0), np.where(a < 0, u.sum() / uu, c)
    return ((c[:, None] * u + a[:, None] * v - 1) ** 2).sum(1), c, a


def _lowest(n: Floats, y: Floats) -> float:
    """The exponent of the least S, to the last digit: a grid between the neighbours of the coarser one's lowest."""
    low, high, steps = LEAST, MOST, 200
    while True:
        grid = np.linspace(low, high, steps)
        lowest = int(_profile(grid, n, y)[0].argmin())
        if high - low < 1e-14:
            return float(grid[lowest])
        low, high, steps = float(grid[max(lowest - 1, 0)]), float(grid[min(lowest + 1, steps - 1)]), 9


def _edge(inside: float, outside: float, bound: float, n: Floats, y: Floats) -> float:
    """Where S passes the bound between the best exponent and one far from it, by bisection."""
    if _profile(outside, n, y)[0][0] <= bound:
        return outside
    for _ in range(50):
        middle = (inside + outside) / 2
        if _profile(middle, n, y)[0][0] <= bound:
            inside = middle
        else:
            outside = middle
    return inside


def _slope(n: Floats, y: Floats) -> tuple[float, float, Floats]:
    """Slope of log y on log N, its standard error and the fitted values."""
    x, log_y = np.log(n), np.log(y)
    x = x - x.mean()
    slope = float(x @ log_y / (x @ x))
    predicted = log_y.mean() + slope * x
    error = float(np.sqrt(((log_y - predicted) ** 2).sum() / (len(n) - 2) / (x @ x)))
    return slope, error, np.exp(predicted)


def _r_squared(y: Floats, predicted: Floats) -> float:
    log_y = np.log(y)
    return float(1 - ((log_y - np.log(predicted)) ** 2).sum() / ((log_y - log_y.mean()) ** 2).sum())


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; beyond the table by Cornish and Fisher's expansion, good to 1e-4."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
