"""vLLM 0.26's sums over the ranks of a tensor-parallel group, with the norms behind them, by exchange_norm.

In layers of ours o_proj and down_proj give this rank's summand, and one operator adds up, adds the residual and norms:
for few tokens in one launch through memory that the ranks' GPUs share, else by vLLM's all-reduce and add_norm. It
decides as it runs, since vLLM compiles one graph for any number of tokens.

Ranks must decide alike, each time. All ranks of a tensor-parallel group run the batch that the scheduler sent to all of
them, padded by rules that look at nothing else (sizes of CUDA graphs), and with data parallelism to what all groups
agreed on (vllm/v1/worker/dp_utils.py): the same tokens, in forwards in the same order. vLLM's own all-reduce has no
other ground to stand on. What would break it is refused (`_why_not`). Epochs are counted on the GPU by the launches
themselves, so graphs that are replayed, other graphs and launches between them follow each other in any order.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from select import poll
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import get_node_count
from vllm.utils.torch_utils import direct_register_custom_op

import kerngen.ops  # noqa: F401 - torch.ops.kerngen
from kerngen.errors import DeviceError, ProblemError, UnknownName
from kerngen.runtime.executors.peer_memory import PeerMemory, gather_by
from kerngen.runtime.selection import lengths_up_to
from kerngen.runtime.world import World, most_rows
from kerngen.templates import find_kernel
from kerngen.templates.add_norm.spec import Problem as AddNorm
from kerngen.templates.exchange_norm.spec import Problem
from kerngen.templates.values import Peers
from kerngen.vllm.ahead import AHEAD, kept_in_sleep
from kerngen.vllm.linear import target
from kerngen.vllm.plugin import ENV, tell_compile_caches

log = logging.getLogger("vllm.kerngen")
KERNEL = "exchange_norm"
GRACE_S = 2.0  # after a rank's end vLLM takes no answer any more, and has not yet killed the others: it gives them 5 s
_is_chosen = False
_memory: dict[tuple[str, int], PeerMemory] = {}  # by the group's name and the width of its rows; as long as the process


def install() -> None:
    """Have layers that are made from now on sum over ranks so."""
    global _is_chosen
    _is_chosen = True


@dataclass(frozen=True, slots=True)
class Rows:
    """A problem of exchange_norm at every number of tokens that one launch takes."""

    problem: Problem
    most: int

    def problems(self) -> Iterator[tuple[str, Any]]:
        for num_tokens in lengths_up_to(self.most):
            yield KERNEL, replace(self.problem, num_tokens=num_tokens)


def exchange_add_norm(
    residual: Tensor, h: Tensor, post_weight: Tensor, layer_scalar: Tensor | None, next_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_norm_functional` of the sum of all ranks' h: the new residual and its norm, the same bits on all ranks.

    residual, h [T, hidden] in the model's dtype, the same T on all ranks, residual the same values; weights [hidden].
    """
    given = post_weight, layer_scalar, next_weight, eps
    if (peers := _peers(h)) is None:
        both: tuple[Tensor, Tensor] = torch.ops.kerngen.add_norm_functional(
            residual, tensor_model_parallel_all_reduce(h), *given
        )
    else:
        both = torch.ops.kerngen.exchange_norm_functional(residual, h, *given, *_flat(peers))
    return both


def exchange_add_post_norm(
    residual: Tensor, h: Tensor, post_weight: Tensor, layer_scalar: Tensor | None, eps: float
) -> Tensor:
    """As exchange_add_norm, where no norm follows: the new residual."""
    given = post_weight, layer_scalar, eps
    if (peers := _peers(h)) is None:
        out: Tensor = torch.ops.kerngen.add_post_norm_functional(residual, tensor_model_parallel_all_reduce(h), *given)
    else:
        out = torch.ops.kerngen.exchange_post_norm_functional(residual, h, *given, *_flat(peers))
    return out


def _fake_add_norm(
    residual: Tensor, h: Tensor, post_weight: Tensor, layer_scalar: Tensor | None, next_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), torch.empty_like(h)


def _fake_add_post_norm(
    residual: Tensor, h: Tensor, post_weight: Tensor, layer_scalar: Tensor | None, eps: float
) -> Tensor:
    return torch.empty_like(residual)


_library = Library("kerngen_vllm", "FRAGMENT")  # operators live as long as it does
for _op, _fake in ((exchange_add_norm, _fake_add_norm), (exchange_add_post_norm, _fake_add_post_norm)):
    direct_register_custom_op(
        _op.__name__, _op, fake_impl=_fake, target_lib=_library, dispatch_key="CompositeExplicitAutograd"
    )


def _peers(h: Tensor) -> Peers | None:
    """The memory that h [T, hidden] is summed through, where one launch does it: the rule of kerngen's own engine."""
    memory = _memory.get((get_tp_group().unique_name, h.shape[-1]))
    return memory.peers if memory is not None and memory.peers.holds(h) else None


def _flat(peers: Peers) -> tuple[Tensor, int, int, int]:
    return peers.addresses, peers.rank, peers.max_rows, peers.two_shot_from


def share(hidden: int, sums: Sequence[Any], behind: Sequence[AddNorm], config: VllmConfig) -> bool:
    """Whether this rank's group sums rows of `hidden` through memory that its GPUs share: the memory is there then, and
    kernels are asked for. All ranks call it and get the same answer; a line says why where it is no.

    sums: which of a forward's are meant, in JSON's types; not the same on all ranks, none is done so. behind: what
    add_norm would be asked for behind them.
    """
    ranks = config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return False
    if (why := _why_not(config) or _why_not_shared(hidden, sums, behind)) is not None:
        log.info("kerngen: sums over ranks stay vLLM's: %s", why)
        return False
    for problem in dict.fromkeys(behind):
        AHEAD.ask_all(Rows(_with_sum(problem, ranks), most_rows(hidden)))
    # vLLM's key is the same with --disable-custom-all-reduce and on other GPUs. A rank that took a graph of such a
    # start would do its sums by vLLM's all-reduce while another waits for it in a launch.
    tell_compile_caches(f"{len(sums)} sums over {ranks} ranks with norms of {hidden}")
    log.info("kerngen: %d sums over %d ranks by exchange_norm, with the norms behind them, up to %d tokens each",
             len(sums), ranks, most_rows(hidden))  # fmt: skip
    return True


def _with_sum(p: AddNorm, ranks: int) -> Problem:
    """Raises ProblemError for so many ranks as there are no kernels for."""
    return Problem(ranks, p.hidden, p.dtype, p.residual_dtype, has_scalar=p.has_scalar, has_next=p.has_next)


def _why_not(config: VllmConfig) -> str | None:
    """What every rank knows without the others, and all know alike."""
    parallel = config.parallel_config
    if not _is_chosen:
        return f"{ENV} does not name exchange"
    if parallel.disable_custom_all_reduce:
        return "--disable-custom-all-reduce is given, or implied"
    if parallel.use_ubatching:
        return "two batches are under way on a GPU at once (--enable-dbo, --ubatch-size)"
    if config.compilation_config.pass_config.enable_sp:
        return "each rank has tokens of its own between its sums (enable_sp)"
    # A rank on another host may have another kerngen or none, and answer nothing.
    if get_node_count() > 1 and not _is_on_one_host():
        return "the ranks are not known to be on one host"
    return None


def _is_on_one_host() -> bool:
    """Whether vLLM found all ranks of the group on one host, as its own all-reduce by shared memory needs it."""
    found = getattr(get_tp_group().device_communicator, "ca_comm", None)
    return found is not None and not found.disabled


def _why_not_shared(hidden: int, sums: Sequence[Any], behind: Sequence[AddNorm]) -> str | None:
    """Make the memory, once. Why it cannot be, where it cannot: on all ranks, in the words of one."""
    group = get_tp_group()
    gather = gather_by(group.cpu_group)
    mine = [_why_not_here(behind, group.world_size), list(sums), _pid_namespace(), os.getpid()]
    said = [json.loads(text) for text in gather(json.dumps(mine).encode())]
    for rank, (why, its, _, _) in enumerate(said):
        if why is not None:
            return f"rank {rank}: {why}"
        if its != said[0][1]:
            return f"ranks 0 and {rank} would leave other sums to vLLM"
    if (key := (group.unique_name, hidden)) in _memory:
        return None
    world = World(group.rank_in_group, group.world_size)
    try:
        memory = PeerMemory(world, gather, hidden=hidden, max_rows=most_rows(hidden), device=group.device)
    except DeviceError as e:
        return e.message
    given = memory.peers.addresses
    memory.peers = replace(memory.peers, addresses=kept_in_sleep(given.device, given.clone))
    _memory[key] = memory
    _abort_without([pid for _, _, where, pid in said if where and where == mine[2] and pid != mine[3]], memory.abort)
    return None


def _pid_namespace() -> str:
    """In which process ids mean the same; "" where that is not told."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _why_not_here(behind: Sequence[AddNorm], ranks: int) -> str | None:
    if not behind:
        return "no decoder layer is kerngen's"
    try:
        found = (find_kernel(KERNEL).why_unsupported(_with_sum(p, ranks), target()) for p in behind)
        return next(filter(None, found), None)
    except (DeviceError, ProblemError, UnknownName) as e:
        return e.message


def _abort_without(pids: Sequence[int], abort: Callable[[], None]) -> None:
    """Call `abort` once one of these processes has ended.

    vLLM then ends the other ranks by SIGTERM. Python sees none while it waits for the GPU, and the GPU would wait for
    the rank that is gone, until SIGKILL comes, if there is somebody left to send it.
    """
    ends = poll()
    # Linux before 5.3, or a Python that was built on one: SIGKILL it is.
    with suppress(OSError, AttributeError):
        for pid in pids:
            ends.register(os.pidfd_open(pid))

    def wait() -> None:
        ends.poll()
        time.sleep(GRACE_S)
        log.info("kerngen: the process of another rank has ended: launches that wait for it give up")
        abort()

    threading.Thread(target=wait, name="kerngen-exchange", daemon=True).start()
