"""Prometheus families from plain numbers: one function per kind. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from kvalet.sched.histograms import HistogramSnapshot
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

Labels = tuple[str, ...]
Key = TypeVar("Key", bound=str)


def counter(name: str, text: str, values: Iterable[tuple[Labels, float]], labels: Labels = ()) -> Metric:
    """``name`` without ``_total``. A value below 0 (a defect elsewhere) is shown as 0."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(key, max(0.0, float(value)))
    return family


def gauge(name: str, text: str, values: Iterable[tuple[Labels, float]], labels: Labels = ()) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(key, float(value))
    return family


def histogram_s(name: str, text: str, values: Iterable[tuple[Labels, HistogramSnapshot]], labels: Labels = ()) -> Metric:
    """Snapshots in milliseconds, shown in seconds."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, snapshot in values:
        buckets = [(f"{bound / 1e3:.6g}", float(below)) for bound, below in snapshot.cumulative()]
        family.add_metric(key, [*buckets, ("+Inf", float(snapshot.count))], snapshot.total / 1e3)
    return family


def by(values: Mapping[Key, float]) -> list[tuple[Labels, float]]:
    """A mapping from the value of one label."""
    return [((str(key),), value) for key, value in values.items()]


def alone(value: float) -> list[tuple[Labels, float]]:
    """One value without labels."""
    return [((), value)]
