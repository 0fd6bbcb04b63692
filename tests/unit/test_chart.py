"""The Helm chart renders the objects of docker/kubernetes.yaml, and its values reach the fields that they name.

Where helm is installed, it renders the chart, and `helm lint` must pass. Elsewhere `render` replaces it, which knows
the few template actions that the chart uses, and refuses all others.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from noloco_p2p._version import __version__

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "docker" / "chart"
ACTION = re.compile(r"(\s*)\{\{(-?) (.+?) \}\}")
PIPE = re.compile(r"toYaml \.Values\.(\w+) \| nindent (\d+)")
VALUE = re.compile(r"\.Values\.(\w+)( \| quote)?")
Objects = list[dict[str, Any]]
CHANGES = {
    "replicas": 7,
    "image": "ghcr.io/lab/noloco@sha256:ab",
    "ticketSecret": "run7",
    "flags": ["--max-upload", "40mbit"],
    "env": [{"name": "NOLOCO_DATA", "value": "c4=/data/*.json.gz"}],
    "data": {"persistentVolumeClaim": {"claimName": "c4"}},
    "metricsPort": 9999,
    "resources": {"limits": {"amd.com/gpu": 2}},
    "storage": "9Gi",
    "storageClass": "fast",
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "amd.com/gpu", "operator": "Exists"}],
}


def defaults() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def render(values: dict[str, Any], *, release: str) -> Objects:
    """Return the objects that `helm template RELEASE CHART` would print; AssertionError for an unknown action."""
    text = (CHART / "templates" / "peers.yaml").read_text(encoding="utf-8")
    out, place, shown = [], 0, [True]
    for found in ACTION.finditer(text):
        before = text[place : found.start()] + ("" if found[2] else found[1])
        out += [before] if all(shown) else []
        place, action = found.end(), found[3]
        if action == "end":
            shown.pop()
        elif action.startswith("if .Values."):
            shown.append(bool(values[action.removeprefix("if .Values.")]))
        elif all(shown):
            out.append(_value(action, values, release=release))
    assert shown == [True], "an `if` without its `end`"
    return list(yaml.safe_load_all("".join(out) + text[place:]))


def _value(action: str, values: dict[str, Any], *, release: str) -> str:
    if action == ".Release.Name":
        return release
    if piped := PIPE.fullmatch(action):
        lines = yaml.safe_dump(values[piped[1]]).splitlines()
        return "".join(f"\n{' ' * int(piped[2])}{line}" for line in lines)
    plain = VALUE.fullmatch(action)
    assert plain is not None, f"{action}: not an action that this test can follow"
    return f'"{values[plain[1]]}"' if plain[2] else str(values[plain[1]])


def helm(*arguments: str) -> str:
    done = subprocess.run(["helm", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(CHANGES))
    return path


def test_the_default_values_make_the_manifest() -> None:
    manifest = list(yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text(encoding="utf-8")))
    assert render(defaults(), release="noloco") == manifest


def test_every_value_reaches_its_place() -> None:
    assert CHANGES.keys() == defaults().keys()
    service, peers = render(CHANGES, release="mine")
    spec = peers["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    env = {each["name"]: each for each in container["env"]}
    claim = spec["volumeClaimTemplates"][0]["spec"]
    assert (spec["replicas"], container["image"]) == (7, "ghcr.io/lab/noloco@sha256:ab")
    assert container["args"] == ["join", "$(TICKET)", "--max-upload", "40mbit"]
    assert env["TICKET"]["valueFrom"]["secretKeyRef"]["name"] == "run7"
    assert env["NOLOCO_DATA"]["value"] == "c4=/data/*.json.gz"
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "c4"}} in pod["volumes"]
    assert env["NOLOCO_METRICS"]["value"] == "0.0.0.0:9999"
    assert {"containerPort": 9999} in container["ports"]
    assert {"name": "metrics", "port": 9999} in service["spec"]["ports"]
    assert container["resources"] == {"limits": {"amd.com/gpu": 2}}
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("fast", "9Gi")
    assert (pod["nodeSelector"], pod["tolerations"]) == (CHANGES["nodeSelector"], CHANGES["tolerations"])
    names = {service["metadata"]["name"], peers["metadata"]["name"], spec["serviceName"]}
    labels = (service["spec"]["selector"], spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"])
    assert names == {each["app"] for each in labels} == {"mine"}
    assert ".mine." in env["NOLOCO_ANNOUNCE"]["value"]


def test_helm_agrees(changed: Path) -> None:
    if shutil.which("helm") is None:
        pytest.skip("no helm here; the tests above follow the templates without it")
    helm("lint", "--strict", str(CHART), "--values", str(changed))
    for flags, values in (((), defaults()), (("--values", str(changed)), CHANGES)):
        assert list(yaml.safe_load_all(helm("template", "mine", str(CHART), *flags))) == render(values, release="mine")


def test_the_chart_has_the_version_of_the_program() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == __version__
