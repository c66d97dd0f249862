"""`kerngen db`, `worker` and a cluster's `tune` with wrong arguments, files that are not there, outputs that cannot be
written: one clear message with a hint, the right exit code, and nothing is made. All in this process.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command import ROOT, Kerngen

from kerngen.tuning_db import Store

ABSENT = r"absent\.db: no such file\n  kerngen tune --db FILE makes one"
NO_BUNDLE = r"absent\.kgdb: No such file or directory\n  kerngen db export makes one"
UNWRITABLE = r"cannot write /proc/nowhere/\w+: No such file or directory\n  name another place with -o"
NO_FOLDER = r"cannot write notes\.txt/\w+: Not a directory\n  name another place with -o"
NO_KERNEL = r"unknown kernel 'nope'\n  known: .*rmsnorm"
NO_ARCH = r"unknown arch 'sm71'\n  did you mean sm75\? known: sm70"
NO_DEVICE = r"unknown device 'nope'\n  known: V100"
NO_CHANGE = r"absent\.db is not there: there is nothing to change\n  name another with --db"
NOTHING = r"nothing\.db is an empty file: there is nothing to change\n  .*kerngen tune --db FILE fills one"
NO_SERVER = r"a cluster fills a tuning database on PostgreSQL\n  --db postgresql\+psycopg://USER@HOST/NAME"
REFUSED = r"127\.0\.0\.1:1/x: connection failed: .*\n  is that server up"
SERVER = "postgresql+psycopg://u@127.0.0.1:1/x"
TUNE = "--arch sm70 --model gemma-4-31b --kernel embed"


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("empty") / "other.db"
    Store.open(path).close()
    return path.read_bytes()


@pytest.fixture
def kerngen(
    empty_database: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Kerngen:
    (tmp_path / "other.db").write_bytes(empty_database)
    (tmp_path / "notes.txt").write_text("Not a database, and somebody's work.\n")
    (tmp_path / "nothing.db").touch()
    (tmp_path / "empty").mkdir()
    return Kerngen(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(("command", "code", "says"), [
    # files that are not there
    ("db ls --db absent.db", 1, ABSENT),
    ("db show rmsnorm --db absent.db", 1, ABSENT),
    ("db explain rmsnorm --db absent.db", 1, ABSENT),
    ("db report -o r.html --db absent.db", 1, ABSENT),
    ("db studies -o s.journal --db absent.db", 1, ABSENT),
    ("db export -o x.kgdb --db absent.db --unsigned", 1, ABSENT),
    ("db dump -o text --db absent.db", 1, ABSENT),
    ("db stats --db absent.db", 1, ABSENT),
    ("db diff other.db absent.db", 1, ABSENT),
    ("db diff absent.db other.db", 1, ABSENT),
    ("db merge all.db absent.db", 1, ABSENT),
    ("db merge other.db absent.db", 1, r"absent\.db: no such file\n  INTO comes first, here other\.db"),
    ("db import absent.kgdb", 1, NO_BUNDLE),
    ("db verify absent.kgdb", 1, NO_BUNDLE),
    ("db install absent.kgdb", 1, NO_BUNDLE),
    ("db sign absent.kgdb --key k", 1, r"k: No such file or directory\n  kerngen db keygen FILE makes one"),
    ("db build absent -o x.kgdb", 2, r"absent is not there\n  kerngen db dump -o absent"),
    ("db rebuild --db absent.db", 2, NO_CHANGE),
    ("db rebuild --db nothing.db", 2, NOTHING),
    ("db gc --db nothing.db", 2, NOTHING),
    ("db ls --db nothing.db", 1, r"nothing\.db holds no tuning database: .*\n  kerngen tune --db FILE fills it"),
    ("db rm --kernel rmsnorm --db absent.db", 2, NO_CHANGE),
    ("db gc --db absent.db", 2, NO_CHANGE),
    ("db trust absent.pub", 1, r"absent\.pub: No such file or directory\n  kerngen db keygen"),
    ("db export -o x.kgdb --key absent.key", 1, r"absent\.key: No such file or directory\n  kerngen db keygen"),
    ("db uninstall nope", 2, r"nope is not installed; nothing is\n  kerngen db install --list"),
    ("db trust --remove nope", 2, r"nope is not trusted\n  kerngen db trust --list"),
    ("run TINY --prompt hi --bundle absent --backend torch", 2, r"torch backend looks nothing up\n  leave it out"),
    # what is something else
    ("db verify notes.txt", 1, r"notes\.txt is not an SQLite database\n  name another"),
    ("db import notes.txt", 1, r"notes\.txt is not an SQLite database\n  name another"),
    ("db merge notes.txt other.db", 1, r"notes\.txt is not an SQLite database\n  name another"),
    ("db verify .", 1, r"\. is a folder, not a database\n  name another"),
    ("db build notes.txt -o x.kgdb", 1, r"notes\.txt, line 1: 'kerngen-results' is missing"),
    ("db build empty -o x.kgdb", 1, r"there is no \.txt file in empty\n  kerngen db dump"),
    ("db trust notes.txt", 1, r"notes\.txt is no public key: .*\n  kerngen db keygen FILE"),
    ("db trust --digest xyz", 1, r"'xyz' is no SHA-256: .*\n  kerngen db verify FILE"),
    ("db verify other.db --model gemma-4-31b", 2, r"other\.db is no bundle: it is no sealed file\n  kerngen"),
    # names that are none
    ("db ls --kernel nope", 2, NO_KERNEL),
    ("db diff other.db other.db --kernel nope", 2, NO_KERNEL),
    ("db rm --kernel nope --db other.db", 2, NO_KERNEL),
    ("db rebuild --kernel nope", 2, NO_KERNEL),
    ("db export --kernel nope -o x.kgdb", 2, NO_KERNEL),
    ("db revoke nope --reason x", 2, NO_KERNEL),
    ("db rm --device nope --db other.db", 2, NO_DEVICE),
    ("db dump --device nope -o text", 2, NO_DEVICE),
    ("db export --arch sm71 -o x.kgdb", 2, NO_ARCH),
    ("db diff other.db other.db --arch sm71", 2, NO_ARCH),
    ("db rebuild --arch sm71", 2, NO_ARCH),
    ("db rm --arch sm71 --db other.db", 2, NO_ARCH),
    ("worker --arch sm71", 2, NO_ARCH),
    (f"tune --submit --arch sm71 --model gemma-4-31b --db {SERVER}", 2, NO_ARCH),
    # arguments that do not go together
    ("db verify other.db --arch sm90", 2, r"go with a --model\n  --model"),
    ("db verify other.db --time-budget 5s", 2, r"--time-budget goes with --run\n  kerngen db verify"),
    ("db rm --db other.db", 2, r"name what to forget: .*\n  everything: delete the file"),
    (f"tune --submit {TUNE} --time-budget 5s", 2, r"--submit takes no --time-budget.*\n  the same without"),
    (f"tune --submit {TUNE} --objective step", 2, r"step is not done by a queue's workers\n  --objective measured"),
    (f"tune --submit {TUNE} --device H200", 2, r"device H200 is sm90, not sm70\n  --arch sm90"),
    # no such queue
    ("worker --db absent.db", 2, NO_SERVER),
    ("worker --db nonsense://x", 2, NO_SERVER),
    ("tune --status", 2, NO_SERVER),
    ("tune --cancel --db absent.db", 2, NO_SERVER),
    (f"tune --submit {TUNE}", 2, NO_SERVER),
    (f"worker --db {SERVER}", 1, REFUSED),
    (f"tune --status --db {SERVER}", 1, REFUSED),
    (f"tune --cancel --db {SERVER}", 1, REFUSED),
    # outputs that cannot be written
    ("db report -o /proc/nowhere/page", 1, UNWRITABLE),
    ("db report -o notes.txt/page", 1, NO_FOLDER),
    ("db studies -o /proc/nowhere/s", 1, UNWRITABLE),
    ("db export --kernel rmsnorm -o /proc/nowhere/x", 1, UNWRITABLE),
    ("db export --kernel rmsnorm -o notes.txt", 2, r"notes\.txt is there, and is no bundle\n  name another file"),
    ("db dump --kernel rmsnorm -o /proc/nowhere/text", 1, r"cannot write /proc/nowhere/text/BOARD: .*\n  name"),
    ("db keygen /proc/nowhere/k", 1, r"/proc/nowhere/k: No such file or directory\n  name another place"),
    ("db keygen notes.txt", 1, r"notes\.txt is there already; a key is never written over\n  name another"),
    ("db merge /proc/nowhere/t.db other.db", 1, r"nowhere/t\.db: cannot make its folder: .*\n  name a place"),
    ("db import other.db --db /proc/nowhere/t.db", 1, r"nowhere/t\.db: cannot make its folder: .*\n  name a place"),
    (f"tune {TUNE} --report /proc/nowhere/page", 1, UNWRITABLE),
    (f"compile {TUNE} -o empty", 2, r"empty is a folder, and a bundle is one file\n  -o empty/bundle\.kgdb"),
    (f"compile {TUNE} -o /proc/nowhere/x", 1, UNWRITABLE),
])  # fmt: skip
def test_one_clear_message_with_a_hint(kerngen: Kerngen, command: str, code: int, says: str) -> None:
    tiny = str(ROOT / "examples" / "tiny" / "gemma-4-tiny")
    before = {name: (kerngen.folder / name).read_bytes() for name in kerngen.files()}
    got, out, err = kerngen(*(tiny if word == "TINY" else word for word in command.split()))
    assert (got, out) == (code, ""), err
    assert re.search(rf"\A\w+: .*{says}", err), err
    lines = err.rstrip().splitlines()
    assert len(lines) == 2 or "line 1" in err, "what it is, and a hint"
    after = {name.removesuffix("-wal").removesuffix("-shm") for name in kerngen.files()}
    assert after - set(before) <= {".local/share/kerngen/bundles/.lock"}, "nothing is made"
    assert all((kerngen.folder / name).read_bytes() == was for name, was in before.items())


@pytest.mark.parametrize(("command", "says"), [
    ("db export", "'-o'"), ("db report", "'-o'"), ("db studies", "'-o'"), ("db dump", "'-o'"), ("db build", "FILE"),
    ("db build x", "'-o'"), ("db import", "FILE"), ("db merge", "INTO"), ("db merge a.db", "FILE"),
    ("db verify", "FILE"), ("db diff other.db", "NEW"), ("db revoke rmsnorm", "'--reason'"), ("db sign", "FILE"),
    ("db uninstall", "NAME"), ("db show", "ID"), ("db explain", "ID"), ("db report -o .", "directory"),
    ("db studies -o .", "directory"), ("db export -o .", "directory"), ("db dump -o notes.txt", "is a file"),
    ("db rebuild --jobs 0", "range"), ("db verify x --run slow", "'loads', 'correct', 'fast'"),
    ("db verify x --run fast --time-budget soon", "no duration"), ("db verify x --tolerance -1", "range"),
    ("db explain rmsnorm --top 0", "range"), ("worker --kind nope", "'measure', 'predict', 'compile'"),
    ("worker --heartbeat 0", "range"), ("worker --jobs 0", "range"), ("tune --submit", "--model"),
    (f"tune {TUNE} --report .", "directory"), ("db nope", "No such command 'nope'"),
])  # fmt: skip
def test_misuse_says_how_it_is_used(kerngen: Kerngen, command: str, says: str) -> None:
    got, out, err = kerngen(*command.split())
    assert (got, out) == (2, ""), err
    assert re.match(r"Usage: kerngen .*\nTry 'kerngen .*--help' for help\.\n\nError: .*\n\Z", err), err
    assert says in err
