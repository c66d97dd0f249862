"""The example that each command's --help gives runs as it stands, against the database that is shipped."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest
from command import ROOT, Kerngen

from kerngen.cli import cli

NEEDS_A_GPU = ("kernel check", "bench ab", "bench kernel", "bench model", "bench step", "bench profile", "soak")
NEEDS_A_SERVER = ("worker", "bench serve")
GOES_ON = ("serve",)  # test_serve_process.py
NEEDS_MORE = NEEDS_A_GPU + NEEDS_A_SERVER + GOES_ON
# What keeps a test short; the example itself stays as it is.
LESS = {
    "": ("--kernel", "embed", "--jobs", "1", "--trials", "1"),
    "tune": ("--kernel", "embed", "--jobs", "1", "--trials", "1"),
    "compile": ("--kernel", "embed", "--jobs", "1"),
    "release": ("--kernel", "embed", "--jobs", "1"),
    "run": ("--max-new-tokens", "4"),
    "eval kv": ("--tokens", "256"),
}


def _walk(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(path), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (found := command.get_command(context, name)) is not None and not found.hidden:
                yield from _walk(found, (*path, name))


def _examples(command: click.Command) -> list[list[str]]:
    """The arguments of each `kerngen ...` behind "Example:", as the help's source has them."""
    return [shlex.split(line) for line in re.findall(r"^\s*Example:\s+kerngen (.*)$", command.help or "", re.MULTILINE)]


# What has to be done first, so that the files that an example names are there.
EXPORT = "db export --arch sm90 --kernel rmsnorm -o sm90.kgdb"
FIRST = {
    "db build": ("db dump --arch sm90 --kernel embed,gelu_gate -o text",),
    "db diff": (EXPORT, EXPORT.replace("sm90.kgdb", "old.kgdb").replace("rmsnorm", "rmsnorm,gelu_gate")),
    "db gc": (EXPORT, "db import sm90.kgdb"), "db rm": (EXPORT, "db import sm90.kgdb"),
    "db rebuild": (EXPORT, "db import sm90.kgdb"), "db install": (EXPORT,),
    "db uninstall": (EXPORT, "db install sm90.kgdb"), "db import": (EXPORT,), "db merge": (EXPORT,),
    "db verify": (EXPORT,), "db sign": (EXPORT, "db keygen release.key"),
}  # fmt: skip
COMMANDS = dict(_walk(cli))


def test_every_command_has_an_example() -> None:
    assert {"tune", "compile", "run", "doctor", "db explain", "kernel show", "arch ls"} <= COMMANDS.keys()
    verbs = {name: _examples(c) for name, c in COMMANDS.items() if not isinstance(c, click.Group) or not name}
    assert [name for name, examples in verbs.items() if len(examples) != 1] == []


@pytest.mark.parametrize("name", [n for n, c in COMMANDS.items() if _examples(c) and n not in NEEDS_MORE])
def test_the_example_runs(kerngen: Kerngen, name: str) -> None:
    (args,) = _examples(COMMANDS[name])
    assert " ".join(args).startswith(name)
    if name in ("run", "eval kv", "convert"):  # a small checkpoint under the large one's name
        (kerngen.folder / args[len(name.split())]).symlink_to(ROOT / "examples" / "tiny" / "gemma-4-tiny-w4a16")
        (kerngen.folder / "book.txt").write_text((ROOT / "README.md").read_text())
    for line in FIRST.get(name, ()):
        kerngen.ok(*shlex.split(line))
    code, out, err = kerngen(*args, *LESS.get(name, ()))
    assert code == 0, err
    assert out.strip()
    assert "Traceback" not in err
    assert "no winners" not in err


@pytest.mark.parametrize("name", NEEDS_MORE)
def test_an_example_that_needs_more_is_understood(name: str) -> None:
    (args,) = _examples(COMMANDS[name])
    path = name.split()
    assert args[: len(path)] == path
    COMMANDS[name].make_context(name, args[len(path) :])
