"""`python -m kerngen.tuning.variants`: variants of a kernel's text beside the text, on a GPU that is played here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kerngen.arch import Target, find_arch
from kerngen.cli import run_command
from kerngen.errors import KerngenError, UsageError
from kerngen.templates import find_kernel
from kerngen.timing.measure import Ceilings, Timing
from kerngen.tuning import variants
from kerngen.tuning.variants import AS_IT_IS, Made, Variant, changed, made_of, read_variants, table

NORM = find_kernel("add_norm")
CASE = NORM.bench.BENCH_CASES[0]
H200 = Target.of(find_arch("sm90"))
FILE = """
[[variant]]
name = "rows by twos"
config = "rows_per_block=2"

[[variant]]
name = "late"
right = false
[[variant.replace]]
this = "    pdl_launch_dependents();\\n"
by = ""
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "variants.toml"
    path.write_text(text)
    return path


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    assert read_variants(_file(tmp_path, FILE)) == [
        Variant("rows by twos", "rows_per_block=2"),
        Variant("late", right=False, replace=(("    pdl_launch_dependents();\n", ""),)),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no variants"),
        ("variant = 1", "has no variants"),
        ("[[variant]]\nconfig = 'a=1'", "variant 1: it has no 'name'"),
        ("[[variant]]\nname = 'a'\nspeed = 1", "variant 1: 'speed' is not one of: name, config, right, replace"),
        ("[[variant]]\nname = 'a'\nright = 'no'", "right is 'no', no bool"),
        ("[[variant]]\nname = 'a'\n[[variant.replace]]\nthis = 'x'", r"variant 1 \(a\), replace: it has no 'by'"),
        ("[[variant]]\nname = 'a'\nreplace = [3]", "replace: 3 is no table"),
        ("[[variant]]\nname = 'a'\n[other]", "'other' is nothing that it may say"),
        ("[[variant]]\nname = ", "variants.toml"),
    ],
)
def test_a_file_that_says_anything_else_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_variants(_file(tmp_path, text))


def test_what_is_replaced_stands_there_once() -> None:
    two = Variant("v", replace=(("a", "b"), ("bc", "d")))
    assert changed("xacx", two) == "xdx", "one behind the other"
    for text, count in (("xbcx", 0), ("aabc", 2)):
        with pytest.raises(UsageError, match=f"v: .*{count} times 'a'"):
            changed(text, two)
    with pytest.raises(UsageError, match="4 times ''"):
        changed("abc", Variant("v", replace=(("", "x"),)))


def test_texts_are_made_beside_the_one_that_there_is(tmp_path: Path) -> None:
    found = made_of(NORM, CASE.problem, H200, read_variants(_file(tmp_path, FILE)))
    assert [one.variant.name for one in found] == [AS_IT_IS, "rows by twos", "late", f"{AS_IT_IS}, again"]
    base, rows, late, again = found
    assert again.text == base.text
    assert (rows.config.rows_per_block, rows.text != base.text) == (2, True)
    assert late.text == base.text.replace("    pdl_launch_dependents();\n", "")
    with pytest.raises(KerngenError):
        made_of(NORM, CASE.problem, H200, [Variant("none", "rows_per_block=1000")])


def _timing(us: float) -> Timing:
    return Timing(us, us - 0.1, us + 0.1, us, 30, 10)


def test_the_fastest_comes_first_and_what_has_no_time_last() -> None:
    found = [(Variant(AS_IT_IS), _timing(4.0)), (Variant("bad"), "wrong: out[0] is 1"), (Variant("fast"), _timing(3.0)),
             (Variant("less", right=False), _timing(2.0))]  # fmt: skip
    lines = table(found)
    assert [line.split()[-1] for line in lines[:3]] == ["intent)", "fast", "is"]
    assert "-25.00 %" in lines[1]
    assert "+0.00 %" in lines[2]
    assert lines[3] == "  no time: bad: wrong: out[0] is 1"
    assert "%" not in table([(Variant("fast"), _timing(3.0))])[0], "beside nothing"


@pytest.mark.parametrize("is_wrong", [False, True])
def test_it_tells_what_came_of_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_wrong: bool
) -> None:
    def played(kernel: Any, case: Any, made: Sequence[Made], images: Any, timeout_s: float) -> Iterator[Any]:
        assert timeout_s == 60.0
        for i, (one, image) in enumerate(zip(made, images, strict=True)):
            assert image.result().image[:4] == b"\x7fELF"
            yield one.variant, "wrong: nan" if is_wrong and i == 1 else _timing(5.0 + i)

    monkeypatch.setattr(variants, "target_here", lambda: H200)
    monkeypatch.setattr(variants, "ceilings", lambda: Ceilings(4580.0, 4100.0, 790.0, {}))
    monkeypatch.setattr(variants, "times_of", played)
    path = _file(tmp_path, FILE)
    monkeypatch.setattr(sys, "argv", ["variants", "add_norm", str(path), "--case", CASE.name, "--jobs", "2"])
    assert run_command(variants.main, "variants") == int(is_wrong)
    out, err = capsys.readouterr()
    assert out.startswith("H200: reads 4580 GB/s\nadd_norm [")
    assert out.count(" us ") == 3 + (not is_wrong)
    assert ("1 variants are wrong or failed" in err) == is_wrong
