"""Kernels that read before their predecessor has ended find in every forward what they read (docs/architecture.md).

The rule is played: what a torch kernel or `embed` finds written is complete for all that follows, for the former starts
after all before it has ended, and the latter lets its successor start after that. What is written later is young, and
is not read ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tiny_gemma
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kerngen.arch import Target, find_arch
from kerngen.compiler.compile import compile_ptx
from kerngen.compiler.render import render
from kerngen.runtime.config import Keeping, read_drafter_config, read_model_config
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.engine import Engine, Request
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.loader import load_drafter, load_model
from kerngen.templates import find_kernel
from kerngen.templates.call import Call
from kerngen.templates.kernel import Launch, spread

R = TypeVar("R")
TINY = Path(__file__).parents[2] / "examples" / "tiny" / "gemma-4-tiny-w4a16"
SERVED = {"head_dim": 128, "global_head_dim": 256, "hidden_size": 64, "intermediate_size": 96}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Chain(TorchDispatchMode):
    """What is young. A storage that may be freed meanwhile keeps its address taken."""

    def __init__(self) -> None:
        super().__init__()
        self.young: dict[int, Tensor] = {}
        self.slots: dict[int, list[Tensor]] = {}  # of each young cache: what was written there
        self.inside = False  # of a kernel of ours

    def finish(self) -> None:
        self.young.clear()
        self.slots.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = isinstance(result, Tensor) and any(
            isinstance(a, Tensor) and a is not result and _storage(a) == _storage(result) for a in args
        )
        if not self.inside and not is_view and "empty" not in func.__name__:
            self.finish()
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, Tensor):
                    self.young[_storage(tensor)] = tensor
        return result


def _attending(call: Call[Any]) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Of each attention in `call` that reads ahead what it is given, as attn_decode, its q_len and its window."""
    p, given = call.problem, call.arguments
    if call.kernel == "attn_decode":
        yield dict(given), p.q_len, p.window
    elif call.kernel == "decode_layers":
        for letter, k_cache in zip(p.layers, given["k_caches"], strict=True):
            kind = "" if letter in "sS" else "full_"
            of_kind = {"block_table": given[f"{kind}block_table"], "slot_mapping": given[f"{kind}slots"]}
            same = {name: given[name] for name in ("kv_lens", "positions")}
            q_len = int(p.makes_kv)  # without a key of the token's own all are read ahead
            yield {"k_cache": k_cache, **same, **of_kind}, q_len, 0 if kind else p.window + 1 - q_len


class Watched(Reference):
    """The reference executor, which notes what each call writes, and checks what it would read ahead."""

    def __init__(self, chain: Chain, target: Target | None = None) -> None:
        super().__init__(target=target)
        self.chain = chain
        self.num_read = 0  # keys
        self.asked: set[str] = set()
        self.num_drafts = 0  # through all layers at once

    def run(self, call: Call[R], where: str) -> R:
        self.chain.inside = True
        self.asked.add(call.kernel)
        self.num_drafts += call.kernel == "decode_layers" and not call.problem.makes_kv
        try:
            attending = list(_attending(call))
            for given, q_len, window in attending:
                self._check(given, q_len, window, where)
            result = super().run(call, where)
            if call.kernel == "embed":
                self.chain.finish()
            outputs = {name: call.arguments[name] for name in find_kernel(call.kernel).outputs}
            for tensor in (t for *_, t in spread(outputs) if isinstance(t, Tensor)):
                self.chain.young[_storage(tensor)] = tensor
            for given in (given for given, *_ in attending) if attending else (call.arguments,):
                if (cache := given.get("k_cache")) is not None and given.get("slot_mapping") is not None:
                    self.chain.slots.setdefault(_storage(cache), []).append(given["slot_mapping"])
            return result
        finally:
            self.chain.inside = False

    def _check(self, given: dict[str, Any], q_len: int, window: int, where: str) -> None:
        for name in ("kv_lens", "block_table", "positions", "slot_mapping"):
            if isinstance(tensor := given.get(name), Tensor):
                assert _storage(tensor) not in self.chain.young, f"{where}: {name} is read ahead and was just written"
        page_size = given["k_cache"].shape[2]
        written = self.chain.slots.get(_storage(given["k_cache"]), [])
        new = {int(slot) for slots in written for slot in slots}
        for table, kv_len in zip(given["block_table"], given["kv_lens"].tolist(), strict=True):
            old = torch.arange(max(0, kv_len - q_len - window + 1) if window else 0, max(0, kv_len - q_len))
            slots = table[old // page_size].long() * page_size + old % page_size
            seen = {int(slot) for slot in slots if slot >= page_size}  # page 0 belongs to nobody
            assert not seen & new, f"{where}: old keys in slots {sorted(seen & new)} were just written"
            self.num_read += len(seen)


@pytest.mark.parametrize("variant", ["dense", "k_eq_v", "shared_ple"])
def test_forwards_have_written_before_embed_what_is_read_ahead(variant: str, tmp_path: Path) -> None:
    """Prefill in chunks (of which shared layers decode the last token), decode steps, drafts."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SERVED.items():
            patch.setitem(tiny_gemma.BASE, name, value)
        tiny_gemma.make_target(tmp_path / "target", variant)
        tiny_gemma.make_assistant(tmp_path / "assistant", variant)
    with Chain() as chain:
        ops = KernelOps(watched := Watched(chain), torch.float32)
        config = read_model_config(tmp_path / "target")
        model = Gemma4(config, load_model(tmp_path / "target", config, ops), ops)
        drafter_config = read_drafter_config(tmp_path / "assistant", config)
        drafter = MtpDrafter(drafter_config, load_drafter(tmp_path / "assistant", drafter_config, ops), model)
        engine = Engine(model, drafter, max_len=80, num_draft_tokens=2, prefill_chunk=11, page_size=16)
        engine.generate([config.bos_id, *range(3, 27)], max_new_tokens=8)
    assert watched.num_read > 100


@pytest.mark.parametrize("variant", ["dense", "k_eq_v"])
def test_mixed_forwards_have_written_before_embed_what_is_read_ahead(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of those who decode, right behind a prefill of others."""
    for name, value in SERVED.items():
        monkeypatch.setitem(tiny_gemma.BASE, name, value)
    tiny_gemma.make_target(tmp_path / "target", variant)
    with Chain() as chain:
        ops = KernelOps(watched := Watched(chain), torch.float32)
        config = read_model_config(tmp_path / "target")
        model = Gemma4(config, load_model(tmp_path / "target", config, ops), ops)
        engine = Engine(model, max_len=80, max_batch=4, prefill_chunk=11, page_size=16)
        num_mixed, plain = 0, model.forward_mixed

        def counted(*args: Any) -> tuple[Tensor, Tensor]:
            nonlocal num_mixed
            num_mixed += 1
            return plain(*args)

        monkeypatch.setattr(model, "forward_mixed", counted)
        list(engine.finished([Request([config.bos_id, *range(3, 9 + 9 * i)], 12) for i in range(4)]))
    assert num_mixed > 3
    assert watched.num_read > 100


def test_forwards_have_written_what_all_layers_at_once_read_ahead() -> None:
    target = Target.of(find_arch("sm90"))
    with Chain() as chain:
        ops = KernelOps(watched := Watched(chain, target), torch.bfloat16)
        config = read_model_config(TINY)
        model = Gemma4(config, load_model(TINY, config, ops), ops)
        engine = Engine(model, max_len=120, prefill_chunk=40, page_size=16)
        engine.generate([config.bos_id, *range(3, 72)], max_new_tokens=6)
    assert watched.num_read > 100 * len(config.layers)
    assert "decode_layers" in watched.asked


def test_drafts_have_written_what_all_layers_at_once_read_ahead() -> None:
    target, folder = Target.of(find_arch("sm90")), TINY.with_name("gemma-4-tiny-assistant")
    with Chain() as chain:
        ops = KernelOps(watched := Watched(chain, target), torch.bfloat16)
        config = read_model_config(TINY)
        model = Gemma4(config, load_model(TINY, config, ops), ops)
        drafter_config = read_drafter_config(folder, config).keeping(Keeping("int4"))
        drafter = MtpDrafter(drafter_config, load_drafter(folder, drafter_config, ops), model)
        engine = Engine(model, drafter, max_len=120, num_draft_tokens=2, prefill_chunk=40, page_size=16)
        engine.generate([config.bos_id, *range(3, 72)], max_new_tokens=6)
    assert watched.num_drafts > 2
    assert watched.num_read > 100 * len(drafter_config.text.layers)


@pytest.mark.parametrize("name", ["embed", "draft_inputs"])
def test_a_forwards_first_kernel_lets_its_successor_start_after_its_own_wait(name: str) -> None:
    kernel, arch = find_kernel(name), find_arch("sm90")
    problem = kernel.problem_type()
    config = kernel.default_config(problem, Target.of(arch))
    ptx = compile_ptx(render(kernel, problem, config, Target.of(arch)), arch).image.decode()
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")


@pytest.mark.parametrize("num_tokens", [4, 8], ids=["bulk copies", "ring"])
def test_a_norm_takes_what_is_posted_while_all_before_its_product_is_complete(num_tokens: int) -> None:
    """The product lets it begin behind its own wait; and it ends when the product has, for who waits for it waits for
    no other.
    """
    kernel, target = find_kernel("w4a16_norm"), Target.of(find_arch("sm90"))
    problem = kernel.problem_type(num_tokens=num_tokens)
    ptx = compile_ptx(
        render(kernel, problem, kernel.default_config(problem, target), target), target.arch
    ).image.decode()
    product, norm = (ptx[ptx.index(f".entry {name}") :].split("\n}")[0] for name in ("w4a16_posts", "norm_of_posts"))
    assert product.index("griddepcontrol.wait") < product.index("griddepcontrol.launch_dependents")
    assert product.count("griddepcontrol.launch_dependents") == 1
    assert norm.count("griddepcontrol.wait") == 1
    assert norm.rindex("st.global") < norm.index("griddepcontrol.wait")


@pytest.mark.parametrize(("k", "num_tokens", "shares"), [(8192, 4, True), (768, 4, False), (21504, 8, True)])
def test_a_product_whose_blocks_add_up_is_started_together_also_before_a_norm(
    k: int, num_tokens: int, shares: bool
) -> None:
    kernel, target = find_kernel("w4a16_norm"), Target.of(find_arch("sm90"))
    problem = kernel.problem_type(k=k, num_tokens=num_tokens)
    config = kernel.default_config(problem, target)
    product, norm = kernel.launches(problem, config, target)
    assert (config.product.shares_tiles, product.cooperative, norm.cooperative) == (shares, shares, False)


def test_outside_of_a_forward_nothing_is_read_ahead() -> None:
    """There the kernel right before may be torch's, and have written the lengths."""
    pytest.importorskip("cuda.bindings")
    from kerngen.runtime.launcher import _attributes

    plain = Launch("attn_decode", (1, 1, 1), (32, 1, 1), 0, pdl=True)
    ahead = Launch("attn_decode", (1, 1, 1), (32, 1, 1), 0, pdl=True, reads_ahead=True)
    given = [len(_attributes(x, in_forward, False)) for x in (plain, ahead) for in_forward in (False, True)]
    assert given == [1, 1, 0, 1]
    kernel, target = find_kernel("attn_decode"), Target.of(find_arch("sm90"))
    problem = kernel.problem_type()
    assert kernel.launches(problem, kernel.default_config(problem, target), target)[0].reads_ahead
