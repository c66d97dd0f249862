"""Train a DFlash drafter for the tiny target, and write its folder as z-lab stores them.

    python examples/tiny/dflash.py --out examples/tiny            # less than an hour on a core of a CPU
    python examples/tiny/dflash.py --target examples/tiny --out /tmp/tiny --steps 20 --rows 64 --batch 4

It learns from the target that `train.py` has written: from the outputs of some of its layers to what it would
say for the next tokens, all at once. Half of the rows are the target's with its weights as int4 shows them. The maths
is that of z-lab's dflash, model.py (arXiv 2602.06036); layers with a window are causal within the block, as kerngen
and SGLang have them. Needs torch, tokenizers and safetensors; uses a CUDA device if there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import corpus
import export
import torch
from model import FULL, SLIDING, TARGET, Linear, Norm, Target, rotate
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from train import LENGTH, encode, minimise, write_rows

DFLASH_DIR = "gemma-4-tiny-dflash"
TAPS = (1, 3, 5)  # layers of the target whose outputs it sees
LAYERS = (SLIDING, SLIDING, FULL)
BLOCK, MASK = 16, 4  # tokens of a block, the last known one included; what stands for those to draft
HEADS, HEAD_DIM, INNER, THETA = 2, 128, 256, 1e6  # one head of keys and values
WINDOW = 64
ANCHORS = 8  # blocks of a row in a training step
HIDDEN = TARGET.hidden_size


def turns(positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [..., 1, HEAD_DIM / 2] of positions [...]: all pairs turn."""
    freq = THETA ** (-2.0 * torch.arange(HEAD_DIM // 2, device=positions.device) / HEAD_DIM)
    angle = positions[..., None, None] * freq
    return angle.cos(), angle.sin()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = Linear(HIDDEN, HEADS * HEAD_DIM), Linear(HEADS * HEAD_DIM, HIDDEN)
        self.k_proj, self.v_proj = Linear(HIDDEN, HEAD_DIM), Linear(HIDDEN, HEAD_DIM)
        self.q_norm, self.k_norm = Norm(HEAD_DIM, TARGET.rms_norm_eps), Norm(HEAD_DIM, TARGET.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, at: Tensor, windowed: bool) -> Tensor:
        """x [B, A, BLOCK, H] at positions `at` [B, A, BLOCK]; context [B, T, H], of which a block sees what is before
        its own first position.
        """
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (HEADS, -1))), turns(at)).flatten(2, 3)
        past = torch.arange(context.shape[1], device=x.device)
        k, v = self.keys(context, past), self.v_proj(context)  # [B, T, HEAD_DIM]
        if windowed:
            near = at[..., :1] + torch.arange(1 - WINDOW, 0, device=x.device)  # negative before the beginning
            rows, past = torch.arange(len(x), device=x.device)[:, None, None], near
            k, v = k[rows, near.clamp(min=0)], v[rows, near.clamp(min=0)]  # [B, A, WINDOW - 1, HEAD_DIM]
        else:
            k, v = k[:, None], v[:, None]
        first, mine, theirs = at[..., :1, None], at[..., None], at[..., None, :]
        old, new = (past >= 0)[..., None, :] & (past[..., None, :] < first), torch.ones_like(mine == theirs)
        if windowed:
            old, new = old & (past[..., None, :] > mine - WINDOW), theirs <= mine
        seen = torch.cat((old.expand(-1, -1, BLOCK, -1), new), -1).repeat_interleave(HEADS, 2)
        scores = torch.cat((q @ k.transpose(-1, -2), q @ self.keys(x, at).transpose(-1, -2)), -1) * HEAD_DIM**-0.5
        chance = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        taken = chance[..., :-BLOCK] @ v + chance[..., -BLOCK:] @ self.v_proj(x)
        return self.o_proj(taken.unflatten(2, (BLOCK, HEADS)).flatten(-2))

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        """Of x [..., HIDDEN] at positions [...]: [..., HEAD_DIM]."""
        return rotate(self.k_norm(self.k_proj(x))[..., None, :], turns(positions))[..., 0, :]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            Linear(HIDDEN, INNER),
            Linear(HIDDEN, INNER),
            Linear(INNER, HIDDEN),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(HIDDEN, TARGET.rms_norm_eps) for _ in range(2))
        self.self_attn, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor, context: Tensor, at: Tensor, windowed: bool) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, at, windowed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Dflash(nn.Module):
    """Parameter names are those of z-lab's checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.hidden_norm = Linear(len(TAPS) * HIDDEN, HIDDEN), Norm(HIDDEN, TARGET.rms_norm_eps)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in LAYERS), Norm(HIDDEN, TARGET.rms_norm_eps)

    def forward(self, target: Target, features: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
        """Logits [B, A, BLOCK - 1, vocab] of what follows ids [B, A], which stand at anchors [B, A] int64.

        features [B, T, len(TAPS) * H]: of each row's tokens, of which a block sees those before its anchor.
        """
        context = self.hidden_norm(self.fc(features))
        masked = torch.full((*ids.shape, BLOCK - 1), MASK, device=ids.device)
        x = target.model.embed(torch.cat((ids[..., None], masked), -1))
        at = anchors[..., None] + torch.arange(BLOCK, device=ids.device)
        for kind, layer in zip(LAYERS, self.layers, strict=True):
            x = layer(x, context, at, kind == SLIDING)
        return logits_of(target, self.norm(x)[:, :, 1:])


def logits_of(target: Target, hidden: Tensor) -> Tensor:
    cap = TARGET.final_logit_softcapping or 0.0
    return cap * torch.tanh(F.linear(hidden, target.model.embed_tokens.weight).float() / cap)


@torch.no_grad()
def seen_by(target: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Features [rows, T, len(TAPS) * H] and final hidden states [rows, T, H] of ids [rows, T], in fp16."""
    taken: list[Tensor] = []
    hooks = [target.model.layers[i].register_forward_hook(lambda _, __, out: taken.append(out[0])) for i in TAPS]
    features, hidden = [], []
    for rows in ids.split(64):
        taken.clear()
        _, states, _ = target(rows)
        features.append(torch.cat(taken, -1).half())
        hidden.append(states.half())
    for hook in hooks:
        hook.remove()
    return torch.cat(features), torch.cat(hidden)


Data = tuple[Tensor, Tensor, Tensor, Tensor]  # ids, spoken, features, hidden


def data_of(target: Target, ids: Tensor, spoken: Tensor) -> Data:
    """The first half of the rows with the target's weights as they are, the other as int4 shows them."""
    halves = []
    for quantised, rows in zip((False, True), ids.chunk(2), strict=True):
        target.show_quantised(quantised)
        halves.append(seen_by(target, rows))
    target.show_quantised(False)
    return ids, spoken, *(torch.cat(both) for both in zip(*halves, strict=True))


def blocks(target: Target, drafter: Dflash, data: Data, rows: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of blocks at anchors [B, A] of those rows: the drafter's logits and the target's [B, A, BLOCK - 1, vocab], and
    where a draft would be asked for, [B, A, BLOCK - 1]: the model speaks, and the drafts before are what it says.
    """
    ids, spoken, features, hidden = (t[rows] for t in data)
    every = torch.arange(len(rows), device=rows.device)[:, None, None]
    at = anchors[..., None] + torch.arange(BLOCK - 1, device=rows.device)  # each says what follows it
    wanted = logits_of(target, hidden[every, at].float())
    right = wanted.argmax(-1) == ids[every, at + 1]
    asked = torch.cat((torch.ones_like(right[..., :1]), right[..., :-1]), -1).cumprod(-1).bool() & spoken[every, at + 1]
    return drafter(target, features.float(), ids[every[..., 0], anchors], anchors), wanted, asked


def loss_of(target: Target, drafter: Dflash, data: Data) -> Callable[[Tensor, Tensor], Tensor]:
    """Divergence from what the target would say, over the drafts that would be asked for, of blocks where it speaks."""
    places = data[1][:, 2 : LENGTH - BLOCK + 1].float() + 1e-6  # a block at p drafts p + 1 first

    def loss(rows: Tensor, _: Tensor) -> Tensor:
        anchors = 1 + places[rows].multinomial(ANCHORS)
        guess, wanted, asked = blocks(target, drafter, data, rows, anchors)
        each = F.cross_entropy(guess.flatten(0, 2), wanted.flatten(0, 2).softmax(-1), reduction="none")
        weight = asked.flatten().float()
        return (each * weight).sum() / weight.sum().clamp(min=1)

    return loss


@torch.no_grad()
def accepted(target: Target, drafter: Dflash, data: Data) -> float:
    """Drafts that are accepted in a round, on average: blocks at all places where the model speaks throughout."""
    found, rounds = 0.0, 0
    spoken = data[1].unfold(1, BLOCK, 1).all(-1)  # [rows, LENGTH - BLOCK + 1]
    for row in range(len(data[0])):
        places = spoken[row, 1 : LENGTH - BLOCK].nonzero()[::7, 0] + 1
        if len(places):
            guess, wanted, _ = blocks(target, drafter, data, torch.tensor([row], device=places.device), places[None])
            found += float((guess.argmax(-1) == wanted.argmax(-1)).cumprod(-1).sum())
            rounds += len(places)
    return found / max(rounds, 1)


def config() -> export.Json:
    """config.json, with the fields of z-lab's."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
        "num_target_layers": len(TARGET.layer_types),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": len(LAYERS),
        "layer_types": list(LAYERS),
        "sliding_window": WINDOW,
        "hidden_act": "silu",
        "rope_theta": THETA,
        "rope_scaling": None,
        "rms_norm_eps": TARGET.rms_norm_eps,
        "vocab_size": TARGET.vocab_size,
        "max_position_embeddings": export.MAX_POSITIONS,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def main() -> None:
    """Read the options, train, evaluate, write."""
    parser = argparse.ArgumentParser(description="Train a DFlash drafter for the tiny Gemma-4 checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="where the target's folder is, and the drafter's goes")
    parser.add_argument("--target", type=Path, help="where the target's folder is, if that is elsewhere")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=16, help="rows of a step")
    parser.add_argument("--rows", type=int, default=3000, help="even: half of them see int4 weights")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    begin = time.perf_counter()
    torch.manual_seed(args.seed)
    place = args.target or args.out
    target = Target().to(args.device)
    export.load_target(target, place)
    target.requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(place / export.TARGET_DIR / "tokenizer.json"))
    ids, spoken = encode(tokenizer, write_rows(range(args.rows), corpus.conversation), args.device)
    data = data_of(target, ids, spoken)
    print(f"features: {len(ids)} rows of {LENGTH} tokens, {time.perf_counter() - begin:.0f} s", file=sys.stderr)

    drafter = Dflash().to(args.device)
    index = torch.arange(len(ids), device=args.device)
    minimise("dflash", model=drafter, loss_of=loss_of(target, drafter, data), data=(index, index), steps=args.steps,
             batch=args.batch, lr=3e-3, seed=args.seed)  # fmt: skip
    export.round_to_bf16(drafter)
    folder = args.out / DFLASH_DIR
    folder.mkdir(parents=True, exist_ok=True)
    save_file(export.state(drafter), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner alone
    (folder / "config.json").write_text(json.dumps(config(), indent=2) + "\n")
    for name, talk in (("all", corpus.conversation), ("notes", corpus.only(corpus.notes))):
        unseen = encode(tokenizer, write_rows(range(10**6, 10**6 + max(2, args.rows // 100)), talk), args.device)
        found = accepted(target, drafter, data_of(target, *unseen))
        print(f"{name}: accepted per round 1 + {found:.2f}", flush=True)
    print(f"done in {time.perf_counter() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
