"""The configurations of examples/: their options for Ray Serve, and the form of a RayService.

`SERVICE` is the part of a schema that people use: of the OpenAPI schema in KubeRay's
CustomResourceDefinition of ray.io/v1 RayService, with its types and required fields. Pods are
Kubernetes' own, so it has only what KubeRay needs of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from minisgl_gateway.deploy.options import deploy_options

EXAMPLES = Path(__file__).parents[3] / "examples"


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT, SWITCH = {"type": "string"}, {"type": "boolean"}
COUNT = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
TEXTS = {"type": "object", "additionalProperties": TEXT}
POD = _object(
    "spec",
    metadata=_object(annotations=TEXTS, labels=TEXTS, name=TEXT, namespace=TEXT),
    spec={"type": "object", "required": ["containers"]},
)
HEAD = _object(
    "template",
    rayStartParams=TEXTS,
    serviceType=TEXT,
    enableIngress=SWITCH,
    headService={"type": "object"},
    template=POD,
)
WORKERS = _object(
    "groupName maxReplicas minReplicas template",
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    rayStartParams=TEXTS,
    suspend=SWITCH,
    template=POD,
)
CLUSTER = _object(
    "headGroupSpec",
    rayVersion=TEXT,
    enableInTreeAutoscaling=SWITCH,
    autoscalerOptions={"type": "object"},
    suspend=SWITCH,
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
SERVICE = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata={"type": "object", "required": ["name"]},
    spec=_object(
        serveConfigV2=TEXT,
        rayClusterConfig=CLUSTER,
        excludeHeadPodFromServeSvc=SWITCH,
        serveService={"type": "object"},
        upgradeStrategy={"type": "object"},
    ),
)


@pytest.fixture
def service() -> Any:
    return yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())


def test_kuberays_schema_holds(service: Any) -> None:
    jsonschema.validate(service, SERVICE)
    service["spec"]["rayClusterConfig"]["workerGroupSpec"] = []
    with pytest.raises(jsonschema.ValidationError, match="workerGroupSpec"):
        jsonschema.validate(service, SERVICE)


def test_the_rayservice_agrees_with_the_file_for_serve_deploy(service: Any) -> None:
    config = yaml.safe_load((EXAMPLES / "ray.yaml").read_text())
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == config
    options = deploy_options(config["applications"][0]["args"])
    assert (options.replicas, options.max_replicas, options.gpus) == (2, 4, 1.0)
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (2, 4)
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert float(container["resources"]["limits"]["cpu"]) >= options.cpus


def test_rays_schema_holds(service: Any) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="minisgl[ray] is not installed")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    parsed = schema.ServeDeploySchema.model_validate(config)
    assert parsed.applications[0].import_path == "minisgl_gateway.deploy:app"
