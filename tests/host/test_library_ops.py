"""`kerngen.ops`, on the CPU: every op of every folder, on its folder's own cases, as torch and torch.compile see it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from toy import toy_kernels

import kerngen
from kerngen.errors import DeviceError, LaunchError, ProblemError, UsageError
from kerngen.ops import library
from kerngen.templates import Case, Kernel, find_kernel, kernel_names
from kerngen.templates.call import Call, Op
from kerngen.templates.call import op as marked
from kerngen.templates.kernel import Arg, fields_of, spread, static_fields

KERNELS = tuple(find_kernel(name) for name in kernel_names())
OPS = {op.name: op for kernel in KERNELS for op in vars(kernel.op).values() if isinstance(op, Op)}
MOST_BYTES = 1_000_000  # of a case that is small


def small_cases() -> list[list[tuple[Kernel, Case]]]:
    """Small cases, three at most for each op and dtype."""
    found: dict[tuple[str, str | None], list[tuple[Kernel, Case]]] = {}
    for kernel in KERNELS:
        names = [op.name for op in vars(kernel.op).values() if isinstance(op, Op)]
        for case in kernel.cases.CASES:
            dtype = fields_of(case.problem).get("dtype")
            enough = all(len(found.get((name, dtype), ())) >= 3 for name in names)
            if enough or kernel.cost(case.problem).bytes > MOST_BYTES:
                continue
            if call := kernel.op_call(case, kernel.cases.inputs(case, torch.device("cpu"))):
                found.setdefault((call[0].name, dtype), []).append((kernel, case))
    return [some[:3] for some in found.values()]


def asked(kernel: Kernel, case: Case) -> tuple[Op[..., Any], dict[str, Any], dict[str, Any]]:
    """The op, its arguments, and the case's inputs, which share no memory with them."""
    op, arguments = kernel.op_call(case, kernel.cases.inputs(case, torch.device("cpu")))
    return op, arguments, kernel.cases.inputs(case, torch.device("cpu"))


SMALL = small_cases()
CASES = [case for some in SMALL for case in some]
EACH = pytest.mark.parametrize(("kernel", "case"), CASES, ids=lambda v: v.name)
FEW = pytest.mark.parametrize(("kernel", "case"), [some[0] for some in SMALL], ids=lambda v: v.name)


def test_every_op_is_a_function_and_an_operator() -> None:
    assert set(OPS) <= set(kerngen.ops.__all__), "name the op, with its type, in kerngen/ops/__init__.py"
    for name, op in OPS.items():
        function = getattr(kerngen.ops, name)
        schema = getattr(torch.ops.kerngen, name).default._schema
        assert [a.name for a in schema.arguments] == list(op.signature.parameters)
        assert tuple(a.name for a in schema.arguments if a.alias_info is not None) == op.mutates
        assert function.__doc__
        assert function.__name__ == name


def test_every_op_has_small_cases() -> None:
    assert {asked(kernel, case)[0].name for kernel, case in CASES} == set(OPS)


@EACH
def test_an_op_asks_for_its_case(kernel: Kernel, case: Case) -> None:
    op, arguments, _ = asked(kernel, case)
    call = op.of_flat(arguments)
    assert isinstance(call, Call)
    assert static_fields(call.problem) == static_fields(case.problem)
    runtime = {k: v for k, v in fields_of(call.problem).items() if k in call.problem.RUNTIME and k != "kv_len"}
    assert runtime.items() <= fields_of(case.problem).items()


@EACH
def test_an_op_gives_what_the_reference_says(kernel: Kernel, case: Case) -> None:
    op, arguments, inputs = asked(kernel, case)
    expected = kernel.reference.expected(case.problem, inputs)
    call = op.of_flat(arguments)
    results = getattr(kerngen.ops, op.name)(**arguments)
    names = {  # the reference's, of what is written in place too
        id(v): shown if name in kernel.outputs else f"{shown}_out"
        for name, shown, v in reversed(list(spread(call.arguments)))
        if isinstance(v, Tensor)
    }
    made = call.result if isinstance(call.result, tuple) else (call.result,) if call.result is not None else ()
    got = {names[id(t)]: r for t, r in zip(made, results if isinstance(results, tuple) else (results,), strict=False)}
    got |= {names[id(t)]: t for *_, t in spread({m: arguments[m] for m in op.mutates})}
    assert got
    wanted = {shown: right for _, shown, right in (*spread(inputs), *spread(expected))}  # what is not written stays
    for name, value in got.items():
        torch.testing.assert_close(value, wanted[name].to(value.dtype), rtol=0, atol=0, equal_nan=True)


def _each(arguments: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The arguments with every tensor changed, those in lists too."""

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(v) for v in value]
        return change(value) if isinstance(value, Tensor) else value

    return {name: changed(value) for name, value in arguments.items()}


@FEW
def test_torch_agrees_with_what_an_op_says_of_itself(kernel: Kernel, case: Case) -> None:
    """Schema, aliasing, fake kernel and functionalisation, with sizes that are known and with symbols."""
    op, arguments, _ = asked(kernel, case)
    overload = getattr(torch.ops.kerngen, op.name).default
    finite = _each(arguments, lambda t: t.nan_to_num(0.5) if t.is_floating_point() else t)
    torch.library.opcheck(overload, (), finite)


@FEW
def test_an_op_on_meta_tensors_computes_nothing(kernel: Kernel, case: Case) -> None:
    op, arguments, _ = asked(kernel, case)
    on_meta = _each(arguments, lambda t: t.to("meta"))
    told, made = (getattr(kerngen.ops, op.name)(**a) for a in (on_meta, arguments))
    for t, m in zip(*(r if isinstance(r, tuple) else (r,) for r in (told, made)), strict=True):
        assert (t is None) == (m is None)
        if t is not None:
            assert (t.is_meta, t.shape, t.dtype, t.stride()) == (True, m.shape, m.dtype, m.stride())


# ---- torch.compile and export


def layer(x: Tensor, residual: Tensor, weight: Tensor, w: kerngen.ops.W4Weights) -> Tensor:
    h = kerngen.ops.add_norm(residual, x, weight, None, weight, 1e-6)
    gated = kerngen.ops.gelu_gate(kerngen.ops.w4a16_gemm(h, w))
    return gated + kerngen.ops.rmsnorm(residual[:, :32], None, 1e-6, x.dtype)


def weights(n: int = 64, k: int = 64) -> kerngen.ops.W4Weights:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator)
    return kerngen.ops.pack_w4(words.int(), torch.rand(n, k // 32, generator=generator) / 50)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_holds_ops_without_a_break(dynamic: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    w, weight = weights(), torch.rand(64)
    for tokens in (3, 4, 17) if dynamic else (3,):
        x, residuals = torch.rand(tokens, 64), [torch.rand(tokens, 64)] * 2
        mine, theirs = (r.clone() for r in residuals)
        assert torch.equal(compiled(x, mine, weight, w), layer(x, theirs, weight, w))
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, residuals[0]), "residual is written in place"
    assert counters["stats"]["unique_graphs"] == 1


def test_a_program_is_exported_for_any_number_of_tokens() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, residual: Tensor, weight: Tensor, w: kerngen.ops.W4Weights) -> Tensor:
            return layer(x, residual, weight, w)

    tokens = torch.export.Dim("tokens", min=2, max=8192)
    given = torch.rand(5, 64), torch.rand(5, 64), torch.rand(64), weights()
    shapes = ({0: tokens}, {0: tokens}, None, kerngen.ops.W4Weights(None, None))  # type: ignore[arg-type]
    program = torch.export.export(Layer(), given, dynamic_shapes=shapes)
    called = {str(n.target) for n in program.graph.nodes if "kerngen" in str(n.target)}
    assert called == {"kerngen.add_norm.default", "kerngen.gelu_gate.default", "kerngen.w4a16_gemm.default",
                      "kerngen.rmsnorm.default"}  # fmt: skip
    x, residual, weight, w = torch.rand(9, 64), torch.rand(9, 64), *given[2:]
    assert torch.equal(program.module()(x, residual.clone(), weight, w), layer(x, residual, weight, w))


# ---- what is refused


X, W = torch.ones(4, 64), torch.ones(64)
CACHE = torch.zeros(2, 1, 16, 128)
PAGES, LENS = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, dtype=torch.int32)


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("rmsnorm", (X, W[:32], 1e-6, torch.float32),
     "rmsnorm: weight is torch.float32 [32]; it takes out_dtype[H] with out_dtype = torch.float32, H = 64"),
    ("rmsnorm", (X, W.half(), 1e-6, torch.float32), "weight is torch.float16 [64]"),
    ("rmsnorm", (X.double(), None, 1e-6, torch.float64), "torch.float64 is not one of: torch.float16"),
    ("rmsnorm", (X[:, :7], None, 1e-6, torch.float32), "hidden=7 is not a positive multiple of 8"),
    ("embed", (torch.zeros(3, dtype=torch.int32), X, 1.0, torch.float32), "ids is torch.int32 [3]; it takes int64[T]"),
    ("embed", (torch.zeros(3, 1, dtype=torch.int64), X, 1.0, torch.float32), "ids is torch.int64 [3, 1]"),
    ("add_norm", (X, X[:3], W, None, W, 1e-6),
     "h is torch.float32 [3, 64]; it takes D[T, H] with D = torch.float32, H = 64, T = 4"),
    ("gelu_gate", (torch.ones(2, 17),), "gate_up has 17 columns"),
    ("gelu_mul", (torch.ones(2, 16), torch.ones(2, 19)[:, :16]), "rows of up are 19 elements apart"),
    ("attn_decode", (torch.ones(4, 1, 128), CACHE, CACHE, PAGES, LENS, 1),
     "q is torch.float32 [4, 1, 128]; it takes D[B * q_len, NQ, HD]"),
    ("attn_decode", (torch.ones(3, 1, 128), CACHE, CACHE[:1], PAGES, LENS, 1),
     "v_cache is torch.float32 [1, 1, 16, 128]"),
    ("attn_decode", (torch.ones(3, 1, 128), CACHE, CACHE, PAGES, LENS.long(), 1), "kv_lens is torch.int64 [3]"),
    ("w4a16_gemm", (torch.ones(2, 96), *weights()), "x is torch.float32 [2, 96]; it takes D[M, 32 * U]"),
    ("w4a16_gemm", (torch.ones(2, 64).half(), *weights()), "scales is torch.float32"),
])  # fmt: skip
def test_tensors_that_an_op_does_not_take_are_refused(name: str, arguments: tuple[Any, ...], message: str) -> None:
    """Also on tensors without storage: a mistake is found while a program is traced."""
    for device in ("cpu", "meta"):
        there = [v.to(device) if isinstance(v, Tensor) and device == "meta" else v for v in arguments]
        if name == "gelu_mul" and device == "meta":
            there[1] = torch.empty(2, 19, device="meta")[:, :16]
        with pytest.raises(ProblemError, match=re.escape(message)):
            getattr(kerngen.ops, name)(*there)


def test_tensors_that_are_not_contiguous_are_refused_or_copied() -> None:
    wide = torch.rand(4, 128)
    view = wide[:, ::2]
    ops = kerngen.ops
    assert torch.equal(ops.rmsnorm(view, W, 1e-6, X.dtype), ops.rmsnorm(view.contiguous(), W, 1e-6, X.dtype))
    assert torch.equal(ops.w4a16_gemm(view, weights()), ops.w4a16_gemm(view.contiguous(), weights()))
    assert torch.equal(ops.gelu_mul(X, wide[:, 64:]), ops.gelu_mul(X, wide[:, 64:].contiguous()))
    with pytest.raises(LaunchError, match=r"gate \(4, 64\).*contiguous.*\(128, 2\)"):
        ops.gelu_gate(view)
    with pytest.raises(LaunchError, match=r"residual.*contiguous"):
        ops.add_norm(view, X, W, None, W, 1e-6)


def test_each_of_several_tensors_may_lie_apart_where_their_argument_may(monkeypatch: pytest.MonkeyPatch) -> None:
    args = Arg("apart", "ptrs", contiguous=False), Arg("rows", "ptrs")
    monkeypatch.setattr(library, "_args_of", lambda kernel: {a.name: a for a in args})
    view = torch.rand(4, 128)[:, ::2]
    library._require_layouts(Call("lists", None, {"apart": (X, view), "rows": (X,)}, None))
    with pytest.raises(LaunchError, match=r"rows\[1\] \(4, 64\).*contiguous"):
        library._require_layouts(Call("lists", None, {"apart": (X,), "rows": (X, view)}, None))


def test_other_devices_are_refused() -> None:
    from kerngen.ops.devices import executor

    with pytest.raises(DeviceError, match="not on xpu:0"):
        executor(torch.device("xpu:0"))
    with pytest.raises(LaunchError, match="x on cpu, weight on meta"):
        library._device("rmsnorm", {"x": X, "weight": W.to("meta")})


def test_an_empty_batch_is_an_empty_answer() -> None:
    assert kerngen.ops.rmsnorm(X[:0], W, 1e-6, X.dtype).shape == (0, 64)
    assert kerngen.ops.w4a16_gemm(X[:0], weights()).shape == (0, 64)


# ---- weights


def test_packed_weights_say_what_they_are() -> None:
    w = weights(96, 128)
    assert (w.out_features, w.in_features, w.group_size) == (96, 128, 32)
    x = torch.rand(3, 128)
    torch.testing.assert_close(kerngen.ops.w4a16_gemm(x, w), x @ w.dense().T)
    half = w.to(dtype=torch.float16)
    assert (half.w_packed.dtype, half.scales.dtype) == (torch.int32, torch.float16)
    assert w.to("meta").scales.is_meta
    with pytest.raises(UsageError, match="needs scales"):
        kerngen.ops.w4a16_gemm(x, w.w_packed)  # type: ignore[call-overload]


@pytest.mark.parametrize(("packed", "scale", "message"), [
    (torch.zeros(32, 8), torch.ones(32, 2), "must be [N, K / 8] torch.int32"),
    (torch.zeros(32, 8, dtype=torch.int32), torch.ones(32, 1, 2), "must be [N, K / 8] torch.int32"),
    (torch.zeros(32, 8, dtype=torch.int32), torch.ones(32, 4), "K = 64 in 4 groups"),
    (torch.zeros(32, 8, dtype=torch.int32), torch.ones(32, 0), "K = 64 in 0 groups"),
    (torch.zeros(33, 8, dtype=torch.int32), torch.ones(33, 2), "both must be multiples of 32"),
    (torch.zeros(32, 8, dtype=torch.int32), torch.ones(64, 2), "do not fit a W of 32 x 64"),
])  # fmt: skip
def test_weights_that_the_kernel_does_not_take_are_refused(packed: Tensor, scale: Tensor, message: str) -> None:
    with pytest.raises(ProblemError, match=re.escape(message)):
        kerngen.ops.pack_w4(packed, scale)


# ---- other folders


def test_a_folder_of_ones_own_has_its_op_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy_kernels(monkeypatch):
        assert torch.equal(kerngen.ops.scale(X), 2 * X)
        assert torch.equal(torch.ops.kerngen.scale(X), 2 * X)
        with pytest.raises(ProblemError, match=r"x .*float16 \[4, 64\].*fp32\[T, W\]"):
            kerngen.ops.scale(X.half())
    with pytest.raises(AttributeError, match="'sclae'"):
        kerngen.ops.sclae  # noqa: B018


def test_an_op_that_torch_cannot_take_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def odd(x: Tensor, how: dict[str, int]) -> Call[Tensor]:
        raise NotImplementedError

    odd.__annotations__ = {"x": Tensor, "how": dict[str, int], "return": Call[Tensor]}
    broken = Op("odd", odd, (), {"x": "D[T]"})
    monkeypatch.setattr(library, "_ops", lambda kernel: iter([broken] if kernel.name == "rmsnorm" else []))
    assert library.functions() == {}
    assert "kernel rmsnorm: torch takes no op odd" in caplog.text


@dataclass(frozen=True, slots=True)
class Window:
    """A value within a value, with a field that no operator of torch could take."""

    size: int = 0
    kind: Literal["left", "both"] = "left"


@dataclass(frozen=True, slots=True)
class Rows:
    x: Tensor
    weight: Tensor | None = None
    window: Window = Window(7)
    scale: float = 2.0


def scaled(times: int, rows: Rows) -> Call[Tensor]:
    return Call("scaled", None, {"rows": rows, "times": times}, rows.x)


def test_a_value_stands_for_its_fields_in_the_operator() -> None:
    """Chosen and ordered by the op: a required field loses its default, and one that is left out keeps it."""
    flat = marked(required=("x", "times", "weight"), optional=("size",))(scaled)
    assert str(flat.signature).replace("torch.", "") == (
        "(x: Tensor, times: int, weight: Tensor, size: int = 0) -> Tensor"
    )
    x, weight = torch.ones(2), torch.ones(3)
    given = flat.of_flat({"times": 3, "x": x, "weight": weight, "size": 5}).arguments
    assert given == {"rows": Rows(x, weight, Window(5)), "times": 3}
    without = marked(required=("times", "x"))(scaled).of_flat({"times": 3, "x": x}).arguments
    assert without["rows"] == Rows(x, None, Window(7), 2.0)
    assert list(marked()(scaled).signature.parameters) == ["times", "x", "weight", "size", "kind", "scale"]


def test_two_arguments_of_one_name_are_refused() -> None:
    def twice(x: Tensor, rows: Rows) -> Call[Tensor]:
        raise NotImplementedError

    twice.__annotations__ = {"x": Tensor, "rows": Rows, "return": Call[Tensor]}
    with pytest.raises(TypeError, match="two arguments are called x"):
        marked()(twice).signature  # noqa: B018


def test_two_ops_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Op("rmsnorm", OPS["embed"].make, (), OPS["embed"].takes)
    monkeypatch.setattr(library, "_ops", lambda kernel: iter([twin] if kernel.name == "embed" else []))
    with pytest.raises(UsageError, match=r"two .* op rmsnorm"):
        library.functions()
