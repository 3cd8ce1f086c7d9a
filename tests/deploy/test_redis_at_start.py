"""What `cachesmith serve` says of Redis before it starts."""

import pytest

from deploy.server import _tell_redis
from deploy.settings import Settings, load_settings
from tests.kv_tier.redis.servers import free_port, running_redis


def settings_with(url: str) -> Settings:
    return load_settings(overrides={"kv_tier": {"redis": {"url": url}}})


def said_of(settings: Settings) -> list[str]:
    said: list[str] = []
    _tell_redis(settings, said.append)
    return said


def test_nothing_is_said_of_what_is_not_configured() -> None:
    assert said_of(load_settings()) == []


def test_a_redis_that_is_absent_is_said_and_nothing_more() -> None:
    (line,) = said_of(settings_with(f"redis://user:secret@127.0.0.1:{free_port()}"))
    assert line.startswith("kv_tier.redis: ") and "serving without it" in line
    assert "secret" not in line


@pytest.mark.redis
def test_a_redis_that_answers_or_refuses_is_said() -> None:
    with running_redis() as server:
        assert said_of(settings_with(server.url)) == ["Redis answers: chunks are shared through it"]
        (line,) = said_of(settings_with(server.url.replace("redis://", "redis://me:secret@")))
        assert "serving without it" in line and "secret" not in line
