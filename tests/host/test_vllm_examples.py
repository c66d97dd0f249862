"""examples/vllm and the pages on vLLM: their form, and that what they name is there. No container is built."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import yaml
from command import ROOT

from kerngen.vllm import PARTS
from kerngen.vllm.plugin import LEFT, chosen_parts, release_of

EXAMPLES = ROOT / "examples" / "vllm"
ALWAYS = "Enters", "Serves", "Refuses", "Numbers", "Logs"  # what is said of each part, in this order
PAGE, PARTS_PAGE = (ROOT / "docs" / name for name in ("vllm.md", "vllm-parts.md"))


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


def test_the_pages_have_each_part_in_one_order() -> None:
    page, parts_page = PAGE.read_text(), PARTS_PAGE.read_text()
    assert re.findall(r"^\| `(\w+)` \|(?= 0)", page, re.MULTILINE) == list(PARTS)
    assert re.findall(r"^## `(\w+)`$", parts_page, re.MULTILINE) == list(PARTS)
    for section in parts_page.split("\n## ")[1:]:
        leads = re.findall(r"^- \*\*(\w+)", section, re.MULTILINE)
        assert [lead for lead in leads if lead in ALWAYS] == list(ALWAYS), section.splitlines()[0]


def test_the_pages_have_each_line_that_is_logged() -> None:
    pages = PAGE.read_text() + PARTS_PAGE.read_text()
    served = ", ".join(f"{part.serves} ({name})" for name, part in PARTS.items())
    assert f": serves {served}; {LEFT}\n" in pages
    lines = [line for path in sorted((ROOT / "kerngen" / "vllm").glob("*.py")) for line in logged(path.read_text())]
    assert len(lines) > 10
    assert [line for line in lines if re.search(line, pages) is None] == []


def test_logged_lines_are_found() -> None:
    source = 'log.info("kerngen: %d of %s (a)", 1, x)\nsay_once(INFO, f"kerngen {v}: b {c}")\nlog.info(text)'
    assert list(logged(source)) == [r".*\ of\ .*\ \(a\)", r"b\ .*"]


def logged(source: str) -> Iterator[str]:
    """A pattern of each line that a module logs, without the name and the version that it begins with."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) in ("log.info", "log.warning", "say_once", "_nothing"):
            text = next((arg for arg in call.args if isinstance(arg, ast.Constant | ast.JoinedStr)), None)
            if text is not None:
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                whole = "".join(str(p.value) if isinstance(p, ast.Constant) else "%s" for p in parts)
                told = re.sub(r"^kerngen[^:]*: ", "", whole)
                yield ".*".join(map(re.escape, re.split(r"%[\d.]*[sdf]", told)))


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
    assert chosen_parts(values.get("KERNGEN_VLLM")) == list(PARTS)
    assert int(container["args"][-1]) == container["resources"]["limits"]["nvidia.com/gpu"]
    ports = {p["containerPort"] for p in container["ports"]}
    assert {container["readinessProbe"]["httpGet"]["port"], service["spec"]["ports"][0]["targetPort"]} == ports
