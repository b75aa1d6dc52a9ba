"""Alert rules and a Grafana dashboard over what routers export, as data. Pure: the objects around them are elsewhere.

The metrics are those of `router.metrics` and `router.placement_metrics`. Rules hold for one cluster each, by the label
that the PodMonitor adds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

CLUSTER = "kvrelay_cluster"
"""Label of every series of one cluster."""
CLIENTS_FAULT = "RequestError|RequestCancelled|Unauthenticated|PermissionDenied|RateLimited"
"""Classes of errors that say nothing about the cluster."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 24


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    expr: str
    wait: str
    """How long it must hold."""
    severity: str
    """critical: clients are not served; warning: they soon may not be, or not as they should."""
    summary: str
    action: str


def _share(part: str, whole: str) -> str:
    return f"{part} / clamp_min({whole}, 1e-9)"


def _rate(metric: str, by: str = "", window: str = "5m") -> str:
    return f"sum by ({', '.join(filter(None, [CLUSTER, by]))}) (rate({metric}[{window}]))"


def _quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share}, {_rate(f'{histogram}_bucket', 'le')})"


_FAILED = _rate(f'kvrelay_request_errors_total{{error!~"{CLIENTS_FAULT}"}}')
_ENDED = f"({_rate('kvrelay_request_success_total')} + {_FAILED})"
_BLOCKS = f"sum by ({CLUSTER}, worker) (kvrelay_kv_blocks)"

ALERTS = (
    Alert(
        "KvrelayRouterAbsent",
        "absent(kvrelay_requests_live)",
        "2m",
        "critical",
        "No router is scraped.",
        "kubectl logs of the head pod, container supervisor; kvrelay doctor there.",
    ),
    Alert(
        "KvrelayNoDecodeWorker",
        f'sum by ({CLUSTER}) (kvrelay_worker_ready{{role="decode"}}) == 0',
        "1m",
        "critical",
        "No decode worker is ready: every request is refused.",
        "kvrelay status; the log of the supervisor says why workers do not start.",
    ),
    Alert(
        "KvrelayWorkerNotReady",
        "kvrelay_worker_ready == 0",
        "5m",
        "warning",
        "Worker {{ $labels.worker }} is not ready.",
        "kvrelay status; the log of the supervisor.",
    ),
    Alert(
        "KvrelayRequestsFail",
        f"{_share(_FAILED, _ENDED)} > 0.02",
        "5m",
        "critical",
        "More than 2 % of calls fail for reasons of the cluster.",
        "The dashboard's errors by class; kvrelay explain of one such request.",
    ),
    Alert(
        "KvrelayRequestsRefused",
        f"""{_rate('kvrelay_request_errors_total{error=~"CapacityError|QueueFull|NoFreeBlocks"}')} > 1""",
        "5m",
        "warning",
        "More than one call in a second is refused for want of capacity.",
        "More replicas: kvrelay scale, or the spec.",
    ),
    Alert(
        "KvrelaySlowFirstToken",
        f"{_quantile(0.95, 'kvrelay_time_to_first_token_seconds')} > 5",
        "10m",
        "warning",
        "One call in twenty waits more than 5 s for its first token.",
        "kvrelay explain shows where the time goes; more prefill workers if it is prefill queue.",
    ),
    Alert(
        "KvrelaySlowTokens",
        f"{_quantile(0.95, 'kvrelay_inter_token_latency_seconds')} > 0.25",
        "10m",
        "warning",
        "One token in twenty comes more than 0.25 s after the one before.",
        "More decode workers, or fewer max_num_seqs.",
    ),
    Alert(
        "KvrelayQueueGrows",
        f"sum by ({CLUSTER}, worker) (kvrelay_num_requests_waiting) > 64",
        "5m",
        "warning",
        "More than 64 requests wait at {{ $labels.worker }}.",
        "More workers of its role.",
    ),
    Alert(
        "KvrelayPoolFull",
        _share(f'sum by ({CLUSTER}, worker) (kvrelay_kv_blocks{{state=~"free|cached"}})', _BLOCKS) + " < 0.05",
        "10m",
        "warning",
        "The KV pool of {{ $labels.worker }} is full: requests are preempted.",
        "More kv_memory_bytes, or more decode workers; kvrelay plan does the sum.",
    ),
    Alert(
        "KvrelayTransfersFail",
        _share(_rate("kvrelay_kv_transfers_failed_total"), _rate("kvrelay_kv_transfers_total")) + " > 0.05",
        "10m",
        "warning",
        "More than 5 % of hand-overs fail in part: decode workers compute prompts again.",
        "Links on the status page name the pair and the error.",
    ),
    Alert(
        "KvrelayBlocksQuarantined",
        f'sum by ({CLUSTER}, worker) (kvrelay_kv_blocks{{state="quarantined"}}) > 0',
        "5m",
        "warning",
        "Blocks of {{ $labels.worker }} are kept back: a write to them has not ended.",
        "Its log names the peer that is silent.",
    ),
    Alert(
        "KvrelayRequestsResumed",
        f"{_rate('kvrelay_request_resumes_total', window='10m')} > 0.1",
        "10m",
        "warning",
        "Requests move between workers: some are lost again and again.",
        "The log of the supervisor; memory limits of the pods.",
    ),
    Alert(
        "KvrelayIndexStale",
        f"max by ({CLUSTER}, worker) (kvrelay_prefix_index_staleness_seconds) > 30",
        "10m",
        "warning",
        "What the router knows of the cache of {{ $labels.worker }} is old: prompts are computed again.",
        "kvrelay status; restart the worker if it lasts.",
    ),
)


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    """Grafana's name of it."""
    series: tuple[tuple[str, str], ...]
    """Expressions and their legends."""


def _latency(title: str, histogram: str) -> Panel:
    return Panel(title, "s", tuple((_quantile(share, histogram), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)))


PANELS = (
    _latency("Time to first token", "kvrelay_time_to_first_token_seconds"),
    _latency("Time between tokens", "kvrelay_inter_token_latency_seconds"),
    _latency("Whole call", "kvrelay_e2e_request_latency_seconds"),
    _latency("Time by output token, of whole outputs", "kvrelay_request_time_per_output_token_seconds"),
    _latency("Waiting for blocks and turns", "kvrelay_request_queue_time_seconds"),
    _latency("Transfer of KV that nothing hides", "kvrelay_kv_transfer_exposed_seconds"),
    Panel(
        "Tokens",
        "cps",
        (
            (_rate("kvrelay_prompt_tokens_total"), "prompt"),
            (_rate("kvrelay_generation_tokens_total"), "generated"),
        ),
    ),
    Panel(
        "Calls that ended well",
        "reqps",
        ((_rate("kvrelay_request_success_total", "finished_reason"), "{{finished_reason}}"),),
    ),
    Panel("Calls that failed, by class", "reqps", ((_rate("kvrelay_request_errors_total", "error"), "{{error}}"),)),
    Panel("HTTP answers", "reqps", ((_rate("kvrelay_http_requests_total", "status"), "{{status}}"),)),
    Panel(
        "Live calls and resumes",
        "short",
        (
            (f"sum by ({CLUSTER}) (kvrelay_requests_live)", "live"),
            (_rate("kvrelay_request_resumes_total"), "resumed in a second"),
        ),
    ),
    Panel(
        "Prompt tokens found in caches",
        "percentunit",
        (
            (
                f"{_rate('kvrelay_prefix_cache_hits_total', 'source')} / ignoring (source) group_left "
                f"clamp_min({_rate('kvrelay_prefix_cache_queries_total')}, 1e-9)",
                "at {{source}} workers",
            ),
        ),
    ),
    Panel("Requests that run", "short", (("kvrelay_num_requests_running", "{{worker}}"),)),
    Panel("Requests that wait", "short", (("kvrelay_num_requests_waiting", "{{worker}}"),)),
    Panel(
        "KV from prefill to decode workers",
        "Bps",
        ((_rate("kvrelay_kv_transfer_bytes_total", "transport"), "{{transport}}"),),
    ),
    Panel(
        "Hand-overs that failed, by decode worker",
        "reqps",
        ((_rate("kvrelay_kv_transfers_failed_total", "decode"), "{{decode}}"),),
    ),
    Panel("Preemptions", "reqps", ((_rate("kvrelay_worker_preemptions_total", "worker"), "{{worker}}"),)),
    Panel(
        "KV pools in use",
        "percentunit",
        ((_share(f'sum by ({CLUSTER}, worker) (kvrelay_kv_blocks{{state=~"owned|leased"}})', _BLOCKS), "{{worker}}"),),
    ),
    Panel("KV blocks by state", "short", ((f"sum by ({CLUSTER}, state) (kvrelay_kv_blocks)", "{{state}}"),)),
    Panel("Workers that are ready", "short", ((f"sum by ({CLUSTER}, role) (kvrelay_worker_ready)", "{{role}}"),)),
    Panel("Errors of workers", "cps", ((_rate("kvrelay_worker_errors_total", "error"), "{{error}}"),)),
    Panel(
        "Prefix index",
        "percentunit",
        (("kvrelay_prefix_index_bytes / kvrelay_prefix_index_max_bytes", "of its budget"),),
    ),
    Panel("Age of what is known of caches", "s", (("kvrelay_prefix_index_staleness_seconds", "{{worker}}"),)),
    Panel(
        "Estimates of placement, mean error",
        "ms",
        (
            (
                _share(
                    _rate("kvrelay_price_absolute_error_milliseconds_total", "term"),
                    _rate("kvrelay_price_terms_total", "term"),
                ),
                "{{term}}",
            ),
        ),
    ),
)


def alert_groups() -> list[dict[str, Any]]:
    """`groups` of a Prometheus rule file."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.wait,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.action},
        }
        for alert in ALERTS
    ]
    return [{"name": "kvrelay", "rules": rules}]


def dashboard() -> dict[str, Any]:
    """For Grafana 10 and newer."""
    return {
        "title": "kvrelay",
        "uid": "kvrelay",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["kvrelay"],
        "templating": {"list": [_datasource_variable()]},
        "panels": [_panel(index, panel) for index, panel in enumerate(PANELS)],
    }


def dashboard_text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    across = _COLUMNS // _WIDTH
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": {"x": index % across * _WIDTH, "y": index // across * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for number, (expr, legend) in enumerate(panel.series)
        ],
    }
