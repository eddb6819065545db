from __future__ import annotations

import re

from groupwise.reporting.documented import documentation_of, documented_metrics


def test_every_range_is_that_of_its_text():
    """The page of metrics shows the text, a report the numbers."""
    metrics = {name: metric for group in documented_metrics().values() for name, metric in group.items()}
    ranges = {name: metric for name, metric in metrics.items() if metric.range}
    assert len(ranges) > 10
    for name, metric in ranges.items():
        in_text = {
            float(number) for number in re.findall(r"\d[\d.]*\b(?! steps)(?<!float32)", metric.healthy)
        }
        given = {float(bound) for bound in metric.range if bound is not None}
        assert given <= in_text, name
        if "below" in metric.healthy and "above" not in metric.healthy:
            assert metric.range[0] is None, name


def test_placeholders_match_names():
    assert documentation_of("rewards/my/reward/mean").meaning.startswith("mean of one reward function")
    assert documentation_of("clip_ratio/low_mean").range == (None, 0.1)
    assert documentation_of("sampling/importance_sampling_ratio/mean").range == (0.9, 1.1)
    assert documentation_of("sampling/importance_sampling_ratio/min").range is None
    assert documentation_of("completions/mean_length").healthy == ""
    assert documentation_of("custom/words") is None and documentation_of("rewards/mean") is None
