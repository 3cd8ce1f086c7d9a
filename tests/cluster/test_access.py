"""API keys and tenants over the HTTP API: who passes, and whose stored KV is found."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import access
from cluster.access import Access, KeyRing
from cluster.config import IngressConfig
from cluster.key_file import ApiKey, KeyFile, KeyFileError, key_hash
from tests.cluster.test_api import MODEL, USER, Api, error_of

SECRET = "5e" * 32
ADMIN = "let-me-in"
KEYS = {"cs-one": "one", "cs-one-more": "one", "cs-two": "two"}  # key → tenant


def write_keys(path: Path, keys: dict[str, str], *, secret: str = SECRET) -> None:
    entries = tuple(
        ApiKey(name=key, tenant=tenant, sha256=key_hash(key.encode()))
        for key, tenant in keys.items()
    )
    KeyFile(tenant_secret=secret, keys=entries).save(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys.yaml", KEYS)
    return tmp_path / "keys.yaml"


Make = Callable[..., Api]


@pytest.fixture
def make(tokenizer, tmp_path: Path, path: Path) -> Make:
    """An ingress with the keys of the file; each has an engine, and so a store, of its own."""

    def build(*, admin_token: str | None = ADMIN) -> Api:
        return Api(tokenizer, tmp_path, access=Access(keys=KeyRing(path), admin_token=admin_token))

    return build


@pytest.fixture
def api(make: Make) -> Api:
    return make()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/chat/completions", {"json": {"model": MODEL, "messages": [USER]}}),
    ("POST", "/v1/completions", {"json": {"model": MODEL, "prompt": "Why?"}}),
    ("POST", "/v1/chunks", {"json": {"documents": ["abc"]}}),
    ("GET", "/v1/models", {}),
    ("GET", "/version", {}),
    ("GET", "/metrics", {}),
    ("GET", "/docs", {}),
    ("GET", "/openapi.json", {}),
]
ADMIN_CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/v1/cache", {}),
    ("GET", "/v1/cache/chunks", {}),
    ("DELETE", "/v1/cache", {"params": {"tier": "host"}}),
    ("POST", "/v1/cache/verify", {"json": {"tier": "host"}}),
]


@pytest.mark.parametrize(("method", "url", "options"), CALLS)
def test_a_key_is_needed_and_enough(api: Api, method: str, url: str, options: dict[str, Any]):
    missing = api.ask(method, url, **options)
    assert error_of(missing, 401)["code"] == "missing_api_key"
    assert missing.headers["www-authenticate"] == "Bearer"
    for wrong in ("Bearer cs-tw", "bearer cs-two2", "Bearer cs-two cs-two", "Bearer ß"):
        response = api.ask(
            method, url, headers={"Authorization": wrong.encode("latin-1")}, **options
        )
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert "cs-tw" not in response.text
    for useless in ("Basic cs-two", "Bearer", "Bearer ", "cs-two", ""):
        response = api.ask(method, url, headers={"Authorization": useless}, **options)
        assert error_of(response, 401)["code"] == "missing_api_key"
    twice = [("Authorization", "Bearer cs-two"), ("Authorization", "Bearer cs-one")]
    assert api.ask(method, url, headers=twice, **options).status_code == 401
    assert api.scheduler.profiles == [] and api.engine.fake_cache.host == {}
    for key in KEYS:
        assert api.ask(method, url, headers=bearer(key), **options).status_code == 200
    assert api.ask(method, url, headers={"authorization": "bearer cs-two"}, **options).is_success


def test_every_route_but_the_probes_is_closed(api: Api):
    """A route that somebody adds is closed too: it is the path that is asked about, not a list."""
    for route in api.app.routes:
        for method in getattr(route, "methods", ()):
            response = api.ask(method, route.path)
            assert response.status_code == (200 if route.path in ("/health", "/ping") else 401)
    assert error_of(api.ask("GET", "/nowhere"), 401)["code"] == "missing_api_key"
    assert api.ask("GET", "/nowhere", headers=bearer("cs-two")).status_code == 404


def test_health_tells_strangers_no_more_than_that(api: Api):
    assert api.ask("GET", "/health").json() == {"status": "ok"}
    assert "replicas" in api.ask("GET", "/health", headers=bearer("cs-two")).json()
    assert "replicas" in api.ask("GET", "/health", headers=bearer(ADMIN)).json()
    assert api.ask("GET", "/health", headers=bearer("x")).json() == {"status": "ok"}


def test_the_probes_are_open_behind_a_prefix_too(api: Api):
    async def status_of(path: str) -> int:
        transport = httpx.ASGITransport(app=api.app, root_path="/rag")
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get(path)).status_code

    for path, status in (("/rag/health", 200), ("/rag/v1/models", 401), ("/rag/rag/health", 401)):
        assert asyncio.run(status_of(path)) == status


@pytest.mark.parametrize(("method", "url", "options"), ADMIN_CALLS)
def test_no_tenant_is_an_administrator(make: Make, method: str, url: str, options: dict[str, Any]):
    api = make()
    assert error_of(api.ask(method, url, **options), 401)["code"] == "missing_api_key"
    error = error_of(api.ask(method, url, headers=bearer("cs-two"), **options), 403)
    assert error["code"] == "not_admin" and error["type"] == "permission_error"
    assert api.ask(method, url, headers=bearer(ADMIN), **options).status_code == 200
    # without a token there are no administrators, and nothing is open
    api = make(admin_token=None)
    error = error_of(api.ask(method, url, headers=bearer("cs-two"), **options), 403)
    assert "does not have" in error["message"]
    assert error_of(api.ask(method, url, headers=bearer(ADMIN), **options), 401)


def test_the_admin_token_is_nobodys_key(api: Api):
    for method, url, options in CALLS[:3]:
        error = error_of(api.ask(method, url, headers=bearer(ADMIN), **options), 403)
        assert error["code"] == "no_tenant"
    assert api.ask("GET", "/metrics", headers=bearer(ADMIN)).status_code == 200


def num_missed(api: Api, key: str, documents: list[str], **fields: Any) -> int:
    answer = api.chat(headers=bearer(key), documents=documents, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["cachesmith"]["num_miss_tokens"]


def test_tenants_find_nothing_of_each_other(api: Api):
    documents = ["the same passage", "another one"]
    num_tokens = sum(map(len, documents))
    assert num_missed(api, "cs-one", documents) == num_tokens
    assert num_missed(api, "cs-one", documents) == 0
    assert num_missed(api, "cs-two", documents) == num_tokens
    assert num_missed(api, "cs-two", documents) == 0
    # nor with a salt that the other one's store was written with
    stolen = api.request().cache_salt
    for salt in ("one", stolen, key_hash(b"cs-two")):
        assert num_missed(api, "cs-one", documents, cache_salt=salt) == num_tokens
        assert api.request().cache_salt not in (salt, stolen)
    assert num_missed(api, "cs-one", documents, cache_salt="one") == 0  # a salt works as before


def test_ingested_chunks_are_the_tenants_own(api: Api):
    body = {"documents": ["abc"], "cache_salt": "s"}

    def ask(method: str, chunk_id: str, key: str) -> httpx.Response:
        return api.ask(method, f"/v1/chunks/{chunk_id}", headers=bearer(key))

    ids = {
        key: api.ask("POST", "/v1/chunks", json=body, headers=bearer(key)).json()["data"][0]["id"]
        for key in KEYS
    }
    assert ids["cs-one"] == ids["cs-one-more"] != ids["cs-two"]
    assert num_missed(api, "cs-two", ["abc"], cache_salt="s") == 0
    mine, stored = ids["cs-one"], ids["cs-one"].partition("-")[0]
    for method in ("GET", "DELETE"):
        for chunk_id in (mine, stored, f"{stored}-{ids['cs-two'].partition('-')[2]}", "%FF", "-"):
            error = error_of(ask(method, chunk_id, "cs-two"), 404)
            assert error["code"] == "chunk_not_found"
        assert ask(method, stored, "cs-one").status_code == 404
    shown = ask("GET", mine, "cs-one-more").json()
    assert (shown["id"], shown["num_tokens"]) == (mine, 3)
    # an administrator knows it by the store's id, which the list has, and by the tenant's
    listed = api.ask("GET", "/v1/cache/chunks", headers=bearer(ADMIN)).json()["data"]
    assert {entry["id"] for entry in listed} == {i.partition("-")[0] for i in ids.values()}
    assert ask("GET", stored, ADMIN).status_code == ask("GET", mine, ADMIN).status_code == 200
    assert ask("DELETE", mine, "cs-one").json() == {
        "id": mine, "object": "chunk", "deleted": True,
    }  # fmt: skip
    assert ask("GET", mine, "cs-one").status_code == 404
    assert ask("GET", ids["cs-two"], "cs-two").status_code == 200
    assert ask("DELETE", ids["cs-two"].partition("-")[0], ADMIN).status_code == 200


def test_every_ingress_and_every_start_derives_the_same(make: Make):
    salts = set()
    for api in (make(), make()):
        api.chat(headers=bearer("cs-one"), documents=["abc"])
        salts.add(api.request().cache_salt)
    assert len(salts) == 1


def test_without_keys_salts_and_ids_stay_what_they_are(tokenizer, tmp_path: Path):
    for access_ in (None, Access(admin_token=ADMIN)):
        api = Api(tokenizer, tmp_path, access=access_)
        for headers in ({}, bearer("anything"), bearer(ADMIN)):
            api.chat(headers=headers, documents=["abc"], cache_salt="me")
            assert api.request().cache_salt == "me"
            api.chat(headers=headers, documents=["abc"])
            assert api.request().cache_salt == ""


def test_a_rotated_key_keeps_the_tenants_store(api: Api, path: Path):
    assert num_missed(api, "cs-one", ["abc"]) == 3
    write_keys(path, {**KEYS, "cs-new": "one"})
    assert num_missed(api, "cs-new", ["abc"]) == 0
    assert num_missed(api, "cs-one", ["abc"]) == 0  # both hold for a while
    write_keys(path, {"cs-new": "one", "cs-two": "two"})
    assert error_of(api.chat(headers=bearer("cs-one")), 401)["code"] == "invalid_api_key"
    assert num_missed(api, "cs-new", ["abc"]) == 0


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("keys: [")])
def test_a_file_that_goes_wrong_changes_nothing(
    api: Api, path: Path, damage: Callable[[Path], object], caplog
):
    damage(path)
    for _ in range(3):
        assert api.chat(headers=bearer("cs-one")).status_code == 200
    assert api.chat(headers=bearer("cs-none")).status_code == 401
    (told,) = [record for record in caplog.records if "api_keys_not_read" in record.message]
    assert str(path) in told.message
    write_keys(path, {"cs-new": "one"})
    assert api.chat(headers=bearer("cs-new")).status_code == 200
    assert api.chat(headers=bearer("cs-one")).status_code == 401


def test_without_a_good_file_no_ingress_starts(tmp_path: Path):
    with pytest.raises(KeyFileError, match="can not read"):
        KeyRing(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(KeyFileError, match="tenant_secret"):
        KeyRing(tmp_path / "empty.yaml")


def test_every_known_key_is_compared_whichever_fits(path: Path, monkeypatch):
    """In constant time each: neither the place of a key in the file nor its beginning shows."""
    ring, compared = KeyRing(path), []

    def compare(known: str, wanted: str) -> bool:
        compared.append(known)
        return known == wanted

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    every = [key_hash(key.encode()) for key in KEYS]
    for key in (*KEYS, "cs-none"):
        compared.clear()
        tenant = ring.tenant_of(key.encode())
        assert compared == every
        assert (tenant.name if tenant else None) == KEYS.get(key)


def test_keys_are_in_no_log_and_no_answer(api: Api, caplog):
    caplog.set_level(logging.DEBUG)
    answers = [api.chat(headers=bearer(key), documents=["abc"]) for key in (*KEYS, "cs-wrong")]
    api.scheduler.answers = [RuntimeError("boom")]
    answers.append(api.chat(headers=bearer("cs-one")))
    answers += [
        api.ask(method, url, headers=bearer("cs-one"), **options)
        for method, url, options in CALLS + ADMIN_CALLS
    ]
    shown = caplog.text + "".join(f"{a.headers} {a.text}" for a in answers)
    assert "boom" in shown
    assert [word for word in (*KEYS, "cs-wrong", SECRET, ADMIN) if word in shown] == []
    assert ADMIN not in repr(IngressConfig(model="m", model_name="m", admin_token=ADMIN))


# --- size ----------------------------------------------------------------------------------------


class Counting:
    """A body in pieces. `num_read` of them were taken."""

    def __init__(self, body: bytes, *, size: int = 100) -> None:
        self.pieces = [body[i : i + size] for i in range(0, len(body), size)]
        self.num_read = 0

    async def receive(self) -> dict[str, Any]:
        piece = self.pieces[self.num_read] if self.num_read < len(self.pieces) else b""
        self.num_read += 1
        more = self.num_read < len(self.pieces)
        return {"type": "http.request", "body": piece, "more_body": more}


def post(api: Api, body: Counting, **headers: str) -> tuple[int, dict[str, Any]]:
    """Send it piece by piece, with no length of its own."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(name.replace("_", "-").encode(), v.encode()) for name, v in headers.items()],
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(api.app(scope, body.receive, send))
    return sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent))


def chat_of(num_bytes: int) -> bytes:
    """A request's body of exactly this size."""
    start = json.dumps({"model": MODEL, "max_tokens": 1, "messages": [USER]})[:-1]
    start += ', "user": "'
    return f'{start}{"x" * (num_bytes - len(start) - 2)}"}}'.encode()


def test_a_body_at_the_limit_is_served_and_a_longer_one_refused(tokenizer, tmp_path: Path):
    api = Api(tokenizer, tmp_path, max_body_bytes=1000)
    assert post(api, Counting(chat_of(1000)))[0] == 200
    long = Counting(chat_of(100_000))
    status, body = post(api, long)
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    assert body["error"]["type"] == "invalid_request_error" and "1000" in body["error"]["message"]
    assert long.num_read == 11  # it was not read to its end
    announced = Counting(chat_of(1001))
    assert post(api, announced, content_length="1001")[0] == 413
    assert announced.num_read == 0
    assert len(api.scheduler.profiles) == 1


def test_a_strangers_body_is_not_read(tokenizer, tmp_path: Path, path: Path):
    api = Api(tokenizer, tmp_path, access=Access(keys=KeyRing(path)))
    body = Counting(chat_of(1000))
    assert post(api, body)[0] == 401
    assert post(api, body, authorization="Bearer cs-none")[0] == 401
    assert body.num_read == 0
    assert post(api, body, authorization="Bearer cs-two")[0] == 200


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"1" * 10_000])
def test_bodies_made_to_hurt_are_plain_errors(tokenizer, tmp_path: Path, body: bytes):
    api = Api(tokenizer, tmp_path)
    status, answer = post(api, Counting(body, size=65536), content_type="application/json")
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


def test_what_a_client_sends_gets_into_no_header_and_no_line_of_the_log(api: Api, caplog):
    caplog.set_level(logging.DEBUG)
    evil = "x\r\nSet-Cookie: a=b\n\x1b[31mERROR forged"
    api.scheduler.answers = [RuntimeError("boom")]
    api.app.add_api_route("/fails/{name}", lambda name: 1 / 0)
    answers = [
        api.chat(headers=bearer("cs-one"), model=evil),
        api.chat(headers=bearer("cs-one"), **{evil: 1}),
        api.chat(headers={**bearer("cs-one"), "x-slo-ttft-ms": "x\x1b[31m"}),
        api.ask("GET", f"/v1/chunks/{httpx.QueryParams({'a': evil})}", headers=bearer("cs-one")),
        api.ask("GET", "/no%0d%0aSet-Cookie:%20a=b%1b[31m", headers=bearer("cs-one")),
        api.ask("GET", "/fails/%0d%0aERROR%20forged%1b[31m", headers=bearer("cs-one")),
    ]
    assert [answer.status_code for answer in answers] == [404, 400, 400, 404, 404, 500]
    for answer in answers:
        assert "set-cookie" not in answer.headers
        assert "\n" not in answer.text and "\x1b" not in answer.text
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("cluster")]
    assert any("request_failed" in message for message in ours)
    assert [message for message in ours if not message.isprintable()] == []
