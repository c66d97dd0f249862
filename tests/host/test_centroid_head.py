"""centroid_head's reference against transformers' head, its promises on ties, NaN and unknown tokens, and the memory
that its two launches share. What holds for every kernel is in test_kernel_folders.py.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from kerngen.arch import Target, find_arch
from kerngen.compiler.compile import compile_ptx
from kerngen.compiler.render import render
from kerngen.errors import ConfigRefused
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Case

KERNEL = find_kernel("centroid_head")
SM90 = find_arch("sm90")
H200 = Target.of(SM90)


def _expected(y: Tensor, centroids: Tensor, token_ids: Tensor, embed: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The selected ids and their logits, in fp32."""
    shape = *token_ids.shape, top_k, y.shape[1]
    problem = KERNEL.problem_type(*shape, dtype="fp32", greedy=False, num_tokens=len(y))
    given = {"y": y, "centroids": centroids, "token_ids": token_ids, "embed": embed}
    expected = KERNEL.reference.expected(problem, given)
    return expected["ids"].long(), expected["logits"]


def _greedy(case: Case, inputs: dict[str, Any]) -> list[int]:
    problem = dataclasses.replace(case.problem, greedy=True)
    ids: list[int] = KERNEL.reference.expected(problem, inputs)["ids"].long().tolist()
    return ids


def test_reference_is_the_models_head() -> None:
    gemma4 = pytest.importorskip("transformers.models.gemma4_assistant.modeling_gemma4_assistant")
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig

    torch.manual_seed(0)
    text = Gemma4TextConfig(
        hidden_size=64, vocab_size=480, num_hidden_layers=2, num_kv_shared_layers=2, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    config = Gemma4AssistantConfig(
        text_config=text, use_ordered_embeddings=True, num_centroids=60, centroid_intermediate_top_k=7
    )
    head = gemma4.Gemma4AssistantMaskedEmbedder(config)
    head.token_ordering.copy_(torch.randperm(480))
    y, embed = torch.randn(5, 64), torch.randn(480, 64)
    with torch.no_grad():
        theirs = head(y[None], embed)[0]
    ids, logits = _expected(y, head.centroids.weight.data, head.token_ordering.view(60, 8), embed, 7)
    torch.testing.assert_close(theirs.gather(1, ids), logits, rtol=0, atol=1e-5)
    selected = torch.zeros(5, 480, dtype=torch.bool).scatter(1, ids, torch.ones_like(ids, dtype=torch.bool))
    assert int(selected.sum()) == 5 * 7 * 8
    assert bool((theirs[~selected] < logits.min() - 0.5).all()), "theirs gives all others a floor below the selected"


def test_best_centroid_comes_first_and_the_lower_one_on_a_tie() -> None:
    centroids = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0])[:, None].expand(5, 8).contiguous()
    token_ids = torch.arange(15).flip(0).view(5, 3)
    ids, _ = _expected(torch.ones(1, 8), centroids, token_ids, torch.ones(15, 8), 3)
    assert ids.tolist() == [[11, 10, 9, 5, 4, 3, 8, 7, 6]]  # centroids 1, 3, 2


def test_greedy_takes_the_first_of_equal_logits_in_the_order_of_the_centroids() -> None:
    case = KERNEL.cases.case_for(KERNEL.problem_type(12, 8, 4, 24, num_tokens=1), kind="equal")
    inputs = KERNEL.cases.inputs(case, "cpu")
    assert _greedy(case, inputs) == [int(inputs["token_ids"][0, 0])]
    inputs["y"][0, 0] = 1.0
    inputs["centroids"][:, 0], inputs["embed"][:, 0] = 0.0, 0.0
    inputs["centroids"][9, 0], inputs["centroids"][3, 0] = 1.0, 0.5
    inputs["embed"][inputs["token_ids"][3, 0], 0] = 1.0
    inputs["embed"][inputs["token_ids"][9, 5:], 0] = 1.0
    assert _greedy(case, inputs) == [int(inputs["token_ids"][9, 5])]


def test_greedy_is_the_first_greatest_of_all() -> None:
    kinds = set()
    for case in KERNEL.cases.CASES:
        if case.problem.greedy or case.problem.num_centroids * case.problem.cluster_size > 2**15:
            continue
        kinds.add(case.options["kind"])
        inputs = KERNEL.cases.inputs(case, "cpu")
        expected = KERNEL.reference.expected(case.problem, inputs)
        ranked = torch.where(expected["logits"].isnan(), float("inf"), expected["logits"])
        if not bool((expected["logits"] == float("inf")).any()):
            first = expected["ids"].gather(1, ranked.argmax(-1, keepdim=True)).squeeze(1)
            assert _greedy(case, inputs) == first.long().tolist(), case.name
    assert kinds == {"normal", "ties", "equal", "crowded", "nan", "infinite", "outside"}


def test_sums_of_the_cases_are_exact_in_any_order() -> None:
    """Else a flipped rounding would choose another centroid, and a right kernel would fail."""
    for case in KERNEL.cases.CASES:
        p = case.problem
        if p.num_centroids * p.cluster_size > 2**15 or case.options["kind"] in ("nan", "infinite"):
            continue
        inputs = KERNEL.cases.inputs(case, "cpu")
        # In fp32: a sum that is below the limit is exact, one that is not is not rounded to below it.
        y, rows = inputs["y"].float(), torch.cat((inputs["centroids"], inputs["embed"])).float()
        assert torch.equal(4 * y, (4 * y).round()), case.name
        assert torch.equal(64 * rows, (64 * rows).round()), case.name
        assert float((y.abs() @ rows.abs().T).max()) * 4 * 64 < 2**24, f"{case}: a sum takes more bits than fp32 has"


def test_a_token_outside_the_vocabulary_shows_itself() -> None:
    case = next(c for c in KERNEL.cases.CASES if c.options["kind"] == "outside" and not c.problem.greedy)
    expected = KERNEL.reference.expected(case.problem, KERNEL.cases.inputs(case, "cpu"))
    vocab = case.problem.num_centroids * case.problem.cluster_size
    outside = (expected["ids"] < 0) | (expected["ids"] >= vocab)
    assert 0 < int(outside.sum()) < outside.numel()
    assert torch.equal(expected["logits"].isnan(), outside)


def test_a_tokens_part_of_the_workspace_stays_where_it_is() -> None:
    """Counts must be zero between launches: keys of a larger batch must not lie where a smaller one counts."""
    for centroids in (1, 33, 2048):
        p = KERNEL.problem_type(num_centroids=centroids, top_k=1)
        config = KERNEL.default_config(p, H200)
        size = KERNEL.workspace_bytes(p, config, H200)
        assert size % 16 == 0
        assert size >= 16 + 2 * centroids
        assert KERNEL.constants(p, config, SM90)["TOKEN_BYTES"] == size
        for tokens in (2, 7, 64):
            assert KERNEL.workspace_bytes(dataclasses.replace(p, num_tokens=tokens), config, H200) == tokens * size


def test_both_entries_let_the_next_kernel_start_and_wait() -> None:
    p = KERNEL.problem_type()
    ptx = compile_ptx(render(KERNEL, p, KERNEL.default_config(p, H200), H200), SM90).image.decode()
    for entry in ("centroid_scores", "centroid_tokens"):
        (body,) = re.findall(rf"\.entry {entry}\b(.*?)(?=\.entry |\Z)", ptx, flags=re.DOTALL)
        assert body.index("griddepcontrol.launch_dependents") < body.index("griddepcontrol.wait")
        if entry == "centroid_tokens":
            assert "ld.global" not in body[: body.index("griddepcontrol.wait")]


def test_one_token_is_spread_over_nearly_every_sm_and_many_share_what_a_block_chooses() -> None:
    p = KERNEL.problem_type()
    grids = [launch.grid[0] for launch in KERNEL.launches(p, KERNEL.default_config(p, H200), H200)]
    assert grids == [128, 128]
    many = dataclasses.replace(p, num_tokens=64)
    config = KERNEL.default_config(many, H200)
    assert config.rows_per_block > 32
    grids = [launch.grid[0] for launch in KERNEL.launches(many, config, H200)]
    assert grids == [128 * 64 // 8, 64 * 4096 // config.rows_per_block]


@pytest.mark.parametrize(("fields", "config", "message"), [
    ({"hidden": 512}, {}, "lanes_per_row=8 hold 8 vectors of a row each; at most 4"),
    ({"hidden": 64}, {"lanes_per_row": 16}, "lanes_per_row=16 for the 8 vectors of a row; 8 do"),
    ({"num_centroids": 8192}, {"num_warps": 4}, "num_warps=4 hold 64 keys a thread; at most 32"),
    ({}, {"num_warps": 16}, "rows_per_block=32; 16 warps take 64 rows at once"),
    ({"top_k": 1}, {"rows_per_block": 256}, "rows_per_block=256 for 128 rows; 128 do"),
    ({"num_tokens": 2**25}, {}, "4,294,967,296 blocks; at most"),
])  # fmt: skip
def test_configurations_that_cannot_run_are_refused(
    fields: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigRefused, match=re.escape(message)):
        KERNEL.require_valid(KERNEL.problem_type(**fields), KERNEL.config_type(**config), H200)
