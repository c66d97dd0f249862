"""Train the tiny target and its drafter on the corpus, and write the three checkpoint folders.

    python examples/tiny/train.py --out examples/tiny            # as shipped: about two minutes on an H200
    python examples/tiny/train.py --out /tmp/tiny --steps 20 --draft-steps 20 --batch 4 --conversations 200

The target learns with its weights as they are, then with its weights as int4 will show them, so that both versions
speak alike. The drafter then learns to foresee the target, half of it from each version. Needs torch, tokenizers
and safetensors; uses a CUDA device if there is one.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random

import corpus
import export
import tokenizer as bpe
import torch
from model import TARGET, Drafter, Target
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH = 384  # tokens in a training row: six windows of the sliding layers
NUM_DRAFTS = 4  # tokens ahead that the drafter learns
OTHERS = 0.03  # weight of tokens that the model does not have to say


def write_rows(seeds: Iterable[int], make: Callable[[Random], Iterable[corpus.Turn]]) -> list[list[corpus.Turn]]:
    """One conversation per seed, long enough to fill a row."""
    rows = []
    for seed in seeds:
        turns: list[corpus.Turn] = []
        letters = 0
        for turn in make(Random(seed)):
            turns.append(turn)
            letters += len(turn.text)
            if letters > 5 * LENGTH:  # a token is about four letters
                break
        rows.append(turns)
    return rows


def encode(tokenizer: Tokenizer, rows: list[list[corpus.Turn]], device: str) -> tuple[Tensor, Tensor]:
    """Token ids [rows, LENGTH] int64 and, of the same shape, True where the model is the one who speaks."""
    flat = [corpus.render(turn) for turns in rows for turn in turns]
    pieces = iter(tokenizer.encode_batch_fast(flat, add_special_tokens=False))
    header = len(tokenizer.encode("<|turn>model\n", add_special_tokens=False).ids)
    ids = torch.full((len(rows), LENGTH), bpe.PAD)
    spoken = torch.zeros_like(ids, dtype=torch.bool)
    for row, turns in enumerate(rows):
        line, speech = [bpe.BOS], [False]
        for turn in turns:
            piece = next(pieces).ids
            own = turn.role == "model"
            line += piece
            speech += [own and header <= i < len(piece) - 1 for i in range(len(piece))]  # not the last line feed
        count = min(len(line), LENGTH)
        ids[row, :count], spoken[row, :count] = torch.tensor(line[:count]), torch.tensor(speech[:count])
    return ids.to(device), spoken.to(device)


def minimise(
    name: str, *, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], data: tuple[Tensor, Tensor],
    steps: int, batch: int, lr: float, seed: int,
) -> None:  # fmt: skip
    """Minimise loss_of(ids, spoken) over model's parameters with AdamW, warm-up and a cosine to zero.

    On CUDA one step is captured as a graph: the network is so small that launches would cost more than the work.
    """
    device = data[0].device
    cuda = device.type == "cuda"
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    rate = torch.tensor(lr, device=device)
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True, capturable=cuda)
    order = torch.randint(len(data[0]), (steps, batch), generator=torch.Generator().manual_seed(seed)).to(device)
    ids, spoken = (t[order[0]].clone() for t in data)
    total = torch.zeros((), device=device)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda, cache_enabled=False):
            loss = loss_of(ids, spoken)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        total.add_(loss.detach())

    run = step
    if cuda:
        rate.zero_()  # the rounds before the capture must not move anything
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        optimiser.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
        total.zero_()
    warm_up, report, begin = max(1, min(200, steps // 10)), max(1, steps // 10), time.perf_counter()
    for i in range(steps):
        progress = i / steps
        rate.fill_(lr * min((i + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * progress))))
        ids.copy_(data[0][order[i]])
        spoken.copy_(data[1][order[i]])
        run()
        if (i + 1) % report == 0:
            loss = total.item() / report
            total.zero_()
            speed = (i + 1) / (time.perf_counter() - begin)
            print(
                f"{name}: step {i + 1}/{steps}, loss {loss:.4f}, {speed:.1f} steps/s",
                file=sys.stderr,
                flush=True,
            )


def target_loss(target: Target) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross entropy of the next token; what others say counts little."""

    def loss(ids: Tensor, spoken: Tensor) -> Tensor:
        logits, _, _ = target(ids)
        each = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weight = torch.where(spoken[:, 1:], 1.0, OTHERS).flatten() * (ids[:, 1:] != bpe.PAD).flatten()
        return (each * weight).sum() / weight.sum()

    return loss


def drafts(target: Target, drafter: Drafter, ids: Tensor, logits: Tensor, hidden: Tensor, kv: dict) -> Iterable[tuple]:
    """Draft NUM_DRAFTS tokens at every position, fed with the tokens of the row.

    Yields, for draft j, (the drafter's logits, the target's logits, True where draft j would be asked for: the drafts
    before it are what the target would say), each for positions 1 to LENGTH - NUM_DRAFTS - 1.
    """
    last = ids.shape[1] - NUM_DRAFTS
    state = hidden.roll(1, 1)  # row p starts from the target's state at p - 1
    asked = torch.ones_like(ids[:, 1:last], dtype=torch.bool)
    for j in range(NUM_DRAFTS):
        guess, state = drafter(target.model.embed(ids.roll(-j, 1)), state, kv)
        wanted = logits.roll(-j, 1)[:, 1:last]
        yield guess[:, 1:last], wanted, asked
        asked = asked & (wanted.argmax(-1) == ids.roll(-j - 1, 1)[:, 1:last])


def drafter_loss(target: Target, drafter: Drafter) -> Callable[[Tensor, Tensor], Tensor]:
    """Divergence from what the target would say, over the drafts that would be asked for."""

    def loss(ids: Tensor, spoken: Tensor) -> Tensor:
        parts = []
        for quantised, rows, speech in zip((False, True), ids.chunk(2), spoken.chunk(2), strict=True):
            target.show_quantised(quantised)
            with torch.no_grad():
                seen = target(rows)
            for j, (guess, wanted, asked) in enumerate(drafts(target, drafter, rows, *seen)):
                said = speech.roll(-j - 1, 1)[:, 1 : asked.shape[1] + 1]
                each = F.cross_entropy(guess.flatten(0, 1), wanted.flatten(0, 1).softmax(-1), reduction="none")
                weight = (said & asked).flatten().float()
                parts.append((each * weight).sum() / weight.sum().clamp(min=1))
        return torch.stack(parts).mean()

    return loss


@torch.no_grad()
def evaluate(name: str, target: Target, drafter: Drafter, data: tuple[Tensor, Tensor]) -> None:
    """Print how often the target says the right token, and how long the accepted drafts are."""
    ids, spoken = data
    for quantised in (False, True):
        target.show_quantised(quantised)
        logits, hidden, kv = target(ids)
        right = (logits[:, :-1].argmax(-1) == ids[:, 1:])[spoken[:, 1:]].float().mean().item()
        going, accepted, rounds = None, 0.0, 1.0
        for j, (guess, wanted, _) in enumerate(drafts(target, drafter, ids, logits, hidden, kv)):
            width = guess.shape[1]
            if going is None:
                going = spoken[:, 1 : width + 1] & spoken[:, 2 : width + 2]
                rounds = going.sum().item()
            going = going & (guess.argmax(-1) == wanted.argmax(-1)) & spoken.roll(-j - 1, 1)[:, 1 : width + 1]
            accepted += going.sum().item()
        kind = "w4a16" if quantised else "bf16"
        print(
            f"{name}, {kind}: right tokens {right:.4f}, accepted per round 1 + {accepted / rounds:.2f}",
            flush=True,
        )
    target.show_quantised(False)


def main() -> None:
    """Read the options, train, evaluate, write."""
    parser = argparse.ArgumentParser(description="Train the tiny Gemma-4 checkpoint and its drafter.")
    parser.add_argument("--out", type=Path, required=True, help="where the three folders go")
    parser.add_argument("--steps", type=int, default=3900, help="of the target; the last third sees int4 weights")
    parser.add_argument("--draft-steps", type=int, default=900)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--draft-batch", type=int, default=16, help="even: half of it sees int4 weights")
    parser.add_argument("--conversations", type=int, default=30000)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--keep-target", action="store_true", help="load the target from --out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    begin = time.perf_counter()
    torch.manual_seed(args.seed)
    rows = write_rows(range(args.conversations), corpus.conversation)
    tokenizer = bpe.train((corpus.render(t) for turns in rows[:3000] for t in turns), TARGET.vocab_size)
    data = encode(tokenizer, rows, args.device)
    unseen = range(10**6, 10**6 + max(2, min(256, args.conversations // 10)))
    held_out = {
        name: encode(tokenizer, write_rows(unseen, talk), args.device)
        for name, talk in (("all", corpus.conversation), ("notes", corpus.only(corpus.notes)))
    }
    seconds = time.perf_counter() - begin
    print(f"corpus: {len(rows)} rows of {LENGTH} tokens in {seconds:.0f} s", file=sys.stderr)

    target, drafter = Target().to(args.device), Drafter().to(args.device)
    if args.keep_target:
        export.load_target(target, args.out)
    else:
        last = args.steps // 3
        fit = partial(minimise, model=target, loss_of=target_loss(target), data=data, batch=args.batch)
        fit("target", steps=args.steps - last, lr=3e-3, seed=args.seed)
        target.show_quantised(True)
        fit("target as int4", steps=last, lr=1e-3, seed=args.seed + 1)
        target.show_quantised(False)
        export.round_to_bf16(target)
        export.write_target(target, tokenizer, args.out)
    target.requires_grad_(False)
    fit = partial(minimise, model=drafter, loss_of=drafter_loss(target, drafter), data=data, batch=args.draft_batch)
    fit("drafter", steps=args.draft_steps, lr=3e-3, seed=args.seed + 2)
    export.round_to_bf16(drafter)
    export.write_drafter(drafter, tokenizer, args.out)
    for name, part in held_out.items():
        evaluate(name, target, drafter, part)
    print(f"done in {time.perf_counter() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
