# shellcheck shell=bash disable=SC2154
# scripts/gpu-day.sh --pack: one archive of what a machine with a GPU needs.

# Bytes that the archive may have.
most=60000000

# What the parts and the tests read.
packed_files() {
    printf '%s\n' LICENSE* configs scripts/gpu-day.sh scripts/gpu-day scripts/head_prompts.py scripts/step-by-kernel.py \
        models/default/*.gguf models/heads/*.gguf tests/fixtures/architectures/*/config.json \
        tests/fixtures/packed/{f*8_*,*fp4}/{config.json,model.safetensors} \
        tests/fixtures/architectures/gpt_oss_mxfp4/model.safetensors
}

# Builds the programs unless they are named, and says where they are.
find_programs() {
    local built_here
    [ -z "${FORETOKEN:-}" ] || return 0
    find_toolkit || fail "there is no nvcc: set CUDA_HOME, or name programs that were built elsewhere (--help)"
    build_programs 2>&1 | tee "$stage/build.txt"
    # built_here SOURCE: what cargo built of it.
    built_here() { sed -n "s|.*Executable .*$1 (\(.*\))\$|\1|p" "$stage/build.txt" | tail -n 1; }
    FORETOKEN=$built/release/foretoken
    FORETOKEN_BENCH_GPU=$(built_here benches/gpu.rs)
    FORETOKEN_TESTS="$(built_here tests/cuda/main.rs) $(built_here tests/cuda_sampling.rs)"
}

# add_program FILE NAME
add_program() {
    [ -x "$1" ] || fail "there is no program $1"
    strip -o "$top/bin/$2" "$1" 2>/dev/null || cp "$1" "$top/bin/$2"
}

# Programs that are nearly the same follow each other, so that what they share is packed once.
compress() {
    local what=(foretoken-gpu-day)
    [ -z "$beside" ] || what=(bin PACKED)
    tar -C "$stage" --sort=name --owner=0 --group=0 -c "${what[@]}" | xz --lzma2=preset=6,dict=256MiB >"$stage/new"
    size=$(stat -c %s "$stage/new")
}

# Replaces the files of the checkout that programs embed by zeros, and lists them in bin/embedded.json.
leave_out_embedded() {
    python3 - "$top/bin" models/default/*.gguf <<'PYTHON'
import json, pathlib, sys

folder, holes = pathlib.Path(sys.argv[1]), []
for program in folder.iterdir():
    code = bytearray(program.read_bytes())
    for name in sys.argv[2:]:
        file = pathlib.Path(name).read_bytes()
        at = code.find(file)
        while at >= 0:
            code[at : at + len(file)] = bytes(len(file))
            holes.append([program.name, name, at])
            at = code.find(file, at + len(file))
    program.write_bytes(code)
(folder / "embedded.json").write_text(json.dumps(holes))
PYTHON
}

# Puts these files back into the programs.
restore_embedded() {
    python3 - <<'PYTHON'
import json, os, pathlib

for program, name, at in json.loads(pathlib.Path("bin/embedded.json").read_text()):
    with open(f"bin/{program}", "r+b") as code:
        code.seek(at)
        code.write(pathlib.Path(name).read_bytes())
os.remove("bin/embedded.json")
PYTHON
}

# pack FILE
pack() {
    local stage=target/gpu-day-pack top test name size
    top=$stage/foretoken-gpu-day
    [ -z "$beside" ] || top=$stage
    rm -rf "$stage"
    mkdir -p "$top/bin"
    find_programs
    add_program "$FORETOKEN" foretoken
    [ -z "${FORETOKEN_BENCH_GPU:-}" ] || add_program "$FORETOKEN_BENCH_GPU" gpu
    for test in ${FORETOKEN_TESTS:-}; do
        name=$(basename "$test")
        # Without cargo's hash.
        add_program "$test" "$(sed -E 's/-[0-9a-f]{16}$//' <<<"$name")"
    done
    [ -n "$beside" ] || packed_files | xargs cp -r --parents -t "$top"
    {
        git log -1 --format='commit %h, %cs' 2>/dev/null || echo "no commit is known"
        git status --porcelain --untracked-files=no 2>/dev/null | sed 's/^/changed since:/'
    } >"$top/PACKED"
    if [ -n "$beside" ]; then
        leave_out_embedded
    fi
    compress
    if [ -n "$beside" ]; then
        echo "programs alone"
    elif [ -e "$smollm2" ] && [ $((size + $(stat -Lc %s "$smollm2"))) -le "$most" ]; then
        cp -L --parents "$smollm2" "$top"
        compress
    else
        echo "without SmolLM2: $([ -e "$smollm2" ] && echo "there is no room for it" || echo "there is no $smollm2")"
    fi
    (cd "$top" && { compgen -G 'bin/*' && compgen -G 'models/*/*' || true; } | xargs du -ch | sort -rh | head -n 12)
    if [ "$size" -gt "$most" ]; then
        fail "the archive would have $((size / 1000000)) MB, more than $((most / 1000000)): leave out a program"
    fi
    mv "$stage/new" "$1"
    rm -r "$stage"
    echo "$1: $((size / 1000)) KB of at most $((most / 1000)) KB"
}
