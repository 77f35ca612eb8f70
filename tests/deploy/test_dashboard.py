"""The Grafana dashboard asks only for what a server exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql
import pytest

from sidestream.observe.metrics import Metrics

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "sidestream.json").read_text())
PANELS = DASHBOARD["panels"]
BY_PROMETHEUS = {"instance", "job"}  # labels that it adds to every series
REPORT = {
    "d2h": {"token": {"copied_bytes": 1, "skipped_bytes": 1, "discarded_bytes": 1}, "issue_seconds": 1.0, "wait_seconds": 1.0},
    **dict.fromkeys(("running", "waiting", "kv_tokens_total", "kv_tokens_free", "kv_tokens_cached", "kv_tokens_evictable", "page_size"), 1),
    **dict.fromkeys(("steps", "forward_tokens", "retracted", "prompt_tokens", "generation_tokens", "cached_tokens", "aborted"), 1),
    "step_seconds": {"plan": 1.0},
}


class Exported(NamedTuple):
    kind: str
    labels: frozenset[str]


class Selected(NamedTuple):
    """One selector of an expression: the series, the labels it is matched and grouped by, the functions around it."""

    name: str
    labels: frozenset[str]
    functions: frozenset[str]


def exported() -> dict[str, Exported]:
    """By name of the series as Prometheus stores it."""
    metrics = Metrics("tiny")
    metrics.observe_report(REPORT)
    metrics.started({"load": 1.0})
    metrics.request_aborted("disconnect")
    metrics.http_response("/generate", 200)
    families = list(metrics.registry.collect())
    return {sample.name: Exported(family.type, frozenset(sample.labels)) for family in families for sample in family.samples}


def expressions() -> Iterator[str]:
    for panel in PANELS:
        yield from (target["expr"] for target in panel.get("targets", ()))


def selectors(expression: str) -> list[Selected]:
    """Every series that an expression selects. Raises ValueError for what is no PromQL."""
    found: list[Selected] = []

    def look(node: Any, labels: frozenset[str], functions: frozenset[str]) -> None:
        if isinstance(node, promql.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql.VectorSelector):
            found.append(Selected(node.name, labels | {matcher.name for matcher in node.matchers.matchers}, functions))
        elif isinstance(node, promql.AggregateExpr):
            grouped = frozenset(node.modifier.labels) if node.modifier else frozenset()
            look(node.expr, labels | grouped, functions)
        elif isinstance(node, promql.Call):
            for argument in node.args:
                look(argument, labels, functions | {node.func.name})
        elif isinstance(node, promql.BinaryExpr):
            look(node.lhs, labels, functions)
            look(node.rhs, labels, functions)
        elif isinstance(node, (promql.ParenExpr, promql.SubqueryExpr, promql.UnaryExpr)):
            look(node.expr, labels, functions)
        else:
            assert isinstance(node, (promql.NumberLiteral, promql.StringLiteral)), type(node)

    look(promql.parse(expression.replace("$__rate_interval", "1m")), frozenset(), frozenset())
    return found


def complaints(expression: str) -> list[str]:
    known = exported()
    found = []
    for selected in selectors(expression):
        series = known.get(selected.name)
        if series is None:
            found.append(f"{selected.name} is not exported")
            continue
        found += [f"{selected.name} has no label {label}" for label in sorted(selected.labels - series.labels - BY_PROMETHEUS)]
        if (series.kind == "gauge") == bool(selected.functions & {"rate", "irate", "increase"}):
            found.append(f"{selected.name} is a {series.kind}, whose rate {'means nothing' if series.kind == 'gauge' else 'is wanted'}")
    return found


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_an_expression_names_only_what_is_exported(expression):
    assert selectors(expression)
    assert complaints(expression) == []


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("sum(sidestream:num_waiting_reqs)", "sidestream:num_waiting_reqs is not exported"),
        ("sum(sglang:num_queue_reqs)", "sglang:num_queue_reqs is not exported"),
        ("1 - sum(rate(sidestream:prompt_tokens[5m]))", "sidestream:prompt_tokens is not exported"),
        ('sum(sidestream:num_queue_reqs{modelname="x"})', "sidestream:num_queue_reqs has no label modelname"),
        ("sum by (output) (rate(sidestream:steps_total[5m]))", "sidestream:steps_total has no label output"),
        ("rate(sidestream:token_usage[5m])", "sidestream:token_usage is a gauge, whose rate means nothing"),
        ("sidestream:steps_total", "sidestream:steps_total is a counter, whose rate is wanted"),
    ],
)
def test_what_is_wrong_would_be_found(expression, complaint):
    assert complaints(expression) == [complaint]


def test_so_do_the_expressions_of_the_documentation():
    page = (ROOT / "docs" / "operations.md").read_text()
    (block,) = re.findall(r"^```promql\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    asked = [*block.splitlines(), *re.findall(r"^ *query: (.*)$", page, flags=re.MULTILINE)]
    assert len(asked) == 3
    assert [complaint for expression in asked for complaint in complaints(expression)] == []


def test_the_dashboard_asks_for_most_of_what_there_is():
    asked = {selected.name for expression in expressions() for selected in selectors(expression)}
    assert len(asked) >= 25
    for word in ("num_running_reqs", "token_usage", "time_to_first_token_seconds_bucket", "d2h_bytes_total", "step_seconds_total"):
        assert f"sidestream:{word}" in asked


def test_variables_are_made_of_labels_that_exist():
    known = exported()
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "model", "instance"}
    for name in ("model", "instance"):
        query = variables[name]["query"]["query"]
        series, label = re.fullmatch(r"label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)", query).groups()
        assert label in known[series].labels | BY_PROMETHEUS
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS)))
    assert used <= {*variables, "__rate_interval"}


def test_every_panel_says_what_it_shows_from_the_chosen_source():
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            references = [target["refId"] for target in panel["targets"]]
            assert references and len(set(references)) == len(references)


def test_panels_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
