"""The documents against what they describe: commands parse, links lead somewhere, the guide's kernel builds."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from command import Kerngen, lent_boards

from kerngen.arch import find_arch
from kerngen.cli import cli
from kerngen.runtime.session import find_drafter
from kerngen.templates.kernel import fields_of
from kerngen.workload.workload import MODELS, find_workload

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "add-a-kernel.md"
QUICK_START = ROOT / "docs" / "quick-start.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
# Pages of the site are made of them. Their commands are of the day that they were measured.
DATA = [*sorted(ROOT.glob("data/experiments/*.toml")), *sorted(ROOT.glob("data/performance/*.toml"))]
GUIDE_KERNEL = "scale_rows"
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^(?: {4}.*\n)+", re.MULTILINE)
# Folders whose files may be named in a document as `path`, from the root of the repository.
_TREES = "kerngen|templates|tuning_db|runtime|tests|docs|examples"
_PATH = re.compile(rf"(?<![\w./-])((?:{_TREES})/[\w./-]*\w\.\w+)(?![\w/*{{<-])")


def _id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(page: Path) -> Iterator[str]:
    text = page.read_text()
    yield from (m.group(2) for m in _FENCED.finditer(text))
    yield from (m.group() for m in _INDENTED.finditer(_FENCED.sub("", text)))


def _commands(page: Path) -> Iterator[list[str]]:
    """Every `kerngen ...` of a code block: lines that begin with it (after $, variables, or `ncu ...`)."""
    for block in _blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"\s*(?:\$ )?(?:\w+=\S+ |echo .* \| |ncu .* |compute-sanitizer )*kerngen [a-z-]", line):
                call = re.sub(
                    r"\s{2,}.*|\s#.*", "", line[line.index("kerngen ") :]
                )  # what is aligned behind is a remark
                yield shlex.split(re.split(r" (?:&&|\||>) ", call)[0])[1:]


def _why_wrong(args: list[str]) -> str | None:
    """Why `kerngen ARGS` would be refused before it does anything, or None."""
    command: click.Command = cli
    context = click.Context(cli, info_name="kerngen")
    while isinstance(command, click.Group) and args:
        found = command.get_command(context, args[0])
        if found is None:
            return f"{context.command_path} has no command {args[0]}"
        command, args = found, args[1:]
        context = click.Context(command, info_name=command.name, parent=context)
    if isinstance(command, click.Group):
        return None  # the group alone is mentioned
    try:
        command.make_context(str(command.name), list(args))
    except click.exceptions.Exit:  # --help
        return None
    except click.UsageError as e:
        return e.format_message()
    return None


def test_the_commands_are_found() -> None:
    assert ["kernel", "show", GUIDE_KERNEL, "--arch", "sm90", "--config", "threads=256"] in list(_commands(GUIDE))
    assert _why_wrong(["kernel", "shw"]) == "kerngen kernel has no command shw"
    assert "--arhc" in str(_why_wrong(["tune", "--arhc", "sm70"]))
    assert "--model" in str(_why_wrong(["tune", "--arch", "sm70"]))


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_command_parses(page: Path) -> None:
    wrong = {" ".join(args): why for args in _commands(page) if (why := _why_wrong(args)) is not None}
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_commands_that_only_look_run(page: Path, kerngen: Kerngen) -> None:
    looking = [args for args in _commands(page) if args[:2] in
               (["kernel", "show"], ["kernel", "ls"], ["arch", "ls"], ["arch", "show"])]  # fmt: skip
    done = {" ".join(args): kerngen(*args) for args in looking if not {GUIDE_KERNEL, "NAME"} & set(args)}
    assert not {command: err for command, (code, _, err) in done.items() if code}


@pytest.mark.parametrize("page", [*PAGES, *DATA], ids=_id)
def test_every_link_and_path_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    relative = {link.split("#")[0] for link in links if not re.match(r"\w+:|#", link)}
    broken = {link for link in relative if not (page.parent / link).exists()}
    paths = {p.rstrip(".") for p in _PATH.findall(text) if GUIDE_KERNEL not in p} if page in PAGES else set()
    broken |= {p for p in paths if not ((ROOT / p).exists() or (page.parent / p).exists())}
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_no_placeholder_is_left(page: Path) -> None:
    assert not re.search(r"\bTODO\b|\bFIXME\b|^[A-Z0-9]+_[A-Z_]+$", page.read_text(), re.MULTILINE)


def test_the_quick_start_says_how_the_command_and_a_model_come_to_be_there(tmp_path: Path) -> None:
    """In its order: the environment on the PATH, what is downloaded, and what is run of that, its drafter found."""
    use = QUICK_START.read_text().partition("\n## Use\n")[2].partition("\n## ")[0]
    assert 0 < use.index(". .venv/bin/activate") < use.index("$ kerngen ")
    downloads = re.findall(r"^\$ hf download \S+ --local-dir (\S+)$", use, re.MULTILINE)
    model, drafter = downloads
    for name in downloads:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    assert find_drafter(tmp_path / model) == tmp_path / drafter
    run = {args[1] for args in _commands(QUICK_START) if args[:1] == ["run"]}
    assert run == {f"./{model}", "examples/tiny/gemma-4-tiny-w4a16"}  # the second's commands: test_readme.py


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_what_is_looked_up_is_what_a_model_asks(page: Path) -> None:
    """`kerngen db show` and `explain` of a kernel and its problem: a released model has it, n and k in their places."""
    for args in _commands(page):
        if args[0] == "db" and args[1] in ("show", "explain") and "--problem" in args and GUIDE_KERNEL not in args:
            arch = find_arch(args[args.index("--arch") + 1])
            asked = dict(part.split("=") for part in args[args.index("--problem") + 1].split(","))
            items = (i for name in MODELS for i in find_workload(name, arch).items if i.kernel == args[2])
            assert any(asked.items() <= _as_written(i.problem).items() for i in items), " ".join(args)


def _as_written(problem: Any) -> dict[str, str]:
    return {field: str(value).lower() for field, value in fields_of(problem).items()}


def test_pages_for_a_person_in_a_hurry_stay_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1800
    page = (ROOT / "docs" / "architecture.md").read_text()
    words = page.partition("\n## The words\n")[2].partition("\n## ")[0]
    assert len(words.strip().splitlines()) <= 60
    choices = page.partition("\n## Choices, and why\n")[2]
    assert all(len(choice.strip().splitlines()) <= 5 for choice in choices.split("\n- ")[1:])


def test_the_guide_is_what_kernel_new_makes(tmp_path: Path) -> None:
    """Its files are the scaffold's, and its commands that need no GPU work on them, outside of the package."""
    root = tmp_path / "kernels"
    cache = tmp_path / "cache"
    names = {"KERNGEN_CACHE_DIR": str(cache), "KERNGEN_DB": str(tmp_path / "t.db")}
    environment = {**os.environ, **names, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    def run(*args: str) -> str:
        done = subprocess.run([sys.executable, "-m", *args], cwd=tmp_path, env=environment, capture_output=True,
                              text=True, timeout=300, check=False)  # fmt: skip
        assert done.returncode == 0, f"{' '.join(args)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    begin = ["kernel", "new", GUIDE_KERNEL, "--templates", "kernels"]
    assert begin in list(_commands(GUIDE))
    assert str(root) in run("kerngen", *begin)
    made = {p.name: p.read_text() for p in (root / GUIDE_KERNEL).iterdir() if p.name != "__init__.py"}
    blocks = re.findall(r"^`kernels/scale_rows/([\w.]+)`\n\n```\w+\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    assert dict(blocks) == made
    environment["KERNGEN_TEMPLATES"] = str(root)

    with lent_boards(cache):
        shown = run("kerngen", "kernel", "show", GUIDE_KERNEL, "--arch", "sm90", "--problem", "hidden=21504")
    assert f"{GUIDE_KERNEL}(void* out" in shown
    assert "2 of 5 configurations can run" in shown
    assert "threads=32 hold 336 registers" in shown
    suite = str(Path(__file__).with_name("test_kernel_folders.py"))
    some = f"{GUIDE_KERNEL} and not (sm75 or sm80 or sm86 or sm89 or sm100)"  # its source differs by none of these
    tested = run("pytest", "-q", "-p", "no:cacheprovider", suite, "-k", some)
    assert re.search(r"\d\d passed", tested), tested
    shutil.rmtree(root / GUIDE_KERNEL)
    assert GUIDE_KERNEL not in run("kerngen", "kernel", "ls", "--json")
