"""vLLM, 0.24 to 0.26, with generated weights of a released model's shapes, to be put under the same load as kerngen."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kerngen.runtime.config import AS_STORED

ENTRY_POINTS = "[vllm.general_plugins]\nkerngen_generated = peer_weights:register\n"


def generated(model: str, folder: Path) -> str:
    """A checkpoint without weights, in `folder`: the text model's configuration alone, and a tokenizer."""
    from kerngen.workload.generated_session import write_checkpoint

    place = folder / "model"
    place.mkdir()
    write_checkpoint(model, place, draft=False, kept=AS_STORED)
    whole = json.loads((place / "config.json").read_text())
    text = whole["text_config"] | {
        "architectures": ["Gemma4ForCausalLM"],
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": whole.get("tie_word_embeddings", True),
    }
    if "quantization_config" in whole:
        text["quantization_config"] = whole["quantization_config"]
    (place / "config.json").write_text(json.dumps(text))
    words = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps(words | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    plugin = folder / "kerngen_generated-0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: kerngen-generated\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text(ENTRY_POINTS)
    return str(place)


def command(python: str, folder: str, length: int, *, generated: bool) -> list[str]:
    """Serves `folder` as vLLM does of itself, with sequences of up to `length` tokens."""
    serve = [python, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--max-model-len", str(length)]
    return [*serve, "--load-format", "dummy"] if generated else serve


def environment(folder: Path) -> dict[str, str]:
    """By which vLLM finds the plugin that `generated` left in `folder`. Where kerngen's own is installed beside it,
    vLLM runs its own kernels, unless $KERNGEN_VLLM says otherwise.
    """
    places = (str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(filter(None, places)), "KERNGEN_VLLM": os.environ.get("KERNGEN_VLLM", "")}
