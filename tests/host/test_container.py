"""The Dockerfile, and examples/serving/compose: their form, and that what they name is there. No engine is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import ROOT
from test_docs import _why_wrong

COMPOSE = ROOT / "examples" / "serving" / "compose"


def dockerfile() -> list[tuple[str, str]]:
    """Its instructions, (word, the rest on one line), without comments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def final_stage() -> list[tuple[str, str]]:
    said = dockerfile()
    return said[max(n for n, (word, _) in enumerate(said) if word == "FROM") :]


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    return found


def test_the_image_runs_as_nobody_special_and_says_whether_it_is_well() -> None:
    known = {
        "ARG",
        "FROM",
        "RUN",
        "ENV",
        "WORKDIR",
        "COPY",
        "USER",
        "VOLUME",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    assert {word for word, _ in dockerfile()} <= known | {"CMD"}
    (image,) = [rest for word, rest in dockerfile() if word == "ARG" and rest.startswith("CUDA_IMAGE=")]
    assert re.fullmatch(r"CUDA_IMAGE=nvidia/cuda:12\.9\.\d+-runtime-\w+[\d.]+", image), (
        "NVRTC 12.9 builds sm70 to sm120"
    )
    stage = final_stage()
    words = [word for word, _ in stage]
    (user,) = [rest for word, rest in stage if word == "USER"]
    assert user not in ("root", "0")
    assert "RUN" not in words[words.index("USER") :]
    check = dict(stage)["HEALTHCHECK"]
    call = json.loads(check[check.index("CMD ") + 4 :])
    compile(call[-1], "HEALTHCHECK", "exec")
    assert f":{dict(stage)['EXPOSE']}/health" in call[-1]
    assert json.loads(dict(stage)["ENTRYPOINT"]) == ["kerngen"]
    assert _why_wrong(json.loads(dict(stage)["CMD"])) is None


def test_what_the_image_is_made_of_is_there_and_not_ignored() -> None:
    copied = {
        name for word, rest in dockerfile() if word == "COPY" and "--from" not in rest for name in rest.split()[:-1]
    }
    assert copied >= {"kerngen", "runtime", "templates", "tuning_db", "pyproject.toml", "setup.py", "LICENSE"}
    assert not {name for name in copied if not (ROOT / name).exists()}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


@pytest.mark.parametrize("extra", ["cuda12", "serve", "pg"])
def test_the_image_has_what_the_compose_file_asks_of_it(extra: str) -> None:
    (install,) = [rest for word, rest in dockerfile() if word == "RUN" and "'.[" in rest]
    assert extra in install[install.index("'.[") + 3 : install.index("]'")].split(",")


def test_the_services_know_each_other() -> None:
    found = services()
    assert set(found) == {"server", "database", "prometheus", "grafana"}
    server = found["server"]
    assert (COMPOSE / server["build"]).resolve() == ROOT
    assert f"@database/{found['database']['environment']['POSTGRES_DB']}" in server["environment"]["KERNGEN_DB"]
    assert server["environment"]["KERNGEN_DB"].startswith("postgresql+psycopg://kerngen:")
    (scraped,) = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": ["server:8000"]}]
    (source,) = yaml.safe_load((COMPOSE / "datasource.yaml").read_text())["datasources"]
    assert re.fullmatch(r"http://prometheus:\d+", source["url"])
    board = json.loads((COMPOSE.parent / "grafana.json").read_text())
    assert board["templating"]["list"][0]["query"] == source["type"]
    (provider,) = yaml.safe_load((COMPOSE / "dashboards.yaml").read_text())["providers"]
    assert any(f":{provider['options']['path']}/" in mount for mount in found["grafana"]["volumes"])
    for name, service in found.items():
        assert set(service.get("depends_on", ())) <= set(found), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), (
            f"{name}: for this machine alone"
        )
    for name in (n for n, asked in server["depends_on"].items() if asked["condition"] == "service_healthy"):
        assert "healthcheck" in found[name]


def test_what_is_mounted_is_there() -> None:
    volumes = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["volumes"]
    mounts = [m.split(":")[0] for s in services().values() for m in s.get("volumes", ())]
    files = {m for m in mounts if m.startswith(".")}
    assert {m for m in mounts if m not in files} == set(volumes)
    assert all((COMPOSE / m).is_file() for m in files)
    assert {p.name for p in COMPOSE.iterdir()} == {"compose.yaml", *(Path(m).name for m in files)} - {"grafana.json"}


def test_the_server_s_command_is_understood_and_no_password_is_written_down() -> None:
    server = services()["server"]
    command = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in server["command"]]
    assert _why_wrong(command) is None
    assert server["ports"] == [f"127.0.0.1:8000:{command[command.index('--port') + 1]}"]
    environment = [item for s in services().values() for item in s.get("environment", {}).items()]
    secret = {name: value for name, value in environment if re.search("PASSWORD|KEY|TOKEN", name)}
    assert len(secret) == 4
    assert all(re.fullmatch(r"\$\{\w+:[?-].*\}", value) for value in secret.values())
