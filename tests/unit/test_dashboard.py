"""The dashboard's layout, and that the test helper reads expressions right."""

from __future__ import annotations

import itertools
from typing import Any

from tests.dashboard import Named, expressions, load

COLUMNS = 24  # of Grafana's grid


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = load()["panels"]
    return found


def test_panels_fill_their_rows_and_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels():
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= COLUMNS, panel["title"]
        for cell in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, (panel["title"], taken.get(cell))
            taken[cell] = panel["title"]
    height = 1 + max(y for _, y in taken)
    assert len(taken) == COLUMNS * height  # no holes either


def test_its_rows() -> None:
    titles = [panel["title"] for panel in panels() if panel["type"] == "row"]
    assert titles == ["Traffic", "Latency", "KV memory", "Workers", "Health"]


def test_every_panel_can_be_found_and_says_what_it_shows() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    for panel in panels():
        if panel["type"] == "row":
            continue
        assert panel["description"] and panel["targets"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs)), panel["title"]
        if panel["type"] in ("timeseries", "stat"):
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_legends_name_labels_that_their_expressions_keep() -> None:
    for panel in panels():
        for target in panel.get("targets", ()):
            legend = target["legendFormat"]
            labels = {part.partition("}}")[0].strip() for part in legend.split("{{")[1:]}
            if " by (" in target["expr"] or "(sum by" in target["expr"]:
                assert labels <= Named.of(target["expr"]).grouping, (panel["title"], legend)


def test_what_expressions_name_is_read_right() -> None:
    named = Named.of(
        'histogram_quantile(0.99, sum by (le, component) (rate(a_bucket{x=~"b{c}", y!="d"}[$__rate_interval])))'
        " / 2e3 * on (instance) group_left (version) up offset 5m"
    )
    assert named.selectors == (("a_bucket", frozenset({"x", "y"})), ("up", frozenset()))
    assert named.grouping == {"le", "component", "instance", "version"}
    assert Named.of("sum(rate(x_total[1m]))").selectors == (("x_total", frozenset()),)
    assert Named.of('x{y="z"} == 1').selectors == (("x", frozenset({"y"})),)
    assert len(expressions()) > 60
