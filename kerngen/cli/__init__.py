"""`kerngen`: verbs and groups, each in a module of its own that is imported only when it is called.

Results go to stdout, progress to stderr. Exit 0 done, 1 failed, 2 misused, 130 stopped by Ctrl-C, 143 by
SIGTERM. No tracebacks, unless KERNGEN_DEBUG is set.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

import click

import kerngen
from kerngen.cli.process import settle_home, settle_notes, settle_streams, settle_threads, stopped_by
from kerngen.errors import KerngenError, printable
from kerngen.system.environment import is_set
from kerngen.system.leaving import leave
from kerngen.system.logs import settle_logging

TEMPLATES_VARIABLE = "KERNGEN_TEMPLATES"  # of kerngen.templates, which --help does not wait for
COMPLETE_VARIABLE = "_KERNGEN_COMPLETE"  # set by the shell while it completes a line (docs/quick-start.md)
# command -> (module, what `kerngen --help` says of it); the attribute has the command's name
COMMANDS = {
    "tune": ("kerngen.cli.tune", "Find the best configuration of every kernel a model needs."),
    "worker": ("kerngen.cli.worker", "Take tuning jobs from a queue, on this machine."),
    "compile": ("kerngen.cli.compile", "Build every kernel of a model, into one folder if you like."),
    "release": ("kerngen.cli.release", "Build all released models for each architecture, into one file each."),
    "run": ("kerngen.cli.run", "Generate text with a Gemma-4 checkpoint."),
    "serve": ("kerngen.cli.serve", "Serve a Gemma-4 checkpoint to OpenAI's clients, and a page to chat."),
    "convert": ("kerngen.cli.convert", "Write a GGUF file or a checkpoint as safetensors that load as they lie."),
    "bench": ("kerngen.cli.bench", "Time kernels, or a model's step, against this GPU's measured limits."),
    "eval": ("kerngen.cli.eval", "Say what an approximation that you may choose costs on a text."),
    "soak": ("kerngen.cli.soak", "Load a model or a server with random requests for minutes, and check answers."),
    "doctor": ("kerngen.cli.doctor", "Say what this machine can compile for, run and measure."),
    "db": ("kerngen.cli.db", "Look into the tuning database."),
    "kernel": ("kerngen.cli.kernel", "List, show, check and begin kernels."),
    "arch": ("kerngen.cli.arch", "List architectures and device profiles."),
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = getattr(import_module(COMMANDS[name][0]), name)
        if not isinstance(command, click.Command):
            raise TypeError(f"{COMMANDS[name][0]}.{name} is not a click command")
        if COMPLETE_VARIABLE in os.environ:
            from kerngen.cli.completing import teach

            teach(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):  # from the table: --help imports no command
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kerngen.__version__, prog_name="kerngen")
@click.option("--templates", "templates", type=click.Path(exists=True, file_okay=False), multiple=True, metavar="DIR",
              help="A folder of kernel folders, beside kerngen's own; may be given several times.")  # fmt: skip
@click.pass_context
def cli(context: click.Context, templates: tuple[str, ...]) -> None:
    """Compile, tune and run Gemma-4's GPU kernels, on the GPU you have or for one you do not.

    \b
    Example:
      kerngen tune --arch sm70 --model gemma-4-31b --time-budget 3m
    """
    if templates:
        _use_templates(context, templates)


def _use_templates(context: click.Context, folders: tuple[str, ...]) -> None:
    """Put `folders` before those of the environment, where worker processes find them too, until the command ends."""
    before = os.environ.get(TEMPLATES_VARIABLE)
    os.environ[TEMPLATES_VARIABLE] = os.pathsep.join([*map(os.path.abspath, folders), *filter(None, [before])])

    @context.call_on_close
    def restore() -> None:
        if before is None:
            del os.environ[TEMPLATES_VARIABLE]
        else:
            os.environ[TEMPLATES_VARIABLE] = before


def main() -> None:
    """The console entry point: exits with the code that `run_command` gives."""
    leave(run_command())


def run_command(command: click.Command | None = None, name: str = "kerngen") -> int:
    """Run what sys.argv asks of `command`, by default of kerngen's, and turn deliberate errors into one clear message.
    Returns the exit code. name: as usage messages have it.
    """
    debug = is_set("KERNGEN_DEBUG")
    with stopped_by() as received:
        try:
            settle_streams()
            settle_logging()
            settle_home()
            settle_threads()
            settle_notes()
            # Commands return None. Where one raises click's Exit, or --help does, click returns the code instead.
            code: int | None = (command or cli)(prog_name=name, standalone_mode=False)
            sys.stdout.flush()  # a pipe that is closed or a disk that is full is reported here, not as the program ends
            return code or 0
        except click.ClickException as e:
            e.show()
            return e.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo("stopped" if received() == signal.SIGINT else f"stopped by {received().name}", err=True)
            return 128 + received()
        except BrokenPipeError:  # `kerngen ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except KerngenError as e:
            if debug:
                raise
            click.echo(f"{type(e).__name__}: {e}", err=True)
            return e.exit_code
        except OSError as e:
            if debug:
                raise
            where = f"{e.filename}: " if e.filename else ""
            click.echo(printable(f"error: {where}{e.strerror or e}"), err=True)
            return 1
