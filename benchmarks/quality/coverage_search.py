"""The smallest sufficient coverage of a curve, found by bisection instead of at every point."""

from benchmarks.quality.curves import Curve, Point


class CoverageSearch:
    """Which coverage of a curve's grid to try next.

    Where enough is enough at every larger coverage too, three or four trials find what ten points
    would; elsewhere they find one of the coverages at which the answer turns right.
    """

    def __init__(self, curve: Curve) -> None:
        if not curve.coverages:
            raise ValueError(f"{curve.name} has no grid of coverages to search")
        self.curve = curve
        self._points = sorted(curve.points(), key=lambda point: point.config.coverage)
        self._short, self._enough = -1, len(self._points)  # known ends: not enough, enough

    @property
    def point(self) -> Point | None:
        """The next one to try, None at the end."""
        if self._enough - self._short <= 1:
            return None
        return self._points[(self._short + self._enough) // 2]

    def saw(self, *, passed: bool) -> None:
        """What came of `point`."""
        middle = (self._short + self._enough) // 2
        if passed:
            self._enough = middle
        else:
            self._short = middle

    @property
    def coverage(self) -> float:
        """At the end: the smallest sufficient one, 1.0 if none of the grid is."""
        if self._enough == len(self._points):
            return 1.0
        return self._points[self._enough].config.coverage
