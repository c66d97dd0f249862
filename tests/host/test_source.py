"""Errors point to the author's file: every line of a rendered source knows where it comes from."""

from __future__ import annotations

import contextlib
import pickle
import re
import sys
from pathlib import Path
from shutil import copytree

import pytest
from toy import TOYS

from kerngen.arch import Target, find_arch
from kerngen.cli import main
from kerngen.compiler.compile import CompilePool, cache_key, compile_cubin
from kerngen.compiler.render import render
from kerngen.compiler.source import Origin, Source, located
from kerngen.errors import CompileError, TemplateError
from kerngen.templates import TEMPLATES_VARIABLE, find_kernel, kernel_names

SM90 = Target.of(find_arch("sm90"))
TEMPLATE = """\
{# A remark
   of two lines. #}
#include "common/ptx/types.cuh"
constexpr int WIDTH = {{ p.width }}; // @@
{% for i in range(2) %}
constexpr int A{{ i }} = 1; // @@

#define M{{ i }}(x) x \\
{% if i %}
    + 1 // @@
{% else %}
    + 2 \\
    + 3 // @@
{% endif %}
{% endfor %}
{% set block %}
{{ c.threads }}
{% endset %}
{% if block == "32\\n" %}
constexpr int SEEN = {{ block }}; // @@
{% endif %}
{% macro several() %}
int b;
int c;
{% endmacro %}
extern "C" __global__ void scale(float* out, const float* x, int num_tokens) {
{{ several() }} // @@
{% include "part.cuh.jinja" %}
{% include "scale/part.cuh.jinja" %}
    // @@
{% raw %}
    // {{ @@ }}
{% endraw %}
}
"""
HALF = "\n    @property\n    def half(self) -> int:\n        return self.width // 2\n"
PART = "{# One line. #}\n    // PART {{ c.threads }}\n"


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The template of a copy of the toy kernel."""
    copytree(TOYS, tmp_path / "kernels")
    monkeypatch.setenv(TEMPLATES_VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels" / "scale" / "kernel.cu.jinja"


def _render(**config: object) -> Source:
    kernel = find_kernel("scale")
    return render(kernel, kernel.problem_type(), kernel.config_type(**({"threads": 32} | config)), SM90)


def test_every_line_knows_its_template_line(template: Path) -> None:
    template.write_text(TEMPLATE)
    (template.parent / "part.cuh.jinja").write_text(PART)
    source, wanted = _render(), TEMPLATE.splitlines()
    seen = 0
    for number, line in enumerate(source.splitlines(), 1):
        place = source.place(number)
        if "PART 32" in line:
            assert place == "kernels/scale/part.cuh.jinja:2"
        elif "@@" in line:
            file, _, at = place.rpartition(":")
            assert file == "kernels/scale/kernel.cu.jinja"
            assert "@@" in wanted[int(at) - 1], f"{line!r} is not from line {at}"
            seen += 1
        elif "struct Half" in line:
            assert place.startswith("templates/common/ptx/types.cuh:")
            file, _, at = place.rpartition(":")
            assert (Path(__file__).parents[2] / file).read_text().splitlines()[int(at) - 1] == line
            seen += 1
    assert seen >= 8
    assert source.place(1) is None, "the arch's constants are from no file"
    assert "constexpr int SEEN = 32\n;" in source, "a template that looks at a block sees it as it is"
    assert not re.search("[\x02\x03]", source)


def test_all_lines_of_all_templates_are_said_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that no value was put into stands in its file as it is in the source."""
    monkeypatch.delenv(TEMPLATES_VARIABLE, raising=False)
    root, files = Path(__file__).parents[2], dict[str, list[str]]()
    for name in kernel_names():
        kernel = find_kernel(name)
        problem = kernel.cases.CASES[-1].problem
        source = render(kernel, problem, kernel.default_config(problem, SM90), SM90)
        same = 0
        for number, line in enumerate(source.splitlines(), 1):
            if (place := source.place(number)) is None:
                continue
            file, _, at = place.rpartition(":")
            if file not in files:
                files[file] = (root / file).read_text().splitlines()
            original = files[file][int(at) - 1]
            if "{{" not in original and "{%" not in original and "#include" not in original:
                assert original == line, f"{place} of {name}"
                same += 1
        assert same > 0.9 * source.count("\n")


def test_nvrtc_errors_name_the_template(template: Path) -> None:
    text = template.read_text()
    template.write_text(text.replace("    } else {", "    {# one\n two #}\n    } else { undefined_thing();"))
    with pytest.raises(CompileError) as e:
        compile_cubin(_render(), SM90.arch)
    place = 'kernels/scale/kernel.cu.jinja:17: error: identifier "undefined_thing" is undefined\n'
    assert place in e.value.message
    assert "} else { undefined_thing();" in e.value.message
    assert place in e.value.log
    with CompilePool(1) as pool:
        assert place in str(pool.submit(_render(), SM90.arch).exception(60))


def test_instantiations_are_located_too() -> None:
    source = Source("a\nb\nc\n", [Origin(1, "", 0), Origin(2, "/somewhere/kernels/k/f.cuh", 7)])
    log = 'kernel.cu(3): error: no\n  instantiation of "f" at line 2\n  declared at line 1 of "kernel.cu"'
    assert located(source, log) == (
        'kernels/k/f.cuh:8: error: no\n  instantiation of "f" at kernels/k/f.cuh:7\n  declared at line 1 of "kernel.cu"'
    )
    assert located(str(source), log) == log


def test_where_it_comes_from_is_no_part_of_a_source() -> None:
    source = Source("int a;\n", [Origin(1, "/x/kernel.cu.jinja", 3)])
    plain = "int a;\n"
    assert source == plain
    assert {source} == {plain}
    assert cache_key(source, "sm_90a", (), (12, 9)) == cache_key(plain, "sm_90a", (), (12, 9))
    again = pickle.loads(pickle.dumps(source))
    assert (again, again.origins) == (source, source.origins)


WRONG = {
    "no field": ("{{ c.vectors }}", "{{ c.vector }}", "1: there is no c.vector; did you mean c.vectors?"),
    "runtime": ("{{ c.vectors }}", "{{ p.num_tokens }}", "1: p.num_tokens is a RUNTIME field"),
    "no constant": ("{{ c.vectors }}", "{{ k.WARP }}", "1: there is no k.WARP; known: none"),
    "syntax": ("extern", "\n{% if %}\nextern", "6: Expected an expression"),
    "python": ("extern", "{{ 1 // 0 }}\nextern", "5: ZeroDivisionError: "),
    "include": ("extern", '{% include "lost.jinja" %}\nextern', r"5: cannot read .*lost.jinja: No such file"),
    "header": ("extern", '#include "common/lost.cuh"\nextern', r'5: #include "common/lost.cuh": no such file in '),
}


@pytest.mark.parametrize(("old", "new", "why"), WRONG.values(), ids=WRONG)
def test_template_errors_name_the_line(template: Path, old: str, new: str, why: str) -> None:
    text = template.read_text()
    assert old in text
    template.write_text(text.replace(old, new, 1))
    with pytest.raises(TemplateError, match=f"scale/kernel.cu.jinja:{why}") as e:
        _render()
    assert new.strip().splitlines()[0] in e.value.message or "#include" in new, "the line is shown"


def test_constants_come_from_the_spec(template: Path) -> None:
    spec = template.with_name("spec.py")
    template.write_text(template.read_text() + "// {{ k.ROWS }} {{ k.WIDE }}\n")
    text = spec.read_text().replace("num_tokens: int = 1\n", "num_tokens: int = 1\n" + HALF)
    spec.write_text(
        text + "\n\ndef constants(problem, config, arch):\n    return {'ROWS': problem.half, 'WIDE': True}\n"
    )
    assert _render().endswith("// 512 true\n")


def test_flags_are_what_they_say_in_conditions_too(template: Path) -> None:
    spec = template.with_name("spec.py")
    template.write_text(template.read_text() + "// {{ 1 if k.YES else 0 }} {{ 1 if k.NO else 0 }} {{ k.NO }}\n")
    flags = "\ndef constants(problem, config, arch):\n    return {'YES': True, 'NO': False}\n"
    spec.write_text(spec.read_text() + flags)
    assert _render().endswith("// 1 0 false\n")


def test_constants_know_nothing_of_a_launch(template: Path) -> None:
    spec = template.with_name("spec.py")
    spec.write_text(
        spec.read_text() + "\ndef constants(problem, config, arch):\n    return {'T': problem.num_tokens}\n"
    )
    with pytest.raises(TemplateError, match=r"spec.py:\d+: AttributeError: num_tokens is a RUNTIME field"):
        _render()


def test_one_fault_is_said_once(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (template.parent / "cases.py").write_text(
        "from kerngen.templates.kernel import Case\nfrom .spec import Problem\n"
        "CASES = tuple(Case(f'w{w}', Problem(width=w)) for w in (64, 128, 256))\n"
    )
    template.write_text(template.read_text() + "oops\n")
    monkeypatch.setenv("KERNGEN_CACHE_DIR", str(tmp_path / "cache"))
    command = ["kerngen", "compile", "--arch", "sm80,sm90", "--kernel", "scale", "--cases", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", command)
    with contextlib.suppress(SystemExit):
        main()
    out = capsys.readouterr().out
    assert out.count("failed: ") == out.count("oops") == 1
    assert "failed: scale on sm80, sm90 (6 sources): kernels/scale/kernel.cu.jinja:21: error: " in out
