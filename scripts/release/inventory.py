#!/usr/bin/env python3
"""What the program is built of, by `cargo metadata`: `licences` writes a text with the licences of all crates for one
target, `sbom` a CycloneDX document of all crates for all targets.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

LICENCE_FILE = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)", re.IGNORECASE)
# The definition of formats whose tables are in a file of ours.
GGML = Path("crates/kernels/LICENSE-GGML")
# For crates that come without a text: this one has no line of a copyright, which another licence would need.
APACHE = Path("LICENSE-APACHE")


def metadata(target, features):
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    if target:
        command += ["--filter-platform", target]
    if features:
        command += ["--features", features]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def linked(data):
    """The packages that the program is linked from, and the ids of what each of them needs."""
    packages = {package["id"]: package for package in data["packages"]}
    nodes = {node["id"]: node for node in data["resolve"]["nodes"]}

    def needs(node):
        kinds = lambda dep: {kind["kind"] for kind in dep["dep_kinds"]}
        return sorted(dep["pkg"] for dep in nodes[node]["deps"] if None in kinds(dep))

    root = next(node for node, package in packages.items() if package["name"] == "foretoken" and package["source"] is None)
    found, waiting = {}, [root]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = needs(node)
            waiting += found[node]
    order = sorted(found, key=lambda node: (packages[node]["name"], packages[node]["version"]))
    return root, [packages[node] for node in order], found


def texts(package):
    """The licences' texts in the crate's folder: by their names, or the one file that the manifest names."""
    folder = Path(package["manifest_path"]).parent
    files = [path for path in folder.iterdir() if path.is_file() and LICENCE_FILE.match(path.name)]
    if package.get("license_file"):
        files.append(folder / package["license_file"])
    return [path.read_text("utf-8", "replace").strip() for path in sorted(set(files))]


def spdx(package):
    """The licence as an expression of SPDX; a slash is crates.io's old form of OR."""
    expression = package["license"]
    return re.sub(r"\s*/\s*", " OR ", expression) if expression else None


def licences(data):
    _, packages, _ = linked(data)
    foreign = [package for package in packages if package["source"] is not None]
    with_text = {GGML.read_text().strip(): ["the grids of ggml's formats IQ1 to IQ3"]}
    lacking = []
    for package in foreign:
        name = f"{package['name']} {package['version']}"
        own = texts(package)
        if not own:
            lacking.append(name)
            expression = spdx(package) or ""
            if "Apache-2.0" in expression:
                own = [APACHE.read_text().strip()]
            else:
                own = [f"{expression}: https://spdx.org/licenses/{expression}.html"]
        for text in own:
            with_text.setdefault(text, []).append(name)
    print("foretoken contains these crates, and the grids of ggml's formats IQ1 to IQ3 (MIT;")
    print("https://github.com/ggml-org/ggml). The texts of their licences follow.\n")
    for package in foreign:
        source = package["repository"] or f"https://crates.io/crates/{package['name']}"
        authors = f"; {', '.join(package['authors'])}" if package["authors"] else ""
        print(f"{package['name']} {package['version']}: {spdx(package) or 'see below'}; {source}{authors}")
    for text, names in sorted(with_text.items(), key=lambda item: item[1]):
        print(f"\n{'=' * 80}\n{', '.join(names)}\n{'=' * 80}\n\n{text}")
    if lacking:
        print(f"inventory.py: without a text of their own: {', '.join(lacking)}", file=sys.stderr)


def purl(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package, checksums):
    entry = {
        "type": "library",
        "bom-ref": purl(package),
        "name": package["name"],
        "version": package["version"],
        "purl": purl(package),
    }
    if package["description"]:
        entry["description"] = " ".join(package["description"].split())
    if spdx(package):
        entry["licenses"] = [{"expression": spdx(package)}]
    checksum = checksums.get((package["name"], package["version"]))
    if checksum:
        entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package["repository"]:
        entry["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return entry


def sbom(data):
    root, packages, needs = linked(data)
    lock = Path("Cargo.lock").read_text()
    checksums = re.findall(r'name = "(.+)"\nversion = "(.+)"\nsource = ".+"\nchecksum = "(.+)"', lock)
    checksums = {(name, version): checksum for name, version, checksum in checksums}
    by_id = {package["id"]: package for package in packages}
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", 0))
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {**component(by_id[root], checksums), "type": "application"},
        },
        "components": [component(package, checksums) for package in packages if package["id"] != root],
        "dependencies": [
            {"ref": purl(package), "dependsOn": [purl(by_id[need]) for need in needs[package["id"]]]}
            for package in packages
        ],
    }
    print(json.dumps(document, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["licences", "sbom"])
    parser.add_argument("--target")
    parser.add_argument("--features")
    args = parser.parse_args()
    data = metadata(args.target, args.features)
    {"licences": licences, "sbom": sbom}[args.what](data)


if __name__ == "__main__":
    main()
