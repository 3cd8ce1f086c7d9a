"""A number over time."""


class Gauge:
    """Its value, and the area under it so far."""

    def __init__(self) -> None:
        self.value = 0
        self._area = 0.0
        self._since_ms = 0.0

    def add(self, amount: int, *, now_ms: float) -> None:
        self._area += self.value * (now_ms - self._since_ms)
        self._since_ms = now_ms
        self.value += amount

    def area(self, *, now_ms: float) -> float:
        return self._area + self.value * (now_ms - self._since_ms)
