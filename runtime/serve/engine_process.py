"""The engine's process: it loads the model, reads requests from a pipe, and sends the tokens of each step.

It handles tokens only. Text, HTTP and clients belong to the other process (engine_client.py), so none of that delays a
step. It exits when it is told to, and when the other process has exited.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from kerngen.errors import KerngenError, UsageError, printable
from kerngen.runtime.media.values import Placed
from kerngen.runtime.sampling import Sampling
from kerngen.system.logs import settle_logging

if TYPE_CHECKING:
    from kerngen.runtime.engine import Engine, Event, Handle, Load, Stats, TokenLogprobs
    from kerngen.runtime.serve.grammars import Guide, Guides
    from kerngen.runtime.session import Session

LESS_MEMORY = "a smaller --context or --max-batch"
COMPILING_S = 0.002  # how often it is seen that a grammar is compiled, where nothing else is to do
RANKS_S = 0.5  # how often it is seen that a rank of a divided model has ended, where nothing else is to do

# -- what the engine is told


@dataclass(frozen=True, slots=True)
class Options:
    """load: arguments of `opens`. max_len: tokens of a sequence. max_batch: of them at once, where memory takes
    as many. opens: gives the session, None for `kerngen.load`; a function of a module, for it is called in the engine's
    process. reproducible: as the engine's. usual: how most requests are sampled, if that is known. devices: where the
    engine runs, () for what `load` says. num_sharing: engines that share this machine's cores, each of which takes its
    part of torch's threads.
    """

    load: Mapping[str, Any]
    max_len: int
    max_batch: int
    opens: Callable[..., Session] | None = None
    reproducible: bool = False
    usual: Sampling | None = None
    devices: tuple[str, ...] = ()
    num_sharing: int = 1


@dataclass(frozen=True, slots=True)
class Guiding:
    """A grammar that the answer follows, as `Guides.guide` has it."""

    grammar: str
    may_think: bool = False
    is_thinking: bool = False


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """What is to be generated. stop_ids, logprobs, prompt_logprobs, media: see the engine's Request; guiding: in place
    of its mask, which is compiled where the engine is.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    guiding: Guiding | None = None
    prompt_logprobs: int | None = None
    media: tuple[Placed, ...] = ()


@dataclass(frozen=True, slots=True)
class Submit:
    """`number` is the other process's name for the request. Its prompt is an array, which a pipe carries in bytes."""

    number: int
    request: TokenRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    number: int


# -- what the engine tells


@dataclass(frozen=True, slots=True)
class Loading:
    """Bytes of the weights that are there, of all; or, with `kernel`, how many are built, and which one is next."""

    done: int
    total: int
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """max_len, max_batch: what fitted. where: backend, device and dtype, in words. load_s, ready_s: seconds that
    weights took, and then kernels and graphs. warnings: the checkpoint's. board: the GPU's name, "" on a CPU.
    """

    max_len: int
    max_batch: int
    num_pages: Mapping[str, int]
    where: str
    load_s: float
    ready_s: float
    drafter: str | None
    warnings: tuple[str, ...] = ()
    board: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """Why there is no engine, or no longer one. is_misuse: what it was asked to load cannot be right."""

    message: str
    hint: str | None = None
    is_misuse: bool = False


class Made(NamedTuple):
    """New tokens of a request, with what is known of each where that was asked for. reason: why they are its last, ""
    where they are not; stats then, and `error` in words where that is why ("error": the model computed no number;
    "refused": the engine does not take the request, or cannot guide it on). prompt_logprobs: of the prompt's tokens but
    the first, with the first that are made.

    A tuple, for one goes through the pipe for each row of each step: a dataclass takes four times as long to pickle.
    """

    number: int
    tokens: list[int]
    logprobs: Sequence[TokenLogprobs] = ()
    reason: str = ""
    stats: Stats | None = None
    error: str = ""
    prompt_logprobs: Sequence[TokenLogprobs] = ()

    def then(self, later: Made) -> Made:
        """Both, as one."""
        of_prompt = self.prompt_logprobs or later.prompt_logprobs
        return later._replace(tokens=self.tokens + later.tokens, logprobs=[*self.logprobs, *later.logprobs],
                              prompt_logprobs=of_prompt)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Told:
    """What came of a step, and who is where after it. drafted, accepted: drafts since the start, by position."""

    made: list[Made] = field(default_factory=list)
    load: Load | None = None


def serve(connection: Connection, options: Options) -> None:
    """In the engine's process (engine_start.py): until `connection` ends, or says None."""
    settle_logging()
    with suppress(BrokenPipeError, EOFError, ConnectionResetError):
        try:
            _Loop(connection, *_open(connection, options)).run()
        except (BrokenPipeError, EOFError, ConnectionResetError):
            raise  # the other process is gone
        except KerngenError as e:
            connection.send(Failed(e.message, e.hint, is_misuse=isinstance(e, UsageError)))
        except Exception as e:
            print(printable(traceback.format_exc()), end="", file=sys.stderr, flush=True)  # for whoever must mend it
            connection.send(Failed(f"{type(e).__name__}: {e}"))


def _open(connection: Connection, options: Options) -> tuple[Session, Engine]:
    import torch

    from kerngen.runtime.backend import explaining_memory
    from kerngen.runtime.session import load

    if options.num_sharing > 1:
        torch.set_num_threads(max(torch.get_num_threads() // options.num_sharing, 1))
    arguments = dict(options.load)
    if options.devices:
        arguments["device"] = options.devices[0]  # from which on the ranks of a divided model have theirs
    told = 0

    def advance(done: int, total: int) -> None:
        nonlocal told
        if done - told > total // 200 or done == total:
            told = done
            connection.send(Loading(done, total))

    with warnings.catch_warnings(record=True, action="always") as caught:
        session = (options.opens or load)(**arguments, advance=advance)
    session.reproducible = options.reproducible
    session.max_len = min(options.max_len, session.config.max_positions)
    with explaining_memory(session.ops.device, LESS_MEMORY):
        engine = session.reserve(session.max_len, options.max_batch)
        began = time.perf_counter()
        engine.make_ready(lambda *told: connection.send(Loading(*told)), options.usual)
        ready_s = time.perf_counter() - began
    keep_out_of_collections()
    connection.send(Ready(
        engine.max_len, engine.max_batch, engine.load.num_pages,
        session.where, session.load_s,
        ready_s, session.drafter_names,
        tuple(str(w.message) for w in caught),
        torch.cuda.get_device_name(session.ops.device) if session.ops.device.type == "cuda" else "",
    ))  # fmt: skip
    return session, engine


def keep_out_of_collections() -> None:
    """What is there now stays: the garbage collector would look through all of it every now and then, for as long as
    ten steps take (0.3 s with torch imported), while everybody waits.
    """
    gc.collect()
    gc.freeze()


class _Loop:
    """Steps while there is work, and between them what the pipe has."""

    def __init__(self, connection: Connection, session: Session, engine: Engine) -> None:
        self._connection, self._session, self._engine = connection, session, engine
        self._by_number: dict[int, Handle] = {}
        self._numbers: dict[Handle, int] = {}
        # Grammars are compiled beside the steps. What takes long waits for its like alone.
        self._quick = ThreadPoolExecutor(1, thread_name_prefix="kerngen-grammar")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="kerngen-slow-grammar")
        self._compiling: dict[int, tuple[Submit, Future[Guide]]] = {}
        self._guides: Guides | None = None

    def run(self) -> None:
        from kerngen.runtime.backend import explaining_memory

        engine, connection, ranks = self._engine, self._connection, self._session.ranks
        idle_s = None if ranks is None else RANKS_S
        with explaining_memory(self._session.ops.device, LESS_MEMORY):
            while True:
                made: list[Made] = []
                while connection.poll(0 if engine.has_work or made else COMPILING_S if self._compiling else idle_s):
                    if (told := connection.recv()) is None:
                        return
                    made += self._heed(told)
                for number in [n for n, (_, guide) in self._compiling.items() if guide.done()]:
                    made += self._submit_guided(*self._compiling.pop(number))
                if made:  # before the step: whose answer has ended waits for its last word
                    connection.send(Told(made, engine.load))
                if not engine.has_work:
                    if ranks is not None:
                        ranks.require_alive()
                    continue
                if made := [self._made(event) for event in engine.step() if event.handle in self._numbers]:
                    connection.send(Told(made, engine.load))

    def _heed(self, told: Submit | Cancel) -> Sequence[Made]:
        if isinstance(told, Submit):
            if (guiding := told.request.guiding) is None:
                return self._submit(told)
            self._compiling[told.number] = told, self._quick.submit(self._guide, guiding)
            return ()
        if (compiling := self._compiling.pop(told.number, None)) is not None:
            compiling[1].cancel()  # where it has not begun
            return (Made(told.number, [], reason="cancelled"),)
        if (handle := self._by_number.pop(told.number, None)) is None:
            return ()  # it had ended meanwhile
        del self._numbers[handle]
        self._engine.cancel(handle)
        return (Made(told.number, [], reason="cancelled", stats=handle.stats),)

    def _guide(self, wanted: Guiding, *, is_slow: bool = False) -> Guide:
        """In a compiler's thread; the quick one is there first."""
        from kerngen.runtime.serve.grammar_cost import MAX_COMPILE_S, QUICK_COMPILE_S
        from kerngen.runtime.serve.grammars import Guides

        if self._guides is None:
            session = self._session
            self._guides = Guides(session.codec, session.config.vocab_size, session.stop_ids)
        return self._guides.guide(wanted.grammar, may_think=wanted.may_think, is_thinking=wanted.is_thinking,
                                  within_s=MAX_COMPILE_S if is_slow else QUICK_COMPILE_S)  # fmt: skip

    def _submit_guided(self, told: Submit, guide: Future[Guide]) -> Sequence[Made]:
        from kerngen.runtime.serve.grammar_cost import GrammarTooSlow
        from kerngen.runtime.serve.grammars import GuidesBusy

        try:
            return self._submit(told, guide.result())
        except GrammarTooSlow:
            assert told.request.guiding is not None
            self._compiling[told.number] = told, self._slow.submit(self._guide, told.request.guiding, is_slow=True)
            return ()
        except GuidesBusy as e:  # no fault of the request
            return (Made(told.number, [], reason="error", error=e.message),)
        except KerngenError as e:
            return (Made(told.number, [], reason="refused", error=e.message),)
        except Exception as e:  # of a library, or a thread that could not start: the others' requests go on
            traceback.print_exc()
            error = f"the answer cannot be guided: {type(e).__name__}: {e}"
            return (Made(told.number, [], reason="error", error=error),)

    def _submit(self, told: Submit, mask: Guide | None = None) -> Sequence[Made]:
        from kerngen.runtime.engine import Request

        asked = told.request
        try:
            handle = self._engine.submit(Request(asked.prompt, asked.max_new_tokens, asked.sampling, asked.stop_ids,
                                                 logprobs=asked.logprobs, mask=mask,
                                                 prompt_logprobs=asked.prompt_logprobs, media=asked.media))  # fmt: skip
        except KerngenError as e:
            return (Made(told.number, [], reason="refused", error=e.message),)
        self._by_number[told.number] = handle
        self._numbers[handle] = told.number
        return ()

    def _made(self, event: Event) -> Made:
        handle = event.handle
        number = self._numbers[handle]
        of_prompt = handle.prompt_logprobs if len(event.tokens) == len(handle.tokens) else []
        if not handle.is_done:
            return Made(number, event.tokens, event.logprobs, prompt_logprobs=of_prompt)
        del self._numbers[handle], self._by_number[number]
        error = "" if handle.error is None else handle.error.message
        reason = "refused" if isinstance(handle.error, UsageError) else handle.stop_reason
        return Made(number, event.tokens, event.logprobs, reason, handle.stats, error, of_prompt)
