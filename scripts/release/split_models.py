#!/usr/bin/env python3
"""Divides the crate of the demonstration models, which is larger than crates.io takes: split_models.py WORKSPACE.
WORKSPACE is a copy of the repository. `foretoken-demo-models` keeps its interface, and all but the second half of the
target; the new crate `foretoken-demo-models-rest` has that. The compiler puts the halves together.
"""

import sys
from pathlib import Path

TARGET = "foretoken-demo.Q5_1.gguf"
FIRST, SECOND = "foretoken-demo.first-half", "foretoken-demo.second-half"
REST = "foretoken-demo-models-rest"


def replaced(text, old, new):
    """`text` with `new` in the one place of `old`."""
    if text.count(old) != 1:
        sys.exit(f"split_models.py: the crate of the models should have {old!r} once, not {text.count(old)} times")
    return text.replace(old, new)


def main():
    workspace = Path(sys.argv[1])
    models, rest = workspace / "models/default", workspace / "crates/demo-models-rest"
    target = models / TARGET
    content = target.read_bytes()
    half = len(content) // 2
    if 2 * half != len(content):
        sys.exit(f"split_models.py: {target} has an odd number of bytes, so its halves differ in size")

    rest.mkdir()
    (models / FIRST).write_bytes(content[:half])
    (rest / SECOND).write_bytes(content[half:])
    target.unlink()

    library = (models / "lib.rs").read_text()
    library = replaced(library, f'include_bytes!("{TARGET}")', "HALVES.as_flattened()")
    (models / "lib.rs").write_text(
        library
        + f"""
/// The halves of the target: crates.io takes no crate that is as large as both.
static HALVES: [[u8; {half}]; 2] = [*include_bytes!("{FIRST}"), *foretoken_demo_models_rest::SECOND_HALF];
"""
    )
    (rest / "lib.rs").write_text(
        f"""//! The second half of the bytes of a demonstration model; `foretoken-demo-models` has the first one.

/// The second half.
pub const SECOND_HALF: &[u8; {half}] = include_bytes!("{SECOND}");
"""
    )

    manifest = (models / "Cargo.toml").read_text()
    name = 'name = "foretoken-demo-models"\ndescription = "The demonstration pair of foretoken: a small target model and a draft for it"'
    part = f'name = "{REST}"\ndescription = "The second half of the target model of foretoken-demo-models"'
    (rest / "Cargo.toml").write_text(replaced(replaced(manifest, name, part), 'readme = "README.md"\n', ""))
    (models / "Cargo.toml").write_text(f"{manifest}\n[dependencies]\n{REST}.workspace = true\n")
    root = (workspace / "Cargo.toml").read_text()
    version = root.split("[workspace.package]", 1)[1].split('version = "', 1)[1].split('"', 1)[0]
    (workspace / "Cargo.toml").write_text(
        replaced(
            root,
            "[workspace.dependencies]\n",
            f'[workspace.dependencies]\n{REST} = {{ version = "{version}", path = "crates/demo-models-rest" }}\n',
        )
    )


main()
