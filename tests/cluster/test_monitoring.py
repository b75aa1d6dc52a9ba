"""Alert rules and dashboard: every metric and label in them is exported, and every expression parses."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import yaml
from http_front import HttpFront
from prometheus_client import Metric
from router_fleet import make_served_model

from cluster.manifests import manifests
from cluster.monitoring import ALERTS, CLIENTS_FAULT, CLUSTER, PANELS, alert_groups, dashboard
from cluster.spec import ClusterSpec
from engine import errors
from router.metrics import RouterMetrics

EXPRESSIONS = [alert.expr for alert in ALERTS] + [expr for panel in PANELS for expr, _ in panel.series]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


@pytest.fixture
async def exported(tmp_path: Path) -> AsyncIterator[Mapping[str, set[str]]]:
    """Labels by the name of each series that a router exports."""
    front = HttpFront(make_served_model(tmp_path))
    await front.start()
    server = front.server
    families = list(RouterMetrics(server.dispatcher.admission, server.registry, server.dispatcher.history).collect())
    assert len(families) > 20
    yield {
        family.name + suffix: {*labels_of(family), *(["le"] if suffix == "_bucket" else [])}
        for family in families
        for suffix in SUFFIXES[family.type]
    }
    await front.close()


def labels_of(family: Metric) -> tuple[str, ...]:
    labels: tuple[str, ...] = family._labelnames  # type: ignore[attr-defined]  # of families that are made by hand
    return labels


async def test_every_metric_that_is_used_is_exported(exported: Mapping[str, set[str]]) -> None:
    used = {name for expr in EXPRESSIONS for name in re.findall(r"kvrelay_\w+", expr)} - {CLUSTER}
    assert used <= set(exported)


async def test_every_label_that_is_used_is_one_of_the_metric(exported: Mapping[str, set[str]]) -> None:
    for expr in EXPRESSIONS:
        selectors = re.findall(r"(kvrelay_\w+)(?:\{([^}]*)\})?", expr)
        for name, matchers in selectors:
            assert set(re.findall(r"(\w+)[=!]~?", matchers)) <= exported.get(name, set())
        for grouped in re.findall(r"by \(([^)]*)\)", expr):
            known = set.union(*(exported[name] for name, _ in selectors if name != CLUSTER))
            assert set(grouped.split(", ")) - {CLUSTER} <= known


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
async def test_legends_name_labels_that_are_left(panel: object, exported: Mapping[str, set[str]]) -> None:
    for expr, legend in next(each for each in PANELS if each is panel).series:
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            groups = re.findall(r"by \(([^)]*)\)", expr)
            known = exported[expr] if not groups else set(groups[0].split(", "))
            assert label in known


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_what_an_alert_says_of_a_series_is_a_label_that_it_has(alert: object) -> None:
    rule = next(each for each in ALERTS if each is alert)
    for label in re.findall(r"\$labels\.(\w+)", rule.summary):
        assert label in rule.expr or rule.expr.startswith("kvrelay_worker_ready")


def test_classes_of_errors_in_rules_exist() -> None:
    lists = [text for expr in EXPRESSIONS for text in re.findall(r'error[!=]~"([^"]*)"', expr)]
    named = {name for text in lists for name in text.split("|")}
    assert named >= set(CLIENTS_FAULT.split("|"))
    for name in named:
        assert issubclass(getattr(errors, name), errors.EngineError)


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_every_expression_parses(expr: str) -> None:
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed: `make tools` does")
    assert promql.parse(expr) is not None


def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: it comes with Debian's prometheus")
    rules = tmp_path / "rules.yaml"
    panels = [{"record": f"panel:{index}", "expr": expr} for index, expr in enumerate(EXPRESSIONS)]
    rules.write_text(yaml.safe_dump({"groups": [*alert_groups(), {"name": "dashboard", "rules": panels}]}))
    checked = subprocess.run([promtool, "check", "rules", str(rules)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len(PANELS)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_alerts_have_names_of_their_own_and_say_what_to_do() -> None:
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
    assert all(alert.summary and alert.action and alert.severity in ("critical", "warning") for alert in ALERTS)


def test_manifests_bring_rules_and_dashboard() -> None:
    found = {each["kind"]: each for each in manifests(ClusterSpec())["monitoring.yaml"]}
    assert found["PrometheusRule"]["spec"]["groups"] == alert_groups()
    assert yaml.safe_load(found["ConfigMap"]["data"]["kvrelay.json"]) == dashboard()
    relabeled = found["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["relabelings"]
    assert [each["targetLabel"] for each in relabeled] == [CLUSTER]
