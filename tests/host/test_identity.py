"""What a source is filed by: neither comments nor white space that means nothing, and every token."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerngen.arch import Target, find_device
from kerngen.compiler.compile import cache_key
from kerngen.compiler.render import render
from kerngen.compiler.source_digest import source_digest_of
from kerngen.identity import digest_of, normal_form, without_comment_lines
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import ROOT as TEMPLATES
from kerngen.templates.kernel import Kernel
from kerngen.tuning_db import Store, lookup, problem_key
from kerngen.tuning_db.dist import results_folder
from kerngen.tuning_db.dist.results_folder import build
from kerngen.tuning_db.dist.results_parser import parse
from kerngen.tuning_db.read.places import PREBUILT
from kerngen.tuning_db.store import rows

H200 = Target.of(find_device("H200"))

SAME = [
    ("int a = b + c;", "int a=b+c;"),
    ("int a;\n\n\nint b;\n", "int a; int b;"),
    ("int a; // one\nint b;", "int a;\nint b;"),
    ("int /* one\n two */ a;", "int a;"),
    ("int/**/a;", "int a;"),
    ("f( x ,y )[ 1 ]", "f(x, y)[1]"),
    ("// ---- common/ptx/types.cuh\nint a;\n// ---- end common/ptx/types.cuh\n", "int a;"),
    ("fo\\\no = 1;", "foo = 1;"),
    ("// a comment that \\\ngoes on\nint a;", "int a;"),
    ('s = "a\\\nb";', 's = "ab";'),
    ("#define A 1 // one\nint a;", "#define A 1\nint a;"),
    ("#  define   A   1\n", "#define A 1\n"),
    ("#define A /* a\n b */ 1\nint a;", "#define A 1\nint a;"),
    ("#define A \\\n  1\nint a;", "#define A 1\nint a;"),
    ("n = 1'000'000; // it's\nint a;", "n = 1'000'000;\nint a;"),
    ("c = '\"'; // \"\nint a;", "c = '\"';\nint a;"),
    ('s = R"x(a // b)" c\n)x"; // one', 's = R"x(a // b)" c\n)x";'),
    ("value + 1", "value+1"),
    ("static_assert(a > 0);", "\nstatic_assert(a>0);"),
    ("// an assert would tell __LINE__\nint a;", "int a;"),
    ("/\\\n/ a comment\nint a;\n" + 's = R"(x)";', 'int a;\ns = R"(x)";'),
    ("#define S(x) #x\nS( a )  // one\n\nint a;", "#define S(x) #x\nS( a )\nint a;"),
]
DIFFERENT = [
    ("a + +b", "a ++b"),
    ("a - -b", "a--b"),
    ("x > > y", "x >> y"),
    ("return a", "returna"),
    ('s = "// a";', 's = "// b";'),
    ('s = "a  b";', 's = "a b";'),
    ("c = ' ';", "c = '';"),
    ('f("a" "b")', 'f("a""b")'),
    ("u8 'a'", "u8'a'"),
    ("0xe + 1", "0xe+1"),
    ("1 .5", "1.5"),
    ("#define F (x)\n", "#define F(x)\n"),
    ("#define A\nint a;", "#define A int a;"),
    ("#pragma unroll\nfor (;;)", "#pragma unroll for (;;)"),
    ("int a;\n#if X\nint b;\n#endif", "int a;\nint b;\n#if X\n#endif"),
    ('s = R"(a\nb)";', 's = R"(ab)";'),
    ('s = R"(a\\\nb)";', 's = R"(ab)";'),
    ('s = R"(a  // b)";', 's = R"(a )";'),
    ("#define S(x) #x\nS(a + b)", "#define S(x) #x\nS(a+b)"),
    ("int a = __LINE__;", "\nint a = __LINE__;"),
    ("assert(a);", "\nassert(a);"),
    ("#define CHECK assert\nCHECK(a);", "#define CHECK assert\n// one\nCHECK(a);"),
    ("n = 1'000;", "n = 1000;"),
    ("#include <a//b>", "#include <a//c>"),
    ("// c \\\r\nint a;\n", "// c\r\nint a;\n"),  # joined with the next line, so no code
    ("// c \\ \nint a;\n", "// c\nint a;\n"),
    ("/\\\n* // */ int a;\n", "/\\\n* // */ int b;\n"),
    ("#include <a//b>\n/**/\n", "#include <a//c>\n/**/\n"),
    ("int a = __LI\\\nNE__;\n", "\nint a = __LI\\\nNE__;\n"),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_what_means_the_same_is_the_same(a: str, b: str) -> None:
    assert normal_form(a) == normal_form(b)
    assert digest_of(a) == digest_of(b)


@pytest.mark.parametrize("end", [b"\\\n", b"\\\r\n", b"\\ \n"])
def test_a_comment_line_that_takes_in_the_next_stays(end: bytes) -> None:
    assert without_comment_lines("a.cuh", b"// c " + end + b"int a;\n") != b"int a;\n"


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_what_may_mean_something_else_is_another(a: str, b: str) -> None:
    assert normal_form(a) != normal_form(b)


_TOKENS = [
    "a", "_b1", "1e", "0xeF", ".5", "1'0", "+", "-", "++", "<", "<<", "(", ")", ";", "[", '"//"', "'\"'", "->", ".",
]  # fmt: skip
_GAPS = [" ", "\n", "\t ", "/**/", "// it's\n", '/* a " b\n*/', " \\\n"]


@given(st.lists(st.tuples(st.sampled_from(_TOKENS), st.sampled_from(_GAPS)), min_size=1, max_size=12))
def test_it_depends_on_the_tokens_alone(pieces: list[tuple[str, str]]) -> None:
    """Whatever stands between them; and others, or the same in another order, have another form."""
    text = "".join(token + gap for token, gap in pieces)
    tokens = [token for token, _ in pieces]
    assert normal_form(text) == normal_form(" ".join(tokens))
    assert normal_form(normal_form(text)) == normal_form(text)
    if tokens != tokens[::-1]:
        assert normal_form(text) != normal_form(" ".join(reversed(tokens)))


def test_comments_of_every_kernel_are_no_part_of_what_it_is_filed_by() -> None:
    """Of each default configuration of each test case on Hopper; and the machine code is cached under the same key."""
    for name in kernel_names():
        kernel = find_kernel(name)
        case = next(c for c in kernel.cases.CASES if kernel.why_unsupported(c.problem, H200) is None)
        source = render(kernel, case.problem, kernel.default_config(case.problem, H200), H200)
        other = "// first\n\n" + source.replace(";\n", "; /* then */ // and\n\n")
        assert other != source
        assert digest_of(other) == digest_of(source) == source.digest
        assert cache_key(other, "sm_90a", (), (12, 9)) == cache_key(source, "sm_90a", (), (12, 9))
        for wrong in (source.replace("= 90;", "= 91;"), source.replace("{", "{;", 1)):
            assert digest_of(wrong) != digest_of(source)


def test_no_template_sees_its_lines() -> None:
    """Of one that did, a comment in a header that it includes would change the machine code, and no source digest."""
    templates = [path for end in ("*.cuh", "*.jinja") for path in TEMPLATES.rglob(end)]
    assert len(templates) > 50
    for path in templates:
        text = path.read_text()
        assert normal_form(text) != text, path


# ---- a shared header


@pytest.fixture
def common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of templates/common that all kernels take their headers from."""
    folder = tmp_path / "common"
    shutil.copytree(find_kernel("rmsnorm").shared[0], folder)
    monkeypatch.setattr(Kernel, "shared", property(lambda self: (folder,)))
    return folder


def _comment(folder: Path) -> None:
    for path in folder.rglob("*.cuh"):
        lines = path.read_text().split("\n")
        lines = [
            line if line.endswith("\\") else f"{line} // a comment" if "//" not in line else line for line in lines
        ]
        path.write_text("// What is said here\n\n\n" + "\n".join(lines) + "\n// and there\n")


def _filled(sheet: Any, path: Path) -> Store:
    store = Store.open(path)
    done = build([sheet], store, None)
    assert (done.stale, done.faults) == ([], [])
    return store


def test_a_comment_in_a_shared_header_makes_nothing_stale(
    common: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of builds stay, a winner is current, and so is the shipped sheet. One token more, and neither is: both hold
    all the same, until the body's revision is raised.
    """
    path = PREBUILT / "H200" / "rmsnorm.txt"
    sheet, kernel = parse(path.read_text(), str(path)), find_kernel("rmsnorm")
    with _filled(sheet, tmp_path / "before.db") as store:
        (first, *_) = winners = store.winners("rmsnorm")
        problem = kernel.problem_type(**first.problem.fields)
        _comment(common)
        with _filled(sheet, tmp_path / "after.db") as other:
            assert [w.build_id for w in other.winners("rmsnorm")] == [w.build_id for w in winners]
        found = lookup([store], kernel, problem, H200)
        assert (found.build_id, found.stale) == (first.build_id, False)

        header = common / "ptx" / "types.cuh"
        header.write_text(header.read_text() + "constexpr int ADDED = 1;\n")
        found = lookup([store], kernel, problem, H200)
        assert (found.build_id, found.stale, found.cubin) == (first.build_id, False, None)
        with _filled(sheet, tmp_path / "changed.db") as other:
            held = {w.problem.id: w for w in other.winners("rmsnorm")}
            assert {id: (w.config, w.latency_us, w.stale) for id, w in held.items()} == {
                w.problem.id: (w.config, w.latency_us, False) for w in winners}  # fmt: skip
            assert all("earlier source" in w.reason for w in held.values())
            assert not {w.build_id for w in held.values()} & {w.build_id for w in winners}
        bodies = tuple(replace(b, revision=b.revision + 1) for b in kernel.spec.BODIES)
        monkeypatch.setattr(kernel.spec, "BODIES", bodies)
        found = lookup([store], kernel, problem, H200)
        assert (found.build_id, found.stale) == (first.build_id, True)
        with Store.open(tmp_path / "raised.db") as other:
            done = build([sheet], other, None)
        assert done.trials == 0
        assert len(done.stale) == sum(len(p.trials) for _, p in sheet.points())


def test_a_line_that_is_a_comment_changes_no_closure(common: Path) -> None:
    """So nothing is rendered anew; a comment behind code has it rendered, and found to be the same."""
    kernel = find_kernel("rmsnorm")
    before, digest = source_digest_of(kernel), kernel.folder_digest
    header = common / "ptx" / "types.cuh"
    header.write_text("// One\n\n" + header.read_text() + "    // two\n")
    vars(kernel).pop("folder_digest")
    assert (source_digest_of(kernel), kernel.folder_digest) == (before, digest)
    header.write_text(header.read_text() + "int x;\n")
    vars(kernel).pop("folder_digest")
    assert source_digest_of(kernel) != before
    assert kernel.folder_digest != digest
    vars(kernel).pop("folder_digest")


# ---- what an older kerngen filed


def test_what_was_filed_with_its_comments_goes_on(
    common: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the text's own digest is current while the text is the same; from then on also where comments change."""
    path = PREBUILT / "H200" / "gelu_gate.txt"
    sheet, kernel = parse(path.read_text(), str(path)), find_kernel("gelu_gate")
    with monkeypatch.context() as m:
        m.setattr(rows, "source_sha", lambda source: hashlib.sha256(source.encode()).hexdigest())
        m.setattr(results_folder, "source_digest_of", lambda kernel: "an older one")
        store = _filled(sheet, tmp_path / "older.db")
    with store:
        (first, *_) = store.winners("gelu_gate")
        key = problem_key(kernel, problem := kernel.problem_type(**first.problem.fields))
        assert all("." not in b.source_sha for b in store.builds(key.static_key).values())
        found = lookup([store], kernel, problem, H200)
        assert (found.build_id, found.stale) == (first.build_id, False)
        store.recompute_winners(kernel, key.static_key, H200)  # which notes what it is filed by today
        _comment(common)
        found = lookup([store], kernel, problem, H200)
        assert (found.build_id, found.stale) == (first.build_id, False)
        (w, *_) = store.recompute_winners(kernel, key.static_key, H200)
        assert (w.build_id, w.stale) == (first.build_id, False)
        header = common / "ptx" / "types.cuh"
        header.write_text(header.read_text() + "constexpr int ADDED = 1;\n")
        found = lookup([store], kernel, problem, H200)
        assert (found.stale, "earlier source" in found.source) == (False, True)
