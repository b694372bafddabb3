from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate.metrics import all_metrics
from tests.prometheus import program

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "components" / "monitoring"
GUIDE = (ROOT / "docs" / "guides" / "monitor.md").read_text()
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
RULES = [
    rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
OF_PROMETHEUS = {"instance", "le", "namespace", "pod"}
SELECTOR = re.compile(r"(decant_\w+)\{([^}]*)\}")
PART = re.compile(r"_(bucket|sum|count)$")


def labels_of(series: str) -> set[str]:
    name = PART.sub("", series)
    return {label for metric in all_metrics() if metric.name == name for label in metric.labels}


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def scaling_queries() -> Iterator[str]:
    for file in ("prefill.yaml", "decode.yaml"):
        text = (MONITORING.parent / "autoscaling-keda" / file).read_text()
        yield from (trigger["metadata"]["query"] for trigger in yaml.safe_load(text)["spec"]["triggers"])


def adapter_queries() -> Iterator[str]:
    """What the Prometheus adapter asks for the HPAs: its templates, and the series that it looks for, filled in."""
    rules = yaml.safe_load((MONITORING.parent / "autoscaling-hpa" / "prometheus-adapter.yaml").read_text())["rules"]
    for rule in rules["custom"] + rules["external"]:
        series = rule["seriesQuery"]
        yield series
        name, grouped = re.findall(r'__name__=~?"([^"]+)"', series)[0], "pod" if "pod" in series else "namespace"
        for one in name.split("|"):
            query = rule["metricsQuery"].replace("<<.Series>>", one).replace("<<.GroupBy>>", grouped)
            yield query.replace("<<.LabelMatchers>>", 'namespace="decant"')


EXPRESSIONS = [
    *(rule["expr"] for rule in RULES),
    *(target["expr"] for panel in panels() for target in panel["targets"]),
    *scaling_queries(),
    *adapter_queries(),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_uses_labels_that_its_metrics_have(expression: str) -> None:
    assert expression.count("(") == expression.count(")")
    for series, matchers in SELECTOR.findall(expression):
        used = set(re.findall(r"(\w+)\s*(?:=|!)", matchers))
        assert used
        assert used <= labels_of(series) | OF_PROMETHEUS, series
    known = OF_PROMETHEUS.union(*(labels_of(series) for series in re.findall(r"decant_\w+", expression)))
    for names in re.findall(r"(?:by|on|group_left) \(([^)]*)\)", expression):
        assert set(re.split(r",\s*", names)) <= known, names


def promtool(*arguments: str) -> None:
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alerts_and_the_expressions_of_the_dashboard_are_valid_for_prometheus(tmp_path: Path) -> None:
    expressions = [e.replace("$__rate_interval", "5m").replace("$model", ".*") for e in EXPRESSIONS]
    rules = [{"record": f"expression_{number}", "expr": one} for number, one in enumerate(expressions)]
    file = tmp_path / "expressions.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", "deploy/components/monitoring/alerts.yaml", str(file))


def test_each_alert_fires_when_it_should_and_not_otherwise() -> None:
    tests = yaml.safe_load((ROOT / "tests" / "deploy" / "alerts.test.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if "exp_alerts" in case} == {rule["alert"] for rule in RULES}
    promtool("test", "rules", "tests/deploy/alerts.test.yaml")


def test_each_alert_has_a_section_that_says_what_to_do() -> None:
    alerts = [rule["alert"] for rule in RULES]
    assert re.findall(r"^### (\w+)$", GUIDE, re.MULTILINE) == alerts
    assert set(re.findall(r"\bDecant[A-Z]\w+", GUIDE)) == set(alerts)


def test_each_alert_has_a_severity_and_a_summary() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+m", rule.get("for", "0m"))


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not own & cells, panel["title"]
        cells |= own


def test_the_guide_names_panels_that_exist() -> None:
    titles = {panel["title"] for panel in panels()}
    assert set(re.findall(r'panels? "([^"]+)"', GUIDE.replace("\n", " "))) <= titles
