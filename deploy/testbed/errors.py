"""What may go wrong with a testbed."""


class TestbedError(Exception):
    """The testbed can not do what it was asked. The message says why."""

    __test__ = False  # for pytest, by the name
