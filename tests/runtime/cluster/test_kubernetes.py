"""The manifests of ``KUBERNETES.md`` fit each other, and the options and routes of a server."""

import re
from typing import Any

import pytest
import yaml
from corun.runtime.cli.parser import parse_arguments
from corun.runtime.cli.serve import serve_configs
from corun.runtime.server.route_docs import ROUTE_DOCS
from support.product import ROOT

PAGE = (ROOT / "runtime/cluster/KUBERNETES.md").read_text(encoding="utf-8")
MANIFESTS: list[dict[str, Any]] = [
    manifest
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for manifest in yaml.safe_load_all(block)
]


def of_kind(kind: str) -> dict[str, Any]:
    (manifest,) = [one for one in MANIFESTS if one["kind"] == kind]
    return manifest


@pytest.fixture
def pod() -> dict[str, Any]:
    template: dict[str, Any] = of_kind("Deployment")["spec"]["template"]
    return template


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def test_kinds_are_those_of_their_groups() -> None:
    assert {(one["apiVersion"], one["kind"]) for one in MANIFESTS} == {
        ("apps/v1", "Deployment"),
        ("inference.networking.k8s.io/v1", "InferencePool"),
        ("gateway.networking.k8s.io/v1", "HTTPRoute"),
        ("inference.networking.x-k8s.io/v1alpha1", "EndpointPickerConfig"),
    }


def test_the_pool_has_the_pods_and_the_route_the_pool(pod: dict[str, Any], container: dict[str, Any]) -> None:
    deployment, pool = of_kind("Deployment"), of_kind("InferencePool")
    labels = pod["metadata"]["labels"]
    for selector in (deployment["spec"]["selector"], pool["spec"]["selector"]):
        assert selector["matchLabels"].items() <= labels.items()
    (port,) = container["ports"]
    assert [one["number"] for one in pool["spec"]["targetPorts"]] == [port["containerPort"]]
    (rule,) = of_kind("HTTPRoute")["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    group = pool["apiVersion"].partition("/")[0]
    names = (backend["group"], backend["kind"], backend["name"])
    assert names == (group, pool["kind"], pool["metadata"]["name"])


def test_the_command_is_one_and_listens_where_the_pool_asks(container: dict[str, Any]) -> None:
    engine, serve = serve_configs(parse_arguments(container["args"]))
    (port,) = container["ports"]
    assert (serve.host, serve.port) == ("0.0.0.0", port["containerPort"])
    assert serve.metrics_prefix == "vllm" and engine.lora_resolver == ("directory:/adapters",)
    assert not serve.health_needs_key and not serve.metrics_need_key
    paths = {one["mountPath"] for one in container["volumeMounts"]}
    assert {"/adapters", "/models", "/dev/shm"} <= paths


def test_pods_have_longer_than_their_requests(pod: dict[str, Any], container: dict[str, Any]) -> None:
    _, serve = serve_configs(parse_arguments(container["args"]))
    assert pod["spec"]["terminationGracePeriodSeconds"] > serve.drain_timeout_s


def test_volumes_that_are_mounted_are_there(pod: dict[str, Any], container: dict[str, Any]) -> None:
    volumes = {one["name"] for one in pod["spec"]["volumes"]}
    assert volumes == {one["name"] for one in container["volumeMounts"]}


def test_probes_ask_routes_of_the_server(container: dict[str, Any]) -> None:
    for probe, path in (
        ("startupProbe", "/health"),
        ("livenessProbe", "/health"),
        ("readinessProbe", "/ready"),
    ):
        asked = container[probe]["httpGet"]
        assert asked == {"path": path, "port": "http"}
        assert ("GET", path) in ROUTE_DOCS


def test_the_picker_scores_with_what_it_has() -> None:
    config = of_kind("EndpointPickerConfig")
    types = {one["type"] for one in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    used = {one["pluginRef"] for one in profile["plugins"]}
    assert used <= types and "lora-affinity-scorer" in used
