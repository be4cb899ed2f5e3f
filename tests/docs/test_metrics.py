"""docs/metrics.md has the one table of metrics, and docs/report.md names what there is."""

from __future__ import annotations

import re
from pathlib import Path

from analysis.report import FORMATS, main
from experiments.metrics import METRICS, Metric

ROOT = Path(__file__).resolve().parents[2]


def row(metric: Metric) -> str:
    name, title = (re.sub(r"<(\w+)>", lambda found: found[1].upper(), text) for text in (metric.pattern, metric.title))
    return f"| `{name}` | {title} | {metric.unit or 'share'} | {metric.better or '-'} |"


def test_every_metric_has_its_row_and_no_other_has_one():
    rows = [line for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if line.startswith("| `")]
    expected = [row(metric) for metric in METRICS]
    assert sorted(rows) == sorted(expected), "missing:\n" + "\n".join(line for line in expected if line not in rows)


def test_the_commands_of_the_report_are_read_as_they_stand(capsys):
    text = (ROOT / "docs" / "report.md").read_text()
    commands = re.findall(r"^    python -m analysis\.report(.*?)(?:#.*)?$", text, re.M)
    assert len(commands) > 3
    for command in commands:
        # Without a folder of runs a command ends there, once its words were understood.
        main([*command.split(), "--runs", "/nowhere"])
        assert "nowhere is not a folder" in capsys.readouterr().err
    assert all(f"`--format {kind}`" in text or f"--format {kind} " in text for kind in FORMATS if kind != "html")


def test_the_tests_that_the_report_page_names_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs" / "report.md").read_text())
    assert named and all((ROOT / path).is_file() for path in named)
