"""Numbers and text that leave a run: metrics, timing, evaluation, tables, dashboards, model card."""
