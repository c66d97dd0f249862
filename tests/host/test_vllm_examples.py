"""examples/vllm and docs/vllm.md: their form, and that what they name is there. No container is built."""

from __future__ import annotations

import re

import yaml
from command import ROOT

from kerngen.vllm import PARTS
from kerngen.vllm.plugin import chosen_parts, release_of

EXAMPLES = ROOT / "examples" / "vllm"


def test_the_examples_name_what_there_is() -> None:
    """Files, releases and variables: what Kubernetes and Docker are told stands nowhere else to be checked."""
    said = {path.name: path.read_text() for path in EXAMPLES.iterdir()}
    told = re.findall(r"^\| \[(\S+)\]\(\1\)", said["README.md"], re.MULTILINE)
    assert {*told, "README.md"} == set(said)
    served = {release for part in PARTS.values() for release in part.releases}
    assert {release_of(v) for v in re.findall(r"vllm-openai:v(\S+)", said["Dockerfile"])} <= served
    for line in re.findall(r"^COPY (.*) \S+$", said["Dockerfile"], re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()), line
    known = "".join(path.read_text() for tree in ("kerngen", "tuning_db") for path in (ROOT / tree).rglob("*.py"))
    variables = set(re.findall(r"\bKERNGEN_[A-Z_]*[A-Z]\b", "".join(said.values())))
    assert len(variables) > 3
    assert [name for name in variables if f'"{name}"' not in known] == []
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert {f"| `{name}` |" for name in PARTS} == set(re.findall(r"^\| `\w+` \|(?= 0)", page, re.MULTILINE))


def test_the_manifest_is_whole() -> None:
    claim, deployment, service = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    assert [d["kind"] for d in (claim, deployment, service)] == ["PersistentVolumeClaim", "Deployment", "Service"]
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    (container,) = pod["spec"]["containers"]
    volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
    assert {m["name"] for m in container["volumeMounts"]} == set(volumes)
    assert volumes["kerngen"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    mounted = [m["mountPath"] for m in container["volumeMounts"]]
    values = {e["name"]: e["value"] for e in container["env"]}
    assert all(any(v.startswith(f"{m}") for m in mounted) for v in values.values() if v.startswith("/"))
    assert chosen_parts(values["KERNGEN_VLLM"]) == ["linear"]
    assert int(container["args"][-1]) == container["resources"]["limits"]["nvidia.com/gpu"]
    ports = {p["containerPort"] for p in container["ports"]}
    assert {container["readinessProbe"]["httpGet"]["port"], service["spec"]["ports"][0]["targetPort"]} == ports
