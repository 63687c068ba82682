"""The manifest for Kubernetes: every document fits the schemas, and says what the command and the guide say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from bsfg.cli.pipeline.replicate import app
from bsfg.spark.cluster import sealing

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "examples" / "kubernetes" / "pipeline.yaml"
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))
OLDEST, NEWEST = "1.28", kubernetes_validate.latest_version()


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: each["kind"])
def test_it_fits_the_schemas(document: dict[str, Any], version: str) -> None:
    """Strictly, so that a key that Kubernetes does not know is a mistake."""
    kubernetes_validate.validate(document, version, strict=True)


def test_a_mistake_would_be_found() -> None:
    """A key in the wrong place, and a number where a text belongs."""
    for change in ({"replica": 1}, {"replicas": "one"}):
        [deployment] = [each for each in DOCUMENTS if each["kind"] == "Deployment"]
        wrong = {**deployment, "spec": {**deployment["spec"], **change}}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, NEWEST, strict=True)


def driver() -> dict[str, Any]:
    """Give the container of the driver."""
    [deployment] = [each for each in DOCUMENTS if each["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_the_command_is_one_of_ours() -> None:
    """Each option that it gives is one that the command has; the calls of such a master are sealed without a secret."""
    program, group, name, *arguments = driver()["command"]
    assert (program, group, name) == ("bsfg", "pipeline", "replicate")
    get_command(app).make_context(name, list(arguments), resilient_parsing=False)
    [master] = [each.partition("=")[2] for each in arguments if each.startswith("--master=")]
    conf = dict(each.removeprefix("--conf=").partition("=")[::2] for each in arguments if each.startswith("--conf="))
    assert sealing(master, conf)["spark.network.crypto.enabled"] == "true"


def test_its_parts_name_each_other() -> None:
    """One namespace; account, ports and labels are those that the other documents mean; no secret is in it."""
    by_kind = {each["kind"]: each for each in DOCUMENTS}
    assert {each["metadata"]["namespace"] for each in DOCUMENTS} == {"bsfg"}
    pod = by_kind["Deployment"]["spec"]["template"]
    assert pod["spec"]["serviceAccountName"] == by_kind["ServiceAccount"]["metadata"]["name"]
    assert by_kind["RoleBinding"]["roleRef"]["name"] == by_kind["Role"]["metadata"]["name"]
    assert by_kind["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    assert by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    arguments = driver()["command"]
    ports = {each["port"] for each in by_kind["Service"]["spec"]["ports"]}
    assert {f"--conf=spark.driver.port={min(ports)}", f"--conf=spark.driver.blockManager.port={max(ports)}"} <= set(
        arguments
    )
    assert "Secret" not in by_kind
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text(encoding="utf-8")
    for name in (
        "bsfg-zone",
        "bsfg-certificates",
        "registry.example/bsfg:0.2.0",
        "registry.example/spark-python:4.3.0",
    ):
        assert name in guide
        assert name in MANIFEST.read_text(encoding="utf-8")
    assert "was not run on a cluster of Kubernetes" in guide
