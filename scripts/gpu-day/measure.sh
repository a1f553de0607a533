# shellcheck shell=bash disable=SC2154
# Parts of scripts/gpu-day.sh: the build, tests and measurements.

bench() { "$binary" bench --device "$device" "$@"; }

# weights TARGET DRAFT: sets `flags` for weights of these types.
weights() {
    flags=()
    [ "$1" = bf16 ] || flags+=(--quantize "$1")
    [ "$2" = bf16 ] || flags+=(--draft-quantize "$2")
}

part_build() {
    skip_dry "a build"
    [ -z "${FORETOKEN:-}" ] || skip "FORETOKEN is $FORETOKEN"
    find_toolkit || {
        echo "there is no nvcc: set CUDA_HOME, or build elsewhere and set FORETOKEN (benches/README.md, On a GPU)"
        return 1
    }
    build_programs
}

# From here on only the GPU's own time should pass.
build_programs() {
    cargo build --release --locked --features cuda
    cargo bench --no-run --locked --features cuda --bench gpu
    cargo test --no-run --release --locked --features cuda --test cuda --test cuda_sampling
}

# A device that answers, and all that one asks later about figures.
part_check() {
    cat PACKED 2>/dev/null || git log -1 --format='commit %h, %cs' 2>/dev/null || echo "no commit is known"
    grep -m 1 'model name' /proc/cpuinfo || true
    echo "$(nproc) CPUs"
    free -g 2>/dev/null || true
    df -h "$out" || true
    if find_toolkit; then
        nvcc --version
    else
        echo "no nvcc"
    fi
    cargo --version 2>/dev/null || echo "no cargo"
    echo "CUDA's libraries: ${LD_LIBRARY_PATH:-those of the system}"
    if [ -n "$dry" ]; then
        echo "skipped in a dry run: nvidia-smi"
    else
        nvidia-smi
        nvidia-smi -q -d CLOCK,POWER || true
        # Only this part may wait for a network.
        if [ ! -e "$smollm2" ] && [ ! -e PACKED ]; then
            timeout 50 scripts/fetch-smollm2.sh || echo "SmolLM2 could not be downloaded"
        fi
    fi
    need_binary
    "$binary" --version
    bench --model "$work/tiny-target" "${one_text[@]}"
}

# A bench that costs next to nothing.
one_text=(--load-format dummy --random-prompts 1 --prompt-tokens 8 --max-tokens 8 --temperatures 0)

part_tests() {
    local test few=()
    if [ -n "$dry" ]; then
        if [ "$device" = cpu ] || [ -z "${FORETOKEN_TESTS:-}" ]; then
            skip_dry "tests that need a GPU; scripts/emulated-gpu.sh runs them"
        fi
        # One that reads a file, and one that runs the program.
        few=(a_quantized_file commands_end)
    fi
    if [ -n "${FORETOKEN_TESTS:-}" ]; then
        for test in $FORETOKEN_TESTS; do
            once "$(basename "$test")" "$test" --show-output "${few[@]}"
        done
    elif [ -n "${FORETOKEN:-}" ]; then
        skip "the program was built elsewhere, and FORETOKEN_TESTS names no tests"
    else
        find_toolkit || true
        once all cargo test --release --locked --features cuda --test cuda --test cuda_sampling
    fi
}

# A command that ends well, and one that ends with an error after all of it.
part_sanitizer() {
    need_binary
    find_toolkit || true
    command -v compute-sanitizer >/dev/null || skip "there is no compute-sanitizer"
    local flags=(--model "$work/tiny-target" "${one_text[@]}" --spec-budget fixed)
    once well sanitized 0 "${flags[@]}"
    once error sanitized 2 "${flags[@]}" --json "$work/no/such/folder.json"
}

# sanitized CODE FLAGS...: a bench that ends with this exit code, and no fault is found in it.
sanitized() {
    local rc=0 said=$work/sanitizer.txt
    compute-sanitizer --error-exitcode 99 "$binary" bench --device "$device" "${@:2}" >"$said" 2>&1 || rc=$?
    tail -n 40 "$said"
    echo "verdict: exit code $rc, $(grep -o 'ERROR SUMMARY: .*' "$said" || echo "and no summary")"
    [ "$rc" = "$1" ] && grep -q 'ERROR SUMMARY: 0 errors' "$said"
}

# steps NAME VARIABLE=VALUE...: the bench `gpu`.
steps() {
    local name=$1
    shift
    if [ -n "${FORETOKEN_BENCH_GPU:-}" ]; then
        once "$name" measured env "$@" "$FORETOKEN_BENCH_GPU" --bench
    elif [ -n "${FORETOKEN:-}" ]; then
        skip "the program was built elsewhere, and FORETOKEN_BENCH_GPU names no bench"
    else
        find_toolkit || true
        once "$name" measured env "$@" cargo bench --locked --features cuda --bench gpu
    fi
}

# measured COMMAND...: the bench does not fail where it finds no GPU, but this does.
measured() {
    "$@" | tee "$work/steps.txt" && ! grep -q 'nothing is measured' "$work/steps.txt"
}

# pair TARGET DRAFT: sets `pair` to the variables of the bench `gpu` for the mission's pair with weights of these types.
pair() {
    pair=(FORETOKEN_BENCH_TARGET=configs/llama-3.2-3b FORETOKEN_BENCH_DRAFT=configs/llama-3.2-1b)
    [ "$1" = bf16 ] || pair+=("FORETOKEN_BENCH_TARGET_QUANTIZE=$1")
    [ "$2" = bf16 ] || pair+=("FORETOKEN_BENCH_DRAFT_QUANTIZE=$2")
}

# steps_of TARGET DRAFT
steps_of() {
    pair "$@"
    steps "$1-$2" FORETOKEN_BENCH_ROWS=1,2,4,6,8,16,32,64,128,256 "${pair[@]}"
}

part_steps_bf16() {
    skip_dry "the bench gpu, which needs a GPU"
    steps_of bf16 bf16
}

part_steps_4bit() {
    skip_dry "the bench gpu, which needs a GPU"
    steps_of q4_k q4_k
    steps_of q8_0 q4_k
    # Last, because no GPU has run it yet.
    pair q4_k q4_k
    steps q4_k-one-launch FORETOKEN_BENCH_ONE_LAUNCH=1 FORETOKEN_BENCH_ONLY_GRAPHS=1 FORETOKEN_BENCH_ROWS=1,2,4,6,8,16 "${pair[@]}"
}

# Each run measures plain decoding, too.
part_streams() {
    need_binary
    local sizes=(--random-prompts 128 --prompt-tokens 64 --max-tokens 48 --max-num-seqs 128) many=16,64,128 few=1,4
    [ -z "$dry" ] || { sizes=(--random-prompts 4 --prompt-tokens 8 --max-tokens 4 --max-num-seqs 4) && many=4 few=1; }
    measure() {
        once "$1" bench --model "$target" --load-format dummy --temperatures 0 "${sizes[@]}" --streams "$2" "${@:3}" \
            --json "$out/streams-$1.json"
    }
    measure tables "$many,$few"
    # How well a draft model pays, if 80% of its tokens are accepted.
    measure draft "$many" --draft-model "$draft" --draft-quantize q4_k --synthetic-acceptance 0.8
    measure tables-q4_k "$many,$few" --quantize q4_k
    measure batch-invariant "$many,$few" --batch-invariant
}

part_grid() {
    need_binary
    local pair sizes=(--random-prompts 3 --max-tokens 200 --spec-lengths "1,2,3,4,5,6,7,8"
        --synthetic-acceptance "0.6,0.7,0.8,0.9")
    [ -z "$dry" ] || sizes=(--random-prompts 1 --prompt-tokens 8 --max-tokens 8 --spec-lengths "1,3"
        --synthetic-acceptance "0.6,0.9")
    for pair in "bf16 q4_k" "q4_k q4_k" "q8_0 q4_k" "bf16 bf16"; do
        # shellcheck disable=SC2086
        weights $pair
        once "${pair/ /-}" bench --model "$target" --draft-model "$draft" --load-format dummy --spec-budget fixed \
            --spec-topk 1 --temperatures 0 "${sizes[@]}" "${flags[@]}" --json "$out/grid-${pair/ /-}.json"
    done
}

part_profile() {
    skip_dry "the bench gpu, which needs a GPU"
    profile_of bf16 q4_k
    profile_of q4_k q4_k
}

# profile_of TARGET DRAFT: steps by kernel, of ncu; without it, by their parts.
profile_of() {
    local kernels=$work/profile-$1-$2.csv
    pair "$@"
    pair+=(FORETOKEN_BENCH_PROFILE=1,8,64)
    local program=${FORETOKEN_BENCH_GPU:-$(compgen -G "$built/release/deps/gpu-*" | grep -v '[.]' | tail -n 1)}
    if find_ncu && [ -n "$program" ]; then
        rm -f "$kernels"
        once "kernels-$1-$2" env "${pair[@]}" "$ncu" --profile-from-start off --clock-control none --csv \
            --print-units base --metrics gpu__time_duration.sum,dram__bytes.sum --log-file "$kernels" \
            "$program" --bench
        [ ! -e "$kernels" ] || once "by-kernel-$1-$2" python3 scripts/step-by-kernel.py "$kernels"
    else
        echo "no ncu, or no program for it"
        steps "parts-$1-$2" "${pair[@]}"
    fi
}

# Sets `ncu`.
find_ncu() {
    find_toolkit || true
    ncu=$(command -v ncu || compgen -G '/opt/nvidia/nsight-compute/*/ncu' | tail -n 1)
    [ -n "$ncu" ]
}

# Each run measures plain decoding, too.
part_smollm2() {
    need_binary
    local model=$smollm2 prompts=${PROMPTS:-$work/measured.jsonl} tokens=128 count=24 drafter
    if [ -n "$dry" ]; then
        tokens=8 count=1
        [ -e "$model" ] || model=$demo
    else
        need_smollm2
    fi
    # With another seed than the corpus.
    python3 scripts/head_prompts.py prompts "$count" 99 >"$work/measured.jsonl"
    measure() {
        once "$1" bench --model "$model" --prompts "$prompts" --max-tokens "$tokens" --temperatures 0,1 \
            --json "$out/smollm2-$1.json" "${@:2}"
    }
    for drafter in tables ngram self; do
        measure "$drafter" --drafter "$drafter"
    done
    if [ "$model" = "$demo" ]; then
        echo "skipped in a dry run: the head, which needs SmolLM2"
    else
        measure head --draft-model models/heads/smollm2-135m-eagle3.Q4_1.gguf
    fi
}
