"""quantization_config: which schemes are read, and what each says about the tensors of a checkpoint.

compressed-tensors `pack-quantized`, GPTQ, AWQ and AutoRound are integers of 4 or 8 bits with a scale, and perhaps a
zero point, for a group of inputs: one arithmetic in several orders of storage. Symmetric int4 of the first two is read
as it lies; others are converted as they are read (weights/converted.py), and so are GGUF's blocks (gguf/weights.py).
Whatever would compute something else with the same tensors is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from kerngen.errors import CheckpointError
from kerngen.runtime.config_fields import Fields, short
from kerngen.templates.common.w4.tiling import Packing

GROUP_SIZES = (32, 64, 128)
MAX_IGNORED = 1 << 16  # names: the official 31B lists 194, every linear of its vision tower
MAX_NAME_CHARS = 512
READ = (
    "compressed-tensors pack-quantized, gptq, awq and auto-round in either's order are, of 4 or 8 bits in groups of "
    "32, 64 or 128 or by row"
)
ROW_GROUP = 64  # what scales of whole rows are given to, each as often as there are such groups: no kernel takes rows
# What stands behind other names of quant_method, for people who did not choose it.
METHODS = {
    "aqlm": "codebooks of AQLM", "awq_marlin": "AWQ, repacked for one kernel",
    "bitblas": "BitBLAS, for its own kernels", "bitnet": "ternary weights",
    "bitsandbytes": "bitsandbytes' int8, fp4 or nf4", "deepspeedfp": "DeepSpeed's floats of 4 to 8 bits",
    "eetq": "EETQ's int8", "exl2": "ExLlamaV2", "exl3": "ExLlamaV3", "experts_int8": "int8 experts",
    "fbgemm_fp8": "FBGEMM's 8-bit floats", "fp8": "8-bit floats", "fp_quant": "FP-Quant's mxfp4 or nvfp4",
    "gptq_marlin": "GPTQ, repacked for one kernel", "higgs": "HIGGS's codebooks",
    "hqq": "HQQ, int4 with zero points in floats",
    "marlin": "Marlin, repacked for one kernel", "modelopt": "NVIDIA ModelOpt's fp8",
    "modelopt_fp4": "NVIDIA ModelOpt's nvfp4", "modelopt_mixed": "NVIDIA ModelOpt's mixture", "mxfp4": "4-bit floats",
    "mxfp8": "8-bit floats", "nvfp4": "4-bit floats", "petit_nvfp4": "4-bit floats",
    "ptpc_fp8": "8-bit floats", "quanto": "Quanto", "quark": "AMD Quark", "quip": "QuIP#'s codebooks",
    "sinq": "SINQ, with two scales", "spqr": "SpQR, with outliers apart", "tpu_int8": "int8",
    "torchao": "tensors of its classes, in the orders of its kernels, or pickled",
    "vptq": "VPTQ's codebooks",
}  # fmt: skip
# The int4 releases of Gemma-4, by hidden_size and num_hidden_layers.
RELEASES = {
    (5376, 60): "31B", (2816, 30): "26B-A4B", (3840, 48): "12B", (2560, 42): "E4B", (1536, 35): "E2B",
}  # fmt: skip
AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")
AUTO_ROUND_ORDERS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
_PREFIX = re.compile(r"(?:model\.language_model|language_model\.model|model)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
# The nibble that stands for 0, as GPTQ stores it: the first format subtracts 1.
GPTQ_ZEROS = {"gptq": 7, "gptq_v2": 8}


@dataclass(frozen=True, slots=True)
class GptqConfig:
    """zero: the nibble of qzeros that symmetric weights have.

    act_order: groups may be of inputs in another order, which is refused unless each g_idx shows that they are not.
    """

    zero: int
    act_order: bool


@dataclass(frozen=True, slots=True)
class Scheme:
    """What is converted as it is read. order: "compressed", "gptq" or "awq". bits: 4 or 8. group_size: inputs that
    share a scale, 0 for all of a row. has_zeros: groups have zero points, which are stored `less` smaller than they
    are.
    """

    order: str
    bits: int
    group_size: int
    has_zeros: bool
    less: int = 0

    @property
    def packing(self) -> Packing:
        return Packing(self.group_size or ROW_GROUP, self.bits, self.has_zeros)


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """Symmetric int4, one scale for `group_size` inputs; some modules may have one of `other_sizes`.

    scheme: what else all packed modules are, which then has their group_size.
    packings: by module how it is packed, where modules differ; those that it does not name are dense. Of experts that
    are matrices of their own it names the first.
    ignore: module names, or "re:" and a regular expression, that are stored dense. gptq: None for compressed-tensors.
    on_load: nothing is stored in int4; matrices become so as they are loaded, where kernels take them: weights/int4.py.
    kv_scales: layers have scales of an fp8 KV cache, k_scale and v_scale.
    """

    group_size: int
    ignore: tuple[str, ...]
    other_sizes: tuple[int, ...] = ()
    gptq: GptqConfig | None = None
    on_load: bool = False
    kv_scales: bool = False
    scheme: Scheme | None = None
    packings: Mapping[str, Packing] | None = field(default=None, hash=False)

    def packing_of(self, module: str) -> Packing | None:
        """How the module is packed, None where it is dense; `ignore` aside, and a group of another size."""
        if self.scheme is not None:
            return self.scheme.packing
        if self.packings is None:
            return Packing(self.group_size)
        return self.packings.get(module_key(module))

    @property
    def group_sizes(self) -> set[int]:
        """Inputs that share a scale, in any module."""
        found = {self.group_size, *self.other_sizes}
        return found if self.packings is None else {packing.group_size for packing in self.packings.values()}

    @property
    def all_packings(self) -> list[Packing]:
        """Each once, in the order in which modules have them."""
        if self.packings is None:
            return [Packing(self.group_size) if self.scheme is None else self.scheme.packing]
        return list(dict.fromkeys(self.packings.values()))


def module_key(module: str) -> str:
    """A module's name in `packings`: without what the text model's begin with, which files spell differently, and of
    experts the first one's.
    """
    return _EXPERT.sub(".experts.0.", _PREFIX.sub("", module))


def joined_packing(packings: Sequence[Packing | None]) -> Packing | None:
    """How a matrix is packed that has the rows of matrices packed so, without loss; None where one of them is dense.

    Symmetric codes have minima where others do, and 4 bits become 8; a group has the greatest size that divides all.
    """
    known = [packing for packing in packings if packing is not None]
    if len(known) < len(packings):
        return None
    sizes, bits = {packing.group_size for packing in known}, max(packing.bits for packing in known)
    return Packing(gcd(*sizes), bits, any(packing.has_minima for packing in known))


# Of a drafter: the group is that of Q4_0, which assistants are trained for; the head's rows are gathered one by one.
INT4_ON_LOAD = QuantConfig(32, ("lm_head",), on_load=True)


def read_quant_config(top: Fields) -> QuantConfig | None:
    """config.json's quantization_config, or None where the weights are dense. Raises CheckpointError, with a way on."""
    try:
        return _read(top)
    except CheckpointError as e:
        raise CheckpointError(e.message, hint=way_on(top)) from e


def way_on(top: Fields) -> str:
    """Which checkpoint of the model with this config.json loads, or how to make one."""
    text = top.values.get("text_config")
    sizes = text if isinstance(text, dict) else top.values
    hidden, layers = sizes.get("hidden_size"), sizes.get("num_hidden_layers")
    if isinstance(hidden, int) and isinstance(layers, int) and (name := RELEASES.get((hidden, layers))):
        model = f"google/gemma-4-{name}-it"
        return f"of this model {model}-qat-w4a16-ct (int4) and {model} (bf16) load"
    return (
        "the bf16 checkpoint that it was made of loads; llm-compressor makes int4 of that: oneshot with "
        'QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head", "re:.*router.*"])'
    )


def _read(top: Fields) -> QuantConfig | None:
    if top.values.get("quantization_config") is None:
        if top.values.get("quantization") is not None:
            raise _mlx(top)
        return None
    quant = top.section("quantization_config")
    if "quant_method" not in quant.values and {"bits", "group_size"} <= set(quant.values):
        raise _mlx(top)
    method, fmt = quant.get("quant_method"), quant.values.get("format")
    if method == "gptq":
        return _gptq(quant)
    if method == "awq":
        return _awq(quant)
    if method in AUTO_ROUND:
        return _auto_round(quant)
    if method == "gguf":
        return _gguf(quant)
    if method == "kerngen":
        return _kerngen(quant)
    if method != "compressed-tensors":
        what = METHODS.get(method) if isinstance(method, str) else None
        raise quant.error(f"{short(method)}{f' ({what})' if what else ''} is not implemented; {READ}")
    if fmt != "pack-quantized":
        raise quant.error(f"compressed-tensors in format {short(fmt)} is not implemented; {READ}")
    return _compressed_tensors(quant)


def _mlx(top: Fields) -> CheckpointError:
    """mlx-lm writes {"bits", "group_size"} with no word about a method, and packs its weights in its own order."""
    return top.error(f"the weights are quantized by MLX, for Apple's chips, which is not implemented; {READ}")


def _compressed_tensors(quant: Fields) -> QuantConfig:
    """Fields: compressed-tensors' QuantizationConfig. Which group a module belongs to is seen by its scales."""
    if (status := quant.values.get("quantization_status")) not in (None, "compressed", "frozen"):
        raise quant.error(
            f"quantization_status is {short(status)}: the weights are not final; 'compressed' ones are read"
        )
    has_kv_scales = bool(quant.values.get("kv_cache_scheme"))
    if has_kv_scales:
        _check_kv_cache(quant.section("kv_cache_scheme"))
    if (transform := quant.values.get("transform_config")) and transform != {"config_groups": {}}:
        raise quant.error("transform_config is set; transforms of weights or activations are not implemented")
    sparse = quant.section("sparsity_config", default={}).values.get("format")
    if sparse not in (None, "dense"):
        raise quant.error(f"sparsity_config has the format {short(sparse)}; only 'dense' is implemented")
    groups = quant.section("config_groups")
    if not groups.values:
        raise quant.error("config_groups is empty")
    schemes = list(dict.fromkeys(_scheme_of(groups.section(name)) for name in groups.values))
    if len(kinds := {(s.bits, s.has_zeros) for s in schemes}) > 1 or (
        len(schemes) > 1 and not all(_is_as_it_lies(scheme) for scheme in schemes)
    ):
        raise quant.error(f"config_groups are of {len(schemes)} schemes: {len(kinds)} of bits and zero points; one is "
                          "implemented, or symmetric int4 in groups of several sizes")  # fmt: skip
    sizes = tuple(scheme.packing.group_size for scheme in schemes)
    scheme = None if _is_as_it_lies(schemes[0]) else schemes[0]
    ignore = quant.values.get("ignore") or []
    if not _is_names(ignore) or len(ignore) > MAX_IGNORED:
        raise quant.error(
            f"ignore must be a list of at most {MAX_IGNORED:,} module names of at most {MAX_NAME_CHARS} characters"
        )
    return QuantConfig(sizes[0], tuple(ignore), sizes[1:], kv_scales=has_kv_scales, scheme=scheme)


def _is_as_it_lies(scheme: Scheme) -> bool:
    """Whether the kernels' loader reads it without conversion."""
    return scheme.bits == 4 and not scheme.has_zeros and scheme.group_size > 0


def _check_kv_cache(scheme: Fields) -> None:
    """Fields: compressed-tensors' QuantizationArgs. Raises CheckpointError for what is not e4m3 with static scales."""
    for name, want in (("num_bits", 8), ("type", "float")):
        _require(scheme, name, want)
    for name, want in (("symmetric", True), ("dynamic", False)):
        if (value := scheme.values.get(name, want)) is not want:
            raise scheme.error(f"{name} is {short(value)}; only {want!r} is implemented")
    if (strategy := scheme.values.get("strategy", "tensor")) not in ("tensor", "attn_head"):
        raise scheme.error(f"strategy is {short(strategy)}; 'tensor' and 'attn_head' are implemented")
    for name in ("group_size", "block_structure"):
        if (value := scheme.values.get(name)) is not None:
            raise scheme.error(f"{name} is {short(value)}; it must be null")


def _scheme_of(group: Fields) -> Scheme:
    """Of one of config_groups, after everything that would change the arithmetic was looked at."""
    targets = group.get("targets")
    if not _is_names(targets) or not targets:
        raise group.error(f"targets is {short(targets)}; it must be names of modules or of their classes")
    if (fmt := group.values.get("format")) not in (None, "pack-quantized"):
        raise group.error(f"format is {short(fmt)}; only 'pack-quantized' is implemented")
    for name in ("input_activations", "output_activations"):
        if group.values.get(name) is not None:
            raise group.error(f"{name} are quantized; only weights may be (W4A16)")
    weights = group.section("weights")
    _require(weights, "type", "int")
    bits, strategy = _one_of(weights, "num_bits", (4, 8)), _one_of(weights, "strategy", ("group", "channel"))
    has_zeros = not _one_of(weights, "symmetric", (True, False))
    if weights.values.get("dynamic") not in (None, False):
        dynamic = short(weights.values["dynamic"])
        raise weights.error(f"dynamic is {dynamic}; the stored scales are used, so it must be false")
    if (order := weights.values.get("actorder")) not in (None, "static", "weight"):
        raise weights.error(f"actorder is {short(order)}; null, 'static' and 'weight' are implemented")
    return Scheme("compressed", bits, _size(weights) if strategy == "group" else 0, has_zeros)


def _gptq(quant: Fields) -> QuantConfig:
    """Fields: GPTQModel's and AutoGPTQ's quantize_config."""
    bits, has_zeros = _one_of(quant, "bits", (4, 8)), not _one_of(quant, "sym", (True, False))
    fmt = quant.values.get("checkpoint_format") or quant.values.get("format") or "gptq"
    if not isinstance(fmt, str) or fmt not in GPTQ_ZEROS:
        raise quant.error(f"checkpoint_format is {short(fmt)}; {' and '.join(GPTQ_ZEROS)} are implemented")
    if quant.values.get("pack_dtype") not in (None, "int32"):
        raise quant.error(f"pack_dtype is {short(quant.values['pack_dtype'])}; only int32 is implemented")
    if quant.flag("is_marlin_format", False):
        raise quant.error("is_marlin_format is true; only the plain order of GPTQ is implemented")
    for pattern in quant.section("dynamic", default={}).values:
        if not pattern.startswith("-:"):  # "-:" leaves modules dense, which their tensors show
            raise quant.error(f"dynamic has {short(pattern)}; modules with settings of their own are not implemented")
    scheme = Scheme("gptq", bits, _size(quant, row=-1), has_zeros, less=8 - GPTQ_ZEROS[fmt])
    if not _is_as_it_lies(scheme):
        return QuantConfig(scheme.packing.group_size, (), scheme=scheme)
    return QuantConfig(scheme.group_size, (), gptq=GptqConfig(GPTQ_ZEROS[fmt], quant.flag("desc_act", False)))


def _awq(quant: Fields) -> QuantConfig:
    """Fields: AutoAWQ's AwqConfig."""
    _require(quant, "bits", 4)
    _require(quant, "zero_point", True)
    if (version := quant.values.get("version", "gemm")) not in ("gemm", "GEMM"):
        raise quant.error(f"version is {short(version)}; 'gemm' is implemented")
    scheme = Scheme("awq", 4, _size(quant, row=-1), has_zeros=True)
    return QuantConfig(scheme.packing.group_size, (), scheme=scheme)


def _auto_round(quant: Fields) -> QuantConfig:
    """Fields: AutoRound's QuantizationConfig. Its orders are GPTQ's and AWQ's."""
    if (fmt := quant.values.get("packing_format", "auto_round:auto_gptq")) not in AUTO_ROUND_ORDERS:
        raise quant.error(f"packing_format is {short(fmt)}; {' and '.join(AUTO_ROUND_ORDERS)} are implemented")
    if quant.values.get("data_type", "int") != "int":
        raise quant.error(f"data_type is {short(quant.values['data_type'])}; only 'int' is implemented")
    if (act := quant.values.get("act_bits", 16)) != 16:
        raise quant.error(f"act_bits is {short(act)}: activations are quantized; only weights may be")
    own = {name: quant.values.get(name) for name in ("bits", "group_size", "sym")}
    for name in quant.section("extra_config", default={}).values:
        its = quant.section("extra_config").section(name).values
        if its.get("bits", own["bits"]) != 16 and any(its.get(key, value) != value for key, value in own.items()):
            raise quant.error(f"extra_config has settings of its own for {short(name)}; those of all are implemented")
    if AUTO_ROUND_ORDERS[fmt] == "gptq":
        return _gptq(quant)
    has_zeros = not _one_of(quant, "sym", (True, False))
    scheme = Scheme("awq", _one_of(quant, "bits", (4,)), _size(quant, row=-1), has_zeros)
    return QuantConfig(scheme.packing.group_size, (), scheme=scheme)


def _gguf(quant: Fields) -> QuantConfig:
    """What gguf/config.py says of a file with packed matrices; no folder's config.json has these fields."""
    packings = quant.values.get("packings")
    if not isinstance(packings, dict) or not all(isinstance(packing, Packing) for packing in packings.values()):
        raise quant.error("quant_method is 'gguf', and weights in llama.cpp's blocks lie in a GGUF file: name that")
    return QuantConfig(32, (), packings={module_key(name): packing for name, packing in packings.items()})


def _kerngen(quant: Fields) -> QuantConfig:
    """Fields: what weights/conversion.py writes."""
    found: dict[str, Packing] = {}
    forms = quant.get("packed")
    if not isinstance(forms, list) or not all(isinstance(form, dict) for form in forms):
        raise quant.error(f"packed is {short(forms)}; it must be a list of forms")
    for form in forms:
        fields = Fields(form, f"{quant.where}: packed")
        if not _is_names(modules := fields.get("modules")):
            raise fields.error(f"modules is {short(modules)}; it must be a list of names")
        bits = _one_of(fields, "bits", (4, 8))
        size = _one_of(fields, "group_size", GROUP_SIZES if bits == 4 else (16, *GROUP_SIZES))
        packing = Packing(size, bits, _one_of(fields, "has_minima", (True, False)))
        found |= {module_key(module): packing for module in modules}
    return QuantConfig(32, (), packings=found)


def _require(fields: Fields, name: str, want: Any) -> None:
    value = fields.get(name)
    if type(value) is not type(want) or value != want:
        raise fields.error(f"{name} is {short(value)}; only {want!r} is implemented")


def _one_of(fields: Fields, name: str, wanted: tuple[Any, ...]) -> Any:
    value = fields.get(name)
    if not any(type(value) is type(want) and value == want for want in wanted):
        raise fields.error(f"{name} is {short(value)}; only {' and '.join(map(repr, wanted))} are implemented")
    return value


def _size(fields: Fields, row: int | None = None) -> int:
    """group_size; 0 where it is `row`, which stands for a scale for each output."""
    value = fields.get("group_size")
    if row is not None and value == row:
        return 0
    if isinstance(value, bool) or value not in GROUP_SIZES:
        raise fields.error(f"group_size is {short(value)}; 32, 64 and 128 are implemented")
    return int(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and len(name) <= MAX_NAME_CHARS for name in value)
