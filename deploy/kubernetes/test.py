#!/usr/bin/env python3
"""Checks the manifests without a cluster: test.py [FORETOKEN]. Needs the packages of requirements.txt, and npm.

Each kustomization is put together (resources, images and JSON patches, which is all that they use). Kubernetes' own
kinds are validated strictly against its published schemas, the PodMonitor against the Prometheus operator's, and the
InferencePool against its type as published, which no registry carries as a schema. Then come what no schema knows: that
the parts fit each other, and the program. With a FORETOKEN, the flags and every metric are checked against it.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

import jsonpatch
import jsonschema
import kubernetes_validate
import yaml

HERE = pathlib.Path(__file__).resolve().parent
VERSION = "1.34"
OPERATOR = "@kubernetes-models/prometheus-operator@6.0.0"
GROUP = r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
PORT = {"type": "object", "required": ["number"], "additionalProperties": False, "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}}}
# The spec of inference.networking.k8s.io/v1.
INFERENCE_POOL = {
    "type": "object",
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "additionalProperties": False,
    "properties": {
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "additionalProperties": False,
            "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}, "minProperties": 1}},
        },
        "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": PORT},
        "endpointPickerRef": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {
                "group": {"type": "string", "pattern": GROUP},
                "kind": {"type": "string"},
                "name": {"type": "string", "minLength": 1, "maxLength": 253},
                "port": PORT,
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}
failures = 0


def check(name, error=None):
    global failures
    failures += error is not None
    print(f"{'FAILED' if error is not None else 'ok    '} {name}{f': {error}' if error is not None else ''}")


def documents(folder):
    """The objects of a kustomization, and its files."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "resources", "images", "patches"}
    assert set(kustomization) <= known, set(kustomization) - known
    objects = []
    for name in kustomization["resources"]:
        path = folder / name
        objects += documents(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for patch in kustomization.get("patches", []):
        targets = [i for i, o in enumerate(objects) if (o["kind"], o["metadata"]["name"]) == tuple(patch["target"][k] for k in ("kind", "name"))]
        assert len(targets) == 1, f"{patch['target']} is {len(targets)} objects"
        objects[targets[0]] = jsonpatch.apply_patch(objects[targets[0]], yaml.safe_load(patch["patch"]))
    for image in kustomization.get("images", []):
        for container in containers(objects):
            # As kustomize does: an image that `resources` have renamed has its new name.
            if re.fullmatch(rf"{re.escape(image['name'])}([:@].*)?", container["image"]):
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return objects


def containers(objects):
    return [c for o in objects if o["kind"] == "Deployment" for c in o["spec"]["template"]["spec"]["containers"]]


def validate(o, pod_monitor):
    """What is wrong with an object, or nothing."""
    try:
        if o["kind"] == "PodMonitor":
            pod_monitor(o)
        elif o["kind"] == "InferencePool":
            jsonschema.validate(o["spec"], INFERENCE_POOL)
        else:
            kubernetes_validate.validate(o, VERSION, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError, ValueError) as e:
        return str(e).splitlines()[0]


def pod_monitor_validator(folder):
    """Validates with the models of the Prometheus operator, whose schemas come from its CRDs."""
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, OPERATOR], check=True)
    script = """
        import { readFileSync } from "node:fs";
        import { PodMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
        const given = JSON.parse(readFileSync(0));
        try { new PodMonitor(given).validate(); } catch (e) { console.log(e.message); }
    """

    def validator(o):
        run = subprocess.run(["node", "--input-type=module", "-e", script], input=json.dumps(o), capture_output=True, text=True, cwd=folder)
        if run.returncode or run.stdout.strip():
            raise ValueError(run.stdout.strip() or run.stderr)

    return validator


def find(objects, kind, name="foretoken"):
    return next(o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name))


def check_fit(objects):
    """What has to be in step."""
    deployment = find(objects, "Deployment")
    pod, labels = deployment["spec"]["template"]["spec"], deployment["spec"]["template"]["metadata"]["labels"]
    (container,) = pod["containers"]
    flags = dict(arg.removeprefix("--").split("=", 1) for arg in container["args"])
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    facts = {
        "grace period": pod["terminationGracePeriodSeconds"] >= container["lifecycle"]["preStop"]["sleep"]["seconds"] + int(flags["shutdown-timeout"]) + 5,
        "port": ports["http"] == int(flags["port"]) and flags["host"] == "0.0.0.0",
        "probes": all(container[p]["httpGet"]["port"] in ports for p in ("startupProbe", "readinessProbe", "livenessProbe")),
        "configuration": any(m["mountPath"] == str(pathlib.Path(flags["config"]).parent) for m in container["volumeMounts"])
        and pathlib.Path(flags["config"]).name in find(objects, "ConfigMap")["data"],
        "volumes": {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]},
        "service": find(objects, "Service")["spec"]["selector"].items() <= labels.items(),
        "budget": find(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels.items(),
        "monitor": find(objects, "PodMonitor")["spec"]["selector"]["matchLabels"].items() <= labels.items()
        and find(objects, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"] in ports,
        "autoscaler": find(objects, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"],
        "security": pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"],
    }
    if any(o["kind"] == "InferencePool" for o in objects):
        pool = find(objects, "InferencePool")["spec"]
        service = find(objects, "Service", pool["endpointPickerRef"]["name"])
        facts["pool"] = pool["selector"]["matchLabels"].items() <= labels.items() and pool["targetPorts"][0]["number"] == ports["http"]
        facts["endpoint picker"] = service["spec"]["ports"][0]["port"] == pool["endpointPickerRef"]["port"]["number"]
        facts["endpoint picker's configuration"] = yaml.safe_load(find(objects, "ConfigMap", service["metadata"]["name"])["data"]["config.yaml"])["kind"] == "EndpointPickerConfig"
    for fact, holds in facts.items():
        check(f"in step: {fact}", None if holds else "it is not")
    return container["args"]


def check_program(binary, args, toml):
    """Starts the program with the flags of the manifest, and looks for every metric that is named there."""
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "foretoken.toml"
        config.write_text(toml)
        args = [f"--config={config}" if a.startswith("--config=") else "--port=0" if a.startswith("--port=") else a for a in args]
        process = subprocess.Popen([binary, *args, "--threads=1", "--num-blocks=256", "--api-key=x"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            url = None
            for line in process.stdout:
                found = re.search(r"http://[0-9.]+:(\d+)", line)
                if found:
                    url = f"http://127.0.0.1:{found[1]}"
                    break
            check("the program takes the flags of the Deployment", None if url else f"exit status {process.wait()}")
            for path in ("/health", "/version", "/metrics"):
                status = urllib.request.urlopen(url + path).status
                check(f"{path} answers without the API key", None if status == 200 else status)
            metrics = urllib.request.urlopen(url + "/metrics").read().decode()
            text = "".join(p.read_text() for p in HERE.rglob("*.yaml"))
            for name in sorted(set(re.findall(r"foretoken:\w+", text))):
                check(f"metric {name}", None if re.search(rf"^{name}\{{", metrics, re.MULTILINE) else "is not in /metrics")
            labels = re.search(r"^foretoken:cache_config_info\{(.*)\}", metrics, re.MULTILINE)[1]
            check("its block size and number of blocks", None if {"block_size", "num_gpu_blocks"} <= set(re.findall(r"(\w+)=", labels)) else labels)
            begun = time.monotonic()
            process.terminate()
            check("SIGTERM ends it", None if process.wait(60) == 0 else f"status {process.returncode} after {time.monotonic() - begun:.0f} s")
        finally:
            process.kill()


def main():
    with tempfile.TemporaryDirectory() as folder:
        pod_monitor = pod_monitor_validator(folder)
        seen = []
        for name in ("base", "cuda", "inference-pool"):
            objects = documents(HERE / name)
            print(f"== {name}: {len(objects)} objects, images {sorted({c['image'] for c in containers(objects)})}")
            (image,) = (c["image"] for c in find(objects, "Deployment")["spec"]["template"]["spec"]["containers"])
            check(f"image {image}", None if image.endswith(":cuda" if name == "cuda" else ":cpu") else "it is for the other device")
            for o in objects:
                if o not in seen:
                    check(f"{o['apiVersion']} {o['kind']} {o['metadata']['name']}", validate(o, pod_monitor))
            seen += objects
            args = check_fit(objects)
        # A validator that finds nothing wrong proves nothing.
        print("== mistakes are found")
        broken = json.loads(json.dumps(objects))
        find(broken, "Deployment")["spec"]["template"]["spec"]["containers"][0]["readyProbe"] = {}
        find(broken, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["interval"] = "often"
        find(broken, "InferencePool")["spec"]["targetPorts"] = [{"number": 0}]
        for kind in ("Deployment", "PodMonitor", "InferencePool"):
            found = validate(find(broken, kind), pod_monitor)
            check(f"{kind}: {found}", None if found else "nothing was found")
    if len(sys.argv) > 1:
        print("== the program")
        check_program(sys.argv[1], args, find(objects, "ConfigMap")["data"]["foretoken.toml"])
    print(f"{failures} failed" if failures else "all well")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
