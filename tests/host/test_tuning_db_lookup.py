"""Looking winners up: who is asked first, what is never served, and what a miss says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from sheets import measured_sheets
from test_tuning_db import H100, H200, OPTIONS, damage

from kerngen.arch import Arch, Device, Target, find_arch, find_device
from kerngen.compiler.compile import Cubin, Resources, cache_key
from kerngen.errors import ProblemError, TuningMiss
from kerngen.templates.kernel import Body, Kernel, fields_of, static_fields
from kerngen.tuning_db import Measurement, Store, Winner, default_stores, lookup, miss_report, problem_key

SM90 = find_arch("sm90")
H20 = replace(H200, name="H20", num_sms=78)
TWIN = replace(H200, name="H200 of another vendor", mem_gbps=4750)
KIN = replace(H200, name="H200 NVL", mem_gbps=4000)


@dataclass(frozen=True)
class Problem:
    head_dim: int = 128
    batch: int = 8
    num_tokens: int = 64

    RUNTIME: ClassVar[tuple[str, ...]] = ("batch", "num_tokens")
    DYNAMIC: ClassVar[str] = "num_tokens"

    def __post_init__(self) -> None:
        if self.head_dim % 64:
            raise ProblemError("head_dim must be a multiple of 64")


@dataclass(frozen=True)
class Config:
    block_n: int = 1


def make_kernel(version: int = 1, largest: int = 1 << 20, revision: int | None = None) -> Kernel:
    """A kernel whose rendered source holds `version`; configurations above `largest` are refused. revision: of its only
    body; None for no body, of which nothing holds but its very source.
    """
    spec = ModuleType("toy_spec")
    spec.BODIES = () if revision is None else (Body("", {}, {}, revision=revision),)  # type: ignore[attr-defined]
    spec.Problem, spec.Config, spec.version = Problem, Config, version  # type: ignore[attr-defined]
    spec.default_config = lambda problem, arch: Config()  # type: ignore[attr-defined]
    spec.why_invalid = (  # type: ignore[attr-defined]
        lambda p, c, arch: f"block_n {c.block_n} is above {largest}" if c.block_n > largest else None
    )
    return Kernel("toy", spec)


def fake_render(kernel: Kernel, problem: Any, config: Any, arch: Arch) -> str:
    return f"{kernel.spec.version} {static_fields(problem)} {fields_of(config)} {arch}"


@pytest.fixture(autouse=True)
def _renders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kerngen.compiler.render.source_of", fake_render)
    monkeypatch.setattr(
        "kerngen.compiler.source_digest.source_digest_of", lambda kernel: f"closure of version {kernel.spec.version}"
    )


@pytest.fixture
def kernel() -> Kernel:
    return make_kernel()


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[Store]]:
    """An override store, the user's and a prebuilt one, in this order."""
    names = ("override", "user", "prebuilt")
    opened = [Store.open(tmp_path / f"{n}.db", name=n, override=n == "override") for n in names]
    yield opened
    for s in opened:
        s.close()


def record(
    store: Store,
    kernel: Kernel,
    block_n: int,
    us: float,
    *,
    problem: Problem = Problem(),
    device: Device = H200,
    provenance: str = "measured",
    arch: Arch = SM90,
    keep_image: bool = True,
    options: tuple[str, ...] = OPTIONS,
    image: bytes = b"",
) -> str:
    """One trial, and the winners chosen anew: the id of its build. image: else one of configuration and version."""
    config = Config(block_n)
    source = fake_render(kernel, problem, config, arch)
    key = cache_key(source, arch.nvrtc_target, options, (12, 9))
    version = kernel.spec.version  # type: ignore[attr-defined]
    image = image or f"code {block_n}{'' if version == 1 else f' of {version}'}".encode() * 99
    cubin = Cubin(key, arch.name, (12, 9), image, {"toy": Resources(32, 0, 0, 0, 0)}, "")
    static = static_fields(problem)
    build = store.add_build(cubin, "toy", source, fields_of(config), static, options=options, keep_image=keep_image)
    said: dict[str, Any] = {"measured": {"error_abs": 0.0, "p50_us": us}, "carried": {"reason": "steps on it"},
                            "predicted": {"model": "roofline-1", "p50_us": us}}[provenance]  # fmt: skip
    filed = problem_key(kernel, problem)
    store.add_measurement(Measurement(filed, arch.name, device, fields_of(config), build, "ok", provenance, **said))
    store.recompute_winners(kernel, filed.static_key, Target(arch, device))
    return build


def ask(stores: list[Store], kernel: Kernel, problem: Problem = Problem(), device: Device = H200) -> Winner | None:
    return lookup(stores, kernel, problem, Target.of(device))


def test_a_hit_brings_its_cubin_and_says_who_spoke(stores: list[Store], kernel: Kernel) -> None:
    assert ask(stores, kernel) is None
    record(stores[1], kernel, 32, 10.0)
    found = ask(stores, kernel)
    assert (found.config, found.source, found.latency_us) == ({"block_n": 32}, "user: exact device", 10.0)
    assert found.cubin.image == b"code 32" * 99
    assert not found.stale


def test_the_order_of_asking(stores: list[Store], kernel: Kernel) -> None:
    """Filled from the last to be asked to the first: each new one must speak instead of those before."""
    override, user, prebuilt = stores

    def now(source: str) -> None:
        found = ask(stores, kernel)
        assert found.source == source

    record(prebuilt, make_kernel(version=0), 1, 1.0, device=KIN)
    now("prebuilt: measured on H200 NVL, the same arch, on an older source")
    record(prebuilt, kernel, 2, 1.0, device=KIN, provenance="predicted")
    now("prebuilt: predicted for H200 NVL")
    record(user, kernel, 2, 1.0, device=KIN, provenance="predicted")
    now("user: predicted for H200 NVL")  # of two stores the first
    record(prebuilt, kernel, 12, 1.0, device=KIN, provenance="carried")
    now("prebuilt: carried, of H200 NVL")
    record(prebuilt, kernel, 3, 1.0, device=KIN)
    now("prebuilt: measured on H200 NVL, the same arch")
    record(prebuilt, kernel, 4, 1.0, device=H200, provenance="predicted")
    now("prebuilt: predicted for H200")
    record(user, kernel, 5, 1.0, device=TWIN, provenance="predicted")
    now("user: predicted for H200 of another vendor")
    record(prebuilt, kernel, 11, 1.0, device=TWIN, provenance="carried")
    now("prebuilt: carried, of H200 of another vendor")
    record(user, kernel, 12, 1.0, provenance="carried")
    now("user: carried, of H200")
    record(prebuilt, kernel, 6, 1.0, device=TWIN)
    now("prebuilt: measured on H200 of another vendor, the same arch")
    record(prebuilt, kernel, 6, 99.0)
    now("prebuilt: exact device")
    record(user, kernel, 7, 98.0)
    now("user: exact device")
    record(override, kernel, 8, 500.0, device=H20, provenance="predicted")
    now("override: predicted for H20")  # whatever it has
    record(override, kernel, 9, 500.0, device=KIN, provenance="predicted")
    now("override: predicted for H200 NVL")  # the nearest that it has


A100, A100_40 = find_device("A100"), find_device("A100-40")
SLICE = replace(H200, name="H200 MIG 1g.18gb", num_sms=16, mem_gib=16)


@pytest.mark.parametrize(("tuned_on", "asked_on", "provenance", "how"), [
    (A100, A100, "measured", "exact device"),
    (A100, A100_40, "measured", "measured on A100, the same arch"),
    (A100_40, A100, "predicted", "predicted for A100-40"),
    (replace(A100_40, name="A100"), A100, "measured", "measured on A100, the same arch"),  # an older kerngen's name
    (replace(A100, mem_gbps=2000), A100, "measured", "exact device"),  # as a driver reports it
    (H100, H200, "measured", None),
    (H200, H100, "predicted", None),
    (H200, SLICE, "measured", None),
    (SLICE, H200, "measured", None),
    (SLICE, SLICE, "measured", "exact device"),
    (SLICE, replace(SLICE, name="H200 MIG 2g.35gb", num_sms=32, mem_gib=33), "measured", None),
    (H200, replace(H200, mem_gbps=0), "measured", None),  # who knows
], ids=lambda v: v if isinstance(v, str | None) else f"{v.name} {v.mem_gbps:.0f}")  # fmt: skip
def test_what_holds_on_another_board(
    stores: list[Store], kernel: Kernel, tuned_on: Device, asked_on: Device, provenance: str, how: str | None
) -> None:
    """A default is better than what was tuned for a board that is far from this one."""
    record(stores[1], kernel, 32, 10.0, device=tuned_on, provenance=provenance, arch=find_arch(tuned_on.arch))
    found = ask(stores, kernel, device=asked_on)
    assert (found and found.source) == (how and f"user: {how}")


def test_another_arch_never_answers(stores: list[Store], kernel: Kernel) -> None:
    record(stores[1], kernel, 32, 10.0, arch=find_arch("sm80"), device=find_device("A100"))
    record(stores[1], kernel, 32, 10.0, arch=find_arch("sm80"), device=H200)  # sm80's body on an H200
    assert ask(stores, kernel) is None
    assert lookup(stores, kernel, Problem(), Target.of(find_device("A100-PCIe"))) is not None


@pytest.mark.parametrize(
    ("tokens", "served_by"),
    [(1, None), (7, None), (8, 8), (9, 16), (16, 16), (17, 64), (64, 64), (65, None), (1 << 20, None)],
)
def test_points_serve_intervals_and_nothing_beyond(
    stores: list[Store], kernel: Kernel, tokens: int, served_by: int | None
) -> None:
    for point in (64, 8, 16):
        record(stores[1], kernel, point, float(point), problem=Problem(num_tokens=point))
    found = ask(stores, kernel, Problem(num_tokens=tokens))
    assert (found.config["block_n"] if found else None) == served_by


def test_points_of_two_devices_are_not_one_interval(stores: list[Store], kernel: Kernel) -> None:
    record(stores[1], kernel, 1, 1.0, problem=Problem(num_tokens=8))
    record(stores[1], kernel, 2, 1.0, problem=Problem(num_tokens=64), device=KIN)
    assert ask(stores, kernel, Problem(num_tokens=16)) is None
    assert ask(stores, kernel, Problem(num_tokens=64), device=KIN) is not None


@pytest.mark.parametrize(("batch", "hits"), [(4, False), (5, True), (8, True), (9, False)])
def test_batch_is_bucketed_to_powers_of_two(stores: list[Store], kernel: Kernel, batch: int, hits: bool) -> None:
    record(stores[1], kernel, 32, 10.0, problem=Problem(batch=8))
    assert (ask(stores, kernel, Problem(batch=batch)) is not None) == hits


@dataclass(frozen=True)
class FinerProblem(Problem):
    FINER: ClassVar[tuple[str, ...]] = ("batch",)


@pytest.mark.parametrize(
    ("batch", "served_by"),
    [(72, 80), (73, 80), (80, 80), (81, 128), (88, 128), (128, 128), (64, None), (136, None)],
)
def test_a_finer_bucket_is_asked_before_those_above_it(stores: list[Store], batch: int, served_by: int | None) -> None:
    """Up to the next power of two: what is tuned there alone serves as it did before there were finer ones."""
    kernel = make_kernel()
    kernel.spec.Problem = FinerProblem  # type: ignore[attr-defined]
    for at in (128, 80):
        record(stores[1], kernel, at, 10.0, problem=FinerProblem(batch=at))
    found = ask(stores, kernel, FinerProblem(batch=batch))
    assert (found.config["block_n"] if found else None) == served_by


def test_between_two_measured_points_the_nearest_carried_one_serves(stores: list[Store], kernel: Kernel) -> None:
    """What was chosen for 96 tokens is nearer to 90 than what was measured at 512, whichever databases they are in. At
    one size what is measured comes first, and a user's own.
    """
    _, user, prebuilt = stores
    for at, how in ((64, "measured"), (96, "carried"), (128, "carried"), (512, "measured"), (640, "carried")):
        record(prebuilt, kernel, at + (how == "carried"), 10.0, problem=Problem(num_tokens=at), provenance=how)
    record(prebuilt, kernel, 3, 10.0, problem=Problem(num_tokens=100), device=TWIN, provenance="carried")

    def served(num_tokens: int) -> int | None:
        found = ask(stores, kernel, Problem(num_tokens=num_tokens))
        return None if found is None else int(found.config["block_n"])

    sizes = (63, 64, 65, 96, 97, 128, 129, 512, 513, 641)
    assert [served(n) for n in sizes] == [None, 64, 97, 97, 129, 129, 512, 512, 641, None]
    for at in (32, 96, 256, 512):
        record(user, kernel, at + 2, 10.0, problem=Problem(num_tokens=at))
    assert [served(n) for n in sizes] == [64, 64, 98, 98, 129, 129, 258, 514, 641, None]


def test_what_was_measured_serves_no_size_out_of_its_reach(
    stores: list[Store], kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tune that was cut short has 64 tokens and 2,048: what won there is no answer for 80."""
    monkeypatch.setattr(Problem, "REACH", 2, raising=False)
    _, user, prebuilt = stores
    for at in (64, 2048):
        record(user, kernel, at, 10.0, problem=Problem(num_tokens=at))

    def served(num_tokens: int) -> int | None:
        found = ask(stores, kernel, Problem(num_tokens=num_tokens))
        return None if found is None else int(found.config["block_n"])

    sizes = (64, 65, 80, 1023, 1024, 2048, 2049)
    assert [served(n) for n in sizes] == [64, None, None, None, 2048, 2048, None]
    record(prebuilt, kernel, 256, 10.0, problem=Problem(num_tokens=256))
    assert [served(n) for n in (80, 127, 128, 256, 512)] == [None, None, None, 256, None]
    record(prebuilt, kernel, 1024, 10.0, problem=Problem(num_tokens=1024), provenance="carried")
    assert [served(n) for n in (64, 80, 256, 257, 1024, 1025)] == [64, None, 256, 1024, 1024, 2048]


def test_what_is_carried_serves_its_own_bucket_alone(stores: list[Store]) -> None:
    """It was chosen for that batch; of 7 sequences a default knows better than what was chosen for 8."""
    kernel = make_kernel()
    kernel.spec.Problem = FinerProblem  # type: ignore[attr-defined]
    record(stores[1], kernel, 8, 10.0, problem=FinerProblem(batch=8), provenance="carried")
    found = ask(stores, kernel, FinerProblem(batch=8))
    assert (found.provenance, found.latency_us, found.reason) == ("carried", None, "carried: steps on it")
    assert ask(stores, kernel, FinerProblem(batch=7)) is None
    record(stores[2], kernel, 9, 10.0, problem=FinerProblem(batch=8))
    assert ask(stores, kernel, FinerProblem(batch=7)).config == {"block_n": 9}


def test_a_power_of_two_is_filed_alike_in_finer_buckets() -> None:
    kernel, finer = make_kernel(), make_kernel()
    finer.spec.Problem = FinerProblem  # type: ignore[attr-defined]
    keys = [(problem_key(kernel, Problem(batch=n)).id, problem_key(finer, FinerProblem(batch=n)).id)
            for n in (1, 2, 8, 80, 128)]  # fmt: skip
    assert [a == b for a, b in keys] == [True, True, True, False, True]


def test_a_spec_may_bucket_in_its_own_way(stores: list[Store]) -> None:
    kernel = make_kernel()
    kernel.spec.bucket = lambda problem: {"many": problem.batch > 4}  # type: ignore[attr-defined]
    record(stores[1], kernel, 32, 10.0, problem=Problem(batch=8))
    assert ask(stores, kernel, Problem(batch=100)) is not None
    assert ask(stores, kernel, Problem(batch=4)) is None


def test_a_corrupt_cubin_is_named_and_the_next_is_served(
    stores: list[Store], kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    build = record(stores[1], kernel, 32, 10.0)
    record(stores[2], kernel, 16, 20.0)
    damage(Path(stores[1].where), "UPDATE artifact SET blob = zeroblob(50)")
    found = ask(stores, kernel)
    assert found.source == "prebuilt: exact device"
    assert build in caplog.text


def test_a_corrupt_winner_row_is_skipped(stores: list[Store], kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    record(stores[1], kernel, 32, 10.0)
    damage(Path(stores[1].where), "UPDATE problem SET static = '{}'")
    assert ask(stores, kernel) is None
    assert "skipped" in caplog.text


def test_a_store_that_breaks_is_skipped(stores: list[Store], kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    record(stores[2], kernel, 16, 20.0)
    damage(Path(stores[1].where), "DELETE FROM kerngen_alembic")
    with closing(__import__("sqlite3").connect(stores[1].where)) as c:
        c.execute("DROP TABLE winner")
    found = ask(stores, kernel)
    assert found is not None
    assert stores[1].where in caplog.text
    assert "unreadable" in miss_report(stores, kernel, Problem(head_dim=64), Target.of(H200))


def test_revoked_in_one_store_is_revoked_in_all(
    stores: list[Store], kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    build = record(stores[2], kernel, 32, 10.0)
    stores[1].revoke(build, "hangs on driver 580.1")
    assert ask(stores, kernel) is None
    assert "revoked" in caplog.text


def test_a_configuration_that_no_longer_runs_is_skipped(
    stores: list[Store], kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    record(stores[1], kernel, 32, 10.0)
    assert ask(stores, make_kernel(largest=16)) is None
    assert "block_n 32 is above 16" in caplog.text


def test_a_stale_winner_gives_its_configuration_alone(stores: list[Store], kernel: Kernel) -> None:
    record(stores[1], kernel, 32, 10.0)
    found = ask(stores, make_kernel(version=2))
    assert (found.config, found.cubin, found.stale) == ({"block_n": 32}, None, True)


def test_an_image_that_was_not_kept(stores: list[Store], kernel: Kernel) -> None:
    record(stores[1], kernel, 32, 10.0, keep_image=False)
    found = ask(stores, kernel)
    assert (found.cubin, found.stale) == (None, False)


def test_a_miss_names_the_nearest_and_what_differs(stores: list[Store], kernel: Kernel) -> None:
    record(stores[1], kernel, 32, 10.0, problem=Problem(head_dim=256))
    record(stores[1], kernel, 32, 10.0, problem=Problem(head_dim=512, batch=1))
    with pytest.raises(TuningMiss) as caught:
        lookup(stores, kernel, Problem(head_dim=128), Target.of(H200), strict=True)
    text = str(caught.value)
    assert "no record for toy[head_dim=128 batch=8 num_tokens=64] on sm90 (H200)" in text
    assert "user (2 of toy)" in text
    assert "head_dim 256 there, 128 asked" in text
    assert text.index("head_dim 256") < text.index("head_dim 512")
    assert "kerngen tune --arch sm90" in text


def test_the_default_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KERNGEN_DB", str(tmp_path / "user.db"))
    monkeypatch.setenv("KERNGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("kerngen.tuning_db.read.places.PREBUILT", tmp_path / "none")
    assert default_stores() == []
    monkeypatch.setattr("kerngen.tuning_db.read.places.PREBUILT", measured_sheets(tmp_path / "prebuilt"))
    Store.open(tmp_path / "user.db").close()
    Store.open(tmp_path / "made.db").close()
    monkeypatch.setattr(  # sources are played here: test_shipped.py has what is made of sheets
        "kerngen.tuning_db.shipped.open_store",
        lambda board: Store.open(tmp_path / "made.db", read_only=True, name=f"prebuilt {board.name}"),
    )
    (tmp_path / "junk").write_text("not a database")
    monkeypatch.setenv("KERNGEN_DB_OVERRIDE", str(tmp_path / "junk"))
    found = default_stores()
    assert [(s.name, s.read_only) for s in found] == [("user", True), ("prebuilt H200", True)]
    assert "junk" in caplog.text
    for s in found:
        s.close()
