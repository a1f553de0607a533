# Lists the recipes.
default:
    @just --list

# Format and lints of the library: for each commit.
check:
    cargo fmt --all --check
    cargo clippy --locked --workspace --lib -- -D warnings

# The README's test command, which fetches the models that tests need.
test:
    bash -euo pipefail -c "$(sed -n '/<!-- test -->/,/<!-- \/test -->/p' README.md | sed -n '/^```sh$/,/^```$/p' | sed '1d;$d')"

# All that must hold for a change.
gate:
    .ci/run
