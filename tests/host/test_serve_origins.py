"""Whose pages may ask a server without keys, and by which names; a name that a client gave is not quoted whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from command import Kerngen
from played_engine import TINY, played_service
from starlette.testclient import TestClient

from kerngen.errors import UsageError
from kerngen.runtime.serve.app import make_app
from kerngen.runtime.serve.origins import allowed

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@contextmanager
def asked_at(
    url: str, *, origins: tuple[str, ...] = (), hosts: tuple[str, ...] = (), keys: tuple[str, ...] = ()
) -> Iterator[TestClient]:
    service, _ = played_service()
    with TestClient(make_app(service, keys, allowed(origins, hosts, "127.0.0.1")), base_url=url) as client:
        yield client


@pytest.mark.parametrize(("url", "origin", "status"), [
    ("http://localhost:8000", None, 200),
    ("http://localhost:8000", "http://localhost:8000", 200),
    ("http://LOCALHOST:8000", "http://localhost:8000", 200),
    ("http://10.1.2.3", "http://10.1.2.3", 200),
    ("http://10.1.2.3", "http://10.1.2.3:80", 200),
    ("http://10.1.2.3", "https://10.1.2.3", 200),
    ("http://[::1]:8000", "http://[::1]:8000", 200),
    ("http://localhost:8000", "http://localhost:8001", 403),
    ("http://localhost:8000", "http://localhost", 403),
    ("http://localhost:8000", "http://127.0.0.1:8000", 403),
    ("http://localhost:8000", "http://localhost:8000.evil.example", 403),
    ("http://localhost:8000", "http://evil.example", 403),
    ("http://localhost:8000", "null", 403),
    ("http://localhost:8000", "", 403),
    ("http://[::1]:8000", "http://[::2]:8000", 403),
    ("http://evil.example:8000", None, 403),
    ("http://localhost.evil.example:8000", "http://localhost.evil.example:8000", 403),
    ("http://127.0.0.1.evil.example", None, 403),
])  # fmt: skip
def test_a_server_without_keys_is_asked_by_its_own_pages_and_names(url: str, origin: str | None, status: int) -> None:
    headers = {"Content-Type": "text/plain"} | ({} if origin is None else {"Origin": origin})
    with asked_at(url) as client:
        for method, path in (("POST", CHAT), ("POST", "/tokenize"), ("GET", "/v1/models")):
            body = {"prompt": "Hi"} if path == "/tokenize" else HI
            answer = client.request(method, path, json=None if method == "GET" else body, headers=headers)
            assert answer.status_code == status, (path, answer.text)
            if status == 403:
                assert "--allow-" in answer.json()["error"]["message"]
        assert client.get("/health", headers=headers).status_code == 200  # a probe may call it anything
        assert client.options(CHAT, headers=headers).status_code == (405 if status == 200 else 403)


def test_pages_that_are_allowed_ask_and_read() -> None:
    theirs = "https://chat.example:8443"
    preflight = {"Origin": theirs, "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    for keys in ((), ("secret",)):
        with asked_at("http://localhost:8000", origins=(theirs, "app://desk"), keys=keys) as client:
            told = client.options(CHAT, headers=preflight)
            assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, theirs)
            assert "authorization" in told.headers["access-control-allow-headers"].lower()
            for origin in (theirs, "app://desk"):
                headers = {"Origin": origin, "Authorization": "Bearer secret"}
                answer = client.post(CHAT, json=HI, headers=headers)
                assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
            other = client.options(CHAT, headers=preflight | {"Origin": "http://evil.example"})
            assert "access-control-allow-origin" not in other.headers
            answer = client.post(CHAT, json=HI, headers={"Origin": "http://evil.example"})
            assert answer.status_code == (401 if keys else 403)
            assert "access-control-allow-origin" not in answer.headers
    with asked_at("http://localhost:8000", origins=("*",)) as client:
        answer = client.post(CHAT, json=HI, headers={"Origin": "http://any.example"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


def test_names_that_are_allowed_may_be_asked() -> None:
    with asked_at("http://gpu1.example:8000", hosts=("GPU1.example",)) as client:
        assert client.post(CHAT, json=HI).status_code == 200
        assert client.post(CHAT, json=HI, headers={"Host": "gpu2.example"}).status_code == 403
    with asked_at("http://any.example", hosts=("*",)) as client:
        assert client.post(CHAT, json=HI).status_code == 200
        assert client.post(CHAT, json=HI, headers={"Origin": "http://other.example"}).status_code == 403
    with asked_at("http://any.example", keys=("secret",)) as client:  # no page has it
        assert client.post(CHAT, json=HI, headers={"Authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize(("option", "value"), [
    ("--allow-origin", "chat.example"), ("--allow-origin", "https://chat.example/"), ("--allow-origin", ""),
    ("--allow-origin", "https://*.example"), ("--allow-host", "gpu1:8000"), ("--allow-host", "http://gpu1"),
    ("--allow-host", ""), ("--allow-host", "*.example"),
])  # fmt: skip
def test_what_is_no_origin_is_refused_before_anything_loads(kerngen: Kerngen, option: str, value: str) -> None:
    code, _, err = kerngen("serve", str(TINY), "--port", "0", option, value)
    assert (code, f"{option} {value}: no " in err) == (2, True), err
    with pytest.raises(UsageError):
        allowed(*(((value,), ()) if option == "--allow-origin" else ((), (value,))), "127.0.0.1")


def test_what_a_client_said_is_not_quoted_whole() -> None:
    long = "x" * 5000
    with asked_at("http://localhost") as client:
        answers = [
            client.post(CHAT, json=HI | {"model": long}),
            client.get(f"/v1/models/{long}"),
            client.post(CHAT, json=HI | {"logit_bias": {long: 1}}),
            client.post(CHAT, json=HI | {"tool_choice": {"type": "function", "function": {"name": long}}}),
            client.post(CHAT, json=HI | {"response_format": {"type": long}}),
            client.post(CHAT, json={"messages": [{"role": long, "content": "Hi"}]}),
            client.post(CHAT, json=HI, headers={"Host": long}),
        ]
    for answer in answers:
        assert 400 <= answer.status_code < 500
        assert len(answer.text) < 2500, answer.text
    assert max(len(answers[0].text), len(answers[1].text), len(answers[-1].text)) < 400
