"""Fixtures of several files' tests, and what they can be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fresh
import pytest
from command import Kerngen
from once import settle
from postgres import postgresql_server, postgresql_url
from toy import toy_kernels

from kerngen.templates.kernel import Kernel
from kerngen.tuning_db.read import trust
from kerngen.tuning_db.store import migrate

__all__ = ["postgresql_server", "postgresql_url"]


@pytest.fixture(scope="session", autouse=True)
def _once(tmp_path_factory: pytest.TempPathFactory) -> None:
    settle(tmp_path_factory)


@pytest.fixture(scope="session", autouse=True)
def _fresh() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "upgrade", fresh.upgrade)
        yield


@pytest.fixture
def kerngen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kerngen:
    return Kerngen(tmp_path, monkeypatch, capsys)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a database that is not there yet."""
    return tmp_path / "tuning.db"


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    with toy_kernels(monkeypatch) as kernel:
        yield kernel


@pytest.fixture
def nobody_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KERNGEN_TRUST", "KERNGEN_TRUST_UNSIGNED", "KERNGEN_TRUST_FILES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(trust, "_HOST", tmp_path / "etc" / "trusted")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The models are so small that threads only get in each other's way, tenfold so on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def played() -> Any:
    """A service and its engine, which is played."""
    from played_engine import played_service

    return played_service()


@pytest.fixture
def client(played: Any) -> Iterator[Any]:
    """Of that service."""
    from starlette.testclient import TestClient

    from kerngen.runtime.serve.app import make_app

    with TestClient(make_app(played[0]), raise_server_exceptions=False) as client:
        yield client


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true",
                     help="compile every case of test_kernel_folders, not only those that tell")  # fmt: skip


# What takes longest begins first, with all of its file, so that no worker waits long for another at the end; the rest
# follows as it is. Seconds are of a processor's time.
FIRST = (
    "test_kernel_folders.py",  # 180 s: NVRTC, some 460 distinct sources
    "test_engine_batches.py",  # 35 s
    "test_prebuilt.py",  # 32 s
    "test_tune_cli.py",  # 29 s: 12 for every problem of the 31B on a V100
    "test_soak.py",  # 45 s
    "test_choosing.py",  # 23 s
    "test_examples.py",  # 22 s
    "test_cluster.py",  # 21 s, and waits: processes for each other
    "test_cli_process.py",  # 20 s: processes, each of which imports torch
    "test_replay.py",  # 20 s
    "test_gguf_model.py",  # 20 s
    "test_library.py",  # 20 s: mypy over the wheel and torch
    "test_serve_page.py",  # 28 s, where there is a browser
    "test_draft_weights.py",  # 16 s
    "test_tune.py",  # 16 s
    "test_executors.py",  # 15 s
    "test_greedy_head.py",  # 15 s
    "test_attn_warpgroups.py",  # 15 s
    "test_tuning_db_migration.py",  # 14 s: a server
    "test_serve_process.py",  # 14 s, and waits: servers of the tiny checkpoint
    "test_serve_replicas.py",  # 12 s, and waits: a server of two engines
    "test_warpgroup_bodies.py",  # 13 s: NVRTC, 12 large ones
    "test_doctor.py",  # 12 s
    "test_step.py",  # 12 s
    "test_shipping.py",  # 11 s
    "test_step_plan.py",  # 11 s: a second process
    "test_decode_layers.py",  # 11 s
    "test_cli_exit_codes.py",  # 10 s: processes
    "test_merge.py",  # 10 s, and waits for a server's disk
    "test_docs.py",  # 10 s
    "test_gguf_container.py",  # 10 s: 10,000 files
    "test_bundle.py",  # 10 s
    "test_library_ops.py",  # 10 s
)


# What takes long and what few changes break, in `make test-slow` alone. Seconds are of a worker of three on two cores.
SLOW = (
    *(
        f"test_attn_decode_on_cpu.py::test_keys_are_multiplied_and_stored[{case}"  # 15 s
        for case in ("d512-fp16-int3", "d512-fp16-shared_int", "d256-fp16-int3", "d512-bf16-shared_int3-sm80")
    ),
    *(
        f"test_attn_decode_on_cpu.py::test_keys_are_multiplied_and_stored[{case}"  # 90 s
        for case in (
            "d128-bf16-int3",
            "d256-fp16-int4",
            "d512-bf16-fp8",
            "d512-bf16-int3",
            "d512-bf16-shared_int3-sm90",
            "d512-fp16-fp8-q",
            "d512-fp16-fp8-sm70",
            "d512-fp16-int4-raw_q",
            "d512-fp16-int4-qk-rows80",
            "d512-qkv-group8-q12",
            "d256-fp16-not-causal",
            "shared_int3-raw_q",
        )
    ),
    "test_centroid_head.py::test_sums_of_the_cases_are_exact_in_any_order",  # 13 s
    *(
        f"test_decode_attention_on_cpu.py::test_attention_is_the_references[{case}"  # 8 s
        for case in ("f-shared_int4_333", "f-shared_int4_257", "f-int4_333", "f-int4_1-", "F-shared_int4", "F-int4")
    ),
    "test_cli_exit_codes.py::test_a_kernel_that_does_not_compile_fails_the_command",  # 16 s
    *(f"test_cli_examples.py::test_the_example_runs[{command}]" for command in ("db export", "doctor")),  # 40 s
    "test_cluster_examples.py::test_the_local_one_tunes",  # 10 s
    "test_dflash.py::test_kernels_draft_what_torch_does[stored-int8]",  # 10 s
    "test_docs.py::test_the_guide_is_what_kernel_new_makes",  # 38 s
    "test_doctor.py::test_a_models_problems_are_counted_by_who_chose_for_them[H200-exact device]",  # 18 s
    "test_doctor.py::test_what_was_measured_on_a_board_of_its_kind_is_the_same_arch",  # 14 s
    "test_doctor.py::test_a_models_problems_are_counted_by_who_chose_for_them[H100-default]",  # 10 s
    *(
        f"test_draft_weights.py::test_its_steps_ask_for_int4_products[{arch}-gemma-4-{model}]"  # 21 s
        for arch in ("sm70", "sm90")
        for model in ("12b", "26b-a4b", "e4b")
    ),
    *(
        f"test_draft_weights.py::test_its_steps_ask_for_int4_products[{m}]"  # 80 s
        for m in ("sm70-gemma-4-31b", "sm70-gemma-4-e2b", "sm90-gemma-4-31b", "sm90-gemma-4-e2b")
    ),
    "test_eight_ranks.py",  # 60 s: eight processes
    "test_engine_batches.py::test_what_is_reproducible_does_not_depend_on_company[3-1]",  # 11 s
    "test_everyday.py::test_torchs_threads_sleep_while_they_wait",  # 5 s
    "test_examples.py::test_the_training_script_runs_anywhere",  # 14 s
    "test_exchange_best_on_cpu.py::test_two_phases_are_enough_and_one_is_not",  # 10 s
    "test_exchange_on_cpu.py::test_two_phases_are_enough_and_one_is_not",  # 10 s
    *(
        f"test_executors.py::test_the_kernel_path_gives_the_oracles_tokens[{of}-7]"
        for of in ("dense_centroids", "k_eq_v")
    ),
    "test_gguf_container.py::test_mutated_files_are_read_or_refused",  # 14 s
    *(
        f"test_kernel_folders.py::test_every_case_builds_within_the_limits[{arch}-"  # 150 s
        for arch in ("sm75", "sm80", "sm86", "sm89", "sm100", "sm120")
    ),
    *(
        f"test_kernel_folders.py::test_every_case_builds_within_the_limits[sm70-{kernel}"  # 60 s
        for kernel in ("attn_decode", "moe_w4a16", "w4a16_gemm", "greedy_head", "embed", "draft_inputs")
    ),
    *(
        f"test_w4_formats.py::test_products_are_the_references[{run}"  # 40 s
        for run in (
            *(f"sm80---{n}]" for n in (4, 5, 6, 7, 8, 9, 12, 13, 14, 15, 16)),
            "sm70-",
            "sm75-",
            "sm90---0]",
            "sm90---2]",
        )
    ),
    "test_kernel_folders.py::test_every_case_builds_within_the_limits[sm90-decode_layers]",  # 32 s
    "test_kernel_folders.py::test_every_case_builds_within_the_limits[sm70-decode_layers]",  # 9 s
    "test_kernel_folders.py::test_inputs_name_every_argument_and_poison_every_output[decode_layers]",  # 18 s
    "test_kernel_folders.py::test_what_is_compiled_leaves_no_value_out[decode_layers]",  # 10 s
    *(
        f"test_kv_formats.py::test_tokens_do_not_depend_on_drafts_chunks_or_kept_prefixes[{kept}]"  # 60 s
        for kept in ("auto-shared", "int4-apart", "int4-shared", "int3-apart", "int3-shared", "fp8-apart")
    ),
    "test_library.py::test_the_page_runs_as_it_stands",  # 20 s
    "test_moe_w4a16.py::test_products_are_the_references[sm70-",  # 4 s
    *(f"test_library.py::test_dtypes_that_nobody_set_are_the_archs[problem{n}-" for n in (2, 3)),  # 44 s
    "test_library.py::test_the_wheel_carries_its_types",  # 16 s
    "test_media_end_to_end.py::test_an_image_that_a_model_cannot_embed_ends_no_server[divided]",  # 14 s
    "test_merge.py::test_any_order_any_number_of_times",  # 13 s
    "test_prebuilt.py::test_carried_rows_are_written_but_for_what_was_measured",  # 19 s
    *(
        f"test_prebuilt.py::test_what_is_predicted_or_carried_holds_today[{device}]"  # 52 s
        for device in ("A100", "B200", "H100", "H200", "L4", "RTX3090", "RTX4090", "RTX5090")
    ),
    "test_reader.py::test_a_file_and_its_rows_say_the_same",  # 9 s
    "test_release.py::test_what_is_shipped_can_be_compiled_ahead",  # 14 s
    "test_replay.py::test_on_an_h200_what_is_learned_finds_the_best",  # 15 s
    "test_report_browser.py::test_it_can_be_read[phone",  # 5 s
    "test_report_browser.py::test_it_can_be_read[desk-dark]",  # 3 s
    "test_results_file.py::test_what_is_written_is_read_back",  # 9 s
    "test_rough_ends.py::test_a_hundred_slow_readers_and_an_end_on_sigterm",  # 15 s
    "test_sealed.py::test_every_flipped_byte_is_found_and_no_other_row_is_served",  # 13 s
    "test_serve_fuzz.py::test_every_request_has_an_answer[2]",  # 4 s
    "test_serve_fuzz.py::test_every_request_has_an_answer[3]",  # 4 s
    "test_serve_guided.py::test_a_grammar_that_takes_too_much_memory_is_refused",  # 13 s
    "test_serve_hostile.py::test_answers_that_nobody_reads_have_an_end_together",  # 30 s
    *(
        f"test_serve_memory.py::test_what_is_asked_takes_no_more_memory_than_is_stated[{kind}]"  # 80 s
        for kind in ("bodies", "choices", "grammars", "lists", "templates", "values")
    ),
    "test_serve_media.py::test_no_part_is_too_odd_for_an_answer",  # 12 s
    "test_serve_output.py::test_tools_that_grow_without_bound_are_refused",  # 12 s
    "test_serve_output.py::test_what_the_template_writes_is_read_back",  # 10 s
    "test_several_drafters.py::test_whoever_drafts_no_token_changes[0]",  # 10 s
    "test_shipped.py::test_64_processes_at_once_make_it_once",  # 11 s
    "test_soak.py::test_every_answer_is_the_one_that_its_request_gets_alone[as is]",  # 12 s
    "test_soak.py::test_every_answer_is_the_one_that_its_request_gets_alone[reproducible]",  # 15 s
    "test_soak.py::test_the_command_on_a_divided_model",  # 21 s
    "test_soak.py::test_the_command_on_the_tiny_model[generated]",  # 9 s
    "test_space.py::test_the_largest_space_is_known_whole",  # 18 s
    "test_step_plan.py::test_another_process_makes_the_same_tokens_of_the_plans",  # 18 s
    *(
        f"test_tensor_parallel.py::test_a_divided_model_makes_one_ranks_tokens[{of}]"  # 22 s
        for of in ("3-dense", "4-dense", "4-k_eq_v", "4-moe")
    ),
    *(f"test_tensor_parallel.py::test_a_dflash_drafter_drafts_alike_on_all_ranks[{of}" for of in ("3-", "4-t")),  # 10 s
    "test_tensor_parallel.py::test_every_rank_embeds_what_it_needs[4]",  # 8 s
    "test_tensor_parallel_cli.py::test_a_server_starts_a_divided_model_again_whose_rank_has_died",  # 12 s
    "test_tensor_parallel_cli.py::test_doctor_knows_the_problems_of_uneven_ranks",  # 9 s
    "test_tensor_parallel_ends.py::test_a_rank_that_hangs_ends_the_group[stuck]",  # 5 s
    "test_tensor_parallel_ends.py::test_rank_0_does_not_stay_in_a_library_that_waits_for_a_dead_rank[idle]",  # 10 s
    "test_torture.py::test_64_writers_lose_nothing",  # 19 s
    "test_tuning_db_damage.py::test_flipped_bits_never_raise_past_lookup",  # 9 s
    "test_tune_cli.py::test_every_problem_of_the_31b_gets_a_v100_cubin",  # 15 s
    "test_warpgroup_bodies.py",  # 24 s: NVRTC, 12 large ones
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: turn for turn, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(FIRST)))
    for item in items:
        if f"{item.path.name}::{item.nodeid.partition('::')[2]}".startswith(SLOW):
            item.add_marker(pytest.mark.slow)
