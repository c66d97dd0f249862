"""Keys and who is trusted: what a signature says, and what counts for nothing."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import Kerngen
from hypothesis import given
from hypothesis import strategies as st

from kerngen.errors import TrustError
from kerngen.tuning_db.dist.keys import SecretKey, user_key, user_key_path
from kerngen.tuning_db.read import trust
from kerngen.tuning_db.read.trust import (
    PublicKey,
    distrust,
    signed_message,
    trust_digest,
    trusted_digests,
    trusted_keys,
    user_folder,
    why_untrusted,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("nobody_is_trusted")

DIGEST = "ab" * 32
# RFC 8032, 7.1, test 2.
SEED = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
PUBLIC = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def sign(*keys: SecretKey, digest: str = DIGEST) -> dict[str, bytes]:
    return {k.public.id: k.sign(signed_message(digest)) for k in keys}


# ---- key files


def test_a_key_signs_as_the_standard_says() -> None:
    key = SecretKey(SEED)
    assert key.public.raw == PUBLIC
    assert key.sign(b"\x72") == SIGNATURE
    assert key.public.verifies(SIGNATURE, b"\x72")
    assert not key.public.verifies(SIGNATURE, b"\x73")
    assert not key.public.verifies(SIGNATURE[:-1] + b"\1", b"\x72")
    assert not key.public.verifies(b"", b"\x72")
    assert not PublicKey(b"\xff" * 32).verifies(SIGNATURE, b"\x72"), "no point of the curve"


def test_a_key_comes_back_from_its_files(tmp_path: Path) -> None:
    key = SecretKey.generate("ann@host of ours")
    key.write(tmp_path / "keys" / "k")
    assert SecretKey.read(tmp_path / "keys" / "k") == key
    public = PublicKey.read(tmp_path / "keys" / "k.pub")
    assert public == key.public
    assert str(public) == f"{public.id} (ann@host of ours)"
    assert (tmp_path / "keys" / "k").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys" / "k.pub").read_text() == public.line
    assert SecretKey.generate() != SecretKey.generate()
    assert base64.b64encode(key._seed).decode() not in repr(key)
    with pytest.raises(TrustError, match="never written over"):
        SecretKey.generate().write(tmp_path / "keys" / "k")
    assert SecretKey.read(tmp_path / "keys" / "k") == key
    (tmp_path / "l.pub").write_text("somebody's")
    with pytest.raises(TrustError, match=r"l\.pub .*already"):
        key.write(tmp_path / "l")
    assert not (tmp_path / "l").exists()
    long = SecretKey.generate("x" * 500)
    long.write(tmp_path / "long")
    assert SecretKey.read(tmp_path / "long") == long
    with pytest.raises(TrustError, match="up to 500 bytes"):
        SecretKey.generate("x" * 501)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666, 0o610, 0o677])
def test_a_secret_that_others_can_reach_is_not_signed_with(tmp_path: Path, mode: int) -> None:
    SecretKey.generate().write(tmp_path / "k")
    (tmp_path / "k").chmod(mode)
    with pytest.raises(TrustError, match=rf"open to others.*{mode:04o}") as caught:
        SecretKey.read(tmp_path / "k")
    assert f"chmod 600 {tmp_path / 'k'}" in str(caught.value)


def test_a_secret_of_another_user_is_not_signed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SecretKey.generate().write(tmp_path / "k")
    real = os.fstat

    def of_another(fd: int) -> os.stat_result:
        found = real(fd)
        return os.stat_result((*found[:4], os.geteuid() + 7, *found[5:10]))

    monkeypatch.setattr(os, "fstat", of_another)
    with pytest.raises(TrustError, match="not to you"):
        SecretKey.read(tmp_path / "k")


CODE = base64.b64encode(PUBLIC).decode()


@pytest.mark.parametrize(("data", "says"), [
    (b"", "does not begin"),
    (b"ssh-ed25519 AAAA", "does not begin"),
    (f"kerngen-ed25519-secret {CODE}".encode(), "does not begin"),
    (b"kerngen-ed25519", "32 bytes"),
    (b"kerngen-ed25519 AAAA", "32 bytes"),
    (f"kerngen-ed25519 {CODE[:-1]}".encode(), "base64"),
    (f"kerngen-ed25519 {CODE[:-2]}x=".encode(), "32 bytes"),  # bits that base64 ignores
    (f"kerngen-ed25519 !{CODE}".encode(), "base64"),
    (f"kerngen-ed25519 {CODE} a\nb".encode(), "one printable line"),
    (f"kerngen-ed25519 {CODE} \x1b[2J".encode(), "one printable line"),
    (f"kerngen-ed25519 {CODE} {'x' * 2000}".encode(), "no line of text"),
    (b"\xff\xfe", "no line of text"),
])  # fmt: skip
def test_what_is_no_key_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "k").write_bytes(data)
    with pytest.raises(TrustError, match=says):
        PublicKey.read(tmp_path / "k")
    secret = data.replace(b"kerngen-ed25519 ", b"kerngen-ed25519-secret ")
    if secret != data:
        (tmp_path / "k").write_bytes(secret)
        (tmp_path / "k").chmod(0o600)
        with pytest.raises(TrustError, match=f"secret key.*{says}"):
            SecretKey.read(tmp_path / "k")


@given(st.text())
def test_any_text_is_a_key_or_refused(text: str) -> None:
    for line in (text, f"kerngen-ed25519 {text}", f"kerngen-ed25519 {CODE} {text}"):
        try:
            found = PublicKey.parse(line)
        except TrustError:
            continue
        assert PublicKey.parse(found.line) == found


def test_a_key_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="No such file") as caught:
        SecretKey.read(tmp_path / "none")
    assert "kerngen db keygen" in str(caught.value)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TrustError, match="no regular file"):
        SecretKey.read(tmp_path / "pipe")
    with pytest.raises(TrustError, match="printable"):
        SecretKey.generate("two\nlines")


# ---- who is trusted


def test_nobody_is_trusted_until_told() -> None:
    key = SecretKey.generate("ann")
    assert why_untrusted(DIGEST, {}) == "is not signed"
    said = why_untrusted(DIGEST, sign(key))
    assert said == f"is signed by no key that is trusted here, but by {key.public.id}"
    path = trust.trust(key.public)
    assert path == user_folder() / "trusted" / f"{key.public.id}.pub"
    assert trusted_keys() == {key.public.id: key.public}
    assert why_untrusted(DIGEST, sign(key)) is None
    assert why_untrusted(DIGEST, {}) == "is not signed"
    assert distrust(key.public.id) == [path]
    assert why_untrusted(DIGEST, sign(key)) == said


def test_a_signature_of_something_else_does_not_hold() -> None:
    ann, bob = SecretKey.generate("ann"), SecretKey.generate("bob")
    trust.trust(ann.public)
    says = f"has a signature of {ann.public} that does not hold: it was changed since"
    assert why_untrusted(DIGEST, sign(ann, digest="cd" * 32)) == says
    assert why_untrusted(DIGEST, {ann.public.id: sign(bob)[bob.public.id]}) == says
    assert why_untrusted(DIGEST, {ann.public.id: b""}) == says
    trust.trust(bob.public)
    assert why_untrusted(DIGEST, sign(ann, digest="cd" * 32) | sign(bob)) is None, "one is enough"


def test_one_bundle_may_be_trusted_by_its_digest() -> None:
    path = trust_digest(DIGEST)
    assert trusted_digests() == {DIGEST}
    assert why_untrusted(DIGEST, {}) is None
    assert why_untrusted("cd" * 32, {}) == "is not signed"
    assert distrust(DIGEST) == [path]
    assert why_untrusted(DIGEST, {}) == "is not signed"
    for bad in ("", "ab", DIGEST.upper(), f"{DIGEST}/../x"):
        with pytest.raises(TrustError, match="no SHA-256"):
            trust_digest(bad)


def test_all_may_be_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNGEN_TRUST_UNSIGNED", "1")
    assert why_untrusted(DIGEST, {}) is None
    monkeypatch.setenv("KERNGEN_TRUST_UNSIGNED", "0")
    assert why_untrusted(DIGEST, {}) == "is not signed"


def test_keys_lie_in_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [SecretKey.generate(f"key {n}").public for n in range(4)]
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "a.pub").write_text(keys[0].line)
    (tmp_path / "share" / "README").write_text("not a key")
    (tmp_path / "one.pub").write_text(keys[1].line)
    trust._HOST.mkdir(parents=True)
    (trust._HOST / "host.pub").write_text(keys[2].line)
    trust.trust(keys[3])
    assert set(trusted_keys()) == {keys[2].id, keys[3].id}
    monkeypatch.setenv("KERNGEN_TRUST", f"{tmp_path / 'share'}:{tmp_path / 'one.pub'}::{tmp_path / 'none.pub'}")
    assert trusted_keys() == {k.id: k for k in keys}
    with pytest.raises(TrustError, match=f"{keys[2].id} .*trusted"):
        distrust(keys[2].id)


def test_what_others_may_have_written_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = SecretKey.generate()
    paths = [trust.trust(key.public), trust_digest(DIGEST)]
    for path in paths:
        path.chmod(0o666)
    assert (trusted_keys(), trusted_digests()) == ({}, set())
    assert [r.message.split(": ")[0] for r in caplog.records] == [str(p) for p in paths]
    assert all("can be written by everyone" in r.message for r in caplog.records)
    monkeypatch.setenv("KERNGEN_TRUST_FILES", "1")
    assert (set(trusted_keys()), trusted_digests()) == ({key.public.id}, {DIGEST})
    monkeypatch.delenv("KERNGEN_TRUST_FILES")
    for path in paths:
        path.chmod(0o644)
    paths[0].parent.chmod(0o777)
    assert (trusted_keys(), trusted_digests()) == ({}, set())


def test_damage_costs_its_own_key_alone(caplog: pytest.LogCaptureFixture) -> None:
    key = SecretKey.generate()
    folder = trust.trust(key.public).parent
    (folder / "a.pub").write_bytes(b"\xff")
    (folder / "b.pub").mkdir()
    os.mkfifo(folder / "c.pub")
    (folder / "d.pub").symlink_to("nowhere")
    (folder / "e.digest").write_text("")
    assert set(trusted_keys()) == {key.public.id}
    assert trusted_digests() == set()
    assert [r.message.split(": ")[0].rsplit("/")[-1] for r in caplog.records] == [
        "a.pub", "b.pub", "c.pub", "d.pub", "e.digest",
    ]  # fmt: skip
    assert all(r.message.endswith("; it is not trusted") for r in caplog.records)
    assert distrust(key.public.id) == [folder / f"{key.public.id}.pub"]


def test_the_users_own_key_is_made_once_and_trusted() -> None:
    key = user_key()
    assert user_key() == key
    assert user_key_path().stat().st_mode & 0o777 == 0o600
    assert user_folder().stat().st_mode & 0o022 == 0
    assert why_untrusted(DIGEST, sign(key)) is None
    distrust(key.public.id)
    assert user_key() == key
    assert why_untrusted(DIGEST, sign(key)) is not None, "what was distrusted stays so"


# ---- the commands


def test_a_key_is_made_trusted_listed_and_removed(kerngen: Kerngen) -> None:
    code, out, _ = kerngen("db", "keygen", "release.key", "--comment", "ours", "--json")
    made = json.loads(out)
    assert code == 0
    key = SecretKey.read("release.key")
    assert (made["key"], made["comment"], made["line"]) == (key.public.id, "ours", key.public.line.strip())
    assert "nobody is trusted" in kerngen("db", "trust")[1]
    out = kerngen.ok("db", "trust", made["public"], "--digest", DIGEST)
    assert f"trusts {key.public.id} (ours): {user_folder() / 'trusted'}" in out
    code, out, _ = kerngen("db", "trust", "--list", "--json")
    assert json.loads(out)["keys"] == [{"key": made["key"], "comment": "ours", "line": made["line"]}]
    assert json.loads(out)["digests"] == [DIGEST]
    assert why_untrusted(DIGEST, {}) is None
    assert why_untrusted("cd" * 32, sign(key, digest="cd" * 32)) is None
    code, out, _ = kerngen("db", "trust", "--remove", made["key"], "--remove", DIGEST)
    assert (code, out.count("does not trust")) == (0, 2)
    assert (trusted_keys(), trusted_digests()) == ({}, set())


def test_the_users_key_is_made_where_no_file_is_named(kerngen: Kerngen) -> None:
    out = kerngen.ok("db", "keygen")
    assert f"secret  {user_key_path()} " in out
    assert user_key() == SecretKey.read(user_key_path())
    code, _, err = kerngen("db", "keygen")
    assert (code, "a key is never written over" in err) == (1, True)


@pytest.mark.parametrize(("args", "code", "says"), [
    (("trust", "."), 1, ".: is no regular file"),
    (("keygen", "k/l"), 1, "k/l: File exists"),
    (("keygen", "other", "--comment", "two\nlines"), 1, "one printable line"),
])  # fmt: skip
def test_mistakes_are_one_clear_line(kerngen: Kerngen, args: tuple[str, ...], code: int, says: str) -> None:
    SecretKey.generate().write("k")
    got, _, err = kerngen("db", *args)
    assert got == code
    assert says in err
    assert "Traceback" not in err
    assert (trusted_keys(), trusted_digests()) == ({}, set())


def test_cryptography_is_loaded_where_a_signature_is_made_or_checked() -> None:
    code = (
        "import sys; from kerngen.tuning_db.read import trust; from kerngen.tuning_db.dist import keys;"
        "key = keys.SecretKey.generate(); trust.trusted_keys(); trust.why_untrusted('ab' * 32, {});"
        "print('cryptography' in sys.modules); key.public; print('cryptography' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "True"]
