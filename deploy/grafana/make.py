#!/usr/bin/env python3
"""Writes foretoken.json, the Grafana dashboard: make.py [--check URL of a running server].

With --check it also looks for every metric of the dashboard in the server's /metrics.
"""

import argparse
import json
import pathlib
import re
import sys
import urllib.request

WHO = 'namespace=~"$namespace", pod=~"$pod", model_name=~"$model"'
panels = []
y = 0


def row(title):
    global y
    panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
    y += 1


def line(*charts):
    """Charts beside each other: (title, unit, description, {legend: expression}[, more])."""
    global y
    width = 24 // len(charts)
    for i, (title, unit, description, targets, *more) in enumerate(charts):
        custom = {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never"}
        defaults = {"unit": unit, "min": 0, "custom": custom, **(more[0] if more else {})}
        panels.append(
            {
                "type": "timeseries",
                "title": title,
                "description": description,
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "gridPos": {"h": 8, "w": width, "x": width * i, "y": y},
                "fieldConfig": {"defaults": defaults, "overrides": []},
                "options": {
                    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                    "tooltip": {"mode": "multi", "sort": "desc"},
                },
                "targets": [
                    {"refId": chr(65 + n), "expr": expression, "legendFormat": legend}
                    for n, (legend, expression) in enumerate(targets.items())
                ],
            }
        )
    y += 8


def rate(name, by=""):
    by = f"by ({by}) " if by else ""
    return f"sum {by}(rate(foretoken:{name}{{{WHO}}}[$__rate_interval]))"


def total(name, by=""):
    by = f"by ({by}) " if by else ""
    return f"sum {by}(foretoken:{name}{{{WHO}}})"


def quantiles(name):
    return {
        f"p{int(q * 100)}": f"histogram_quantile({q}, {rate(f'{name}_bucket', 'le')})" for q in (0.5, 0.95, 0.99)
    }


def share(part, whole):
    return f"{part} / ({whole} > 0)"


def build():
    row("Latency")
    line(
        ("Time to first token", "s", "From the arrival of a request to its first token.", quantiles("time_to_first_token_seconds")),
        ("Time between tokens", "s", "Between two tokens of a request. Tokens of one round come together.", quantiles("inter_token_latency_seconds")),
        ("Whole request", "s", "From the arrival of a request to its last token.", quantiles("e2e_request_latency_seconds")),
    )
    row("Load")
    line(
        ("Tokens a second", "short", "Prompt tokens of admitted requests, and generated tokens.", {"prompt": rate("prompt_tokens_total"), "generated": rate("generation_tokens_total")}),
        ("Requests", "short", "In the batch, and in the queue.", {"running": total("num_requests_running"), "waiting": total("num_requests_waiting")}),
        ("Requests that end, by reason", "reqps", "abort: the client went away.", {"{{finished_reason}}": rate("request_success_total", "finished_reason")}),
    )
    line(
        ("Time in the queue", "s", "From the arrival of a request to its place in the batch.", quantiles("request_queue_time_seconds")),
        ("Where the time of requests goes", "s", "Mean seconds of a request in the queue, to its first token, and from there.", {
            what: share(rate(f"request_{what}_time_seconds_sum"), rate(f"request_{what}_time_seconds_count")) for what in ("queue", "prefill", "decode")
        }),
        ("Preemptions", "ops", "Requests that gave their blocks to others and are computed again: the KV cache is too small.", {"preempted": rate("num_preemptions_total")}),
    )
    row("Speculation")
    line(
        ("Draft tokens that are accepted", "percentunit", "Accepted of those that were checked, in all and by where they came from.", {
            "all": share(rate("spec_decode_num_accepted_tokens_total"), rate("spec_decode_num_draft_tokens_total")),
            "{{source}}": share(rate("spec_decode_num_accepted_tokens_by_source_total", "source"), rate("spec_decode_num_draft_tokens_by_source_total", "source")),
        }, {"max": 1}),
        ("Accepted, by position in the draft", "percentunit", "Rounds whose draft was accepted to this position, of all rounds with a draft.", {
            "{{position}}": f"{rate('spec_decode_num_accepted_tokens_per_pos_total', 'position')} / ignoring(position) group_left() ({rate('spec_decode_num_drafts_total')} > 0)",
        }, {"max": 1}),
        ("Tokens a round", "short", "1 + accepted draft tokens, of rounds with a draft.", {
            "tokens": f"1 + {share(rate('spec_decode_num_accepted_tokens_total'), rate('spec_decode_num_drafts_total'))}",
        }),
    )
    line(
        ("The budget", "short", "Draft tokens a second that were checked, and those that the budget left out.", {"checked": rate("spec_decode_num_draft_tokens_total"), "left out": rate("spec_decode_num_refused_tokens_total")}),
        ("Gain", "short", "The server's estimate of its tokens a second over those of plain decoding.", {"{{pod}}": f"avg by (pod) (foretoken:spec_decode_speed_up{{{WHO}}})"}),
        ("Time of a step", "s", "Mean seconds of a forward of the target, and of a draft model.", {
            "target": share(rate("target_seconds_total"), rate("target_steps_total")),
            "draft": share(rate("draft_seconds_total"), rate("draft_steps_total")),
        }),
    )
    row("Memory")
    line(
        ("KV cache in use", "percentunit", "Blocks of running requests, of all; what is only cached counts as free.", {"{{pod}}": f"max by (pod) (foretoken:kv_cache_usage_perc{{{WHO}}})", "{{pod}}, draft": f"max by (pod) (foretoken:draft_kv_cache_usage_perc{{{WHO}}})"}, {"max": 1}),
        ("Prompt tokens that were cached", "percentunit", "Of the prompts' tokens, those that the prefix cache had.", {
            "all": share(rate("prefix_cache_hits_total"), rate("prefix_cache_queries_total")),
            "{{pod}}": share(rate("prefix_cache_hits_total", "pod"), rate("prefix_cache_queries_total", "pod")),
        }, {"max": 1}),
        ("Resident memory", "bytes", "Of each process.", {"{{pod}}": f"max by (pod) (process_resident_memory_bytes{{{WHO}}})"}),
    )
    row("Faults")
    line(
        ("What should not happen", "short", "Requests whose logits were not finite, log lines that stderr did not take, and servers without drafts since their drafter panicked.", {"not finite": rate("nonfinite_logits_total"), "log lines dropped": rate("log_lines_dropped_total"), "drafter off": f"sum (foretoken:drafter_off{{{WHO}}})"}),
    )


def variable(name, label, query):
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "includeAll": True,
        # What has no such label is shown, too: a server that Prometheus scrapes outside of Kubernetes.
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def dashboard():
    build()
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    metric = "foretoken:num_requests_running"
    return {
        "title": "foretoken",
        "uid": "foretoken",
        "tags": ["llm", "inference"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                variable("namespace", "Namespace", f"label_values({metric}, namespace)"),
                variable("pod", "Pod", f'label_values({metric}{{namespace=~"$namespace"}}, pod)'),
                variable("model", "Model", f"label_values({metric}, model_name)"),
            ]
        },
        "panels": panels,
    }


def check(url, text):
    """Every metric of the dashboard is in the server's /metrics, with the labels that it is summed by."""
    # Some counters appear with their first label, so something has to be generated.
    model = json.load(urllib.request.urlopen(url + "/v1/models"))["data"][0]["id"]
    body = {"model": model, "prompt": "one two three one two three one two", "max_tokens": 64, "temperature": 0}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request).read()
    metrics = urllib.request.urlopen(url + "/metrics").read().decode()
    missing = [n for n in sorted(set(re.findall(r"(?:foretoken:|process_)\w+", text))) if not re.search(rf"^{n}\{{", metrics, re.MULTILINE)]
    for label in ("finished_reason", "source", "position"):
        if not re.search(rf'[{{,]{label}="', metrics):
            missing.append(f"label {label}")
    names = set(re.findall(r"(?:foretoken:|process_)\w+", text))
    print(f"{len(names)} metrics, {len(panels)} panels; missing: {', '.join(missing) or 'none'}")
    return not missing


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", metavar="URL")
    options = parser.parse_args()
    text = json.dumps(dashboard(), indent=1) + "\n"
    pathlib.Path(__file__).with_name("foretoken.json").write_text(text)
    if options.check and not check(options.check, text):
        sys.exit(1)


if __name__ == "__main__":
    main()
