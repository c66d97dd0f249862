"""Measure how many tokens of a drafter are accepted, with transformers as the engine, of a DFlash drafter with kerngen.

    python examples/tiny/acceptance.py                      # both versions of the target, 2 to 6 drafts a round
    python examples/tiny/acceptance.py --target DIR --assistant DIR --drafts 4
    python examples/tiny/acceptance.py --dflash examples/tiny/gemma-4-tiny-dflash           # 3, 7 and 15 drafts

For each prompt: greedy text with drafting must equal greedy text without. The acceptance length is the number of
tokens that one step of the target yields: 1 without drafting, at most 1 + drafts with it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

HERE = Path(__file__).parent
PROMPTS: tuple[str, ...] = (
    (HERE / "prompt.txt").read_text().strip(),
    "What is speculative decoding?",
    "Explain shared memory. How do I make my kernel faster?",
    "Tell me how to grow tomatoes.",
    "Write a short story about a robot and a compass.",
    "Who are you?",
    "Count from three to fifteen.",
    "I want to grow lavender. Tell me about a residual stream.",
)


def dequantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A compressed-tensors pack-quantized int4 state dict with its linear layers as bf16 weights again.

    weight_packed: [out, in/8] int32, eight nibbles a word, the lowest first, each the value plus 8; weight_scale:
    [out, in/group] bf16; weight_shape: (out, in).
    """
    plain = {name: value for name, value in tensors.items() if not name.endswith(("_packed", "_scale", "_shape"))}
    for name, words in tensors.items():
        if not name.endswith(".weight_packed"):
            continue
        base = name.removesuffix("_packed")
        rows, columns = tensors[f"{base}_shape"].tolist()
        nibbles = (words.unsqueeze(-1) >> (4 * torch.arange(8))) & 15  # [out, in/8, 8]
        values = (nibbles.flatten(1)[:, :columns] - 8).to(torch.bfloat16)
        scale = tensors[f"{base}_scale"]
        plain[base] = (values.view(rows, scale.shape[1], -1) * scale.unsqueeze(-1)).reshape(rows, columns)
    return plain


def load(folder: Path) -> PreTrainedModel:
    """The checkpoint in `folder` in fp32. Packed weights are unpacked here: transformers wants a package for it."""
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(dequantised(load_file(folder / "model.safetensors")))
    return model.eval()


@dataclass(frozen=True, slots=True)
class Drafted:
    """One generation. text: what the model said; num_tokens: with the stop token; num_steps: of the target."""

    text: str
    num_tokens: int
    num_steps: int

    @property
    def acceptance_length(self) -> float:
        """Tokens per step of the target after the prompt's own."""
        return (self.num_tokens - 1) / max(1, self.num_steps - 1)


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, *,
    assistant: PreTrainedModel | None = None, num_drafts: int = 4, max_new_tokens: int = 200,
) -> Drafted:  # fmt: skip
    """Answer `prompt` greedily, with `num_drafts` drafted tokens a round if there is an assistant."""
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = num_drafts
    handle = model.register_forward_pre_hook(count)
    try:
        out = model.generate(  # type: ignore[operator]
            ids, assistant_model=assistant, max_new_tokens=max_new_tokens,
            do_sample=False, temperature=None, top_k=None, top_p=None,
        )  # fmt: skip
    finally:
        handle.remove()
    new = out[0, ids.shape[1] :]
    return Drafted(str(tokenizer.decode(new, skip_special_tokens=True)), len(new), steps)


def by_blocks(target: Path, drafter: Path, num_drafts: int) -> list[Drafted]:
    """The answers to PROMPTS, greedy, drafted by a DFlash drafter with kerngen in fp32 on the CPU."""
    import kerngen

    session = kerngen.load(target, draft=drafter, device="cpu", dtype="fp32", num_draft_tokens=num_drafts)
    made = [session.generate(prompt, max_new_tokens=200, temperature=0.0) for prompt in PROMPTS]
    return [Drafted(m.text, m.stats.num_tokens, 1 + m.stats.num_steps) for m in made]  # 1: of the prompt


def main() -> int:
    """Print one row per target and number of drafts. Returns 1 if drafting changed a text."""
    parser = argparse.ArgumentParser(description="Acceptance length of the tiny drafter.")
    targets = [HERE / "gemma-4-tiny", HERE / "gemma-4-tiny-w4a16"]
    parser.add_argument("--target", type=Path, action="append", help="default: both versions beside this script")
    parser.add_argument("--assistant", type=Path, default=HERE / "gemma-4-tiny-assistant")
    parser.add_argument("--dflash", type=Path, help="a DFlash drafter, in place of the assistant")
    parser.add_argument("--drafts", type=int, action="append", help="default: 2, 3, 4 and 6; of DFlash 3, 7 and 15")
    parser.add_argument("--show", action="store_true", help="print the texts")
    args = parser.parse_args()

    assistant = None if args.dflash else load(args.assistant)
    differing = 0
    for folder in args.target or targets:
        model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
        plain = [generate(model, tokenizer, prompt) for prompt in PROMPTS]
        if args.show:
            for prompt, answer in zip(PROMPTS, plain, strict=True):
                print(f"> {prompt}\n{answer.text}\n")
        for num_drafts in args.drafts or ((3, 7, 15) if args.dflash else (2, 3, 4, 6)):
            if args.dflash:
                drafted = by_blocks(folder, args.dflash, num_drafts)
            else:
                drafted = [generate(model, tokenizer, p, assistant=assistant, num_drafts=num_drafts) for p in PROMPTS]
            differing += sum(a.text != b.text for a, b in zip(plain, drafted, strict=True))
            lengths = " ".join(f"{d.acceptance_length:.2f}" for d in drafted)
            mean = sum(d.num_tokens - 1 for d in drafted) / sum(d.num_steps - 1 for d in drafted)
            print(
                f"{folder.name}: {num_drafts} drafts a round, acceptance length {mean:.2f} ({lengths})",
                flush=True,
            )
    if differing:
        print(f"{differing} texts differ with drafting", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
