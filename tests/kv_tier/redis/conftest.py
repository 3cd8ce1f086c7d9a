"""A Redis server for a test, and an arena and a tier over it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_tier.redis import RedisTier
from tests.kv_tier.redis.cases import Arena, open_tier
from tests.kv_tier.redis.servers import RedisServer


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, as the path of a Unix socket must be."""
    with tempfile.TemporaryDirectory(prefix="cs-redis-") as name:
        yield Path(name)


@pytest.fixture
def server(folder: Path) -> Iterator[RedisServer]:
    with RedisServer(folder) as started:
        yield started


@pytest.fixture
def arena() -> Arena:
    return Arena()


@pytest.fixture
def tier(server: RedisServer, arena: Arena) -> Iterator[RedisTier]:
    with open_tier(server.url, arena) as opened:
        yield opened
