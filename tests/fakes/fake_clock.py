"""A clock that only the test moves."""


class FakeClock:
    def __init__(self, now_ms: float = 1_000.0) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> float:
        return self._now_ms

    def advance(self, ms: float) -> None:
        self._now_ms += ms
