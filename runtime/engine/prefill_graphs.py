"""Short prefills as CUDA graphs.

While other sequences decode, a step prefills few tokens, and launching its kernels takes the host longer than running
them takes the device: the host would set the inter-token latency. So forwards of a few sizes are captured, and a
prefill runs in the next larger one. The padding is a dummy sequence: token 0, written to page 0.

Of a divided model the larger ones have NCCL's kernels: sums of more rows than exchange_norm takes. They are captured
all the same, as sampled steps are, whose logits are gathered: chunked prefill knows by these sizes how long a chunk
takes (prefill_budget.py), and from the small ones alone it would take large chunks for cheap. NCCL ends no group while
such a graph is there, so Ranks.close frees them first; where NCCL keeps the engine waiting Ranks ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kerngen.runtime.batch import Batch, ragged_layout
from kerngen.runtime.cache import KINDS, KVCache
from kerngen.runtime.engine.graphs import Captured, Graphs
from kerngen.runtime.engine.logit_processors import Send
from kerngen.runtime.model import Gemma4

SIZES = (64, 128, 192, 256, 384, 512, 768, 1024)  # tokens: of more, the device takes longer than the host
SEQUENCES = 4  # of a forward, the one that stands for nobody included
STRIDE = 7919  # from one id to the next, of tokens that are only timed
OUTPUTS = ("none", "last")  # as Gemma4.forward has them


class PrefillGraphs:
    """Those of one engine, each captured for contexts of any length."""

    def __init__(self, model: Gemma4, cache: KVCache, graphs: Graphs, max_kv_len: int, send: Send) -> None:
        """max_kv_len: tokens that tables have room for. send: brings values to the device without waiting for it."""
        self._model, self._cache, self._graphs, self._max_kv_len = model, cache, graphs, max_kv_len
        self._send = send
        self._captured: dict[tuple[int, str], Captured] = {}
        device = cache.tables.device
        self._tables = torch.zeros(len(KINDS), SEQUENCES, cache.tables.shape[2], dtype=torch.int32, device=device)
        self._lengths = torch.zeros(2 * SEQUENCES + 1, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(3, SIZES[-1], dtype=torch.int64, device=device)

    @property
    def sizes(self) -> list[int]:
        """That the cache's tables have room for."""
        return [size for size in SIZES if size <= self._max_kv_len]

    @property
    def captured_sizes(self) -> list[int]:
        return sorted({size for size, _ in self._captured})

    def forward(self, size: int, outputs: str) -> Tensor:
        """What a graph of `size` tokens does: of the `last` tokens [SEQUENCES, H], in the order of the sequences."""
        self._model.ops.row_invariant = False
        batch, cache = self.batch(size)
        return self._model.forward(batch, cache, outputs=outputs)

    def batch(self, size: int) -> tuple[Batch, KVCache]:
        """What lies in the tables and lengths when it is replayed, and the cache under those tables."""
        cache = self._cache.with_tables(self._tables)
        batch = Batch.ragged(self._tokens[:, :size], self._lengths, cache, max_seqlen=size, max_kv_len=self._max_kv_len)
        return batch, cache

    def capture(self, size: int) -> None:
        """Have it at hand; `run` uses no others."""
        self.clear(size)
        for outputs in OUTPUTS:
            if (size, outputs) not in self._captured:
                self._captured[size, outputs] = self._graphs.capture(partial(self.forward, size, outputs), [])

    def replay(self, size: int) -> None:
        """One of nobody's tokens, which differ as a prompt's do: what is alike goes to the same experts."""
        self._tables.zero_()
        self._fill([i * STRIDE % self._model.config.vocab_size for i in range(size)], [0], [size], size)
        self._captured[size, "none"][0].replay()

    def run(
        self, ids: Sequence[int], starts: Sequence[int], sizes: Sequence[int], tables: Tensor, outputs: str
    ) -> Tensor | None:
        """The forward of these chunks, as Runner.chunks has them, and the hidden states of their last tokens, [chunks,
        H], where `outputs` says so: valid until any graph of this pool is replayed. None where no graph serves. tables:
        on the host.
        """
        size = next((size for size in self.captured_sizes if size >= sum(sizes)), None)
        if size is None or len(sizes) >= SEQUENCES:
            return None
        self.put(ids, starts, sizes, tables, size)
        graph, hidden = self._captured[size, outputs]
        graph.replay()
        return hidden[: len(sizes)]

    def put(self, ids: Sequence[int], starts: Sequence[int], sizes: Sequence[int], tables: Tensor, size: int) -> None:
        """Have a forward of `size` tokens be that of these chunks. tables: on the host."""
        self._fill(ids, starts, sizes, size)
        known = torch.zeros(self._tables.shape, dtype=torch.int32)
        known[:, : len(sizes), : tables.shape[2]] = tables
        self._tables.copy_(self._send(known, torch.int32))

    def clear(self, size: int) -> None:
        """Have it be of nobody's tokens."""
        self._tables.zero_()
        self._fill([], [], [], size)

    def _fill(self, ids: Sequence[int], starts: Sequence[int], sizes: Sequence[int], size: int) -> None:
        """The tokens of chunks, and then of nobody, up to `size`. What is left of the sequences is empty."""
        spare, left = size - sum(sizes), [0] * (SEQUENCES - 1 - len(sizes))
        tokens, lengths = ragged_layout([*ids, *[0] * spare], [*starts, 0, *left], [*sizes, spare, *left])
        self._tokens[:, :size] = self._send(tokens, torch.int64)
        self._lengths.copy_(self._send(lengths, torch.int32))
