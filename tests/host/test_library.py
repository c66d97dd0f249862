"""`import kerngen` as others use it: names and types, one kernel at a time, text. Its ops: test_library_ops.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from sheets import measured_sheets

import kerngen
from kerngen import errors
from kerngen.arch import Target, find_arch, find_device
from kerngen.compiler.render import render
from kerngen.runtime.session import load, open_checkpoint
from kerngen.templates import find_kernel
from kerngen.templates.kernel import static_fields
from kerngen.tuning_db import Measurement, Store, problem_key

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny"
TARGET = TINY / "gemma-4-tiny-w4a16"
ASSISTANT = TINY / "gemma-4-tiny-assistant"
QUESTION = "Where is the lantern?"


# ---- names


def test_every_name_is_there_and_no_other() -> None:
    for name in kerngen.__all__:
        assert getattr(kerngen, name) is not None
        assert name in dir(kerngen)
    with pytest.raises(AttributeError, match="'complie'"):
        kerngen.complie  # type: ignore[attr-defined]  # noqa: B018


def test_every_error_is_exported() -> None:
    found = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.KerngenError)}
    assert found <= set(kerngen.__all__)


def test_importing_is_cheap() -> None:
    code = (
        "import sys, time; began = time.perf_counter(); import kerngen; took = time.perf_counter() - began\n"
        "kerngen.KerngenError, kerngen.compile_kernel, kerngen.find_winner\n"
        "print(took, [m for m in ('torch', 'cupy', 'sqlalchemy') if m in sys.modules])"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    times, heavy = zip(*(done.stdout.strip().split(" ", 1) for done in runs), strict=True)
    assert set(heavy) == {"[]"}
    assert min(map(float, times)) < 0.05


# ---- one kernel


def test_a_kernel_is_compiled_by_its_name() -> None:
    cubin = kerngen.compile_kernel("rmsnorm", {"hidden": 256, "dtype": "fp16", "residual_dtype": "fp32"}, target="sm70")
    assert (cubin.arch, list(cubin.entries)) == ("sm70", ["rmsnorm"])
    kernel, target = find_kernel("rmsnorm"), Target.of(find_arch("sm70"))
    problem = kernel.problem_type(hidden=256, dtype="fp16", residual_dtype="fp32")
    same = kernel.default_config(problem, target)
    for again in (same, {"rows_per_block": same.rows_per_block, "vecs_per_thread": same.vecs_per_thread}):
        assert kerngen.compile_kernel("rmsnorm", problem, again, target=target).key == cubin.key


@pytest.mark.parametrize(("problem", "target", "dtypes"), [
    ({}, "sm75", ("fp16", "fp32")),
    ({"dtype": "fp16"}, "sm75", ("fp16", "fp32")),
    ({"dtype": "fp16"}, "sm90", ("fp16", "fp32")),
    ({"residual_dtype": "fp16"}, "sm70", ("fp16", "fp16")),
    ({}, "sm90", ("bf16", "bf16")),
])  # fmt: skip
def test_dtypes_that_nobody_set_are_the_archs(problem: dict[str, str], target: str, dtypes: tuple[str, str]) -> None:
    cubin = kerngen.compile_kernel("rmsnorm", {"hidden": 3840} | problem, target=target)
    whole = dict(zip(("dtype", "residual_dtype"), dtypes, strict=True))
    assert kerngen.compile_kernel("rmsnorm", {"hidden": 3840} | whole, target=target).key == cubin.key
    assert kerngen.find_winner("rmsnorm", {"hidden": 7160} | problem, target=target) is None  # and is no error


@pytest.mark.parametrize("target", ["L4", "sm89", find_arch("sm89"), find_device("L4"), Target.of(find_device("L4"))])
def test_a_target_is_an_arch_or_a_board(target: Any) -> None:
    assert kerngen.compile_kernel("embed", {"hidden": 64, "vocab_size": 9}, target=target).arch == "sm89"


@pytest.mark.parametrize(("kernel", "problem", "config", "target", "message"), [
    ("rmsnrom", {}, None, "sm90", "unknown kernel 'rmsnrom'"),
    ("rmsnorm", {"hiden": 8}, None, "sm90", "unknown problem field 'hiden'"),
    ("rmsnorm", {"hidden": "many"}, None, "sm90", "hidden='many' is not of type int"),
    ("rmsnorm", {"hidden": 7}, None, "sm90", "hidden=7 is not a positive multiple of 8"),
    ("rmsnorm", 7, None, "sm90", "7 is neither a kerngen.templates.rmsnorm.spec.Problem nor a mapping"),
    ("w4a16_gemm", {"k": 64}, None, "sm90", "n must be given"),
    ("rmsnorm", {}, {"threads": 3}, "sm90", "unknown config field 'threads'"),
    ("rmsnorm", {}, None, "sm71", "unknown target 'sm71'"),
    ("rmsnorm", {"dtype": "bf16"}, None, "sm70", "bf16 needs sm80"),
])  # fmt: skip
def test_a_request_that_cannot_be_right_says_why(
    kernel: str, problem: Any, config: Any, target: str, message: str
) -> None:
    with pytest.raises(kerngen.KerngenError, match=re.escape(message)):
        kerngen.compile_kernel(kernel, problem, config, target=target)


def test_a_winner_is_found_and_compiled(tmp_path: Path) -> None:
    kernel, target = find_kernel("rmsnorm"), Target.of(find_arch("sm90"))
    problem = kernel.problem_type(hidden=512, residual_dtype="bf16")
    config = {"rows_per_block": 2, "vecs_per_thread": 1}
    place = tmp_path / "mine.db"
    with Store.open(place) as store:
        cubin = kerngen.compile_kernel("rmsnorm", problem, config, target="sm90")
        source = render(kernel, problem, kernel.config_type(**config), target)
        build = store.add_build(cubin, kernel.name, source, config, static_fields(problem))
        key = problem_key(kernel, problem)
        store.add_measurement(
            Measurement(key, "sm90", target.device, config, build, "ok", "predicted", model="test", p50_us=1.0)
        )
        store.recompute_winners(kernel, key.static_key, target)
    winner = kerngen.find_winner("rmsnorm", {"hidden": 512}, target="H200", db=place)
    assert winner.config == config
    assert winner.cubin is not None
    again = kerngen.compile_kernel("rmsnorm", {"hidden": 512}, winner.config, target="H200")
    assert again.image == winner.cubin.image
    assert kerngen.find_winner("rmsnorm", {"hidden": 520}, target="H200", db=place) is None


# ---- text


@pytest.fixture(scope="module")
def session() -> Any:
    return load(TARGET)


def test_text_is_what_run_prints(session: kerngen.Session) -> None:
    command = [sys.executable, "-m", "kerngen", "run", str(TARGET), "--draft", str(ASSISTANT), "--temperature", "0",
               "--prompt", QUESTION]  # fmt: skip
    options = ["--max-new-tokens", "24", "--num-draft-tokens", "3", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    made = kerngen.load(str(TARGET), draft=ASSISTANT, dtype=torch.float32, device="cpu", num_draft_tokens=3).generate(
        QUESTION, max_new_tokens=24
    )
    assert (made.text, made.tokens, made.stop_reason) == (said["text"], said["tokens"], said["stop_reason"])
    assert made.stats.num_tokens == len(made.tokens) == said["num_tokens"]
    assert made.stats.num_draft_tokens == said["num_draft_tokens"] == 3


def test_a_stream_is_the_text_in_pieces(session: kerngen.Session) -> None:
    whole = session.generate(QUESTION, max_new_tokens=24)
    stream = session.stream(QUESTION, max_new_tokens=24)
    first = next(stream)
    with pytest.raises(kerngen.UsageError, match="has not ended"):
        stream.completion  # noqa: B018
    pieces = [first, *stream]
    assert len(pieces) > 3
    assert "" not in pieces
    assert "".join(pieces) == stream.completion.text == whole.text
    assert stream.completion.tokens == whole.tokens


def test_streams_go_on_beside_other_generations(session: kerngen.Session) -> None:
    whole = session.generate(QUESTION, max_new_tokens=24).text
    stream = session.stream(QUESTION, max_new_tokens=24)
    first = next(stream)
    session.generate(QUESTION, max_new_tokens=2)
    session.generate(QUESTION, max_new_tokens=40)  # a larger engine takes over; the stream keeps its own
    assert first + "".join(stream) == whole
    closed = session.stream(QUESTION, max_new_tokens=24)
    next(closed)
    closed.close()
    assert not session.reserve(1).has_work
    with pytest.raises(kerngen.UsageError, match="has not ended"):
        closed.completion  # noqa: B018


def test_many_prompts_are_answered_as_each_alone(session: kerngen.Session) -> None:
    prompts = [QUESTION, "hi", "Tell me a story.", QUESTION]
    alone = [session.generate(p, max_new_tokens=16) for p in prompts]
    order: list[int] = []
    many = session.generate_many(prompts, max_new_tokens=16, on_done=lambda i, _: order.append(i))
    assert [(m.text, m.tokens, m.stop_reason) for m in many] == [(a.text, a.tokens, a.stop_reason) for a in alone]
    assert sorted(order) == [0, 1, 2, 3]
    assert session.generate_many([]) == []
    with pytest.raises(kerngen.UsageError, match="at least 1 is made"):
        session.generate_many(prompts, max_new_tokens=0)


def test_a_stop_string_ends_the_text_before_it(session: kerngen.Session) -> None:
    whole = session.generate(QUESTION, max_new_tokens=24).text
    assert len(whole) > 12
    for begin, end in ((4, 5), (5, 9), (0, 2)):
        stop = whole[begin:end]
        expected = whole[: whole.index(stop)]
        stream = session.stream(QUESTION, max_new_tokens=24, stop=["no such text", stop])
        assert "".join(stream) == stream.completion.text == expected
        assert stream.completion.stop_reason == "stop"
        assert session.generate_many([QUESTION], max_new_tokens=24, stop=[stop])[0].text == expected
    almost = whole[-3:] + "never"  # held back at the end, and shown then
    stream = session.stream(QUESTION, max_new_tokens=24, stop=[almost])
    assert "".join(stream) == whole
    with pytest.raises(kerngen.UsageError, match="empty stop string"):
        session.generate(QUESTION, stop=[""])


def test_messages_and_raw_text(session: kerngen.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    message = [{"role": "user", "content": QUESTION}]
    assert session.encode(message) == session.encode(QUESTION) != session.encode(QUESTION, chat=False)
    raw = session.codec.chat(message)
    said = session.generate(message, max_new_tokens=8).tokens
    assert session.encode(raw, chat=False) != session.encode(message), "what looks like a control token is text"
    monkeypatch.setattr(session, "control_tokens", True)
    assert session.encode(raw, chat=False) == session.encode(message)
    assert said == session.generate(raw, chat=False, max_new_tokens=8).tokens
    with pytest.raises(kerngen.UsageError, match="chat template"):
        session.generate(message, chat=False)


def test_a_session_makes_room_as_it_needs_it() -> None:
    session = load(TARGET, draft=False)
    assert session.drafter is None
    session.generate("hi", max_new_tokens=2)
    small = session.reserve(1)
    session.generate("hi", max_new_tokens=1)
    assert session.reserve(1) is small
    session.generate("hi", max_new_tokens=20)
    assert session.reserve(1) is not small
    fixed = load(TARGET, max_len=12)
    with pytest.raises(kerngen.UsageError, match="the cache holds 12"):
        fixed.generate("hi", max_new_tokens=20)
    for count in (0, -50):
        with pytest.raises(kerngen.UsageError, match="at least 1 is made"):
            session.generate("hi", max_new_tokens=count)


@pytest.mark.parametrize(("options", "message"), [
    ({"folder": TINY / "nothing"}, "is not a folder"), ({"device": "tpu"}, "unknown device 'tpu'"),
    ({"dtype": "int4"}, "unknown dtype 'int4'"), ({"dtype": torch.float64}, "unknown dtype 'torch.float64'"),
    ({"backend": "jax"}, "unknown backend 'jax'"), ({"num_draft_tokens": 99}, "99 draft tokens"),
    ({"max_len": 1 << 40}, "the model takes"), ({"db": "x.db"}, "looks nothing up"),
])  # fmt: skip
def test_a_folder_that_cannot_be_opened_so_says_why(options: dict[str, Any], message: str) -> None:
    if torch.cuda.is_available() and "db" in options:
        pytest.skip("the cuda backend looks winners up")
    options = {"folder": TARGET, **options}
    with pytest.raises(kerngen.KerngenError, match=re.escape(message)):
        load(**options)


def test_a_session_shows_what_it_is(session: kerngen.Session) -> None:
    assert repr(session).startswith("<kerngen.Session gemma-4-tiny-w4a16: ")
    assert repr(session).endswith(", drafting>")
    session.num_draft_tokens = 3
    assert "drafting 3 tokens" in repr(session)
    assert open_checkpoint(TARGET, session.ops).drafter is None


# ---- the page, and the types


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "library.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 3
    script, cache = tmp_path / "page.py", tmp_path / "cache"
    script.write_text("\n".join(blocks))
    few = str(measured_sheets(tmp_path / "prebuilt"))  # with predictions too it takes ten seconds more, once
    begin = ("import runpy, sys; from pathlib import Path; from kerngen.tuning_db.read import places; "
             "places.PREBUILT = Path(sys.argv[2]); runpy.run_path(sys.argv[1], run_name='__main__')")  # fmt: skip
    done = run(
        sys.executable, "-c", begin, script, few, KERNGEN_CACHE_DIR=cache, KERNGEN_DB=tmp_path / "t.db", PYTHONPATH=ROOT
    )
    assert done.returncode == 0, done.stderr


CONSUMER = """
from typing import assert_type

import torch
from torch import Tensor

import kerngen
from kerngen.ops import W4Weights, pack_w4

cubin = kerngen.compile_kernel("rmsnorm", {"hidden": 256}, target="sm90")
assert_type(cubin, kerngen.Cubin)
assert_type(cubin.image, bytes)
winner = kerngen.find_winner("rmsnorm", {"hidden": 256}, target="H200")
assert_type(winner, kerngen.Winner | None)
x = torch.ones(2, 256)
assert_type(kerngen.ops.rmsnorm(x, None, 1e-6, torch.float32), Tensor)
assert_type(kerngen.ops.moe_route(x, x, top_k=2), tuple[Tensor, Tensor])
assert_type(kerngen.ops.attn_decode(x, x, x, x, x, 1, window=4), Tensor)
w = pack_w4(torch.zeros(32, 32, dtype=torch.int32), torch.ones(32, 8))
assert_type(w, W4Weights)
assert_type(kerngen.ops.w4a16_gemm(x, w), Tensor)
assert_type(kerngen.ops.w4a16_gemm(x, w.w_packed, w.scales), Tensor)
session = kerngen.load("folder", dtype="bf16", draft=False)
assert_type(session, kerngen.Session)
assert_type(session.generate("hi", max_new_tokens=3, temperature=0.5), kerngen.Completion)
for piece in (stream := session.stream([{"role": "user", "content": "hi"}])):
    assert_type(piece, str)
assert_type(stream.completion.stats.tokens_per_s, float)
kerngen.ops.rmsnorm(x, None, "eps", torch.float32)  # error: arg-type
kerngen.ops.gelu_gate(x, x)  # error: call-arg
kerngen.compile_kernel("rmsnorm", {})  # error: call-arg
"""


def test_the_wheel_carries_its_types(tmp_path: Path) -> None:
    """Built as it ships and installed in an environment of its own, where mypy --strict checks who uses it."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    done = run(*build, _source_tree(tmp_path / "source"))
    assert done.returncode == 0, done.stderr
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    (site / "others.pth").write_text(str(Path(torch.__file__).parents[1]))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assets = ("report/page.css", "report/page.js", "report/page.html.jinja", "job_queue/worker.py")
    for name in ("ops/library.py", "templates/rmsnorm/op.py", "runtime/executors/reference.py", *assets):
        assert (site / "kerngen" / name).is_file()
    python = tmp_path / "venv" / "bin" / "python"
    done = run(python, "-I", "-c", "import kerngen; print(kerngen.ops.embed.__name__, kerngen.__file__)", cwd=tmp_path)
    assert done.stdout.split() == ["embed", str(site / "kerngen" / "__init__.py")], done.stderr
    script = tmp_path / "consumer.py"
    script.write_text(CONSUMER)
    config = tmp_path / "mypy.ini"  # what pyproject.toml leaves out of torch is no part of any of kerngen's types
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    left_out = next(o["module"] for o in overrides if o.get("follow_imports") == "skip")
    config.write_text("[mypy]\n" + "".join(f"[mypy-{module}]\nfollow_imports = skip\n" for module in left_out))
    check = [sys.executable, "-m", "mypy", "--strict", "--config-file", config, "--python-executable", python]
    done = run(*check, "--cache-dir", tmp_path / "cache", script, cwd=tmp_path)
    lines = CONSUMER.splitlines()
    expected = {(i, text.split("# error: ")[1]) for i, text in enumerate(lines, 1) if "# error: " in text}
    found = {(int(m[1]), m[2]) for m in re.finditer(r"^consumer\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.M)}
    assert found == expected, done.stdout + done.stderr


def run(*command: object, cwd: Path = ROOT, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def _source_tree(place: Path) -> Path:
    """What a wheel is built of, without the databases, so that the build leaves nothing in the repository."""
    place.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.sqlite", "*.egg-info")
    for tree in ("kerngen", "templates", "tuning_db", "runtime"):
        shutil.copytree(ROOT / tree, place / tree, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / name)
    return place
