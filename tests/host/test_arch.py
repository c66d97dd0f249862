"""Arch and Device: facts, lookup, and errors that name what exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import kerngen
from kerngen.arch import (
    ARCHES,
    DEVICES,
    Target,
    arch_of_capability,
    borrowed,
    default_device,
    find_arch,
    find_device,
    parse_arches,
)
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import render
from kerngen.errors import UnknownName, UsageError
from kerngen.templates import find_kernel
from kerngen.tuning.checks import why_not_cubin


def test_arch_order_and_print() -> None:
    assert [str(a) for a in ARCHES.values()] == ["sm70", "sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120"]


@pytest.mark.parametrize(("name", "smem", "target", "ptx"), [
    ("sm70", 98304, "sm_70", "compute_70"), ("sm75", 65536, "sm_75", "compute_75"),
    ("sm80", 166912, "sm_80", "compute_80"), ("sm86", 101376, "sm_86", "compute_86"),
    ("sm90", 232448, "sm_90a", "compute_90"), ("sm120", 101376, "sm_120a", "compute_120"),
])  # fmt: skip
def test_arch_figures(name: str, smem: int, target: str, ptx: str) -> None:
    arch = find_arch(name)
    assert (arch.max_smem_bytes, arch.nvrtc_target, arch.ptx_target) == (smem, target, ptx)
    assert arch.max_smem_bytes + arch.reserved_smem_bytes == arch.smem_per_sm


def test_unknown_arch_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="sm71") as e:
        find_arch("sm71")
    assert "sm70" in (e.value.hint or "")
    assert e.value.exit_code == 2


def test_parse_arches() -> None:
    assert [a.name for a in parse_arches("sm90, sm70,sm90")] == ["sm90", "sm70"]
    assert len(parse_arches("all")) == len(ARCHES)
    with pytest.raises(UsageError):
        parse_arches(" , ")


@pytest.mark.parametrize(("cc", "name", "target", "words"), [
    ((7, 0), "sm70", "sm_70", ""),
    ((7, 2), "sm70", "sm_72", "Jetson Xavier"),
    ((8, 7), "sm86", "sm_87", "Jetson Orin"),
    ((8, 9), "sm89", "sm_89", ""),
    ((9, 0), "sm90", "sm_90a", ""),
    ((10, 0), "sm100", "sm_100a", ""),
    ((10, 1), "sm100", "sm_101", "Jetson Thor"),
    ((10, 3), "sm100", "sm_103", "B300 runs sm100's kernels, compiled for sm_103"),
    ((11, 0), "sm100", "sm_110", "Jetson Thor"),
    ((12, 0), "sm120", "sm_120a", ""),
    ((12, 1), "sm120", "sm_121", "GB10"),
])  # fmt: skip
def test_what_a_gpu_runs_is_compiled_for_it(cc: tuple[int, int], name: str, target: str, words: str) -> None:
    arch = arch_of_capability(*cc)
    assert (arch.name, arch.nvrtc_target) == (name, target)
    assert arch == find_arch(name), "what was tuned for that arch serves this GPU"
    assert borrowed(arch).startswith(words)
    assert bool(words) == bool(borrowed(arch))


@pytest.mark.parametrize("cc", [(6, 1), (9, 1), (13, 0)])
def test_no_kernel_runs_there(cc: tuple[int, int]) -> None:
    with pytest.raises(UnknownName, match="--backend torch"):
        arch_of_capability(*cc)


@pytest.mark.parametrize("cc", [(8, 7), (10, 3), (12, 1)])
def test_kernels_compile_for_gpus_without_an_arch_of_their_own(cc: tuple[int, int]) -> None:
    """All kernels do, with NVRTC 12.9 (tests/gpu has no such GPU); two with much of the arch in them stand for them."""
    arch = arch_of_capability(*cc)
    target = Target.of(arch)
    for name in ("attn_decode", "w4a16_gemm"):
        kernel = find_kernel(name)
        problem = next(c.problem for c in kernel.cases.CASES if kernel.why_unsupported(c.problem, target) is None)
        cubin = compile_cubin(render(kernel, problem, kernel.default_config(problem, target), target), arch)
        assert why_not_cubin(cubin.image, arch) is None
        assert why_not_cubin(cubin.image, find_arch(arch.name)) is not None


def test_devices_have_sources_and_known_arches() -> None:
    for device in DEVICES.values():
        assert device.arch in ARCHES
        assert len(device.source) > 10
    assert {default_device(a).arch for a in ARCHES.values()} == set(ARCHES)
    assert find_device("h200").name == "H200"
    with pytest.raises(UnknownName, match="device"):
        find_device("K80")


@pytest.mark.parametrize(("module", "heavy"), [
    ("kerngen", ("torch", "cupy", "jinja2", "click", "sqlalchemy", "optuna")),
    ("kerngen.templates", ("torch", "cupy", "sqlalchemy", "optuna")),
    ("kerngen.compiler.render", ("torch", "cupy", "sqlalchemy", "optuna")),
    ("kerngen.cli", ("torch", "cupy", "jinja2", "sqlalchemy", "optuna", "rich", "prompt_toolkit")),
    ("kerngen.cli.run", ("prompt_toolkit",)),
    ("kerngen.tuning_db", ("torch", "cupy", "sqlalchemy", "optuna")),
    ("kerngen.vllm", ("vllm", "torch", "cupy", "sqlalchemy")),
    ("kerngen.workload.workload", ("torch", "cupy", "sqlalchemy")),
    ("kerngen.tuning_db.read.values", ("kerngen.templates", "kerngen.compiler.compile", "jinja2", "zstandard")),
    ("kerngen.tuning_db.read.ids", ("kerngen.compiler.compile", "jinja2", "zstandard", "multiprocessing")),
    ("kerngen.tuning_db.read.winner_table", ("multiprocessing", "jinja2", "sqlalchemy", "torch", "cupy")),
    ("kerngen.runtime.serve.output_parser", ("torch", "cupy", "llguidance", "jinja2")),
    ("kerngen.runtime.serve.grammars", ("torch", "cupy", "llguidance", "jinja2")),
])  # fmt: skip
def test_layers_stay_light(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(' '.join(m for m in {heavy!r} if m in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""


PACKAGE = Path(kerngen.__file__).parent
TREES = tuple(PACKAGE / tree for tree in (".", "runtime", "templates", "tuning_db"))  # the last three are links


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _imports(folder: Path) -> Iterator[tuple[str, str]]:
    """(file:line, module) of every import in `folder`, those inside of functions too."""
    for path in _files(folder):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            yield from ((f"{path.relative_to(folder)}:{node.lineno}", name) for name in names)


_TUNES = ("kerngen.tuning", "kerngen.cost.predict", "kerngen.timing", "kerngen.cli")


@pytest.mark.parametrize(("layer", "above"), [
    ("runtime", _TUNES),
    ("tuning_db", (*_TUNES, "kerngen.runtime", "kerngen.workload")),
    ("tuning_db/store", ("kerngen.tuning_db.dist", "optuna")),
    ("tuning_db/read", ("kerngen.tuning_db.store", "kerngen.tuning_db.dist", "sqlalchemy", "alembic", "optuna")),
    ("templates", (*_TUNES, "kerngen.runtime", "kerngen.workload", "kerngen.tuning_db", "kerngen.compiler.compile")),
])  # fmt: skip
def test_no_layer_imports_what_lies_above_it(layer: str, above: tuple[str, ...]) -> None:
    found = list(_imports(PACKAGE / layer))
    assert any(name.startswith("kerngen.") for _, name in found), "nothing was read"
    wrong = [f"{where} {name}" for where, name in found if f"{name}.".startswith(tuple(f"{a}." for a in above))]
    assert wrong == []


def test_nothing_that_is_read_is_run_and_few_modules_reach_a_network() -> None:
    """No pickles, and no shell: models, databases and caches come from others."""
    found = {f"{where} {name}" for tree in TREES for where, name in _imports(tree)}
    assert {f for f in found if re.search(r" (pickle|shelve|marshal|dill|cloudpickle|joblib)\b", f)} == set()
    clients = r" (urllib\.request|http\.client|requests|httpx|aiohttp|huggingface_hub|psycopg|procrastinate|uvicorn)\b"
    reach = {f.partition(":")[0] for f in found if re.search(clients, f)}
    assert reach == {
        "hub.py", "media/fetch.py", "serve/connections.py", "serve/server.py", "job_queue/queue.py",
        "job_queue/worker.py",
    }  # fmt: skip
    calls = [n for tree in TREES for path in _files(tree) for n in ast.walk(_parsed(path)) if isinstance(n, ast.Call)]
    assert len(calls) > 1000, "nothing was read"
    forbidden = {"os.system", "os.popen", "subprocess.getoutput", "torch.load", "exec"}
    assert [ast.unparse(c) for c in calls if _name(c.func) in forbidden or "shell" in [k.arg for k in c.keywords]] == []


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def test_what_a_run_reads_loads_where_there_is_no_sqlalchemy() -> None:
    """Nor alembic nor Optuna: to import any of them is an error here, as where they are not installed."""
    code = (
        "import sys; from importlib import import_module; from pathlib import Path;"
        "sys.modules.update(dict.fromkeys(('sqlalchemy', 'alembic', 'optuna')));"
        "import kerngen.tuning_db.read as read;"
        "names = sorted(p.stem for p in Path(read.__file__).parent.glob('*.py') if p.stem != '__init__');"
        "[import_module(f'{read.__name__}.{n}') for n in names]; print(*names)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert {"winner_table", "lookup"} <= set(out.stdout.split())
