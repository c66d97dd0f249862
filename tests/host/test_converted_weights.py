"""Checkpoints in orders that are converted as they are read: the weights are those of the codes, exactly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WIDE, edit_config, edit_tensors, logits
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from tiny_gemma import load, make_target
from torch import Tensor

from kerngen.errors import CheckpointError
from kerngen.runtime.config import read_model_config
from kerngen.runtime.executors.record import Record
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.loader import planned_model
from kerngen.runtime.weights.opened import open_tensors
from kerngen.runtime.weights.synthetic import synthetic_model
from kerngen.runtime.world import Span

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the elements of a word, from the lowest bits on


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 of the last dimension's codes, one after the other from the lowest bits on."""
    each = 32 // bits
    grouped = codes.unflatten(-1, (-1, each)).long()
    grouped = grouped if order is None else grouped[..., list(order)]
    return (grouped << torch.arange(0, 32, bits)).sum(-1).to(torch.uint32).view(torch.int32)


@dataclass(frozen=True)
class Way:
    """How a test stores matrices. less: than zero points are, as they are stored."""

    order: str
    bits: int
    group: int  # 0: a scale a row
    has_zeros: bool
    less: int = 0
    floats: torch.dtype = torch.float16

    def made_of(self, weight: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and zero points [out, groups] of a matrix about as large as `weight`."""
        size = self.group or weight.shape[1]
        top, middle = (1 << self.bits) - 1, 1 << self.bits - 1
        grouped = weight.unflatten(-1, (-1, size))
        scales = (grouped.abs().amax(-1) * 2 / top).to(self.floats)
        zeros = torch.full_like(scales, middle).long()
        if self.has_zeros:
            zeros = torch.randint(1, top, scales.shape, generator=rng)
        codes = (grouped / scales.float()[..., None]).round() + zeros[..., None]
        return codes.clamp(0, top).long().flatten(-2), scales, zeros

    def tensors(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
        if self.order == "gptq":
            of_zeros = words(zeros.T.contiguous() - self.less & (1 << self.bits) - 1, self.bits)
            return {"qweight": words(codes, self.bits).T, "scales": scales.T, "qzeros": of_zeros,
                    "g_idx": (torch.arange(codes.shape[1]) // (self.group or codes.shape[1])).int()}  # fmt: skip
        return {"qweight": words(codes.T.contiguous(), 4, AWQ_ORDER), "scales": scales.T,
                "qzeros": words(zeros.T.contiguous(), 4, AWQ_ORDER)}  # fmt: skip


def of_library(way: Way, weight: Tensor, rng: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """What compressed-tensors stores of a linear, and what it makes of that again."""
    args = QuantizationArgs(
        num_bits=way.bits, type="int", symmetric=not way.has_zeros,
        strategy="group" if way.group else "channel", group_size=way.group or None,
    )  # fmt: skip
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    given = {"weight": weight, "weight_scale": way.made_of(weight, rng)[1].float()}
    if way.has_zeros:
        half, shape = 1 << way.bits - 1, given["weight_scale"].shape
        given["weight_zero_point"] = torch.randint(-half, half, shape, generator=rng).to(torch.int8)
    stored = PackedQuantizationCompressor.compress(given, scheme)
    again = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    return {k: v for k, v in stored.items() if k != "weight"}, again.float()


def config_of(way: Way) -> dict[str, Any]:
    if way.order == "compressed":
        weights = {"num_bits": way.bits, "type": "int", "symmetric": not way.has_zeros,
                   "strategy": "group" if way.group else "channel", "group_size": way.group or None}  # fmt: skip
        return {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip
    if way.order == "gptq":
        form = "gptq" if way.less else "gptq_v2"
        return {"quant_method": "gptq", "bits": way.bits, "group_size": way.group or -1, "sym": not way.has_zeros,
                "desc_act": False, "checkpoint_format": form}  # fmt: skip
    return {"quant_method": "awq", "bits": 4, "group_size": way.group or -1, "zero_point": True, "version": "gemm"}


def stored_as(folder: Path, way: Way, **more: Any) -> Path:
    """Rewrites a checkpoint so, and returns a folder with the dense weights that it stands for."""
    dense, stored = load_file(folder / "model.safetensors"), {}
    rng = torch.Generator().manual_seed(0)
    for name, weight in list(dense.items()):
        module = name.removesuffix(".weight")
        if "embed_tokens" in name or "router" in name or weight.dim() < 2:
            stored[name] = weight
            continue
        matrices = {module: weight}
        if weight.dim() == 3:  # experts, which are stored apart
            half = weight.shape[1] // 2
            stem = module.rpartition(".")[0]
            parts = {"gate_proj": slice(half), "up_proj": slice(half, None)} if "gate_up" in name else {
                "down_proj": slice(None)}  # fmt: skip
            matrices = {
                f"{stem}.{e}.{part}": matrix[rows] for e, matrix in enumerate(weight) for part, rows in parts.items()
            }
        made: dict[str, Tensor] = {}
        for its, matrix in matrices.items():
            if way.order == "compressed":
                tensors, made[its] = of_library(way, matrix, rng)
            else:
                codes, scales, zeros = way.made_of(matrix, rng)
                tensors = way.tensors(codes, scales, zeros)
                grouped = codes.unflatten(-1, (scales.shape[1], -1)) - zeros[..., None]
                made[its] = (grouped * scales.float()[..., None]).flatten(-2)
            stored |= {f"{its}.{part}": t for part, t in tensors.items()}
        if weight.dim() == 2:
            dense[name] = made[module]
        else:
            of_expert = [torch.cat([made[n] for n in made if f".experts.{e}." in n]) for e in range(len(weight))]
            dense[name] = torch.stack(of_expert)
    twin = folder.with_name(f"{folder.name}-dense")
    twin.mkdir()
    (twin / "config.json").write_text((folder / "config.json").read_text())
    save_file({k: v.float().contiguous() for k, v in dense.items()}, twin / "model.safetensors")
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
    edit_config(folder, lambda c: c.update(quantization_config=config_of(way) | more))
    return twin


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no float16.*")
        yield


WAYS: dict[str, tuple[Way, str]] = {
    "compressed-tensors W8A16": (Way("compressed", 8, 128, False), "int8"),
    "compressed-tensors W8A16 by channel": (Way("compressed", 8, 0, False), "int8"),
    "compressed-tensors W8A16 asymmetric": (Way("compressed", 8, 64, True), "int8_min"),
    "compressed-tensors W4A16 asymmetric": (Way("compressed", 4, 32, True), "int4_min"),
    "compressed-tensors W4A16 by channel": (Way("compressed", 4, 0, False), "int4"),
    "GPTQ asymmetric": (Way("gptq", 4, 64, True, less=1), "int4_min"),
    "GPTQ v2 asymmetric": (Way("gptq", 4, 128, True), "int4_min"),
    "GPTQ 8 bits": (Way("gptq", 8, 32, False, less=1), "int8"),
    "GPTQ 8 bits asymmetric by row": (Way("gptq", 8, 0, True), "int8_min"),
    "AWQ": (Way("awq", 4, 128, True), "int4_min"),
    "AWQ by row": (Way("awq", 4, 0, True), "int4_min"),
}


def nearly(ours: Tensor, theirs: Tensor) -> bool:
    """As near as fp32 is where n * scale - zero * scale stands for (n - zero) * scale."""
    return bool((ours - theirs).abs().max() < 2e-5 * theirs.abs().max())


@pytest.mark.parametrize("case", WAYS)
def test_the_model_is_that_of_the_codes(tmp_path: Path, case: str) -> None:
    way, form = WAYS[case]
    make_target(tmp_path / "q", "k_eq_v", **WIDE)
    dense = stored_as(tmp_path / "q", way)
    with quiet():
        ours, theirs = logits(load(tmp_path / "q")), logits(load(dense))
    assert nearly(ours, theirs) if way.has_zeros else torch.equal(ours, theirs)
    ops = KernelOps(Record(lambda *_: None, lambda _: None), torch.bfloat16)
    config = read_model_config(tmp_path / "q")
    for model in (planned_model(tmp_path / "q", config, ops), synthetic_model(config, ops)):
        views = [view for layer in model.layers for view in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        assert {(view.format.name, view.format.group_size) for view in views} == {(form, way.group or 64)}


@pytest.mark.parametrize("case", ["compressed-tensors W8A16 by channel", "GPTQ asymmetric", "AWQ"])
def test_experts_stay_packed(tmp_path: Path, case: str) -> None:
    way, form = WAYS[case]
    make_target(tmp_path / "q", "moe", **WIDE, moe_intermediate_size=128)
    dense = stored_as(tmp_path / "q", way)
    with quiet():
        assert nearly(logits(load(tmp_path / "q")), logits(load(dense)))
    ops = KernelOps(Record(lambda *_: None, lambda _: None), torch.bfloat16)
    config = read_model_config(tmp_path / "q")
    for model in (planned_model(tmp_path / "q", config, ops), synthetic_model(config, ops)):
        views = [view for layer in model.layers if (moe := layer.moe) for view in (moe.gate_up, moe.down)]
        assert {(view.format.name, view.format.group_size) for view in views} == {(form, way.group or 64)}
        assert {view.tensors[-1].dtype for view in views} == {torch.float16}


@pytest.mark.parametrize("fmt", ["auto_round:auto_gptq", "auto_round:auto_awq"])
def test_auto_round_is_in_either_order(tmp_path: Path, fmt: str) -> None:
    way = Way("gptq", 4, 64, True, less=1) if fmt.endswith("gptq") else Way("awq", 4, 64, True)
    make_target(tmp_path / "q", "dense", **WIDE)
    dense = stored_as(tmp_path / "q", way)
    quant = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "packing_format": fmt,
             "data_type": "int", "iters": 200, "extra_config": {"model.layers.0.mlp.x": {"bits": 16}}}  # fmt: skip
    edit_config(tmp_path / "q", lambda c: c.update(quantization_config=quant))
    with quiet():
        assert nearly(logits(load(tmp_path / "q")), logits(load(dense)))
    edit_config(tmp_path / "q", lambda c: c["quantization_config"].update(extra_config={"a": {"bits": 8}}))
    with pytest.raises(CheckpointError, match="extra_config has settings of its own for 'a'"):
        read_model_config(tmp_path / "q")


@pytest.mark.parametrize("case", ["compressed-tensors W8A16 asymmetric", "GPTQ asymmetric", "AWQ"])
def test_a_rank_reads_its_part(tmp_path: Path, case: str) -> None:
    """Of each tensor that is made, any rows and columns are those of the whole one."""
    make_target(tmp_path / "q", "dense", **WIDE)
    stored_as(tmp_path / "q", WAYS[case][0])
    checkpoint = open_tensors(tmp_path / "q", read_model_config(tmp_path / "q").quant)
    for name in (f"model.layers.0.mlp.up_proj.{part}" for part in ("weight_packed", "weight_scale", "weight_minimum")):
        whole = checkpoint.tensor(name)
        rows, columns = Span(32, 96, whole.shape[0]), Span(whole.shape[1] // 2, whole.shape[1] // 2, whole.shape[1])
        part = torch.cat([piece for _, piece in checkpoint.pieces(name, box=(rows, columns))])
        assert torch.equal(part, whole[rows.slice, columns.slice])


UP = "model.layers.0.mlp.up_proj"
REFUSED: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Tensor]], Any] | None, str]] = {
    "a zero point of 16 or 0": ("GPTQ asymmetric", {}, lambda t: t[f"{UP}.qzeros"].view(-1)[3].fill_(-1),
                                "qzeros holds 15, which tools read as a zero point of 16 or of 0"),
    "zeros where none are": ("GPTQ 8 bits", {}, lambda t: t[f"{UP}.qzeros"].view(-1)[3].add_(1),
                             "qzeros holds other zeros than 127"),
    "another order": ("GPTQ 8 bits", {}, lambda t: t.update({f"{UP}.g_idx": t[f"{UP}.g_idx"].flip(0)}),
                      "groups are not of neighbouring inputs"),
    "no zeros": ("AWQ", {}, lambda t: t.pop(f"{UP}.qzeros"), f"lacks the tensor {UP}.qzeros"),
    "another version": ("AWQ", {"version": "gemv"}, None, "version is 'gemv'; 'gemm' is implemented"),
    "another size": ("AWQ", {"group_size": 64}, None, "scales has shape [2, 128]; config.json implies [4, 128]"),
    "3 bits": ("GPTQ 8 bits", {"bits": 3}, None, "bits is 3; only 4 and 8"),
    "zeros of a symmetric scheme": ("compressed-tensors W8A16 asymmetric", {"symmetric": None}, None,
                                    "weight_zero_point, and config.json says that weights are symmetric"),
    "both": ("AWQ", {}, lambda t: t.update({f"{UP}.weight_packed": t[f"{UP}.qweight"].clone()}), "and the same packed"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_itself_is_refused(tmp_path: Path, case: str) -> None:
    name, config, edit, message = REFUSED[case]
    make_target(tmp_path / "q", "dense", **WIDE)
    stored_as(tmp_path / "q", WAYS[name][0])
    if "symmetric" in config:

        def symmetric(c: dict[str, Any]) -> None:
            c["quantization_config"]["config_groups"]["group_0"]["weights"].update(symmetric=True)

        edit_config(tmp_path / "q", symmetric)
    else:
        edit_config(tmp_path / "q", lambda c: c["quantization_config"].update(config))
    if edit is not None:
        edit_tensors(tmp_path / "q", edit)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "q")
    assert message in str(caught.value)
    assert "\n" not in caught.value.message


def test_what_fp16_rounds_is_counted(tmp_path: Path) -> None:
    make_target(tmp_path / "q", "dense", **WIDE)
    stored_as(tmp_path / "q", WAYS["AWQ"][0])
    with pytest.warns(UserWarning, match=r"[\d,]+ of [\d,]+ scales and minima are no float16 and were rounded"):
        load(tmp_path / "q", torch.bfloat16)
    with warnings.catch_warnings(record=True, action="always") as caught:
        load(tmp_path / "q")
    assert not [w for w in caught if "rounded" in str(w.message)]
