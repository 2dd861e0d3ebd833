"""What `deploy/` tells Kubernetes is what the server does."""

from pathlib import Path

import pytest
import yaml

from server.app import add_routes
from server.flags import make_parser
from server.settings import parse

MANIFEST = Path(__file__).parent.parent.parent / "deploy" / "kubernetes" / "jaxpaged.yaml"


@pytest.fixture
def pod():
    documents = list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))
    assert [document["kind"] for document in documents] == [
        "Deployment",
        "Service",
        "PodDisruptionBudget",
    ]
    return documents[0]["spec"]["template"]["spec"]


def test_its_flags_are_known_and_draining_fits_the_grace_period(pod):
    (container,) = pod["containers"]
    args = parse(make_parser("serve"), container["args"])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause + args.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": args.port, "metrics": args.metrics_port}
    live = container["livenessProbe"]
    assert live["periodSeconds"] * live["failureThreshold"] > 2 * args.stall_timeout


def test_its_probes_ask_for_routes_that_are_served(pod):
    class Routes(set):
        def add_get(self, path, handler, *, name):
            self.add(path)

        def add_post(self, path, handler, *, name):
            pass

        def add_resource(self, path, *, name):
            return self

        def add_route(self, method, handler):
            pass

    add_routes(served := Routes())
    (container,) = pod["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in served
        assert container[probe]["httpGet"]["port"] == "http"
