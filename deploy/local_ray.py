"""A Ray that belongs to one server: on loopback, and closed to the machine's other users."""

import os
import secrets


def prepare_environment() -> None:
    """Set what Ray reads when it is imported; call it before. What the user has set stands.

    Without the first, Ray listens on every interface, whatever address `ray.init` is given: on
    Linux it replaces 127.0.0.1 by the machine's own address. The replicas' gRPC servers of Serve
    still listen everywhere, so calls need a token, known to this process and its children alone
    (`ray.init` by itself would write one to a file, and later Rays would find it there).
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
