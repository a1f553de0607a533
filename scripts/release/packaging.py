#!/usr/bin/env python3
"""Writes SHA256SUMS of a folder of artefacts, and fills the templates of deploy/packaging with them: packaging.py FOLDER
--version VERSION [--repository URL]

In a template, @VERSION@ is the version, @REPOSITORY@ the address under which releases/download/vVERSION has the artefacts,
and @SHA256 NAME@ an artefact's checksum. A package whose artefacts are not in the folder is left out, and its files of an
earlier run are removed.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parent.parent.parent / "deploy" / "packaging"
PACKAGES = ["aur", "homebrew", "winget"]


def repository_of_manifest():
    command = ["cargo", "metadata", "--locked", "--no-deps", "--format-version", "1"]
    packages = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["packages"]
    return next(package["repository"] for package in packages if package["name"] == "foretoken")


def fill(text, version, repository, sums):
    """The text with its values, and the names of artefacts that it lacks."""
    text = text.replace("@VERSION@", version).replace("@REPOSITORY@", repository)
    wanted = re.findall(r"@SHA256 ([^@]+)@", text)
    for name in wanted:
        text = text.replace(f"@SHA256 {name}@", sums.get(name, ""))
    return text, [name for name in wanted if name not in sums]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", required=True)
    parser.add_argument("--repository", default="")
    args = parser.parse_args()
    files = sorted(path for path in args.folder.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    lines = [f"{digest}  {name}\n" for name, digest in sums.items()]
    (args.folder / "SHA256SUMS").write_text("".join(lines))
    repository = args.repository or repository_of_manifest()
    for package in PACKAGES:
        folder = args.folder / "packaging" / package
        shutil.rmtree(folder, ignore_errors=True)
        if not repository:
            print(f"not made here: {package}, without --repository or a repository in Cargo.toml")
            continue
        templates = sorted((TEMPLATES / package).iterdir())
        filled = [fill(path.read_text(), args.version, repository.rstrip("/"), sums) for path in templates]
        lacking = sorted({name for _, names in filled for name in names})
        if lacking:
            print(f"not made here: {package}, without {', '.join(lacking)}")
            continue
        folder.mkdir(parents=True)
        for path, (text, _) in zip(templates, filled):
            (folder / path.name).write_text(text)


if __name__ == "__main__":
    main()
