"""vLLM's MTP drafter of Gemma-4 with kerngen's heads, beside its own: loaded, run and asked for tokens, on the CPU."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import capability, rank, recorded, serves
from torch import Tensor, nn

if not serves("head"):
    pytest.skip("the part `head` is not for this release of vLLM", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("registered", "small_vllm")

HIDDEN, BACKBONE, VOCAB, INTERMEDIATE, HEADS = 64, 48, 1024, 96, 2
DIMS = {"sliding_attention": 16, "full_attention": 32}
CENTROIDS: dict[str, Any] = {
    "use_ordered_embeddings": True,
    "num_centroids": 32,
    "centroid_intermediate_top_k": 4,
}


class Attend(nn.Module):
    """In place of vLLM's Attention, which needs a GPU: over keys and values that are always the same."""

    def __init__(self, num_heads: int, head_size: int, scale: float, **others: Any) -> None:
        super().__init__()
        self.shape, self.scale = (num_heads, head_size), scale
        self.kv = torch.randn(2, 5, head_size, generator=torch.Generator().manual_seed(head_size)).bfloat16()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.kv
        return ((q.unflatten(-1, self.shape) @ keys.T * self.scale).softmax(-1) @ values).flatten(1)


@pytest.fixture(scope="module")
def small_vllm(gated_gelu: None) -> Iterator[None]:
    from vllm.model_executor.models import gemma4_mtp

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemma4_mtp, "Attention", Attend)
        yield


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    on_rank(monkeypatch, 0, 1, lambda tensor, dim: tensor)


def on_rank(patch: pytest.MonkeyPatch, this: int, of: int, gather: Callable[[Tensor, int], Tensor]) -> None:
    """vLLM's group of ranks as one of them sees it. gather: of what it gives, what all of them gave."""
    from vllm.distributed import parallel_state

    group = rank(this, of)
    group.all_gather = lambda tensor, dim=-1: gather(tensor, dim)
    group.gather = lambda tensor, dst=0, dim=-1: gather(tensor, dim)
    patch.setattr(parallel_state, "_TP", group)


def settings(
    suppressed: tuple[int, ...] = (), cap: float | None = None, max_num_seqs: int = 16, mode: int = 0, **changes: Any
) -> Any:
    """vLLM's configuration for a small drafter. suppressed: tokens that its generation_config.json forbids. mode: of
    vLLM's use of torch.compile.
    """
    from vllm.config import CompilationConfig, DeviceConfig, VllmConfig

    text = SimpleNamespace(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=2, layer_types=[*DIMS],
        sliding_window=8, num_attention_heads=HEADS, num_key_value_heads=1, head_dim=16, global_head_dim=32,
        num_global_key_value_heads=1, attention_k_eq_v=True, attention_bias=False, rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh", max_position_embeddings=128, final_logit_softcapping=cap,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in DIMS},
    )  # fmt: skip
    hf = SimpleNamespace(text_config=text, backbone_hidden_size=BACKBONE, tie_word_embeddings=True, **changes)
    compiled = CompilationConfig(custom_ops=["none"], mode=mode, backend="eager", cudagraph_mode="NONE")
    made = VllmConfig(device_config=DeviceConfig(device="cpu"), compilation_config=compiled)
    made.model_config = SimpleNamespace(
        hf_config=hf, dtype=torch.bfloat16, head_dtype=torch.bfloat16, quantization=None, enforce_eager=False,
        compute_hash=lambda: "", try_get_generation_config=lambda: {"suppress_tokens": [*suppressed]},
    )  # fmt: skip
    made.speculative_config = SimpleNamespace(draft_model_config=made.model_config)
    made.scheduler_config.max_num_seqs = max_num_seqs
    return made


def checkpoint(seed: int = 1, centroids: int = 0) -> list[tuple[str, Tensor]]:
    """Of such a drafter, by names as a checkpoint has them."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=draw) / shape[-1] ** 0.5).bfloat16()

    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCAB, HIDDEN), "pre_projection": (HIDDEN, 2 * BACKBONE),
        "post_projection": (BACKBONE, HIDDEN), "model.norm": (HIDDEN,),
    }  # fmt: skip
    for i, dim in enumerate(DIMS.values()):
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        at = f"model.layers.{i}"
        shapes |= {f"{at}.{name}_layernorm": (HIDDEN,) for name in norms}
        shapes |= {f"{at}.mlp.{name}_proj": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{at}.self_attn.q_proj": (HEADS * dim, HIDDEN), f"{at}.self_attn.o_proj": (HIDDEN, HEADS * dim),
                   f"{at}.self_attn.q_norm": (dim,), f"{at}.mlp.down_proj": (HIDDEN, INTERMEDIATE)}  # fmt: skip
    if centroids:
        shapes["masked_embedding.centroids"] = centroids, HIDDEN
    made = [(f"{n}.weight", normal(*s) + (1 if len(s) == 1 else 0)) for n, s in shapes.items()]
    if centroids:
        made.append(("masked_embedding.token_ordering", torch.randperm(VOCAB, generator=draw)))
    return made


def make(cls: Any, config: Any, tensors: list[tuple[str, Tensor]]) -> Any:
    """A drafter as vLLM makes and loads it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.no_grad():
        made = initialize_model(config, model_class=cls)
        made.load_weights(iter(tensors))
        process_weights_after_loading(made, config.model_config, torch.device("cpu"))
        # As vLLM's proposer does: the target's embedding, whose rows are as wide as its hidden states.
        draw = torch.Generator().manual_seed(9)
        made.model.embed_tokens = nn.Embedding(VOCAB, BACKBONE, dtype=torch.bfloat16)
        made.model.embed_tokens.weight.copy_(torch.randn(VOCAB, BACKBONE, generator=draw))
    return made


def ours() -> Any:
    from vllm import ModelRegistry

    cls = ModelRegistry.models["Gemma4MTPModel"].load_model_cls()
    assert cls.__module__ == "kerngen.vllm.head_v0_26"
    return cls


def pair(config: Callable[[], Any], tensors: list[tuple[str, Tensor]]) -> tuple[Any, Any]:
    """(kerngen's, vLLM's own) of the same weights"""
    from vllm.model_executor.models import gemma4_mtp

    return make(ours(), config(), tensors), make(gemma4_mtp.Gemma4MTP, config(), tensors)


def final_states(model: Any, tokens: int, seed: int = 3) -> Tensor:
    from vllm.config import set_current_vllm_config

    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (tokens,), generator=draw)
    hidden = torch.randn(tokens, BACKBONE, generator=draw).bfloat16()
    with torch.no_grad(), set_current_vllm_config(model.vllm_config):
        return model(ids, torch.arange(tokens), hidden)[0]


def drafts(model: Any, count: int, by: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """`count` drafts [3, count] one after the other, each from the ones before, as vLLM's proposer makes them."""
    from vllm.config import set_current_vllm_config

    draw = torch.Generator().manual_seed(5)
    ids, hidden = torch.tensor([3, 700, 41]), torch.randn(3, BACKBONE, generator=draw).bfloat16()
    found = []
    with torch.no_grad(), set_current_vllm_config(model.vllm_config):
        for _ in range(count):
            y, hidden = model(ids, torch.tensor([7, 7, 2]), hidden)
            ids = by(model, y)
            found.append(ids)
    return torch.stack(found, 1)


def by_tokens(model: Any, y: Tensor) -> Tensor:
    tokens: Tensor = model.get_top_tokens(y)
    assert tokens.dtype == torch.int64
    return tokens


def by_logits(model: Any, y: Tensor) -> Tensor:
    """vLLM's default."""
    tokens: Tensor = model.compute_logits(y).argmax(dim=-1)
    return tokens


def ran(call: Callable[[], Any]) -> set[str]:
    """kerngen's operators that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {e.key for e in profile.key_averages() if e.key.startswith("kerngen::")}


@pytest.mark.parametrize("cap", [None, 30.0])
def test_a_drafter_drafts_the_tokens_that_vllms_own_drafts(cap: float | None) -> None:
    mine, theirs = pair(lambda: settings(cap=cap), checkpoint())
    found, expected = drafts(mine, 6, by_tokens), drafts(theirs, 6, by_logits)
    assert torch.equal(found, expected)
    assert len(found.unique()) > 6, "drafts that differ"
    for tokens in (1, 2, 31, 32, 33, 50):
        y = final_states(mine, tokens)
        assert torch.equal(y, final_states(theirs, tokens))
        assert torch.equal(by_tokens(mine, y), by_logits(theirs, y))
        served = {"kerngen::greedy_head"} if tokens <= 32 else set()
        assert ran(lambda y=y: mine.get_top_tokens(y)) == served  # type: ignore[misc]
        logits = y.float() @ mine.lm_head.weight.float().T
        torch.testing.assert_close(mine.compute_logits(y).float(), theirs.compute_logits(y).float(), rtol=0, atol=0)
        best = logits.gather(-1, by_tokens(mine, y)[:, None])[:, 0]
        assert (best >= logits.amax(-1) * (1 - 2**-7)).all(), "the greatest in fp32, but for rounding to bf16"


def test_a_head_with_centroids_gives_the_tokens_of_vllms_own() -> None:
    mine, theirs = pair(lambda: settings(**CENTROIDS), checkpoint(centroids=32))
    assert torch.equal(drafts(mine, 6, by_tokens), drafts(theirs, 6, by_tokens))
    for tokens in (1, 7, 64, 65):
        y = final_states(mine, tokens)
        assert torch.equal(by_tokens(mine, y), by_tokens(theirs, y))
        logits = theirs.compute_logits(y)  # whose arg-max is the lowest token on a tie, not the better centroid's
        assert torch.equal(logits.gather(-1, by_tokens(mine, y)[:, None])[:, 0], logits.amax(-1))
        assert ran(lambda y=y: mine.get_top_tokens(y)) == {"kerngen::centroid_greedy"}  # type: ignore[misc]
        # The first model runner captures this call by itself.
        weight = mine._get_full_lm_head_weight()
        assert torch.equal(mine.masked_embedding.get_top_tokens(y, weight), by_tokens(theirs, y))
    assert not ran(lambda: theirs.get_top_tokens(y))


def test_a_compiled_drafter_drafts_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM compiles the class that it was given, by a decorator that it put on its own."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    for name, value in (("CACHE_ROOT", str(tmp_path)), ("USE_AOT_COMPILE", "0"), ("DISABLE_COMPILE_CACHE", "1")):
        monkeypatch.setenv(f"VLLM_{name}", value)
    mine = make(ours(), settings(mode=2), checkpoint())  # traced once
    torch._dynamo.reset()
    with torch.no_grad(), set_current_vllm_config(mine.vllm_config):
        for tokens in (3, 7, 5):
            given = torch.arange(tokens), torch.arange(tokens), torch.randn(tokens, BACKBONE).bfloat16()
            expected = mine.forward(*given)
            with set_forward_context(None, mine.vllm_config, num_tokens=tokens):
                found = mine(*given)
            assert all(map(torch.equal, found, expected))
            assert torch.equal(by_tokens(mine, found[0]), by_logits(mine, expected[0]))
    assert mine.compiled


def test_a_tie_gives_the_lowest_token() -> None:
    tensors = dict(checkpoint())
    weight = tensors["model.embed_tokens.weight"]
    weight[VOCAB // 2 :] = weight[: VOCAB // 2].clone()
    mine, theirs = pair(settings, list(tensors.items()))
    y = final_states(mine, 9)
    assert by_tokens(mine, y).max() < VOCAB // 2
    assert torch.equal(by_tokens(mine, y), by_logits(theirs, y))


def test_suppressed_tokens_are_never_drafted() -> None:
    """vLLM takes them from logits alone: a centroid head goes by those then."""
    for more, centroids in (({}, 0), (CENTROIDS, 32)):
        tensors = checkpoint(centroids=centroids)
        free, _ = pair(lambda more=more: settings(**more), tensors)  # type: ignore[misc]
        y = final_states(free, 12)
        wanted = by_tokens(free, y)
        forbidden = tuple(wanted.unique().tolist())
        mine, theirs = pair(lambda more=more, no=forbidden: settings(no, **more), tensors)  # type: ignore[misc]
        found = by_tokens(mine, y)
        assert not set(found.tolist()) & set(forbidden)
        assert torch.equal(found, by_logits(theirs, y))
        assert ran(lambda y=y, m=mine: m.get_top_tokens(y)) == (set() if centroids else {"kerngen::greedy_head"})  # type: ignore[misc]


@pytest.mark.parametrize("suppressed", [False, True])
def test_ranks_choose_among_their_tokens_as_the_whole_head(suppressed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is played, first to tell what it gives, then with what all gave: vLLM's gather is of the pairs alone."""
    tensors = dict(checkpoint())
    weight = tensors["model.embed_tokens.weight"]
    weight[VOCAB // 2 + 10 :] = weight[10 : VOCAB // 2].clone()  # ties of ranks
    whole, _ = pair(settings, list(tensors.items()))
    y = final_states(whole, 32)
    forbidden = tuple(by_tokens(whole, y)[::3].unique().tolist()) if suppressed else ()
    _, theirs = pair(lambda: settings(forbidden), list(tensors.items()))
    expected = by_logits(theirs, y)
    given: list[Tensor] = []
    parts = []
    for this in (0, 1):
        on_rank(monkeypatch, this, 2, lambda t, dim: given.append(t) or torch.cat([t, t], dim))  # type: ignore[func-returns-value]
        parts.append(make_head(settings(forbidden), weight))
        by_tokens(parts[-1], y)
    assert [t.shape for t in given] == [(32, 2), (32, 2)]
    for this, part in enumerate(parts):
        on_rank(monkeypatch, this, 2, lambda t, dim: torch.cat(given, dim))
        assert torch.equal(by_tokens(part, y), expected)
    assert (expected >= VOCAB // 2).any() or not suppressed
    assert (given[1][:, 1] >= VOCAB // 2).all(), "a rank's tokens are the whole vocabulary's"


def make_head(config: Any, weight: Tensor) -> Any:
    """A rank's drafter with its rows of the head."""
    made = make(ours(), config, [("model.embed_tokens.weight", weight)])
    rows = made.lm_head.shard_indices
    assert torch.equal(made.lm_head.weight, weight[rows.org_vocab_start_index : rows.org_vocab_end_index])
    return made


def test_weights_that_are_loaded_again_are_screened_again_in_their_memory() -> None:
    """CUDA graphs hold the addresses."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from kerngen.templates.common.screen.screen import head_screen

    mine = make(ours(), settings(), checkpoint())
    names = ("kerngen_codes", "kerngen_bounds")
    before = {name: getattr(mine.lm_head, name).data_ptr() for name in names}
    other = checkpoint(seed=2)
    mine.lm_head.weight.data.copy_(dict(other)["model.embed_tokens.weight"])
    process_weights_after_loading(mine, mine.vllm_config.model_config, torch.device("cpu"))
    assert before == {name: getattr(mine.lm_head, name).data_ptr() for name in names}
    expected = head_screen(dict(other)["model.embed_tokens.weight"], bits=4, likely=True)
    for name, tensor in zip(names, expected, strict=True):
        torch.testing.assert_close(getattr(mine.lm_head, name), tensor, rtol=0, atol=0, equal_nan=True)


def test_parameters_are_vllms() -> None:
    """Names: vLLM loads and reloads by name, and what kerngen adds is none of a checkpoint's."""
    for more, centroids in (({}, 0), (CENTROIDS, 32)):
        mine, theirs = pair(lambda more=more: settings(**more), checkpoint(centroids=centroids))  # type: ignore[misc]
        assert mine.state_dict().keys() == theirs.state_dict().keys()


def refusals() -> Iterator[tuple[Callable[[pytest.MonkeyPatch, Any], None], str]]:
    """(what differs of a configuration, why)"""

    def fp32_logits(patch: pytest.MonkeyPatch, config: Any) -> None:
        config.model_config.head_dtype = torch.float32

    def old_board(patch: pytest.MonkeyPatch, config: Any) -> None:
        from vllm.platforms import current_platform

        patch.setattr(type(current_platform), "get_device_capability", capability(7, 5))

    def wide(patch: pytest.MonkeyPatch, config: Any) -> None:
        config.model_config.hf_config.text_config.hidden_size = 68

    def quantized(patch: pytest.MonkeyPatch, config: Any) -> None:
        from vllm.model_executor.layers import vocab_parallel_embedding as module

        class Other(module.UnquantizedEmbeddingMethod):
            pass

        patch.setattr(module, "UnquantizedEmbeddingMethod", Other)

    yield fp32_logits, "its logits are asked for in torch.float32"
    yield old_board, "bf16"
    yield wide, "hidden=68"
    yield quantized, "its weights are of Other, not as they were trained"


@pytest.mark.parametrize(("change", "why"), list(refusals()), ids=lambda v: getattr(v, "__name__", ""))
def test_what_is_not_served_is_vllms_and_one_line_says_why(
    change: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And gives tokens all the same, by logits: vLLM is told to ask for them."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = settings()
    change(monkeypatch, config)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.kerngen")
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.no_grad():
        made = initialize_model(config, model_class=ours())
        for p in made.parameters():
            p.normal_(generator=torch.Generator().manual_seed(4))
    (line,) = {r.getMessage() for r in caplog.records if r.name == "vllm.kerngen"}
    assert line.startswith("kerngen: the drafter's head stays vLLM's: ")
    assert why in line
    y = torch.randn(3, made.lm_head.embedding_dim, generator=torch.Generator().manual_seed(4)).bfloat16()
    with torch.no_grad():
        assert torch.equal(by_tokens(made, y), by_logits(made, y))
        assert not ran(lambda: made.get_top_tokens(y))


def test_ranks_with_unequal_parts_leave_the_head_to_vllm() -> None:
    """They would decide by their own numbers of rows, and must decide alike."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from kerngen.vllm.head_v0_26 import _why_not

    def why(tokens: int, ranks: int) -> str | None:
        head = SimpleNamespace(quant_method=UnquantizedEmbeddingMethod(), weight=torch.empty(1), org_vocab_size=tokens,
                               tp_size=ranks, num_embeddings_per_partition=512)  # fmt: skip
        return _why_not(SimpleNamespace(lm_head=head, logits_processor=SimpleNamespace(head_dtype=None)))

    assert why(1024, 2) is None
    assert why(500, 1) is None
    assert why(1000, 2) == "its 1000 tokens are not as many for each of 2 ranks"


def test_every_problem_of_a_draft_is_asked_for_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any number of drafts at once that vLLM may ask for, captures at load among them, and no other kernel."""
    from kerngen.vllm import ahead, head_v0_26

    for more, centroids, most in (({}, 0, 32), (CENTROIDS, 32, 100)):
        asked = ahead.Ahead()
        monkeypatch.setattr(head_v0_26, "AHEAD", asked)
        model = make(ours(), settings(max_num_seqs=100, **more), checkpoint(centroids=centroids))
        assert not +asked._asked
        problems = [each for grid in asked._grids for each in grid.problems()]
        assert [p.num_tokens for _, p in problems] == [*range(1, most + 1)]
        calls = recorded(
            lambda model=model, most=most: [by_tokens(model, final_states(model, n)) for n in (1, 5, most)]
        )  # type: ignore[misc]
        assert {(c.kernel, c.problem) for c in calls} < set(problems)
        assert len(calls) == 3


def drafting(**changes: Any) -> Any:
    """A target's configuration with a drafter, as vLLM gives it to the list of configurations."""
    fields = {"draft_model_config": SimpleNamespace(architectures=["Gemma4MTPModel"]), "draft_sample_method": "greedy",
              "use_heterogeneous_vocab": False, "use_local_argmax_reduction": False}  # fmt: skip
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**(fields | changes)), attention_config=SimpleNamespace(backend="named"),
        model_config=None, cache_config=None,
    )  # fmt: skip


@pytest.mark.parametrize(("changes", "asked"), [
    ({}, True), ({"draft_sample_method": "probabilistic"}, False), ({"use_heterogeneous_vocab": True}, False),
    ({"draft_model_config": SimpleNamespace(architectures=["Eagle3LlamaForCausalLM"])}, False),
    ({"draft_model_config": None}, False),
], ids=["MTP", "sampled", "another vocabulary", "EAGLE-3", "n-grams"])  # fmt: skip
def test_vllm_asks_mtp_drafters_for_tokens(
    changes: dict[str, Any], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After what its list has for the model itself."""
    from vllm.model_executor.models import config as models

    verified: list[Any] = []
    monkeypatch.setattr(models.Gemma4Config, "verify_and_update_config", staticmethod(verified.append))
    for name in ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"):
        made = models.MODELS_CONFIG_MAP[name]
        assert [cls.__name__ for cls in made.__mro__].count("AsksForTokens") == 1, "registered twice is once"
        assert made is models.MODELS_CONFIG_MAP["Gemma4ForCausalLM"]
        given, alone = drafting(**changes), drafting()
        alone.speculative_config = None
        for config in (given, alone):
            made.verify_and_update_config(config)
            assert verified.pop() is config
        assert given.speculative_config.use_local_argmax_reduction is asked


def test_vllm_reads_that_where_it_drafts() -> None:
    """Both model runners, before they have loaded the drafter."""
    from vllm.v1.spec_decode import llm_base_proposer

    folder = inspect.getsourcefile(llm_base_proposer).rpartition("/v1/")[0]  # type: ignore[union-attr]
    for name in ("v1/spec_decode/llm_base_proposer.py", "v1/worker/gpu/spec_decode/speculator.py"):
        with open(f"{folder}/{name}") as file:
            source = file.read()
        assert "self.speculative_config.use_local_argmax_reduction" in source
        assert "return self.model.get_top_tokens(hidden_states)" in source


def test_each_method_takes_what_vllm_gives_it() -> None:
    from kerngen.vllm import head_v0_26 as module

    for cls in (module.Gemma4MTP, module.MaskedEmbedder, module.Screened, module.Beside):
        base = cls.__bases__[0]
        overridden = [n for n, value in vars(cls).items() if inspect.isfunction(value) and hasattr(base, n)]
        for name in {*overridden} - {"__init__"}:
            mine, theirs = (inspect.signature(getattr(c, name)).parameters.values() for c in (cls, base))
            assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs], name
    assert list(inspect.signature(module.Gemma4MTP.__init__).parameters)[1:] == ["vllm_config", "prefix"]


def test_it_looks_like_vllms_own() -> None:
    from vllm.model_executor.models import gemma4_mtp
    from vllm.model_executor.models.registry import _ModelInfo

    assert _ModelInfo.from_model_cls(ours()) == _ModelInfo.from_model_cls(gemma4_mtp.Gemma4MTP)
    assert ours().load_weights is gemma4_mtp.Gemma4MTP.load_weights
    assert ours().forward is gemma4_mtp.Gemma4MTP.forward
