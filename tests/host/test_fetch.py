"""What a request's URL may reach: listed hosts of the public internet, within bounds."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kerngen.errors import UsageError
from kerngen.runtime.media.fetch import _fetch, _Place, _place_of, _resolved, read_url, why_refused
from kerngen.runtime.media.limits import MediaLimits
from kerngen.system.cancellation import Cancellation

HOSTS = MediaLimits(hosts=("files.test", "127.0.0.1", "[::1]", "localhost"), fetch_s=5.0)
HOST = "files.test"
BODY = bytes(range(256)) * 40

# -- which URLs


@pytest.mark.parametrize("url", [
    "file:///etc/passwd", "ftp://files.test/a", "gopher://files.test/a", "//files.test/a", "files.test/a", "", "http:",
    "http://", "https:///a", "http:/files.test/a", "https:files.test",
    "http://u@files.test/", "http://u:p@files.test/", "http://@files.test/", "http://files.test@evil.test/",
    "http://files.test\\@evil.test/", "http://files.test\\.evil.test/", "http:\\\\files.test/", "http://files.test/a\\b",
    "http://files.test/a b", "http://files.test/\r\nX: y", "http://files.test/\n", "\nhttp://files.test/",
    " http://files.test/", "http://files.test/\x00", "http://files.test\t/", "http://files.test/\x7f", "http://files.test/é",
    "http://ﬁles.test/", "http://files。test/", "http://%66iles.test/", "http://files.test%00/",
    "http://files.test:22/", "http://files.test:8080/", "http://files.test:443443/", "http://files.test:/",
    "http://files.test:+80/", "http://[::1%25eth0]/", "http://[v1.a]/", "http://[files.test]/", "http://::1/",
    "https://files.test:443:80/", "http://files.test;evil.test/", "http://a_b.test/", "http://files.test/" + "a" * 9000,
])  # fmt: skip
def test_urls_that_could_be_read_in_two_ways_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="the URL"):
        read_url(url, 100, HOSTS)


@pytest.mark.parametrize("url", ["http://evil.test/", "https://files.test.evil.test/", "https://xfiles.test/",
                                 "http://files.test./", "http://169.254.169.254/latest/meta-data/",
                                 "http://0/", "http://2130706433/", "http://0x7f.1/"])  # fmt: skip
def test_only_listed_hosts_are_asked(url: str) -> None:
    with pytest.raises(UsageError, match="are not fetched"):
        read_url(url, 100, HOSTS)
    with pytest.raises(UsageError, match="are not fetched"):
        read_url("https://files.test/a.png", 100, MediaLimits())


def test_a_url_names_one_place() -> None:
    assert _place_of("HTTPS://Files.Test?a=b@c#/d@e") == _Place("https", HOST, 443, "/?a=b@c")
    assert _place_of("http://files.test") == _Place("http", HOST, 80, "/")
    assert _place_of("http://files.test:443/%2e%2e/a%00?x[]={}|^`'\"<>#").host_header == "files.test:443"
    assert _place_of("https://[2606:4700::1111]:80/~a") == _Place("https", "[2606:4700::1111]", 80, "/~a")
    assert _place_of("https://files.test:443/").host_header == HOST


# -- which addresses

PRIVATE = """
127.0.0.1 127.8.9.1 0.0.0.0 0.1.2.3 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 100.64.0.1 100.127.255.255
169.254.169.254 192.0.0.1 192.0.0.8 192.0.2.1 192.88.99.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.1.1.1
240.0.0.1 255.255.255.255 :: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::ffff:0:8.8.8.8 64:ff9b::a00:1
64:ff9b::808:808 64:ff9b:1::1 100::1 2001::1 2001:db8::1 2001:10::1 2002:7f00:1::1 2002:808:808::1 3fff::1 5f00::1
fc00::1 fd12::1 fe80::1 fe80::1%eth0 fec0::1 ff02::1 ff0e::1 8.8.8 08.8.8.8 localhost
"""
PUBLIC = """
1.1.1.1 8.8.8.8 93.184.216.34 100.63.255.255 100.128.0.1 172.32.0.1 192.167.255.255 2606:4700::1111 2a00:1450::1
"""


def test_addresses_are_of_the_public_internet() -> None:
    assert [a for a in PRIVATE.split() if why_refused(a) is None] == []
    assert [a for a in PUBLIC.split() if why_refused(a) is not None] == []


@pytest.mark.parametrize("url", ["http://localhost/", "http://127.0.0.1/", "http://[::1]/", "https://127.0.0.1/"])
def test_this_machine_is_not_asked_though_it_is_listed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *a: pytest.fail("was asked"))
    with pytest.raises(UsageError, match="cannot be fetched") as found:
        read_url(url, 100, HOSTS)
    assert "no public address" in str(found.value.__cause__)
    assert "address" not in str(found.value)


@pytest.mark.parametrize("addresses", [["10.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::ffff:127.0.0.1"], []])
def test_a_name_with_a_private_address_is_refused(addresses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *a: pytest.fail("was asked"))
    with pytest.raises(UsageError, match="cannot be fetched"):
        _fetch(_Place("http", HOST, 80, "/"), 100, 5.0, resolve=lambda host, port: addresses)


# -- what a host answers

Answer = Callable[[socket.socket], None]


def says(*parts: bytes, every_s: float = 0.0) -> Answer:
    def answer(client: socket.socket) -> None:
        for part in parts:
            client.sendall(part)
            time.sleep(every_s)

    return answer


def ok(body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % (len(body) if length is None else length), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Server:
    """Answers each connection as told, and keeps what it was asked. It never says no to a host's name."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[bytes] = []
        self._answer, self._tls = answer, tls
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(client,), daemon=True).start()

    def _one(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            head = b""
            while b"\r\n\r\n" not in head and (more := client.recv(4096)):
                head += more
            self.asked.append(head)
            self._answer(client)
        except OSError:  # who asked is gone, as is meant
            pass
        finally:
            client.close()

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)


def fetched(server: Server, *, scheme: str = "http", host: str = HOST, most: int = 20_000, within_s: float = 5.0,
            target: str = "/a.png?b", **options: Any) -> bytes:  # fmt: skip
    options = {"resolve": lambda name, port: ["127.0.0.1"], "refusal": lambda address: None, **options}
    return _fetch(_Place(scheme, host, server.port, target), most, within_s, **options)


@pytest.mark.parametrize("answer", [
    says(ok(BODY)),
    says(ok(BODY, b"Set-Cookie: a=b", b"Content-Type: text/html", b"Content-Encoding: Identity")),
    says(b"HTTP/1.0 200 OK\r\n\r\n" + BODY),
    says(CHUNKED + b"2800\r\n" + BODY + b"\r\n0\r\n\r\n"),
    says(*[ok(BODY)[n : n + 999] for n in range(0, 10_400, 999)], every_s=0.01),
], ids=["length", "headers", "until the end", "chunks", "in pieces"])  # fmt: skip
def test_a_file_is_fetched(answer: Answer) -> None:
    with Server(answer) as server:
        assert fetched(server) == BODY
        assert fetched(server, most=len(BODY)) == BODY
    head = server.asked[0].decode().split("\r\n")
    assert head[0] == "GET /a.png?b HTTP/1.1"
    assert f"Host: files.test:{server.port}" in head
    assert "Accept-Encoding: identity" in head
    assert not [h for h in head if h.lower().startswith(("cookie", "authorization", "referer", "proxy"))]


@pytest.mark.parametrize("status", [201, 204, 206, 301, 302, 303, 307, 308, 400, 401, 403, 404, 500])
def test_redirects_and_errors_are_not_followed_nor_told(status: int) -> None:
    with Server(says(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")) as other:
        answer = (
            f"HTTP/1.1 {status} Secret\r\nLocation: http://127.0.0.1:{other.port}/\r\nContent-Length: 6\r\n\r\nsecret"
        )
        with Server(says(answer.encode())) as server, pytest.raises(UsageError) as found:
            fetched(server)
        assert str(found.value) == "a file of http://files.test cannot be fetched"
        assert str(status) in str(found.value.__cause__)
        assert not other.asked


@pytest.mark.parametrize("answer", [
    says(b""), says(b"\x89PNG\r\n\x1a\n" + bytes(100)), says(b"SSH-2.0-OpenSSH\r\n"), says(b"HTTP/1.1 abc\r\n\r\n"),
    says(ok(BODY, length=len(BODY) + 1)), says(ok(BODY, b"Content-Encoding: gzip")),
    says(ok(BODY, b"A: " + b"b" * 70_000)), says(ok(BODY, *[b"A: b"] * 200)), says(CHUNKED + b"xyz\r\n" + BODY),
    says(CHUNKED + b"2800\r\n" + BODY[:99]),
], ids=["nothing", "png", "ssh", "status", "short", "gzip", "header", "headers", "chunk", "short chunk"])  # fmt: skip
def test_what_is_no_whole_answer_is_an_error(answer: Answer) -> None:
    with Server(answer) as server, pytest.raises(UsageError, match=r"cannot be fetched$"):
        fetched(server)


def _endless(head: bytes, part: bytes) -> tuple[Answer, list[int]]:
    sent = [0]

    def answer(client: socket.socket) -> None:
        client.sendall(head)
        while True:
            client.sendall(part)
            sent[0] += len(part)

    return answer, sent


@pytest.mark.parametrize(("head", "part"), [(b"HTTP/1.1 200 OK\r\n\r\n", b"a" * 4096),
                                            (CHUNKED, b"1000\r\n" + b"a" * 4096 + b"\r\n")],
                         ids=["endless", "chunks"])  # fmt: skip
def test_too_many_bytes_are_cut(head: bytes, part: bytes) -> None:
    answer, sent = _endless(head, part)
    with Server(answer) as server, pytest.raises(UsageError, match="more than 20,000 bytes"):
        fetched(server)
    assert sent[0] < 16 << 20, "what sockets hold, and no more"


def test_a_length_that_is_too_much_is_enough() -> None:
    with Server(says(ok(b"", length=20_001), every_s=3)) as server:
        began = time.monotonic()
        with pytest.raises(UsageError, match="more than 20,000 bytes"):
            fetched(server)
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("answer", [
    says(*[b"H"] * 100, every_s=0.05), says(b"HTTP/1.1 200 OK\r\n", *[b"A"] * 100, every_s=0.05),
    says(ok(b"", length=1000), *[b"a"] * 100, every_s=0.05), says(CHUNKED, *[b"1\r\na\r\n"] * 100, every_s=0.05),
    says(*[b"HTTP/1.1 100 Continue\r\n\r\n"] * 100, every_s=0.05), says(b"", every_s=5),
], ids=["status", "header", "body", "chunks", "continue", "silence"])  # fmt: skip
def test_a_slow_drip_ends_at_the_deadline(answer: Answer) -> None:
    with Server(answer) as server:
        began = time.monotonic()
        with pytest.raises(UsageError, match=r"cannot be fetched within 0.5 s"):
            fetched(server, within_s=0.5)
        assert time.monotonic() - began < 1.5


def test_a_file_that_nobody_wants_any_more_is_not_waited_for() -> None:
    work = Cancellation()
    with Server(says(ok(b"", length=1000), every_s=5)) as server, ThreadPoolExecutor(1) as threads:
        fetching = threads.submit(fetched, server, work=work)
        while not server.asked:
            time.sleep(0.001)
        work.cancel()
        with pytest.raises(CancelledError):
            fetching.result(1)
        with pytest.raises(CancelledError):
            fetched(server, work=work)
    assert len(server.asked) == 1


def test_a_slow_resolver_ends_at_the_deadline() -> None:
    def resolve(host: str, port: int) -> Sequence[str]:
        time.sleep(2)
        return ["127.0.0.1"]

    with Server(says(ok(BODY))) as server, pytest.raises(UsageError, match=r"within 0.2 s"):
        fetched(server, within_s=0.2, resolve=resolve)
    assert not server.asked


def test_a_name_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers with a public address first, for the check, and with a private one then, for the connection."""
    names: list[str] = []
    real = socket.getaddrinfo

    def rebinding(host: Any, *rest: Any, **options: Any) -> Any:
        if host == HOST:
            names.append(host)
            return real("127.0.0.1" if len(names) == 1 else "127.0.0.2", *rest, **options)
        return real(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    checked: list[str] = []
    with Server(says(ok(BODY))) as server:
        assert fetched(server, resolve=_resolved, refusal=lambda address: checked.append(address)) == BODY
    assert (names, checked) == ([HOST], ["127.0.0.1"])


def test_another_address_is_tried_where_one_does_not_answer() -> None:
    with Server(says(ok(BODY))) as server:
        assert fetched(server, resolve=lambda host, port: ["127.0.0.9", "127.0.0.1"]) == BODY
        with pytest.raises(UsageError, match="cannot be fetched"):
            fetched(server, resolve=lambda host, port: ["127.0.0.9"])


def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(says(ok(b"proxy"))) as proxy, Server(says(ok(BODY))) as server:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
            monkeypatch.setenv(name.upper(), f"http://127.0.0.1:{proxy.port}")
        assert fetched(server) == BODY
    assert not proxy.asked


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of files.test, signed by itself: (certificate, key)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))  # fmt: skip
    return folder / "cert.pem", folder / "key.pem"


def test_https_asks_for_the_hosts_name_and_checks_it(certificate: tuple[Path, Path]) -> None:
    named: list[str | None] = []
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    tls.sni_callback = lambda connection, name, context: named.append(name)
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    with Server(says(ok(BODY)), tls) as server:
        assert fetched(server, scheme="https", tls=trusting) == BODY
        assert named == [HOST]
        with pytest.raises(UsageError, match=r"cannot be fetched$") as found:
            fetched(server, scheme="https", host="other.test", tls=trusting)
        assert "other.test" in str(found.value.__cause__)
        with pytest.raises(UsageError, match=r"https://files.test cannot be fetched$"):
            fetched(server, scheme="https")  # nobody answers for the certificate
    assert len(server.asked) == 1


def test_a_handshake_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = _Place("https", HOST, silent.getsockname()[1], "/")
        began = time.monotonic()
        with pytest.raises(UsageError, match=r"within 0.4 s"):
            _fetch(place, 100, 0.4, resolve=lambda host, port: ["127.0.0.1"], refusal=lambda address: None)
        assert time.monotonic() - began < 1.5
