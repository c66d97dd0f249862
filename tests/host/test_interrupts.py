"""Ctrl-C and SIGTERM: they come where work can bear them, and at once where someone has had enough."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from sqlalchemy import text

from kerngen.system import interrupts
from kerngen.system.interrupts import heed, held, result_of
from kerngen.system.processes import ProcessDied
from kerngen.tuning_db import Store


@pytest.fixture(autouse=True)
def _python_handles_them() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_they_come_as_it_ends() -> None:
    done: list[str] = []

    def work() -> None:
        with held():
            with held():
                signal.raise_signal(signal.SIGINT)
            done.append("and what follows the inner one")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_they_come_where_they_are_heeded() -> None:
    with held():
        heed()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            heed()
        heed()


def test_a_ctrl_c_of_someone_who_has_had_enough_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "IMPATIENT_S", 0.1)
    with held():
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_ctrl_c_that_arrives_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "IMPATIENT_S", 60.0)
    with held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            heed()
        heed()


def test_none_is_lost_where_its_end_is_interrupted() -> None:
    """SIGTERM's handler is put back after SIGINT's, and a Ctrl-C may come in between."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    ours = signal.getsignal(signal.SIGTERM)
    look, was_sent = _interrupting(2, at_call="signal")
    try:
        with pytest.raises(KeyboardInterrupt):
            _held_and_watched(look)
        assert was_sent()
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        with held():
            signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ours is not None


def _held_and_watched(look: Callable[[FrameType, str, Any], None]) -> None:
    try:
        with held():
            sys.setprofile(look)
    finally:
        sys.setprofile(None)


def test_a_handler_that_was_put_there_meanwhile_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    with held():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, before)


def test_each_comes_to_its_own_handler_and_what_is_ignored_stays_so() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with held():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert seen == []
        assert seen == [signal.SIGTERM] * 2
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with held():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_hold_nothing() -> None:
    def elsewhere() -> Any:
        with held():
            heed()
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(elsewhere).result() is signal.default_int_handler


def test_a_wait_heeds_them() -> None:
    never: Future[int] = Future()
    main = threading.main_thread().ident
    assert main is not None
    soon = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
    began = time.monotonic()
    with held():
        soon.start()
        with pytest.raises(KeyboardInterrupt):
            result_of(never)
    assert time.monotonic() - began < 10
    with pytest.raises(TimeoutError):
        result_of(never, 0.3)
    never.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        result_of(never, 60)
    now: Future[int] = Future()
    now.set_result(3)
    assert result_of(now) == result_of(now, 0) == 3


def test_an_interrupt_comes_before_what_it_did_to_others() -> None:
    """A signal to the group: what took a process down is no fault of what it was at."""
    lost: Future[int] = Future()
    lost.set_exception(ProcessDied(True))
    with held():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            result_of(lost)
        with pytest.raises(ProcessDied):
            result_of(lost)


def _interrupting(at: int, at_call: str = "") -> tuple[Callable[[FrameType, str, Any], None], Callable[[], bool]]:
    """A profile function that sends SIGINT at the `at`th place where Python looks for signals, or only of those as it
    enters a function of the name `at_call`.
    """
    count = 0

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_return") and (not at_call or (event, frame.f_code.co_name) == ("call", at_call)):
            count += 1
            if count == at:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    return look, lambda: count >= at


def test_a_transaction_is_whole_wherever_the_interrupt_comes(tmp_path: Path) -> None:
    """Without `held`, one place in a thousand loses SQLAlchemy's lock: the next connection waits for 30 s."""
    with Store.open(tmp_path / "tuning.db") as store:
        with store.writing() as connection:
            connection.execute(text("CREATE TABLE seen (at INTEGER)"))
        at, interrupted = 1, True
        while interrupted:
            look, was_sent = _interrupting(at)
            try:
                sys.setprofile(look)
                try:
                    with store.writing() as connection:
                        connection.execute(text(f"INSERT INTO seen VALUES ({at})"))
                finally:
                    sys.setprofile(None)
            except KeyboardInterrupt:
                pass
            interrupted = was_sent()
            with store.reading() as connection:
                rows = connection.execute(text("SELECT count(*) FROM seen WHERE at = :at"), {"at": at}).scalar_one()
            assert rows in (0, 1)
            at += 1
        assert at > 200, "it was interrupted all the way through"
