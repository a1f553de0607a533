#!/usr/bin/env bash
# Everything that we want of a GPU, for a day on which one is lent to us, in the order of its worth:
#
#   scripts/gpu-day.sh [--dry] [--out DIR] [--list] [--again] [--budget SECONDS] [PART...]
#
# Each part has a time limit, and leaves DIR/PART.txt (what it printed) and, when it has ended, DIR/PART.done
# (exit code and seconds). Run again, the script goes on where it was: it leaves out what is done, and repeats a
# part that failed or reached its limit only if the part is named or --again is given. Within a part, too, only
# the runs are made that are missing. To make a part anew, delete DIR/PART.* (for corpus and train DIR/work, too). Parts
# that the budget cut off, and those that were skipped, are tried again every time.
#
#   --dry      tiny sizes on the CPU, to see that all of this works; in a minute, and without downloads. After
#              scripts/emulated-gpu.sh, with a program built there, on the emulated GPU, which takes long
#   --out      DIR, by default target/gpu-day (target/gpu-day-dry in a dry run)
#   --list     the parts, with their limits in seconds
#   --budget   seconds for all of this call: a part gets no more than is left, and none starts that could not do much
#
# The end of every call packs the results and the head, DIR/gpu-day.tar.gz, which tells the script what is done if it
# is unpacked in DIR on another machine. Beside it are, in pieces, the weights and the corpus from which training can
# go on elsewhere: head-weights.tar.gz.* and corpus.tar.gz.*
#
# Without a toolkit on the machine of the GPU, give it what was built elsewhere: FORETOKEN, the program;
# FORETOKEN_BENCH_GPU, the bench `gpu`; FORETOKEN_TESTS, the tests `cuda` and `cuda_sampling`, separated by spaces.
# `cargo bench --no-run` and `cargo test --no-run` print the paths of the last two. SMOLLM2 is the model if it is
# not where scripts/fetch-smollm2.sh puts it, and PROMPTS a file of prompts to measure it with. CORPUS_SHARDS (6) is
# how large the corpus becomes if there is time, TRAIN_SECONDS how long the head trains in all calls together (what
# the first leaves it). Paths are relative to the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
script=scripts/gpu-day.sh

# Name, seconds at most, seconds without which it does not start, what it does.
parts="\
build      1500  60 the program, the bench and the tests
check        90  10 what this machine is, and whether the program finds its GPU
tests       600  60 the tests of the GPU
steps-bf16  180  30 floors and steps of 3B and 1B in bf16
steps-4bit  420  30 the same with quantized weights
grid        600  60 speed-up by acceptance and length of drafts, bf16 and quantized pairs
streams     420  60 throughput of 1 to 128 streams, plain, with tables, batch-invariant
smollm2     300  40 SmolLM2 with every drafter
corpus      300  40 SmolLM2 answers prompts that we wrote
train      3600 120 a head for SmolLM2 learns from the answers
pack         60   0 an archive of the results and of the head"

# Exit codes of parts: this machine lacks what it needs; the time was too short, and the next call goes on.
skip_code=77
later_code=75

usage() {
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$script"
}

fail() {
    echo "gpu-day: $*" >&2
    exit 2
}

now() { date +%s; }
milliseconds() { date +%s%3N; }

# What follows runs within a part, of which the result file is the output.

# skip WHY: ends the part, which is neither done nor failed.
skip() {
    echo "skipped: $*"
    exit "$skip_code"
}

# skip_dry WHY: the same, in a dry run only.
skip_dry() {
    [ -z "$dry" ] || { echo "skipped in a dry run: $*" && exit "$skip_code"; }
}

# later WHY: ends the part for this call.
later() {
    echo "to be continued: $*"
    exit "$later_code"
}

# Seconds until the part's limit.
left() { echo $((deadline - $(now))); }

# once NAME COMMAND...: one of the part's runs, unless it was made in an earlier call. If it fails, the others are
# still made.
once() {
    local name=$1 started
    shift
    if grep -qxF -e "$name" "$out/$part.runs" 2>/dev/null; then
        return
    fi
    printf '\n== %s: %s\n' "$name" "$*"
    started=$(now)
    if "$@"; then
        echo "$name" >>"$out/$part.runs"
        echo "== $name: $(($(now) - started)) s"
    else
        echo "== $name: failed"
        failed=1
    fi
}

# Puts a toolkit on the path if there is one.
find_toolkit() {
    local folder
    for folder in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; do
        if ! command -v nvcc >/dev/null && [ -n "$folder" ] && [ -x "$folder/bin/nvcc" ]; then
            export CUDA_HOME=$folder PATH=$folder/bin:$PATH
        fi
    done
    command -v nvcc >/dev/null
}

need_binary() {
    if [ ! -x "$binary" ]; then
        echo "there is no $binary"
        exit 1
    fi
}

need_smollm2() {
    [ -e "$smollm2" ] || skip "there is no $smollm2; scripts/fetch-smollm2.sh downloads it"
}

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
    cargo build --release --locked --features cuda
    # From here on only the GPU's own time should pass.
    cargo bench --no-run --locked --features cuda --bench gpu
    cargo test --no-run --release --locked --features cuda --test cuda --test cuda_sampling
}

# A device that answers, and all that one asks later about figures.
part_check() {
    git log -1 --format='commit %h, %cs' 2>/dev/null || echo "no commit is known"
    grep -m 1 'model name' /proc/cpuinfo || true
    echo "$(nproc) CPUs"
    free -g 2>/dev/null || true
    df -h "$out"
    if find_toolkit; then
        nvcc --version
    else
        echo "no nvcc"
    fi
    cargo --version 2>/dev/null || echo "no cargo"
    if [ -n "$dry" ]; then
        echo "skipped in a dry run: nvidia-smi"
    else
        nvidia-smi
        nvidia-smi -q -d CLOCK,POWER || true
        # Only this part may wait for a network.
        if [ ! -e "$smollm2" ]; then
            timeout 50 scripts/fetch-smollm2.sh || echo "SmolLM2 could not be downloaded"
        fi
    fi
    need_binary
    "$binary" --version
    bench --model "$target" --load-format dummy --random-prompts 1 --prompt-tokens 8 --max-tokens 8 --temperatures 0
}

part_tests() {
    skip_dry "tests that need a GPU; scripts/emulated-gpu.sh runs them"
    local test
    if [ -n "${FORETOKEN_TESTS:-}" ]; then
        for test in $FORETOKEN_TESTS; do
            once "$(basename "$test")" "$test"
        done
    elif [ -n "${FORETOKEN:-}" ]; then
        skip "the program was built elsewhere, and FORETOKEN_TESTS names no tests"
    else
        find_toolkit || true
        once all cargo test --release --locked --features cuda --test cuda --test cuda_sampling
    fi
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

part_steps_bf16() {
    skip_dry "the bench gpu, which needs a GPU"
    steps bf16 FORETOKEN_BENCH_TARGET=configs/llama-3.2-3b FORETOKEN_BENCH_DRAFT=configs/llama-3.2-1b
}

part_steps_4bit() {
    skip_dry "the bench gpu, which needs a GPU"
    local pair
    for pair in "q4_k q4_k" "q8_0 q4_k"; do
        steps "${pair/ /-}" FORETOKEN_BENCH_TARGET=configs/llama-3.2-3b FORETOKEN_BENCH_DRAFT=configs/llama-3.2-1b \
            FORETOKEN_BENCH_TARGET_QUANTIZE="${pair% *}" FORETOKEN_BENCH_DRAFT_QUANTIZE="${pair#* }"
    done
}

part_grid() {
    need_binary
    local pair sizes=(--random-prompts 3 --max-tokens 200 --spec-lengths "1,2,3,4,5,6,7,8"
        --synthetic-acceptance "0.6,0.7,0.8,0.9")
    [ -z "$dry" ] || sizes=(--random-prompts 1 --prompt-tokens 8 --max-tokens 8 --spec-lengths "1,3"
        --synthetic-acceptance "0.6,0.9")
    for pair in "bf16 bf16" "bf16 q4_k" "q8_0 q4_k" "q4_k q4_k"; do
        # shellcheck disable=SC2086
        weights $pair
        once "${pair/ /-}" bench --model "$target" --draft-model "$draft" --load-format dummy --spec-budget fixed \
            --spec-topk 1 --temperatures 0 "${sizes[@]}" "${flags[@]}" --json "$out/grid-${pair/ /-}.json"
    done
}

# Each run measures plain decoding, too.
part_streams() {
    need_binary
    local sizes=(--random-prompts 128 --prompt-tokens 64 --max-tokens 48 --streams "1,4,16,64,128" --max-num-seqs 128)
    [ -z "$dry" ] || sizes=(--random-prompts 4 --prompt-tokens 8 --max-tokens 4 --streams "1,4" --max-num-seqs 4)
    once tables bench --model "$target" --load-format dummy --temperatures 0 "${sizes[@]}" \
        --json "$out/streams-tables.json"
    once batch-invariant bench --model "$target" --load-format dummy --temperatures 0 "${sizes[@]}" --batch-invariant \
        --json "$out/streams-batch-invariant.json"
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

# answer PROMPTS TEMPERATURE MAX_TOKENS: writes the answers beside the prompts; those that are there stay.
answer() {
    local answers=${1%.jsonl}-answers.jsonl seconds rc=0
    seconds=$(($(left) - 5))
    [ "$seconds" -ge 5 ] || later "not all prompts are answered"
    # In the part's group of processes, which ends as a whole.
    timeout --foreground "$seconds" "$binary" generate --model "$answering" --device "$device" \
        --speculative-decoding=false --max-num-seqs 256 --prompts "$1" --out "$answers" --temperature "$2" \
        --max-tokens "$3" || rc=$?
    [ "$rc" != 124 ] || later "not all prompts are answered"
    [ "$rc" = 0 ] || exit "$rc"
}

# Shards are answered greedily and sampled in turns, so that both are there whenever the time ends.
part_corpus() {
    need_binary
    local shard shards=${CORPUS_SHARDS:-6} prompts=2000 follow=480 tokens=200 temperature first texts
    answering=$smollm2
    if [ -n "$dry" ]; then
        shards=2 prompts=6 follow=2 tokens=100
        answering=$demo
    else
        need_smollm2
    fi
    mkdir -p "$work/corpus"
    if [ -e "$work/texts.jsonl" ]; then
        echo "the head already learns from what there is"
        return
    fi
    for ((shard = 0; shard < shards; shard++)); do
        first=$work/corpus/$shard-first.jsonl texts=$work/corpus/$shard-follow.jsonl
        [ ! -e "$work/corpus/$shard.done" ] || continue
        temperature=$((shard % 2))
        echo "shard $shard, temperature $temperature"
        python3 scripts/head_prompts.py prompts $(((shard + 1) * prompts)) | tail -n "$prompts" >"$first"
        answer "$first" "$temperature" "$tokens"
        python3 scripts/head_prompts.py follow "$follow" $((shard + 1)) <"${first%.jsonl}-answers.jsonl" >"$texts"
        answer "$texts" "$temperature" "$((tokens * 4 / 5))"
        touch "$work/corpus/$shard.done"
    done
}

# learn FOLDER STEPS ARGS...: trains the head in the folder, from where it is.
learn() {
    "$binary" distill --method eagle3 --model "$answering" --corpus "$work/$texts" --ttt-steps 3 --resume \
        "${shape[@]}" --out "$work/$1" --steps "$2" "${@:3}"
}

# timed COMMAND...: sets `took` to its milliseconds.
timed() {
    local started
    started=$(milliseconds)
    "$@"
    took=$(($(milliseconds) - started))
}

# made FOLDER: the steps that the head there has made.
made() {
    local file=$work/$1/report.json
    python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["steps"])' "$file" 2>/dev/null || echo 0
}

# What the target computed for the trial serves FOLDER, too.
linked() {
    local file
    mkdir -p "$work/$1"
    for file in "$work"/trial/{features,targets}*; do
        ln -sf "../trial/${file##*/}" "$work/$1/"
    done
}

# choose_texts SECONDS: the texts to learn from, as many as the target reads again in that time (on the CPU, where one
# may wait long for it). From here on they stay the same.
choose_texts() {
    local sample=100 count
    # A line that was cut off ends otherwise. Greedy and sampled answers are mixed.
    cat "$work"/corpus/*-answers.jsonl 2>/dev/null | grep '"finish_reason":"[a-z]*"}$' >"$work/answers.jsonl" \
        || skip "there is no corpus"
    shuf --random-source=<(yes) "$work/answers.jsonl" -o "$work/answers.jsonl"
    texts=sample.jsonl train_on=$device
    head -n "$sample" "$work/answers.jsonl" >"$work/$texts"
    rm -rf "$work/sample"
    echo "a sample"
    timed try_sample
    echo "$train_on" >"$work/train.device"
    rm -rf "$work/sample"
    count=$(wc -l <"$work/$texts")
    count=$((count * $1 * 1000 / took))
    [ "$count" -ge "$sample" ] || count=$sample
    head -n "$count" "$work/answers.jsonl" >"$work/texts.new"
    mv "$work/texts.new" "$work/texts.jsonl"
    echo "$(wc -l <"$work/texts.jsonl") of $(wc -l <"$work/answers.jsonl") texts"
}

# Sets `train_on` to the device that the program trains heads on.
try_sample() {
    if ! learn sample 100 --device "$train_on" --stop-after 1 >"$work/sample.txt" 2>&1; then
        cat "$work/sample.txt"
        # A program that trains heads only on the CPU says so before it does anything.
        grep -q 'trains on the CPU' "$work/sample.txt" || return 1
        train_on=cpu
        learn sample 100 --stop-after 1
    fi
}

# Makes the target's pass and measures what a step costs: `pace`, and `fixed` for a start and an end.
measure_pace() {
    local few=3 more=10 first
    [ -z "$dry" ] || { few=1 && more=1; }
    echo "the target's pass"
    learn trial 100 --device "$train_on" --stop-after 1
    timed learn trial 100 --device "$train_on" --stop-after "$few"
    first=$took
    timed learn trial 100 --device "$train_on" --stop-after $((few + more))
    pace=$(((took - first) / more))
    [ "$pace" -ge 1 ] || pace=1
    fixed=$((first - few * pace))
    [ "$fixed" -ge 0 ] || fixed=0
    echo "$pace $fixed" >"$work/train.pace"
}

# stage FOLDER STEPS ARGS...: trains as far as the time allows. Only a run that ends by itself leaves weights, so it
# must not be cut off.
stage() {
    local folder=$1 steps=$2 did fits
    shift 2
    did=$(made "$folder")
    [ "$did" -lt "$steps" ] || return 0
    linked "$folder"
    # Now and then it measures, and the head is converted after it.
    fits=$((((($(left) - 10) * 1000 - fixed) * 9 / 10) / pace))
    echo "$folder: $did of $steps steps, and time for $fits"
    [ "$fits" -ge 1 ] || later "$folder has made $did of $steps steps"
    learn "$folder" "$steps" --device "$train_on" --stop-after "$fits" "$@"
    convert "$folder"
    did=$(made "$folder")
    [ "$did" -ge "$steps" ] || later "$folder has made $did of $steps steps"
}

# convert FOLDER: the head as it is now.
convert() {
    local type
    for type in q4_1 q8_0; do
        "$binary" convert --model "$work/$1" --type "$type" --out "$out/head.$type.gguf"
    done
    cp "$work/$1/report.json" "$out/train-$1.json"
    echo "$1" >"$work/best"
}

part_train() {
    need_binary
    local seconds all rough batch=8
    answering=$smollm2
    # One row a core.
    [ "$(nproc)" -lt 16 ] || batch=16
    shape=(--draft-config configs/smollm2-eagle3.json --batch-size "$batch" --holdout 0.005 --eval-every 100
        --checkpoint-every 100)
    if [ -n "$dry" ]; then
        answering=$demo
        shape=(--draft-vocab-size 256 --seq-len 32 --batch-size 1 --holdout 0.01)
    else
        need_smollm2
    fi
    # Training allocates again at once what it frees, so memory is not returned to the system.
    export MIMALLOC_PURGE_DELAY=-1
    # Of the time, a third is for the target's pass and half for steps; the rest goes to starts and measurements.
    [ -e "$work/train.seconds" ] || echo "${TRAIN_SECONDS:-$(left)}" >"$work/train.seconds"
    seconds=$(<"$work/train.seconds")
    [ -e "$work/texts.jsonl" ] || choose_texts $((seconds / 3))
    texts=texts.jsonl train_on=$(<"$work/train.device")
    [ -e "$work/train.pace" ] || measure_pace
    read -r pace fixed <"$work/train.pace"
    echo "a step takes $pace ms, a start and an end $fixed ms, on $train_on"
    all=$((seconds * 500 / pace))
    [ -z "$dry" ] || all=3
    [ "$all" -ge 2 ] || all=2
    # As in scripts/make-smollm2-head.sh: roughly, then for what is rejected.
    rough=$(((all * 3 + 2) / 5))
    stage rough "$rough" --learning-rate 3e-3
    stage head $((all - rough)) --learning-rate 1.2e-3 --init-from "$work/rough" --overlap-share 0.9
}

# What a fresh machine has to make anew is not in it: the build, and what the corpus and the training left in `work`.
part_pack() {
    local archive=$out/gpu-day.tar.gz best
    rm -f "$archive" "$out"/head-weights.tar.gz.* "$out"/corpus.tar.gz.*
    (
        cd "$out"
        find . -maxdepth 1 -type f ! -name 'pack.*' ! -name '*.tar.gz*' \
            ! -name build.done ! -name corpus.done ! -name train.done -print0 \
            | tar -czf work/gpu-day.tar.gz --null -T -
    )
    mv "$work/gpu-day.tar.gz" "$archive"
    # In pieces, because what brings files back may limit their size.
    if compgen -G "$work/corpus/*-answers.jsonl" >/dev/null; then
        tar -czf - -C "$work" corpus | split -b 15M - "$out/corpus.tar.gz."
    fi
    if [ -e "$work/best" ]; then
        best=$work/$(<"$work/best")
        # --init-from takes this folder.
        tar -czf - -C "$best" config.json model.safetensors | split -b 15M - "$out/head-weights.tar.gz."
    fi
    du -ch "$out"/*.tar.gz*
}

# What follows starts the parts.

# recorded PART: sets `code` and `seconds` of a part that has ended.
recorded() {
    code="" seconds=""
    [ ! -e "$out/$1.done" ] || read -r code seconds <"$out/$1.done"
}

# goes_on PART: whether what its limit cuts off is no failure: a part that takes what time it gets.
goes_on() { [ "$1" = corpus ] || [ "$1" = train ]; }

# run_part NAME LIMIT LEAST: sets `result[NAME]` if no record will say it.
run_part() {
    local name=$1 limit=$2 least=$3 room started rc=0 took by_budget="" code seconds
    recorded "$name"
    case $code in
        "" | "$skip_code") ;;
        0) [ "$name" = pack ] || return 0 ;;
        *) [ -n "$again" ] || is_named "$name" || [ "$name" = pack ] || return 0 ;;
    esac
    if [ -n "$dry" ]; then
        least=$((least < 2 ? least : 2))
        limit=60
        # The emulator is slow.
        [ "$device" = cpu ] || limit=1800
    fi
    room=$limit
    if [ -n "$budget" ]; then
        room=$((ends - $(now)))
        [ "$name" = pack ] || room=$((room - reserve))
        if [ "$room" -lt "$least" ]; then
            if [ "$name" != pack ]; then
                result[$name]="no time left"
                return 0
            fi
            # The results must come back.
            room=$reserve
        fi
        if [ "$room" -lt "$limit" ]; then
            by_budget=1
        else
            room=$limit
        fi
    fi
    rm -f "$out/$name.done"
    [ "$name" != pack ] || rm -f "$out/pack.txt"
    echo "== $name: at most $room s"
    started=$(now)
    printf '\n==== %s, at most %s s\n' "$(date -u '+%F %T')" "$room" >>"$out/$name.txt"
    timeout --kill-after=5 "$room" "$script" --inside "$name" "$((started + room))" --out "$out" ${dry:+--dry} \
        >>"$out/$name.txt" 2>&1 </dev/null &
    child=$!
    wait "$child" || rc=$?
    if [ -n "$stopped" ]; then
        wait "$child" || true
    fi
    end_group "$child"
    if [ -n "$stopped" ]; then
        result[$name]="stopped"
        return 0
    fi
    child=""
    took=$(($(now) - started))
    # A part that did not end by itself when told was killed.
    if [ "$rc" = 137 ] && [ "$took" -ge "$room" ]; then
        rc=124
    fi
    case $rc in
        0) ;;
        "$skip_code") grep '^skipped' "$out/$name.txt" | tail -n 1 ;;
        "$later_code" | 124)
            # A dry run has time enough, and must show it.
            if [ -n "$by_budget" ] || { [ -z "$dry" ] && goes_on "$name"; }; then
                result[$name]="unfinished, $took"
                return 0
            fi
            ;;
        *) tail -n 12 "$out/$name.txt" | sed 's/^/    /' ;;
    esac
    echo "$rc $took" >"$out/$name.done"
}

# end_group GROUP: ends what a part has left running, which would take the next one's GPU.
end_group() {
    for _ in 1 2 3 4 5; do
        kill -0 -- "-$1" 2>/dev/null || return 0
        sleep 1
    done
    kill -KILL -- "-$1" 2>/dev/null || true
}

is_named() { [[ " ${names[*]} " == *" $1 "* ]]; }

# summary: the table. Sets `failures`.
summary() {
    local name rest code seconds said
    failures=0
    printf '\n%-12s %-14s %s\n' part result seconds
    while read -r name rest; do
        is_chosen "$name" || continue
        recorded "$name"
        case $code in
            "") said=${result[$name]:-not run} seconds=${said##*, } said=${said%%, *} ;;
            0) said="done" ;;
            "$skip_code") said=skipped ;;
            124) said="reached limit" failures=$((failures + 1)) ;;
            *) said="failed ($code)" failures=$((failures + 1)) ;;
        esac
        [ "$seconds" != "$said" ] || seconds=""
        printf '%-12s %-14s %s\n' "$name" "$said" "$seconds"
    done <<<"$parts"
}

is_chosen() { [ ${#names[@]} = 0 ] || is_named "$1" || [ "$1" = pack ]; }

dry="" again="" budget="" out="" names=() part="" deadline=""
while [ $# -gt 0 ]; do
    case $1 in
        --dry) dry=1 ;;
        --again) again=1 ;;
        --out) out=${2:?--out needs a folder} && shift ;;
        --budget) budget=${2:?--budget needs seconds} && shift ;;
        --list)
            awk '{ printf "%-12s %5s s  ", $1, $2; for (i = 4; i <= NF; i++) printf "%s ", $i; print "" }' <<<"$parts"
            exit
            ;;
        # Only this script says that: a part is a process of its own, so that it can be ended.
        --inside) part=$2 deadline=$3 && shift 2 ;;
        -h | --help)
            usage
            exit
            ;;
        -*) fail "unknown flag $1, see --help" ;;
        *)
            [[ $'\n'$parts == *$'\n'"$1 "* ]] || fail "unknown part $1, see --list"
            names+=("$1")
            ;;
    esac
    shift
done
[[ $budget =~ ^[0-9]*$ ]] || fail "--budget is a number of seconds, not $budget"

demo=models/default/foretoken-demo.Q5_1.gguf
smollm2=${SMOLLM2:-models/SmolLM2-135M-Instruct.Q4_1.gguf}
built=${CARGO_TARGET_DIR:-target}
binary=${FORETOKEN:-$built/release/foretoken}
device=cuda target=configs/llama-3.2-3b draft=configs/llama-3.2-1b
out=${out:-target/gpu-day${dry:+-dry}}
work=$out/work
if [ -n "$dry" ]; then
    device=cpu target=$work/tiny-target draft=$work/tiny-draft
    # scripts/emulated-gpu.sh sets that.
    [ -z "${FORETOKEN_EMULATED_GPU:-}" ] || device=cuda
    if [ -z "${FORETOKEN:-}" ] && [ -x "$built/debug/foretoken" ]; then
        binary=$built/debug/foretoken
    fi
fi

if [ -n "$part" ]; then
    failed=0
    "part_${part//-/_}"
    exit "$failed"
fi

# tiny FOLDER HIDDEN LAYERS: a shape for random weights. Rows must be whole blocks of all types.
tiny() {
    mkdir -p "$1"
    cat >"$1/config.json" <<JSON
{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 1024,
  "hidden_size": $2, "num_hidden_layers": $3, "num_attention_heads": $(($2 / 64)),
  "num_key_value_heads": $(($2 / 128)), "head_dim": 64, "intermediate_size": 512, "max_position_embeddings": 1024,
  "rope_theta": 10000.0, "rms_norm_eps": 1e-05, "tie_word_embeddings": true, "torch_dtype": "bfloat16"
}
JSON
}

mkdir -p "$work"
kind=${dry:+dry}
[ -e "$work/kind" ] || echo "$kind" >"$work/kind"
[ "$(<"$work/kind")" = "$kind" ] || fail "$out has results of a run that was ${kind:+not }dry: choose another --out"
if [ -n "$dry" ]; then
    tiny "$target" 512 2
    tiny "$draft" 256 1
fi

declare -A result=()
started_all=$(now)
ends=$((started_all + ${budget:-0}))
# For the archive.
reserve=25
[ -z "$dry" ] || reserve=3
stopped="" child=""
trap 'stopped=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' INT TERM
while read -r -u 3 name limit least _; do
    [ -z "$stopped" ] || [ "$name" = pack ] || continue
    if [ "$name" = pack ]; then
        was_stopped=$stopped stopped=""
        summary >"$out/summary.txt"
        run_part pack "$limit" "$least"
    elif is_chosen "$name"; then
        run_part "$name" "$limit" "$least"
    fi
done 3<<<"$parts"
summary
cat "$out/pack.txt"
echo "$(($(now) - started_all)) s in all"
[ "$failures" = 0 ] && [ -z "$was_stopped" ]
