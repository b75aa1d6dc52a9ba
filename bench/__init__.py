"""Benchmarks, each `python -m bench.<name> [--json]`. Figures and goals; nothing here is imported by the product."""
