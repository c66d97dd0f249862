"""Reads what config.json says of images and sound: how they are cut up, what encodes them, which tokens stand for them.

Fields and defaults: transformers' Gemma4VisionConfig and Gemma4AudioConfig (31B, 26B-A4B, E4B, E2B), and
Gemma4UnifiedVisionConfig and Gemma4UnifiedAudioConfig (12B, which has no encoders).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kerngen.runtime.config_fields import Fields

if TYPE_CHECKING:
    from kerngen.runtime.media.values import Kind

DEFAULT_TOKENS = 280  # of an image, where config.json has no budget of its own
Part = Literal["vision", "audio"]  # of a model, beside its text part
BOTH: tuple[Part, ...] = ("vision", "audio")
DEFAULT_PLACEHOLDERS: dict[Kind, int] = {"image": 258_880, "video": 258_884, "audio": 258_881}  # transformers'
NUM_MELS = 128  # of a conformer's input; transformers has the number in its feature extractor


@dataclass(frozen=True, slots=True)
class VisionEncoderConfig:
    """A vision transformer. Heads have as many keys and values as queries. rope_theta: of both axes.

    standardizes: the checkpoint holds a bias and a scale for pooled patches. clips: it holds bounds for what each
    linear of a layer takes and gives.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    standardizes: bool
    clips: bool


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """How images become soft tokens.

    patch_size: pixels of a side of what is one row of `Media.data`. pooling: patches of a side that make one soft
    token. default_tokens: the most soft tokens of an image that a request asks no other number for. hidden_size: of a
    soft token before the projector. num_positions: rows of the position table, of each axis. eps: of RMS norms.
    encoder: None where a patch is a soft token, embedded on its own.
    """

    patch_size: int
    pooling: int
    default_tokens: int
    hidden_size: int
    num_positions: int
    eps: float
    encoder: VisionEncoderConfig | None


@dataclass(frozen=True, slots=True)
class AudioEncoderConfig:
    """A conformer. channels: of the two convolutions that halve time and mels. num_keys: frames that a frame attends
    to, itself and those before it. clips: as of VisionEncoderConfig. largest: bound of what goes through a layer.
    """

    num_layers: int
    num_heads: int
    hidden_size: int
    channels: tuple[int, int]
    conv_kernel: int
    residual_weight: float
    num_keys: int
    logit_cap: float
    largest: float
    clips: bool


@dataclass(frozen=True, slots=True)
class AudioConfig:
    """How sound becomes soft tokens.

    num_features: of a frame, which is one row of `Media.data`: log mels, or samples where there is no encoder.
    hidden_size: of a soft token before the projector. eps: of RMS norms. encoder: None where a frame is a soft token.
    """

    num_features: int
    hidden_size: int
    eps: float
    encoder: AudioEncoderConfig | None


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """What a model takes beside text; None for what it does not. hidden_size: the text model's.

    bidirectional: tokens of an image see each other both ways in sliding layers. image_id, audio_id, video_id: the
    placeholders that soft tokens replace; begin and end stand around them in a prompt, those of images around frames.
    """

    vision: VisionConfig | None
    audio: AudioConfig | None
    hidden_size: int
    bidirectional: bool
    image_id: int
    audio_id: int
    video_id: int
    begin_image: int
    end_image: int
    begin_audio: int
    end_audio: int

    @property
    def parts(self) -> tuple[Part, ...]:
        """Those that the model has."""
        return tuple(part for part in BOTH if getattr(self, part) is not None)

    @property
    def images_see_themselves(self) -> bool:
        """Whether the model sees images, and their tokens see each other both ways in sliding layers."""
        return self.bidirectional and self.vision is not None

    @property
    def placeholders(self) -> dict[Kind, int]:
        """The token that stands where an item of a kind is, whether the model takes that kind or not."""
        return {"image": self.image_id, "video": self.video_id, "audio": self.audio_id}

    def only(self, which: Collection[Part]) -> MediaConfig | None:
        """The same without the parts that are not in `which`; None where nothing is left."""
        vision = self.vision if "vision" in which else None
        audio = self.audio if "audio" in which else None
        return replace(self, vision=vision, audio=audio) if vision or audio else None


def read_placeholders(config_json: dict[str, Any], where: str = "config.json") -> dict[Kind, int]:
    """The token that stands where an item of a kind is, of a model of text alone too where its config.json has one.

    Raises CheckpointError.
    """
    top = Fields(config_json, where)
    takes_media = any(top.values.get(name) is not None for name in ("vision_config", "audio_config"))
    return {
        kind: top.integer(f"{kind}_token_id", default=default if takes_media else None, low=0)
        for kind, default in DEFAULT_PLACEHOLDERS.items()
        if takes_media or top.values.get(f"{kind}_token_id") is not None
    }


def read_media_config(config_json: dict[str, Any], where: str = "config.json") -> MediaConfig | None:
    """What the content of a config.json says, None of a model of text alone. where: the file's name, for complaints.

    Raises CheckpointError on a field that is missing, of another type, or that contradicts others.
    """
    top = Fields(config_json, where)
    vision, audio = (top.section(name) if top.values.get(name) is not None else None
                     for name in ("vision_config", "audio_config"))  # fmt: skip
    if vision is None and audio is None:
        return None
    text = top.section("text_config")
    unified = str(top.values.get("model_type")).startswith("gemma4_unified")
    # transformers 5.22 has "vision" where a unified text model's config.json leaves the field out.
    both_ways = text.values.get("use_bidirectional_attention", "vision" if unified else None)
    if both_ways not in (None, "vision"):
        raise text.error(f"use_bidirectional_attention is {both_ways!r}; known: null, 'vision'")
    placeholders = read_placeholders(config_json, where)
    return MediaConfig(
        vision=None if vision is None else _vision(vision, unified=unified),
        audio=None if audio is None else _audio(audio, unified=unified),
        hidden_size=text.integer("hidden_size"),
        bidirectional=both_ways == "vision",
        image_id=placeholders["image"],
        audio_id=placeholders["audio"],
        video_id=placeholders["video"],
        begin_image=top.integer("boi_token_id", default=255_999, low=0),
        end_image=top.integer("eoi_token_id", default=258_882, low=0),
        begin_audio=top.integer("boa_token_id", default=256_000, low=0),
        end_audio=top.integer("eoa_token_index", default=258_883, low=0),
    )


def _is_unified(section: Fields, kind: str, unified: bool) -> bool:
    """Whether a model without encoders is meant: by the section's own model_type, else by the model's."""
    stated = section.values.get("model_type", f"gemma4_unified_{kind}" if unified else f"gemma4_{kind}")
    if stated not in (f"gemma4_{kind}", f"gemma4_unified_{kind}"):
        raise section.error(f"model_type is {stated!r}; known: gemma4_{kind}, gemma4_unified_{kind}")
    return bool(stated == f"gemma4_unified_{kind}")


def _vision(vision: Fields, *, unified: bool) -> VisionConfig:
    patch, pooling = vision.integer("patch_size", default=16), vision.integer("pooling_kernel_size", default=3)
    if patch * pooling > 1024:
        raise vision.error(f"patches of {patch} pixels, {pooling} of them a token, are more than 1,024 pixels wide")
    eps = vision.number("rms_norm_eps", default=1e-6)
    if _is_unified(vision, "vision", unified):
        width = patch * pooling
        if vision.integer("model_patch_size", default=width) != width:
            raise vision.error(f"model_patch_size is not patch_size {patch} times pooling_kernel_size {pooling}")
        hidden = vision.integer("mm_embed_dim", default=3840)
        if vision.integer("output_proj_dims", default=hidden) != hidden:
            raise vision.error(f"output_proj_dims is not mm_embed_dim {hidden}")
        return VisionConfig(
            patch_size=width,
            pooling=1,
            default_tokens=vision.integer("num_soft_tokens", default=DEFAULT_TOKENS),
            hidden_size=hidden,
            num_positions=vision.integer("mm_posemb_size", default=1120),
            eps=eps,
            encoder=None,
        )
    return VisionConfig(
        patch_size=patch,
        pooling=pooling,
        default_tokens=vision.integer("default_output_length", default=DEFAULT_TOKENS),
        hidden_size=vision.integer("hidden_size", default=768),
        num_positions=vision.integer("position_embedding_size", default=10_240),
        eps=eps,
        encoder=_vision_encoder(vision),
    )


def _vision_encoder(vision: Fields) -> VisionEncoderConfig:
    heads, dim = vision.integer("num_attention_heads", default=12), vision.integer("head_dim", default=64)
    if (kv_heads := vision.integer("num_key_value_heads", default=heads)) != heads:
        raise vision.error(
            f"num_key_value_heads {kv_heads} is not num_attention_heads {heads}; only that is implemented"
        )
    if dim % 4:
        raise vision.error(f"head_dim {dim} is no multiple of 4; each half of a head rotates in pairs")
    if (act := vision.values.get("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise vision.error(f"hidden_activation is {act!r}; only gelu_pytorch_tanh is known")
    if vision.flag("attention_bias", False):
        raise vision.error("attention_bias is true; no released Gemma-4 has it and it is not implemented")
    rope = vision.section("rope_parameters", default={})
    if (kind := rope.values.get("rope_type", "axial")) not in ("axial", "default"):
        raise rope.error(f"rope_type is {kind!r}; known: axial, and default, which means it")
    return VisionEncoderConfig(
        num_layers=vision.integer("num_hidden_layers", default=16),
        num_heads=heads,
        head_dim=dim,
        intermediate_size=vision.integer("intermediate_size", default=3072),
        rope_theta=rope.number("rope_theta", default=100.0),
        standardizes=vision.flag("standardize", False),
        clips=vision.flag("use_clipped_linears", False),
    )


def _audio(audio: Fields, *, unified: bool) -> AudioConfig:
    eps = audio.number("rms_norm_eps", default=1e-6)
    if _is_unified(audio, "audio", unified):
        samples = audio.integer("audio_embed_dim", default=640)
        for name in ("audio_samples_per_token", "hidden_size", "output_proj_dims"):
            if audio.integer(name, default=samples) != samples:
                raise audio.error(f"{name} is not audio_embed_dim {samples}")
        return AudioConfig(num_features=samples, hidden_size=samples, eps=eps, encoder=None)
    return AudioConfig(
        num_features=NUM_MELS,
        hidden_size=audio.integer("output_proj_dims", default=1536),
        eps=eps,
        encoder=_audio_encoder(audio),
    )


def _audio_encoder(audio: Fields) -> AudioEncoderConfig:
    hidden, heads = audio.integer("hidden_size", default=1024), audio.integer("num_attention_heads", default=8)
    if hidden % heads or hidden % 2:
        raise audio.error(f"hidden_size {hidden} does not split over {heads} heads, or into sines and cosines")
    if (act := audio.values.get("hidden_act", "silu")) != "silu":
        raise audio.error(f"hidden_act is {act!r}; only silu is known")
    channels = audio.values.get("subsampling_conv_channels", [128, 32])
    if not (isinstance(channels, list) and len(channels) == 2):
        raise audio.error("subsampling_conv_channels must be the channels of two convolutions")
    first, second = (Fields({"channels": c}, f"{audio.where}: subsampling_conv_channels") for c in channels)
    if audio.integer("attention_context_right", default=0, low=0):
        raise audio.error("attention_context_right is not 0: frames that see later ones are not implemented")
    left = audio.integer("attention_context_left", default=13, low=2)
    if audio.integer("attention_chunk_size", default=12) != left - 1:  # the table of distances would end elsewhere
        raise audio.error(
            f"attention_chunk_size is not attention_context_left {left} less one, which is not implemented"
        )
    return AudioEncoderConfig(
        num_layers=audio.integer("num_hidden_layers", default=12),
        num_heads=heads,
        hidden_size=hidden,
        channels=(first.integer("channels"), second.integer("channels")),
        conv_kernel=audio.integer("conv_kernel_size", default=5),
        residual_weight=audio.number("residual_weight", default=0.5),
        num_keys=left - 1,
        logit_cap=audio.number("attention_logit_cap", default=50.0),
        largest=audio.number("gradient_clipping", default=1e10),
        clips=audio.flag("use_clipped_linears", True),
    )
