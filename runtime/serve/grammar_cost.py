"""What compiling a grammar costs, found in a process that may be killed for it.

llguidance has limits on most of what it does, not on all: a `multipleOf` of six digits may compile for a quarter of a
minute and keep 370 MB. So each new grammar is first compiled in a fork of a process that holds the tokenizer, under
limits on its CPU time and memory. What keeps to them is compiled again where it is used.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from kerngen.errors import UsageError
from kerngen.runtime.serve.grammar_compiler import STACK_BYTES, GrammarCompiler
from kerngen.runtime.text import TextCodec
from kerngen.system.processes import ProcessDied, Processes

MAX_COMPILE_S = 5.0  # of CPU; a schema of 256 kB with 3,500 dates takes 1.2 s
MAX_COMPILE_BYTES = 256 * 1024 * 1024  # that schema takes 31 MB
QUICK_COMPILE_S = 0.5  # what takes longer waits for its like alone
LEAST_BYTES = 64 * 1024  # of a compiled grammar, where less is seen
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class GrammarTooSlow(UsageError):
    """The grammar takes more time to compile than it was given."""


class GrammarTooCostly(UsageError):
    """The grammar takes more time or memory to compile than any may."""


class GrammarCosts:
    """Of grammars for the tokenizer in `folder`; the other arguments are as those of GrammarCompiler. Two threads may
    ask at once: one process is for what is quick, and another, which starts when there is need, for the rest.
    """

    def __init__(self, folder: Path, bos_id: int, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer = (folder, bos_id, vocab_size, tuple(stop_ids))
        self._quick, self._slow = Processes(1, tries=2), Processes(1, tries=2)
        self._quick.submit(_prepare, *self._tokenizer)  # takes its second beside that of whoever asks

    def measure(self, grammar: str, within_s: float) -> int:
        """Bytes that `grammar` takes once it is compiled, without what answers that follow it add.

        Raises UsageError where llguidance refuses it, GrammarTooSlow where it takes more than `within_s` of CPU, and
        GrammarTooCostly where that is MAX_COMPILE_S, or where it takes more than MAX_COMPILE_BYTES.
        """
        processes = self._quick if within_s < MAX_COMPILE_S else self._slow
        try:
            return processes.submit(_measure, self._tokenizer, grammar, within_s).result()
        except GrammarTooSlow as e:
            if within_s < MAX_COMPILE_S:
                raise
            raise GrammarTooCostly(e.message) from e
        except ProcessDied as e:
            raise RuntimeError(f"no grammar can be compiled: {e}") from e

    def close(self) -> None:
        """End the processes."""
        self._quick.close()
        self._slow.close()


# -- in such a process


@cache
def _compiler(folder: Path, bos_id: int, vocab_size: int, stop_ids: tuple[int, ...]) -> GrammarCompiler:
    compiler = GrammarCompiler(TextCodec(folder, bos_id), vocab_size, stop_ids)
    gc.collect()
    gc.freeze()  # so that forks share it
    with suppress(AttributeError):  # glibc's: what is free goes back, so that a fork shows what it adds
        ctypes.CDLL(None).malloc_trim(0)
    return compiler


def _prepare(folder: Path, bos_id: int, vocab_size: int, stop_ids: tuple[int, ...]) -> None:
    _compiler(folder, bos_id, vocab_size, stop_ids)


def _measure(tokenizer: tuple[Path, int, int, tuple[int, ...]], grammar: str, within_s: float) -> int:
    compiler = _compiler(*tokenizer)
    ours, theirs = os.pipe()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # the other thread here waits, no more
        child = os.fork()
    if child == 0:
        _measure_and_exit(compiler, grammar, within_s, theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        told = pipe.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended == 0 and told:
        answer: int | str = json.loads(told)
        if isinstance(answer, int):
            return answer
        raise UsageError(answer)
    most = "the answer cannot be guided so: its grammar takes more than {} to compile"
    if ended == -signal.SIGPROF:
        raise GrammarTooSlow(most.format(f"{within_s:g} s"))
    raise GrammarTooCostly(most.format(f"{MAX_COMPILE_BYTES >> 20} MB"))


def _measure_and_exit(compiler: GrammarCompiler, grammar: str, within_s: float, pipe: int) -> None:
    """In the fork, which ends here: by a signal where it takes too long, or llguidance gets no more memory."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = _statm(5) + STACK_BYTES + MAX_COMPILE_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust's last words
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, within_s)
        before = _statm(1)
        matcher = compiler.compile(grammar)
        answer: int | str = max(_statm(1) - before, len(grammar), LEAST_BYTES)
        del matcher
        os.write(pipe, json.dumps(answer).encode())
    except UsageError as e:
        os.write(pipe, json.dumps(e.message).encode())
    except BaseException:
        os._exit(1)
    os._exit(0)


def _statm(field: int) -> int:
    """Bytes of this process: 1 resident, 5 data and stack."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[field]) * _PAGE_BYTES
