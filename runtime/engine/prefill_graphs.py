"""Short prefills as CUDA graphs.

While other sequences decode, a step prefills few tokens, and launching its kernels takes the host longer than running
them takes the device: the host would set the inter-token latency. So forwards of a few sizes are captured, and a
prefill runs in the next larger one. The padding is a dummy sequence: token 0, written to page 0. Where the model takes
images or sounds each size is captured once more, for chunks with embeddings of theirs.

Whether padding takes the device longer than launching takes the host depends on board and host, so Engine.make_ready
times both (sizes_worth_padding). A plan says in which graph its prefill runs, so all ranks do what rank 0 has timed.

Of a divided model the larger ones have NCCL's kernels: sums of more rows than exchange_norm takes. They are captured
all the same, as sampled steps are, whose logits are gathered: chunked prefill knows by these sizes how long a chunk
takes (prefill_budget.py), and from the small ones alone it would take large chunks for cheap. NCCL ends no group while
such a graph is there, so Ranks.close frees them first; where NCCL keeps the engine waiting Ranks ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from kerngen.runtime.batch import Batch, ListedChunks, MediaRows, ragged_layout
from kerngen.runtime.cache import KINDS, KVCache
from kerngen.runtime.engine.graphs import Captured, Graphs
from kerngen.runtime.engine.logit_processors import Send
from kerngen.runtime.model import Gemma4

SIZES = (64, 128, 192, 256, 384, 512, 768, 1024)  # tokens: of more, the device takes longer than the host
SEQUENCES = 4  # of a forward, the one that stands for nobody included
STRIDE = 7919  # from one id to the next, of tokens that are only timed
OUTPUTS = ("none", "last")  # as Gemma4.forward has them
TIMED_RUNS = 2  # of a prefill, of which the shortest counts
MOST_EAGER_S = 0.3  # of a start, that eager forwards are timed for


def sizes_worth_padding(
    graphs: Sequence[tuple[int, float]], eager: Callable[[int], Sequence[float]], longest: int
) -> frozenset[int]:
    """The sizes whose graph takes no longer than an eager forward of the middle one of the lengths padded to that size.

    graphs: (tokens, seconds of a replay), ascending. eager: seconds of TIMED_RUNS eager forwards of so many tokens.
    longest: tokens of a prefill. An eager forward takes at least as long as one of fewer tokens, so a graph that took
    no longer than the last eager forward needs no other to be timed. Nothing is padded to a size that MOST_EAGER_S
    leaves no time for: the device takes long for it.
    """
    worth, eager_s, left_s, before = set[int](), 0.0, MOST_EAGER_S, 0
    for size, graph_s in graphs:
        if eager_s < graph_s and before < longest and TIMED_RUNS * graph_s <= left_s:
            times = eager((before + 1 + min(size, longest)) // 2)
            eager_s, left_s = min(times), left_s - sum(times)
        if eager_s >= graph_s:
            worth.add(size)
        before = size
    return frozenset(worth)


@dataclass(frozen=True, slots=True)
class MediaOfChunks:
    """What stands in the chunks of a forward in place of tokens. rows: embeddings [m, H] together, on the device;
    places: of the forward's tokens, which those are; ends: the last position that each token sees in sliding layers,
    its own or that of its image's last token; see_themselves: whether any is another's.
    """

    rows: list[Tensor]
    places: Sequence[int]
    ends: Sequence[int]
    see_themselves: bool


class PrefillGraphs:
    """Those of one engine, each captured for contexts of any length."""

    def __init__(
        self, model: Gemma4, cache: KVCache, graphs: Graphs, max_kv_len: int, send: Send,
        forward: Callable[[Batch, KVCache, str], Tensor],
    ) -> None:  # fmt: skip
        """max_kv_len: tokens that tables have room for. send: brings values to the device without waiting for it.
        forward: of `model`, and what else takes in its tokens.
        """
        self._model, self._cache, self._graphs, self._max_kv_len = model, cache, graphs, max_kv_len
        self._send, self._forward = send, forward
        self._captured: dict[tuple[int, str, bool], Captured] = {}  # of (tokens, outputs, whether they have media)
        self.padded: frozenset[int] | None = None  # sizes that fewer tokens are padded to; None: all, none was timed
        device = cache.tables.device
        self._tables = torch.zeros(len(KINDS), SEQUENCES, cache.tables.shape[2], dtype=torch.int32, device=device)
        self._lengths = torch.zeros(2 * SEQUENCES + 1, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(3, SIZES[-1], dtype=torch.int64, device=device)
        self._media: MediaRows | None = None
        self._ends: Tensor | None = None  # as MediaOfChunks has them, of a model whose images see themselves
        if model.media is not None:
            rows = torch.zeros(SIZES[-1], model.config.hidden_size, dtype=model.ops.dtype, device=device)
            self._media = MediaRows(rows, torch.zeros(SIZES[-1], dtype=torch.int64, device=device))
            if model.media.bidirectional:
                self._ends = torch.zeros(SIZES[-1], dtype=torch.int32, device=device)
        self._listed: Tensor | None = None  # [2, SEQUENCES]: as ListedChunks has them
        if model.config.sparse is not None:
            self._listed = torch.zeros(2, SEQUENCES, dtype=torch.int32, device=device)

    @property
    def sizes(self) -> list[int]:
        """That the cache's tables have room for."""
        return [size for size in SIZES if size <= self._max_kv_len]

    @property
    def captured_sizes(self) -> list[int]:
        return sorted({size for size, _, _ in self._captured})

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Of forwards of each size: without media, and with them if the model takes any."""
        return (False,) if self._media is None else (False, True)

    def size_for(self, tokens: int, chunks: int) -> int:
        """Tokens of the graph that a prefill of so many tokens in so many chunks runs in; 0: it runs eagerly."""
        size = next((size for size in self.captured_sizes if size >= tokens), 0)
        serves = size == tokens or self.padded is None or size in self.padded
        return size if serves and chunks < SEQUENCES else 0

    def forward(self, size: int, outputs: str, has_media: bool) -> Tensor:
        """What a graph of `size` tokens does: of the `last` tokens [SEQUENCES, H], in the order of the sequences."""
        self._model.ops.row_invariant = False
        batch, cache = self.batch(size)
        if has_media and self._media is not None:
            media = MediaRows(self._media.rows[:size], self._media.places[:size])
            batch = replace(batch, media=media, ends=None if self._ends is None else self._ends[:size])
        return self._forward(batch, cache, outputs)

    def batch(self, size: int) -> tuple[Batch, KVCache]:
        """What lies in the tables and lengths when it is replayed, and the cache under those tables."""
        cache = self._cache.with_tables(self._tables)
        listed = None if self._listed is None else ListedChunks(self._listed[0], self._listed[1], size)
        batch = Batch.ragged(self._tokens[:, :size], self._lengths, cache, max_seqlen=size, max_kv_len=self._max_kv_len,
                             listed=listed)  # fmt: skip
        return batch, cache

    def capture(self, size: int) -> None:
        """Have it at hand; `run` uses no others."""
        self.clear(size)
        for kind in product((size,), OUTPUTS, self.kinds):
            if kind not in self._captured:
                self._captured[kind] = self._graphs.capture(partial(self.forward, *kind), [])

    def run(
        self, ids: Sequence[int], starts: Sequence[int], sizes: Sequence[int], tables: Tensor, size: int, outputs: str,
        listed: Sequence[tuple[int, int]] = (), media: MediaOfChunks | None = None,
    ) -> Tensor | None:  # fmt: skip
        """The forward of these chunks, as Runner.chunks has them, in the graph of `size` tokens, and the hidden states
        of their last tokens, [chunks, H], where `outputs` says so: valid until any graph of this pool is replayed. None
        where there is no such graph. tables: on the host. listed: as of Runner.chunks.
        """
        captured = self._captured.get((size, outputs, media is not None))
        if captured is None or len(sizes) >= SEQUENCES:
            return None
        self.put(ids, starts, sizes, tables, size, listed)
        if media is not None:
            self._put_media(media, size)
        graph, hidden = captured
        graph.replay()
        return hidden[: len(sizes)]

    def put(
        self, ids: Sequence[int], starts: Sequence[int], sizes: Sequence[int], tables: Tensor, size: int,
        listed: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Have a forward of `size` tokens be that of these chunks. tables: on the host."""
        self._fill(ids, starts, sizes, size, listed)
        known = torch.zeros(self._tables.shape, dtype=torch.int32)
        known[:, : len(sizes), : tables.shape[2]] = tables
        self._tables.copy_(self._send(known, torch.int32))

    def _put_media(self, media: MediaOfChunks, size: int) -> None:
        """What is left of the rows stands for the first one once more: in its place, with the same values."""
        if self._media is None:
            raise TypeError("a model of text alone has graphs of text alone")
        count = len(media.places)
        torch.cat(media.rows, out=self._media.rows[:count])
        self._media.rows[count:size] = self._media.rows[0]
        places = [*media.places, *[media.places[0]] * (size - count)]
        self._media.places[:size].copy_(self._send(places, torch.int64))
        if self._ends is not None:
            self._ends[:size].copy_(self._send([*media.ends, *range(size - len(media.ends))], torch.int32))

    def clear(self, size: int) -> None:
        """Have it be of nobody's tokens."""
        self._tables.zero_()
        self._fill([], [], [], size)

    def _fill(
        self, ids: Sequence[int], starts: Sequence[int], sizes: Sequence[int], size: int,
        listed: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """The tokens of chunks, and then of nobody, up to `size`. What is left of the sequences is empty."""
        spare, left = size - sum(sizes), [0] * (SEQUENCES - 1 - len(sizes))
        tokens, lengths = ragged_layout([*ids, *[0] * spare], [*starts, 0, *left], [*sizes, spare, *left])
        self._tokens[:, :size] = self._send(tokens, torch.int64)
        self._lengths.copy_(self._send(lengths, torch.int32))
        if self._listed is not None:
            of_all = [*listed, *[(0, 0)] * (SEQUENCES - len(listed))]
            self._listed.copy_(self._send(list(zip(*of_all, strict=True)), torch.int32))
