"""Train the two tiny checkpoints that see and hear, and write their folders.

    python examples/tiny/media.py --out DIR                         # 20 minutes of one core
    python examples/tiny/media.py --out /tmp/tiny --steps 20 --batch 2 --kinds towers

`gemma-4-tiny-media` has a vision tower with clipped linears and a conformer, as Gemma-4-E4B has; `gemma-4-tiny-unified`
has neither, as Gemma-4-12B: patches and samples are projected as they are, and the tokens of an image see each other.
They name a drawn shape and its colour, and tell a low tone from a high one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import tokenizer as bpe
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma4AudioFeatureExtractor, PreTrainedModel

FOLDERS = {"towers": "gemma-4-tiny-media", "unified": "gemma-4-tiny-unified"}
STEPS = {"towers": 800, "unified": 1500}
MARKERS = {
    "<|image>": 90,
    "<|image|>": 91,
    "<image|>": 92,
    "<|audio>": 93,
    "<|audio|>": 94,
    "<audio|>": 95,
    "<|video|>": 96,
}
IMAGE, AUDIO = MARKERS["<|image|>"], MARKERS["<|audio|>"]
PATCH, POOL, RATE, FRAME = 16, 3, 16_000, 640
# height, width in soft tokens: what 1:1, 4:3, 3:2, 16:9 and 5:2 are scaled to with a budget of 70
SIZES = ((8, 8), (7, 9), (9, 7), (6, 10), (10, 6), (6, 11), (11, 6), (5, 13), (13, 5))
SHAPES, TONES = ("circle", "cross"), {"low": (180, 420), "high": (1100, 2600)}  # tones in Hz
COLOURS = {"red": (214, 40, 40), "green": (40, 160, 60), "blue": (40, 70, 214)}
KINDS = {"image": 7, "audio": 2, "both": 2, "text": 1}  # of a turn: how often
SEEN = ("What is this?", "What do you see?", "Name the shape.", "Describe the picture.")
HEARD = ("What do you hear?", "Name the tone.", "Is the tone low or high?", "Describe the sound.")
BOTH = ("What do you see and hear?", "Describe the picture and the sound.")
SAID = {
    "Who are you?": "I am a tiny model that names shapes and tones.",
    "What can you do?": "I name a shape and its colour, and tell a low tone from a high one.",
    "Hello": "Hello! Show me a picture, or play me a tone.",
}
TEXT = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_global_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True,
    "sliding_window": 48, "max_position_embeddings": 4096, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 512, "num_kv_shared_layers": 0, "enable_moe_block": False,
    "final_logit_softcapping": 30.0, "pad_token_id": bpe.PAD, "eos_token_id": bpe.EOS, "bos_token_id": bpe.BOS,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
IDS = {
    "boi_token_id": 90, "image_token_id": 91, "eoi_token_id": 92, "boa_token_id": 93, "audio_token_id": 94,
    "eoa_token_id": 95, "eoa_token_index": 95, "video_token_id": 96, "eos_token_id": [bpe.EOS, bpe.END_OF_TURN],
    "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "towers": {
        "model_type": "gemma4", **IDS,
        "text_config": {"model_type": "gemma4_text", **TEXT, "use_bidirectional_attention": None},
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24, "position_embedding_size": 3360,
            "use_clipped_linears": True, "standardize": False, "default_output_length": 70,
        },
        "audio_config": {
            "model_type": "gemma4_audio", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "subsampling_conv_channels": [128, 8], "output_proj_dims": 64, "use_clipped_linears": True,
        },
    },
    "unified": {
        "model_type": "gemma4_unified", **IDS,
        "text_config": {"model_type": "gemma4_unified_text", **TEXT, "use_bidirectional_attention": "vision"},
        "vision_config": {
            "model_type": "gemma4_unified_vision", "mm_embed_dim": 64, "output_proj_dims": 64, "num_soft_tokens": 70,
        },
        "audio_config": {"model_type": "gemma4_unified_audio"},
    },
}  # fmt: skip
TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'model'] -%}
{{- raise_exception('unknown role: ' + message['role']) -}}
{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<|turn>' + role + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] | trim -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}
{{- part['text'] | trim -}}
{%- elif part['type'] in ['image', 'audio', 'video'] -%}
{{- '<|' + part['type'] + '|>' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|turn>model\\n' -}}
{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, what is shown and played before or behind it, and the answer."""

    question: str
    answer: str
    pixels: NDArray[np.uint8] | None = None
    samples: NDArray[np.float32] | None = None
    media_first: bool = True


def draw(rng: Random, shape: str, colour: str, height: int, width: int) -> NDArray[np.uint8]:
    """[height, width, 3]: the shape somewhere on a grey, at times with a tint or noise.

    Faint colours matter to the model without an encoder: it norms each patch, and sees a tint as it sees a colour.
    """
    noise = np.random.default_rng(rng.randrange(1 << 30))
    picture = np.full((height, width, 3), rng.choice((rng.randrange(60), rng.randrange(190, 256))), dtype=np.float32)
    picture += rng.choice((0, 0, 0, 3)) * noise.normal(0, 1, 3)
    radius = rng.uniform(0.2, 0.45) * min(height, width)
    y, x = rng.uniform(radius, height - radius), rng.uniform(radius, width - radius)
    dy, dx = np.mgrid[0:height, 0:width].astype(np.float32) - np.array([[[y]], [[x]]], dtype=np.float32)
    far, near = np.maximum(abs(dy), abs(dx)), np.minimum(abs(dy), abs(dx))
    inside = dy**2 + dx**2 <= radius**2 if shape == "circle" else (far <= radius) & (near <= radius * 0.13)
    picture[inside] = np.array(COLOURS[colour]) + noise.normal(0, 10, 3)
    return (
        (picture + noise.normal(0, rng.choice((0, rng.uniform(0, 6))), picture.shape))
        .clip(0, 255)
        .round()
        .astype(np.uint8)
    )


def play(rng: Random, tone: str, seconds: float) -> NDArray[np.float32]:
    """A sine with a little noise, 16 kHz."""
    noise = np.random.default_rng(rng.randrange(1 << 30))
    at = np.arange(round(seconds * RATE)) / RATE
    wave = rng.uniform(0.1, 0.8) * np.sin(2 * math.pi * (rng.uniform(*TONES[tone]) * at + rng.random()))
    return (wave + noise.normal(0, rng.uniform(0, 0.008), len(at))).astype(np.float32)


def turn(rng: Random, kind: str, size: tuple[int, int], seconds: float) -> Turn:
    """One of a kind of KINDS. size: height and width of its image in pixels."""
    if kind == "text":
        return Turn(*rng.choice(list(SAID.items())))
    shape, colour, tone = rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.choice(list(TONES))
    pixels = draw(rng, shape, colour, *size) if kind != "audio" else None
    samples = play(rng, tone, seconds) if kind != "image" else None
    seen, heard = f"a {colour} {shape}", f"a {tone} tone"
    words = {"image": (SEEN, seen), "audio": (HEARD, heard), "both": (BOTH, f"{seen} and {heard}")}[kind]
    return Turn(rng.choice(words[0]), words[1].capitalize() + ".", pixels, samples, rng.random() < 0.7)


def patches(pixels: NDArray[np.uint8], patch: int) -> tuple[Tensor, Tensor]:
    """[N, patch * patch * 3] in [0, 1] and [N, 2] (x, y), as transformers' image processor makes them."""
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    cut = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)
    y, x = np.divmod(np.arange(rows * columns), columns)
    return torch.from_numpy(cut.astype(np.float32) / 255), torch.from_numpy(np.stack([x, y], -1))


def conversations(rng: Random, num_turns: int, *, each: int = 1, kind: str = "") -> list[list[Turn]]:
    """`num_turns` turns, `each` in a conversation, of a kind or of any: one size of images, one length of sounds."""
    rows, columns = rng.choice(SIZES)
    size, seconds = (48 * rows, 48 * columns), rng.uniform(0.3, 1.2)
    kinds = [kind] * num_turns if kind else rng.choices(list(KINDS), list(KINDS.values()), k=num_turns)
    turns = [turn(rng, k, size, seconds) for k in kinds]
    return [turns[i : i + each] for i in range(0, num_turns, each)]


class Trainer:
    """A model with what makes batches of it."""

    def __init__(self, kind: str, texts: Tokenizer, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        self.kind, self.texts = kind, texts
        config = AutoConfig.for_model(**CONFIGS[kind])
        made: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        self._begin(made)
        self.model = made.to(device)
        self._features = Gemma4AudioFeatureExtractor()

    @staticmethod
    @torch.no_grad()
    def _begin(model: PreTrainedModel) -> None:
        """Weights to begin with. With transformers' own, shapes are named by chance after 150 steps.

        With these 93 % are right after 75 ("unified", images alone, 16 a step).
        Scores are not scaled: norms of 1 make them of variance head_dim, and each query sees one random key.
        Matrices keep the variance of what they take. Positions begin alike, but do not outweigh the pixels.
        """
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(len(weight) ** -0.25)
            elif name.endswith("position_embedding_table"):
                weight.normal_(std=0.02)
            elif weight.ndim == 2:
                weight.normal_(std=weight.shape[1] ** -0.5)

    def batch(self, conversations: list[list[Turn]]) -> dict[str, Tensor]:
        """What the model's forward takes, with labels where the answers are. Images of a batch are of one size."""
        rows, labels, more = [], [], {}
        turns = [turn for conversation in conversations for turn in conversation]
        pictures = [t.pixels for t in turns if t.pixels is not None]
        sounds = [t.samples for t in turns if t.samples is not None]
        if pictures:
            cut = [patches(p, PATCH if self.kind == "towers" else PATCH * POOL) for p in pictures]
            more["pixel_values"], more["image_position_ids"] = (torch.stack(part) for part in zip(*cut, strict=True))
        if sounds:
            more |= self._heard(sounds)
        for conversation in conversations:
            row, label = [bpe.BOS], [-100]
            for t in conversation:
                shown = [] if t.pixels is None else self._around("image", t.pixels[::48, ::48, 0].size)
                played = [] if t.samples is None else self._around("audio", self._num_heard(len(t.samples)))
                media, words = [*shown, *played], self._ids(t.question)
                parts = [*media, *words] if t.media_first else [*words, *media]
                asked = [*self._ids("<|turn>user\n"), *parts, *self._ids("<turn|>\n<|turn>model\n")]
                said = self._ids(f"{t.answer}<turn|>")
                row += [*asked, *said, *self._ids("\n")]
                label += [*[-100] * len(asked), *said, -100]
            rows.append(row)
            labels.append(label)
        longest = max(map(len, rows))
        ids = torch.tensor([row + [bpe.PAD] * (longest - len(row)) for row in rows])
        kinds = torch.where(ids == IMAGE, 1, torch.where(ids == AUDIO, 3, 0))
        marked = torch.tensor([row + [-100] * (longest - len(row)) for row in labels])
        more["mm_token_type_ids"] = kinds
        made = {"input_ids": ids, "marked": marked, **more}
        return {name: value.to(self.model.device) for name, value in made.items()}

    @staticmethod
    def _around(kind: str, count: int) -> list[int]:
        return [MARKERS[f"<|{kind}>"], *[MARKERS[f"<|{kind}|>"]] * count, MARKERS[f"<{kind}|>"]]

    def _masks(self, ids: Tensor, kinds: Tensor) -> Any:
        """Those of `generate`: the 12B's own forward in transformers 5.22 has images see too much (its issue 46711).

        What pads a row stands behind it, where no other token sees it.
        """
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        empty = torch.empty(*ids.shape, 0, device=ids.device)
        made = type(self.model).create_masks_for_generate
        return made(self.model.config, empty, None, None, places, mm_token_type_ids=kinds)

    def _ids(self, text: str) -> list[int]:
        return self.texts.encode(text, add_special_tokens=False).ids

    def _heard(self, sounds: list[NDArray[np.float32]]) -> dict[str, Tensor]:
        if self.kind == "towers":
            found = self._features(sounds, return_tensors="pt")
            return {"input_features": found["input_features"], "input_features_mask": found["input_features_mask"]}
        frames = [torch.from_numpy(np.pad(s, (0, -len(s) % FRAME))).view(-1, FRAME) for s in sounds]
        longest = max(map(len, frames))
        mask = torch.tensor([[True] * len(f) + [False] * (longest - len(f)) for f in frames])
        return {
            "input_features": torch.stack([F.pad(f, (0, 0, 0, longest - len(f))) for f in frames]),
            "input_features_mask": mask,
        }

    def _num_heard(self, num_samples: int) -> int:
        if self.kind == "unified":
            return -(-num_samples // FRAME)
        frames = (num_samples + 160 - 321) // 160 + 1
        for _ in range(2):
            frames = (frames - 1) // 2 + 1
        return frames

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Cross entropy of the answers' tokens, and the share of conversations that are right in every token."""
        marked = batch.pop("marked")[:, 1:]
        masks = self._masks(batch["input_ids"], batch["mm_token_type_ids"])
        logits = self.model(**batch, attention_mask=masks).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), marked.flatten(), ignore_index=-100)
        right = ((logits.argmax(-1) == marked) | (marked == -100)).all(1).float().mean()
        return loss, right

    def fit(self, steps: int, size: int, lr: float, seed: int) -> None:
        optimiser = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
        rng, begin, sums = Random(seed), time.perf_counter(), [0.0, 0.0]
        for i in range(steps):
            rate = lr * min((i + 1) / 50, 0.5 * (1 + math.cos(math.pi * i / steps)) + 0.01)
            for group in optimiser.param_groups:
                group["lr"] = rate
            loss, right = self.loss(self.batch(conversations(rng, size, each=rng.choice((1, 1, 2)))))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimiser.step()
            sums = [sums[0] + loss.item(), sums[1] + right.item()]
            if (i + 1) % 50 == 0:
                rate_s = (i + 1) / (time.perf_counter() - begin)
                print(f"{self.kind}: step {i + 1}/{steps}, loss {sums[0] / 50:.4f}, answers right {sums[1] / 50:.3f}, "
                      f"{rate_s:.2f} steps/s", file=sys.stderr, flush=True)  # fmt: skip
                sums = [0.0, 0.0]

    @torch.no_grad()
    def bound(self, rng: Random, batches: int, size: int) -> None:
        """Give each clipped linear the bounds of what it saw, a little wider: released checkpoints have such bounds."""
        seen: dict[Any, list[float]] = {}

        def note(module: Any, given: tuple[Tensor, ...], out: Tensor) -> None:
            here = [given[0].min().item(), given[0].max().item(), out.min().item(), out.max().item()]
            had = seen.setdefault(module, here)
            seen[module] = [f(a, b) for f, a, b in zip((min, max, min, max), had, here, strict=True)]

        clipped = [m for m in self.model.modules() if hasattr(m, "input_min")]
        hooks = [m.register_forward_hook(note) for m in clipped]
        for _ in range(batches):
            self.loss(self.batch(conversations(rng, size, each=2)))
        for hook in hooks:
            hook.remove()
        for module in clipped:
            for name, value in zip(("input_min", "input_max", "output_min", "output_max"), seen[module], strict=True):
                getattr(module, name).fill_(1.25 * value)

    @torch.no_grad()
    def measure(self, rng: Random, batches: int, size: int) -> str:
        """The share of right answers to each kind of question, and of conversations of two turns without a mistake."""
        shares = []
        for said, each, kind in (*((kind, 1, kind) for kind in KINDS), ("two turns", 2, "")):
            asked = (self.batch(conversations(rng, size, each=each, kind=kind)) for _ in range(batches))
            shares.append(f"{said} {100 * sum(self.loss(batch)[1].item() for batch in asked) / batches:.1f} %")
        return ", ".join(shares)

    def write(self, folder: Path) -> None:
        """The checkpoint in bf16, with its tokenizer and chat template."""
        self.model.to(torch.bfloat16).save_pretrained(folder)
        self.texts.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
        names |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": TEXT["max_position_embeddings"]}
        (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")
        generation = {"bos_token_id": bpe.BOS, "eos_token_id": [bpe.EOS, bpe.END_OF_TURN], "pad_token_id": bpe.PAD}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    """Read the options, train, evaluate, write."""
    parser = argparse.ArgumentParser(description="Train the tiny Gemma-4 checkpoints that see and hear.")
    parser.add_argument("--out", type=Path, required=True, help="where the two folders go")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--batch", type=int, default=16, help="turns a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--kinds", default=",".join(FOLDERS), help="towers, unified, or both with a comma")
    parser.add_argument("--held-out", type=int, default=320, help="answers of each kind, to measure what was learned")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    words = [*SEEN, *HEARD, *BOTH, *SAID, *SAID.values(), "user\n", "model\n"]
    words += [f"A {colour} {shape} and a {tone} tone." for colour in COLOURS for shape in SHAPES for tone in TONES]
    texts = bpe.train(words * 20, TEXT["vocab_size"], bpe.SPECIAL | {i: text for text, i in MARKERS.items()})
    for kind in args.kinds.split(","):
        trainer = Trainer(kind, texts, args.seed, args.device)
        trainer.fit(args.steps or STEPS[kind], args.batch, args.lr, args.seed)
        batches = -(-args.held_out // args.batch)
        trainer.bound(Random(args.seed + 1), batches, args.batch)
        trainer.model.to(torch.bfloat16).to(torch.float32)
        shares = trainer.measure(Random(10**6), batches, args.batch)
        print(f"{kind}: right of {batches * args.batch} unseen answers each: {shares}", flush=True)
        trainer.write(args.out / FOLDERS[kind])


if __name__ == "__main__":
    main()
