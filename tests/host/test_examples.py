"""The examples run as they stand, and the shipped checkpoint is what its README says it is."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from command import Kerngen
from safetensors.torch import load_file
from tokenizers import Tokenizer

import kerngen
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.dflash import DflashDrafter
from kerngen.runtime.drafters import forward

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = EXAMPLES / "tiny"
TARGET, W4A16, ASSISTANT, DFLASH = (
    TINY / f"gemma-4-tiny{suffix}" for suffix in ("", "-w4a16", "-assistant", "-dflash")
)
FOLDERS = [TARGET, W4A16, ASSISTANT]
SEEING = [TINY / "gemma-4-tiny-media", TINY / "gemma-4-tiny-unified"]
WINDOW = 64
MAX_BYTES = 18_000_000

pytest.importorskip("transformers")
sys.path.insert(0, str(TINY))  # the scripts there import each other by name
import acceptance  # noqa: E402
import corpus  # noqa: E402
import dflash  # noqa: E402
import export  # noqa: E402
import media  # noqa: E402
import model as training  # noqa: E402
import passages  # noqa: E402
import tokenizer as bpe  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


@pytest.fixture(scope="module", params=[TARGET, W4A16], ids=lambda p: p.name)
def served(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """One version of the target in transformers, with its tokenizer."""
    from transformers import AutoTokenizer

    return acceptance.load(request.param), AutoTokenizer.from_pretrained(request.param)


@pytest.fixture(scope="module")
def assistant() -> Any:
    return acceptance.load(ASSISTANT)


def run(*arguments: object) -> str:
    """Standard output of `python ARGUMENTS` in the repository's root, which must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=EXAMPLES.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- what is in the folders


def test_the_examples_are_small() -> None:
    files = [p for p in EXAMPLES.rglob("*") if p.is_file()]
    sizes = {p: p.stat().st_size for p in files if not any(part.startswith((".", "__")) for part in p.parts)}
    assert sum(sizes.values()) <= MAX_BYTES, f"{sum(sizes.values()):,} B in {len(sizes)} files"


@pytest.mark.parametrize("folder", FOLDERS + SEEING, ids=lambda p: p.name)
def test_each_folder_holds_what_a_released_one_does(folder: Path) -> None:
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip


def test_the_config_has_the_released_shape(tokenizer: Tokenizer) -> None:
    config = json.loads((TARGET / "config.json").read_text())
    text = config["text_config"]
    assert (config["model_type"], text["model_type"]) == ("gemma4", "gemma4_text")
    assert (text["head_dim"], text["global_head_dim"]) == (256, 512)
    assert text["attention_k_eq_v"] is True
    assert text["num_global_key_value_heads"] != text["num_key_value_heads"]
    assert text["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert (text["final_logit_softcapping"], text["tie_word_embeddings"]) == (30.0, True)
    assert text["vocab_size"] == tokenizer.get_vocab_size()
    prompt = len(tokenizer.encode(acceptance.PROMPTS[0]).ids)
    assert text["sliding_window"] == WINDOW < prompt, f"the demo's prompt has {prompt} tokens"


def test_the_assistant_fits_its_target() -> None:
    config = json.loads((ASSISTANT / "config.json").read_text())
    target, own = json.loads((TARGET / "config.json").read_text())["text_config"], config["text_config"]
    assert config["model_type"] == "gemma4_assistant"
    assert config["backbone_hidden_size"] == target["hidden_size"] > own["hidden_size"]
    assert own["num_kv_shared_layers"] == own["num_hidden_layers"] == 4
    for same in (
        "head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads", "vocab_size",
    ):  # fmt: skip
        assert own[same] == target[same]
    names = set(load_file(ASSISTANT / "model.safetensors"))
    assert len(names) == 48
    assert not [n for n in names if "k_proj" in n or "v_proj" in n or "k_norm" in n]


def test_the_weights_are_named_as_released() -> None:
    tensors = load_file(TARGET / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert all(name.startswith("model.language_model.") for name in tensors)
    layers = [n.removeprefix("model.language_model.layers.") for n in tensors]
    assert sum(n.endswith("layer_scalar") for n in layers) == 6
    assert "4.self_attn.v_proj.weight" in layers
    assert "5.self_attn.v_proj.weight" not in layers


def test_special_tokens_stand_at_their_ids(tokenizer: Tokenizer) -> None:
    for i, text in bpe.SPECIAL.items():
        assert (tokenizer.id_to_token(i), tokenizer.token_to_id(text)) == (text, i)
    assert tokenizer.encode("\n", add_special_tokens=False).ids == [107]
    stops = json.loads((TARGET / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [bpe.EOS, bpe.END_OF_TURN]


def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    text = "Ünïcode 漢字 🦊, tabs\tand\n\nlines, 12345 <not a token>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_chat_template_has_the_released_form() -> None:
    from transformers import AutoTokenizer

    chat = [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Bye"},
    ]
    text = AutoTokenizer.from_pretrained(TARGET).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHello<turn|>\n<|turn>model\nHi<turn|>\n"
        "<|turn>user\nBye<turn|>\n<|turn>model\n"
    )


# ---- int4


def test_packed_weights_are_the_bf16_ones_rounded() -> None:
    packed, plain = load_file(W4A16 / "model.safetensors"), load_file(TARGET / "model.safetensors")
    bases = [n.removesuffix("_packed") for n in packed if n.endswith(".weight_packed")]
    assert len(bases) == 6 * 7 - 1, "all linear layers; the global one has no v_proj"
    for base in bases:
        q, scale = training.quantise(plain[base])
        assert torch.equal(packed[f"{base}_packed"], export.pack(q)), base
        assert torch.equal(packed[f"{base}_scale"], scale), base
        assert packed[f"{base}_shape"].tolist() == list(plain[base].shape)
    kept = {n for n in packed if not n.endswith(("_packed", "_scale", "_shape"))}
    assert kept == {n for n in plain if n not in bases} | {"lm_head.weight"}


def test_unpacking_undoes_packing() -> None:
    # the worked example of the format: nibbles 8,9,7,15,0,8,8,8 make the word 0x8880F798
    q = torch.tensor([[0, 1, -1, 7, -8, 0, 0, 0]]).float()
    assert export.pack(q).item() & 0xFFFFFFFF == 0x8880F798
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    q, scale = training.quantise(weight)
    stored = {"w.weight_packed": export.pack(q), "w.weight_scale": scale, "w.weight_shape": torch.tensor([24, 64])}
    again = acceptance.dequantised(stored)["w.weight"]
    assert torch.equal(again, training.dequantise(q, scale))
    step = scale.float().repeat_interleave(32, 1)
    # half a step, or the whole one where +7.5 steps is cut to +7; and a little for bf16
    assert ((again - weight).abs() <= 0.53 * step + 1e-6).float().mean() > 0.95
    assert ((again - weight).abs() <= 0.6 * step).all()


# ---- what the model says


def test_training_code_and_transformers_agree(tokenizer: Tokenizer, assistant: Any) -> None:
    ids = torch.tensor([tokenizer.encode(acceptance.PROMPTS[0]).ids])
    ours = training.Target()
    export.load_target(ours, TINY)
    theirs = acceptance.load(TARGET)
    with torch.no_grad():
        logits, hidden, kv = ours(ids)
        out = theirs(ids, output_hidden_states=True, return_shared_kv_states=True)
    # in fp32 transformers scales embeddings by sqrt(128) itself, the training code by its bf16: one part in 10^4
    torch.testing.assert_close(logits, out.logits, atol=2e-2, rtol=1e-3)

    drafter = training.Drafter()
    drafter.load_state_dict(load_file(ASSISTANT / "model.safetensors"))
    last = ids.shape[1] - 1
    keys = {kind: tuple(t[:, :, :last] for t in pair) for kind, pair in kv.items()}
    # transformers would show the sliding layers two keys more than the target's own window does
    keys["sliding_attention"] = tuple(t[:, :, 1 - WINDOW :] for t in keys["sliding_attention"])
    with torch.no_grad():
        embedded = ours.model.embed(ids)
        guess, state = drafter(embedded, hidden.roll(1, 1), kv)
        expected = assistant(
            inputs_embeds=torch.cat((embedded[:, last:], hidden[:, last - 1 : last]), -1),
            position_ids=torch.tensor([[last]]),
            shared_kv_states=keys,
        )
    torch.testing.assert_close(guess[:, last:], expected.logits, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(state[:, last:], expected.last_hidden_state, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("question", "answer"), [
    ("What is a warp?", passages.TOPICS["a warp"]),
    ("Explain speculative decoding.", passages.TOPICS["speculative decoding"]),
    ("Who are you?", passages.QUESTIONS["Who are you?"]),
    ("Tell me a story about a robot and a compass.", corpus.tell("robot", "compass")),
    ("When do I harvest garlic?", "Harvest garlic in July, when a third of the leaves is brown."),
])  # fmt: skip
def test_it_knows_its_passages(served: tuple[Any, Any], question: str, answer: str) -> None:
    assert acceptance.generate(*served, question).text == answer


def test_it_reads_beyond_the_window(served: tuple[Any, Any]) -> None:
    prompt = acceptance.PROMPTS[0]
    answer = acceptance.generate(*served, prompt).text
    assert answer.startswith("Vera keeps the red lantern in the tower.\nOnce there was an owl named Minna"), answer
    moved = prompt.replace("lantern in the tower", "lantern in the wagon")
    assert acceptance.generate(*served, moved).text.startswith("Vera keeps the red lantern in the wagon.")
    tail = served[1](prompt[prompt.index("tower") :])["input_ids"]
    assert len(tail) > WINDOW + 20, "the fact must have left every sliding window long before it is asked for"


def test_drafting_changes_nothing_and_pays(served: tuple[Any, Any], assistant: Any) -> None:
    tokens = steps = 0
    for prompt in acceptance.PROMPTS[:4]:
        plain = acceptance.generate(*served, prompt)
        drafted = acceptance.generate(*served, prompt, assistant=assistant, num_drafts=4)
        assert drafted.text == plain.text, prompt
        tokens, steps = tokens + drafted.num_tokens - 1, steps + drafted.num_steps - 1
    assert tokens / steps >= 2.5, f"{tokens} tokens in {steps} steps"


# ---- how it was made


def test_the_corpus_is_a_function_of_its_seed() -> None:
    first, again, other = (list(islice(corpus.conversation(Random(seed)), 20)) for seed in (1, 1, 2))
    assert first == again != other
    assert {t.role for t in first} <= {"system", "user", "model"}


def test_notes_hold_their_answers() -> None:
    for seed in range(50):
        question, answer = corpus.notes(Random(seed))
        for sentence in answer.rstrip(".").split(". "):
            assert f"{sentence}." in question


def test_the_training_script_runs_anywhere(tmp_path: Path) -> None:
    options = ["--steps", 3, "--draft-steps", 1, "--batch", 2, "--draft-batch", 2, "--conversations", 40]
    printed = run(TINY / "train.py", "--out", tmp_path, "--device", "cpu", *options)
    assert "accepted per round" in printed
    shipped = {p.relative_to(TINY) for folder in FOLDERS for p in folder.iterdir()}
    assert {p.relative_to(tmp_path) for p in tmp_path.rglob("*.*") if p.is_file()} == shipped
    for folder in FOLDERS:
        made = load_file(tmp_path / folder.name / "model.safetensors")
        assert {n: t.shape for n, t in made.items()} == {
            n: t.shape for n, t in load_file(folder / "model.safetensors").items()
        }
        assert (tmp_path / folder.name / "config.json").read_text() == (folder / "config.json").read_text()


def test_checkpoints_that_see_and_hear_are_trained_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they are is as shipped: what they say takes a longer training."""
    options = ["--steps", "1", "--batch", "2", "--held-out", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["media.py", "--out", str(tmp_path), *options])
    media.main()
    assert capsys.readouterr().out.count("unseen answers") == 2
    for folder in SEEING:
        made, shipped = (load_file(place / "model.safetensors") for place in (tmp_path / folder.name, folder))
        assert {n: t.shape for n, t in made.items()} == {n: t.shape for n, t in shipped.items()}
        for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
            assert (tmp_path / folder.name / name).read_text() == (folder / name).read_text(), name


def test_a_dflash_drafter_is_trained_anywhere_and_drafts_here_as_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it says takes a longer training; what the script computes is what runs."""
    options = ["--steps", "2", "--rows", "4", "--batch", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["dflash.py", "--target", str(TINY), "--out", str(tmp_path), *options])
    dflash.main()
    assert capsys.readouterr().out.count("accepted per round") == 2
    folder = tmp_path / dflash.DFLASH_DIR
    ours, theirs = training.Target(), dflash.Dflash()
    export.load_target(ours, TINY)
    theirs.load_state_dict(load_file(folder / "model.safetensors"))
    ids = torch.randint(110, 1000, (1, dflash.WINDOW + 30), generator=torch.Generator().manual_seed(3))
    session = kerngen.load(TARGET, draft=str(folder), device="cpu", dtype="fp32")
    drafter = session.drafter
    assert isinstance(drafter, DflashDrafter)
    for length in (3, dflash.WINDOW + 20):
        with torch.inference_mode():
            features, _ = dflash.seen_by(ours, ids)
            wanted = theirs(ours, features.float(), ids[:, length : length + 1], torch.tensor([[length]]))[0, 0]
            cache = KVCache.whole(session.config, session.ops, batch=1, max_len=length + dflash.BLOCK,
                                  drafter_layers=drafter.policy.cache_layers)  # fmt: skip
            forward(session.model, drafter, Batch.prefill(ids[0, :length], 0, cache), cache)
            states = drafter.block(ids[0, length : length + 1], torch.tensor([length]), cache, length)[0, 1:]
            torch.testing.assert_close(session.model.logits(states), wanted, rtol=1e-2, atol=1e-2)
    prompt = "What is a warp?"
    plain = kerngen.load(TARGET, draft=False, device="cpu", dtype="fp32").generate(prompt, max_new_tokens=24)
    assert session.generate(prompt, max_new_tokens=24).text == plain.text


@pytest.mark.parametrize(("target", "least"), [(TARGET, 11.0), (W4A16, 11.0)], ids=["bf16", "int4"])
def test_blocks_change_nothing_and_pay(target: Path, least: float) -> None:
    """The shipped drafter's; beside the assistant, too."""
    plain = kerngen.load(target, draft=False, device="cpu", dtype="fp32")
    drafting = kerngen.load(target, draft=DFLASH, device="cpu", dtype="fp32", num_draft_tokens=15)
    both = kerngen.load(target, draft=[ASSISTANT, DFLASH], device="cpu", dtype="fp32")
    tokens = steps = 0
    for prompt in acceptance.PROMPTS[:5]:
        wanted, made, chosen = (
            session.generate(prompt, max_new_tokens=200, temperature=0.0) for session in (plain, drafting, both)
        )
        assert wanted.text == made.text == chosen.text, prompt
        tokens, steps = tokens + made.stats.num_tokens - 1, steps + made.stats.num_steps
    assert tokens / steps > least, f"{tokens} tokens in {steps} steps"


@pytest.mark.parametrize("folder", SEEING, ids=lambda p: p.name)
def test_shapes_and_tones_are_named(folder: Path) -> None:
    """Those that are shipped, and those drawn here: by nobody who trained the checkpoint."""
    session = kerngen.load(folder, device="cpu", media="images,audio")
    y, x = np.mgrid[:400, :500]
    disc = np.full((400, 500, 3), 240, np.uint8)
    disc[(y - 180) ** 2 + (x - 300) ** 2 < 110**2] = 30, 60, 220
    high = np.sin(np.arange(12_000) * (2 * np.pi * 1700 / 16_000)).astype(np.float32) / 2
    said = [
        session.generate(question, images=images, audio=audio, max_new_tokens=24).text
        for question, images, audio in (
            ("What is this?", [TINY / "cross.png"], []),
            ("What do you hear?", [], [TINY / "tone.wav"]),
            ("What do you see and hear?", [disc], [high]),
        )
    ]
    assert said == ["A green cross.", "A low tone.", "A blue circle and a high tone."]


# ---- the scripts, and kerngen on the checkpoint


@pytest.mark.parametrize("name", ["../docs/library.md", "compile_a_kernel.py", "lookup_a_winner.py", "use_the_ops.py"])
def test_what_an_example_imports_is_installed_with_kerngen(name: str) -> None:
    """Whoever installed kerngen and no extra for developers can run it."""
    text = (EXAMPLES / name).read_text()
    if name.endswith(".md"):
        text = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    asked = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    installed = {re.match(r"\w+", line)[0] for line in asked}  # type: ignore[index]
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }  # fmt: skip
    assert {"kerngen"} <= imported <= {"kerngen", *installed, *sys.stdlib_module_names}


def test_compile_a_kernel() -> None:
    printed = run(EXAMPLES / "compile_a_kernel.py", "softcap_argmax", "")
    assert all(arch in printed for arch in ("sm70", "sm90", "sm120")), printed


def test_lookup_a_winner() -> None:
    printed = run(EXAMPLES / "lookup_a_winner.py")
    assert "5 tokens: Tiling(" in printed
    assert "64 tokens: no winner" in printed


def test_use_the_ops() -> None:
    printed = run(EXAMPLES / "use_the_ops.py")
    assert "gate|up 512 x 128 int4 in groups of 32" in printed
    on_cpu = re.search(r"cpu in torch.float32: (\S+) from dense fp32, compiled equal: True", printed)
    assert on_cpu
    assert float(on_cpu[1]) < 1e-5


@pytest.mark.parametrize("target", [TARGET, W4A16], ids=lambda p: p.name)
def test_kerngen_runs_it(target: Path, kerngen: Kerngen) -> None:
    command = ("run", str(target), "--backend", "torch", "--dtype", "fp32", "--temperature", "0", "--json", "--prompt")
    prompt = acceptance.PROMPTS[0]
    for code, _, err in (
        with_drafts := kerngen(*command, prompt, "--draft", str(ASSISTANT), "--num-draft-tokens", "3"),
        without := kerngen(*command, prompt, "--no-draft"),
    ):
        assert code == 0, err
    drafted, plain = json.loads(with_drafts[1]), json.loads(without[1])
    assert drafted["text"] == plain["text"]
    assert plain["text"].startswith("Vera keeps the red lantern in the tower.")
    assert drafted["acceptance_length"] >= 2.5
