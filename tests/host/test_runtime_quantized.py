"""int4 checkpoints in every form: what compressed-tensors writes, experts in all spellings, GPTQ, what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import PROMPT, WIDE, compress, edit_config, edit_tensors, logits, quantize, save_compressed
from safetensors.torch import load_file, save_file
from tiny_gemma import CPU, hf_logits, load, make_target
from torch import Tensor
from transformers import Gemma4ForCausalLM

from kerngen.errors import CheckpointError
from kerngen.runtime.config import read_model_config
from kerngen.runtime.ops import Experts, Linear
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.weights.loader import load_model
from kerngen.runtime.weights.synthetic import synthetic_model

MOE = WIDE | {"moe_intermediate_size": 128, "num_experts": 4, "num_hidden_layers": 2, "layer_types": None}
EXPERTS = "model.layers.0.experts"


class Seeing(TorchOps):
    """Remembers what came to be repacked."""

    def __init__(self) -> None:
        super().__init__(CPU, torch.float32)
        self.linears: list[Linear] = []
        self.all_experts: list[Experts] = []

    def prepare(self, weights: Linear) -> Linear:
        self.linears.append(weights)
        return super().prepare(weights)

    def prepare_experts(self, gate_up: Experts, down: Experts) -> tuple[Experts, Experts]:
        self.all_experts += (gate_up, down)
        return super().prepare_experts(gate_up, down)


def save_dense(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Beside `folder`: the same model, unquantized."""
    place = folder.with_name(f"{folder.name}-dense")
    place.mkdir()
    (place / "config.json").write_text((folder / "config.json").read_text())
    edit_config(place, lambda c: c.pop("quantization_config"))
    save_file({k: v.contiguous() for k, v in tensors.items()}, place / "model.safetensors", {"format": "pt"})
    return place


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("experts", ["one by one", "one tensor", "with a shape", "joined by _"])
def test_what_compressed_tensors_writes_is_what_it_reads(tmp_path: Path, group: int, experts: str) -> None:
    make_target(tmp_path / "q", "moe", **MOE)
    dense = save_dense(tmp_path / "q", save_compressed(tmp_path / "q", group, experts))
    ours = logits(load(tmp_path / "q"))
    assert torch.equal(ours, logits(load(dense)))
    torch.testing.assert_close(ours, hf_logits(Gemma4ForCausalLM.from_pretrained(dense), PROMPT), atol=1e-4, rtol=0)
    ops = Seeing()
    load_model(tmp_path / "q", read_model_config(tmp_path / "q"), ops)
    assert [e.format.name for e in ops.all_experts] == ["int4"] * 4
    gate_up, down = ops.all_experts[:2]
    assert gate_up.packed.shape == (4, 256, 128 // 8)
    assert gate_up.scales.shape == (4, 256, 128 // group)
    assert (down.out_features, down.in_features, gate_up.format.group_size) == (128, 128, group)


def test_a_mixture_of_packed_and_dense_experts_is_dense(tmp_path: Path) -> None:
    make_target(tmp_path / "q", "moe", **MOE)
    tensors = save_compressed(tmp_path / "q", 32, "one by one")
    dense = save_dense(tmp_path / "q", tensors)

    def unpack_one(stored: dict[str, Tensor]) -> None:
        for key in ("packed", "scale", "shape"):
            del stored[f"{EXPERTS}.2.down_proj.weight_{key}"]
        stored[f"{EXPERTS}.2.down_proj.weight"] = tensors[f"{EXPERTS}.down_proj"][2].clone()

    edit_tensors(tmp_path / "q", unpack_one)
    assert torch.equal(logits(load(tmp_path / "q")), logits(load(dense)))
    edit_tensors(tmp_path / "q", lambda t: t.pop(f"{EXPERTS}.2.down_proj.weight"))
    with pytest.raises(CheckpointError, match=r"experts.2.down_proj.weight \[128, 128\]"):
        load(tmp_path / "q")


def test_modules_may_have_group_sizes_of_their_own(tmp_path: Path) -> None:
    """As where 128 does not divide an expert's 704 inputs: two config_groups, told apart by the stored scales."""
    make_target(tmp_path / "q", "dense", **WIDE)
    names = [n for n in load_file(tmp_path / "q" / "model.safetensors") if "mlp" in n]
    dense = quantize(tmp_path / "q", 64)
    for name in names:
        part, dense[name] = compress(dense[name], 32)
        edit_tensors(tmp_path / "q", lambda t, n=name, p=part: t.update({f"{n}{k[6:]}": v for k, v in p.items()}))
    wide = "group_1: weights: group_size is 48"
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj.weight_scale.*\[256, 4\].*config\.json"):
        load(tmp_path / "q")

    def second(size: int) -> Callable[[dict[str, Any]], None]:
        def add(config: dict[str, Any]) -> None:
            groups = config["quantization_config"]["config_groups"]
            group = json.loads(json.dumps(groups["group_0"])) | {"targets": ["re:.*mlp.*"]}
            group["weights"]["group_size"] = size
            groups["group_1"] = group

        return add

    edit_config(tmp_path / "q", second(32))
    assert torch.equal(logits(load(tmp_path / "q")), logits(load(save_dense(tmp_path / "q", dense))))
    edit_config(tmp_path / "q", second(48))
    with pytest.raises(CheckpointError, match=wide):
        load(tmp_path / "q")


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_head_is_the_head(tmp_path: Path, tied: bool) -> None:
    make_target(tmp_path / "q", "dense", **WIDE)
    dense = quantize(tmp_path / "q", 32, ignore=())
    part, dense["lm_head.weight"] = compress(dense["model.embed_tokens.weight"].roll(1, 0), 32)
    edit_tensors(tmp_path / "q", lambda t: t.update({f"lm_head.{k}": v for k, v in part.items()}))
    edit_config(tmp_path / "q", lambda c: c.update(tie_word_embeddings=tied))
    other = save_dense(tmp_path / "q", dense)
    edit_config(other, lambda c: c.update(tie_word_embeddings=False))
    assert torch.equal(logits(load(tmp_path / "q")), logits(load(other)))
    ops = Seeing()
    load_model(tmp_path / "q", read_model_config(tmp_path / "q"), ops)
    head = ops.linears[-1]
    assert head.format.name == "int4"
    assert head.name == "lm_head"


def test_a_shape_may_be_left_out_but_not_be_wrong(tmp_path: Path) -> None:
    make_target(tmp_path, "dense", **WIDE)
    quantize(tmp_path, 32)
    expected = logits(load(tmp_path))
    name = "model.layers.0.mlp.up_proj.weight_shape"
    edit_tensors(tmp_path, lambda t: t.update({name: torch.tensor([256, 120])}))
    with pytest.raises(CheckpointError, match=r"weight_shape.*\(256, 120\).*config\.json.*\(256, 128\)"):
        load(tmp_path)
    edit_tensors(tmp_path, lambda t: t.pop(name))
    assert torch.equal(logits(load(tmp_path)), expected)


# ---- GPTQ -----------------------------------------------------------------------------------------------------------


def save_gptq(folder: Path, group: int, *, zero: int = 7, **config: Any) -> dict[str, Tensor]:
    """Rewrite a checkpoint as GPTQ stores it, element by element. Returns the dense tensors that it stands for."""
    dense = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in list(dense.items()):
        if weight.dim() != 2 or "embed_tokens" in name:
            stored[name] = weight
            continue
        out, cols = weight.shape
        scale = (weight.view(out, -1, group).abs().amax(-1) / 7.5).half()
        spread = scale.float().repeat_interleave(group, 1)
        q = (weight / spread).round().clamp(-8, 7)
        dense[name] = q * spread
        words = torch.zeros(cols // 8, out, dtype=torch.int64)
        for i in range(8):  # row 8 r + i of W^T in bits 4 i of word r
            words |= (q.long().T + 8)[i::8] << (4 * i)
        module = name.removesuffix(".weight")
        stored[f"{module}.qweight"] = words.to(torch.uint32).view(torch.int32)
        stored[f"{module}.scales"] = scale.T
        bits = sum(zero << (4 * i) for i in range(8))
        zeros = torch.full((cols // group, out // 8), bits, dtype=torch.int64)
        stored[f"{module}.qzeros"] = zeros.to(torch.uint32).view(torch.int32)
        stored[f"{module}.g_idx"] = (torch.arange(cols) // group).int()
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
    quant = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": False} | config
    edit_config(folder, lambda c: c.update(quantization_config=quant))
    return dense


@pytest.mark.parametrize(("group", "zero", "config"), [
    (32, 7, {}),
    (64, 7, {"checkpoint_format": "gptq", "pack_dtype": "int32", "lm_head": False, "true_sequential": True}),
    (128, 8, {"checkpoint_format": "gptq_v2", "desc_act": True, "static_groups": True}),
    (64, 7, {"format": "gptq", "dynamic": {"-:.*vision.*": {}}}),
])  # fmt: skip
def test_symmetric_gptq_becomes_the_one_order(tmp_path: Path, group: int, zero: int, config: dict[str, Any]) -> None:
    make_target(tmp_path / "q", "k_eq_v", **WIDE)
    dense = save_dense(tmp_path / "q", save_gptq(tmp_path / "q", group, zero=zero, **config))
    assert torch.equal(logits(load(tmp_path / "q")), logits(load(dense)))
    ops = Seeing()
    load_model(tmp_path / "q", read_model_config(tmp_path / "q"), ops)
    assert sum(w.format.name == "int4" and w.format.group_size == group for w in ops.linears) == 4 * 5


def test_gptq_without_an_order_is_in_order(tmp_path: Path) -> None:
    make_target(tmp_path, "dense", **WIDE)
    save_gptq(tmp_path, 32)
    expected = logits(load(tmp_path))
    edit_tensors(tmp_path, lambda t: [t.pop(n) for n in list(t) if n.endswith("g_idx")])
    assert torch.equal(logits(load(tmp_path)), expected)
    edit_config(tmp_path, lambda c: c["quantization_config"].update(desc_act=True))
    with pytest.raises(CheckpointError, match=r"desc_act.*q_proj\.g_idx.*missing"):
        load(tmp_path)


UP = "model.layers.0.mlp.up_proj"
GPTQ_REFUSED: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], Any] | None, str]] = {
    "bits": ({"bits": 3}, None, "bits is 3; only 4 and 8"),
    "symmetric by the number": ({"sym": 1}, None, "sym is 1; only True and False"),
    "channels": ({"group_size": -1}, None, "scales has shape [8, 128]; config.json implies [1, 128]"),
    "marlin": ({"checkpoint_format": "marlin"}, None, "checkpoint_format is 'marlin'"),
    "marlin's flag": ({"is_marlin_format": True}, None, "is_marlin_format is true"),
    "other words": ({"pack_dtype": "int16"}, None, "pack_dtype is 'int16'"),
    "settings of its own": ({"dynamic": {"+:.*up.*": {"bits": 8}}}, None, r"dynamic has '+:.*up.*'"),
    "other zeros": ({}, lambda t: t[f"{UP}.qzeros"].view(-1)[3].add_(1), "qzeros holds other zeros than 7"),
    "the other format's zeros": ({"checkpoint_format": "gptq_v2"}, None, "qzeros holds other zeros than 8"),
    "another order": ({}, lambda t: t.update({f"{UP}.g_idx": t[f"{UP}.g_idx"].flip(0)}), "groups are not of neighbour"),
    "another size": ({"group_size": 64}, None, "scales has shape [4, 128]; config.json implies [2, 128]"),
    "no zeros": ({}, lambda t: t.pop(f"{UP}.qzeros"), f"lacks the tensor {UP}.qzeros"),
    "another scheme": ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
        "g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                                                 "group_size": 32}}}}, None,
        "q_proj has a tensor qweight, but quantization_config says compressed-tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", GPTQ_REFUSED)
def test_gptq_that_means_something_else_is_refused(tmp_path: Path, case: str) -> None:
    config, edit, message = GPTQ_REFUSED[case]
    make_target(tmp_path, "dense", **WIDE)
    save_gptq(tmp_path, 32)
    edit_config(tmp_path, lambda c: c["quantization_config"].update(config))
    if edit is not None:
        edit_tensors(tmp_path, edit)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in caught.value.message


# ---- ignore ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evil", ["re:(.|.)*$X", "re:(a+)+$", "re:" + "a?" * 40 + "a" * 40, "re:^(?!x)(.*)*$", "re:(x"])
def test_an_expression_that_takes_for_ever_is_not_matched(tmp_path: Path, evil: str) -> None:
    make_target(tmp_path, "dense", **WIDE)
    quantize(tmp_path, 32, ignore=("lm_head",))
    expected = logits(load(tmp_path))
    edit_config(tmp_path, lambda c: c["quantization_config"].update(ignore=["lm_head", evil]))
    began = time.perf_counter()
    if evil != "re:(x":  # what is packed and what is not, the tensors themselves say
        assert torch.equal(logits(load(tmp_path)), expected)
    with pytest.raises(CheckpointError, match=r"ignore holds 're:"):  # where there are none, they are made as it says
        synthetic_model(read_model_config(tmp_path), TorchOps(CPU, torch.float32))
    assert time.perf_counter() - began < 5


def test_many_costly_expressions_meet_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_target(tmp_path, "dense", **WIDE)
    quantize(tmp_path, 32)
    monkeypatch.setattr("kerngen.runtime.weights.quantized.MAX_MATCH_S", 0.05)
    costly = [f"re:.*.*.*{i}X" for i in range(1000)]
    edit_config(tmp_path, lambda c: c["quantization_config"].update(ignore=costly))
    with pytest.raises(CheckpointError, match=r"ignore.* 1000 .* 0\.05 s"):
        load(tmp_path)


@pytest.mark.parametrize("ignore", [UP, "re:.*up_proj$", r"re:model\.layers\.[0-3]\.mlp.*", "re:.*(gate|up)_proj"])
def test_what_is_ignored_cannot_be_packed(tmp_path: Path, ignore: str) -> None:
    make_target(tmp_path, "dense", **WIDE)
    quantize(tmp_path, 32)
    edit_config(tmp_path, lambda c: c["quantization_config"].update(ignore=["lm_head", ignore]))
    with pytest.raises(CheckpointError, match=r"packed.*quantization_config"):
        load(tmp_path)
    model = synthetic_model(read_model_config(tmp_path), (ops := Seeing()))
    names = {w.name for w in ops.linears if w.format.name == "int4"}
    assert "q_proj+k_proj+v_proj" in names
    assert ("gate_proj+up_proj" in names) is (ignore == UP)  # of layer 0 alone
    assert len(model.layers) == 4
