#!/usr/bin/env bash
# Trains the EAGLE-3 head for SmolLM2-135M-Instruct, models/heads: the model answers prompts that we wrote,
# and a head learns to continue its answers.
#
#   scripts/make-smollm2-head.sh [WORK]            from scratch
#   scripts/make-smollm2-head.sh --further [WORK]  goes on from the head that is there, with other prompts
#
# WORK (default: target/smollm2-head) contains all intermediate files, 4 GB. Each step resumes where it was
# interrupted; delete its file to repeat it. From scratch it takes about three hours on 2 cores. PROMPTS, FOLLOW,
# ROUGH_STEPS and STEPS change the amount of work; with --further, SEED chooses the prompts, and the head in
# models/heads is replaced only if the acceptance rate on held-out rows has risen by MIN_GAIN (0.02).
# Needs cargo and python3. If there is a GPU, and nvcc to build for it, everything runs there: from scratch in about five
# minutes on an H100 (not measured). CUDA_VISIBLE_DEVICES= hides the GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

further=
if [[ ${1:-} == --further ]]; then
    further=1
    shift
fi
work=${1:-target/smollm2-head}
prompts=${PROMPTS:-3130}
follow=${FOLLOW:-740}
rough_steps=${ROUGH_STEPS:-1100}
steps=${STEPS:-$((further ? 1900 : 700))}
out=models/heads
head=$out/smollm2-135m-eagle3.Q4_1.gguf
mkdir -p "$work" "$out"

step() { printf '== %s\n' "$*" >&2; }
ours() { python3 scripts/head_prompts.py "$@"; }
# Training allocates again at once what it frees, so memory is not returned to the system.
export MIMALLOC_PURGE_DELAY=-1

step "foretoken"
features=()
if command -v nvcc >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    features=(--features cuda)
fi
cargo build --release "${features[@]}"
foretoken=${CARGO_TARGET_DIR:-target}/release/foretoken
./scripts/fetch-smollm2.sh
model=models/SmolLM2-135M-Instruct.Q4_1.gguf
device=cpu many=()
if no_gpu=$($foretoken check --model "$model" --device cuda 2>&1 >/dev/null); then
    device=cuda many=(--max-num-seqs 256 --speculative-decoding=false)
    step "on the GPU"
else
    step "on the CPU: $no_gpu"
fi

# answer NAME TEMPERATURE MAX_TOKENS: the model's answers to NAME.jsonl.
answer() {
    $foretoken generate --model "$model" --device "$device" "${many[@]}" --prompts "$work/$1.jsonl" \
        --out "$work/$1-answers.jsonl" --temperature "$2" --max-tokens "$3"
}
# halves NAME: every other prompt is answered greedily, the others are sampled.
halves() {
    awk 'NR % 2 == 0' "$work/$1.jsonl" > "$work/$1-greedy.jsonl"
    awk 'NR % 2 == 1' "$work/$1.jsonl" > "$work/$1-sampled.jsonl"
}

# The target's layers, but with a head of K and V for each of Q: through these the head sees its token.
shape=configs/smollm2-eagle3.json
# learn OUT STEPS RATE ARGS
learn() {
    $foretoken distill --method eagle3 --model "$model" --device "$device" --draft-config "$shape" --ttt-steps 3 \
        --holdout 0.02 --batch-size 8 --eval-every 50 --checkpoint-every 50 --resume \
        --out "$1" --steps "$2" --learning-rate "$3" "${@:4}"
}

if [[ $further ]]; then
    seed=${SEED:-2}
    work=$work/further-$seed
    mkdir -p "$work"
    # thirds NAME TOKENS: the prompts NAME.jsonl are answered greedily, at temperature 0.7 and at 1.
    thirds() {
        local rest=0
        for temperature in 0 0.7 1; do
            awk -v rest=$rest 'NR % 3 == rest' "$work/$1.jsonl" > "$work/$1-$temperature.jsonl"
            answer "$1-$temperature" $temperature "$2"
            corpora+=(--corpus "$work/$1-$temperature-answers.jsonl")
            rest=$((rest + 1))
        done
    }
    corpora=()
    step "answers"
    ours prompts "$prompts" "$seed" > "$work/first.jsonl"
    thirds first 200
    cat "$work"/first-*-answers.jsonl > "$work/texts.jsonl"
    ours follow "$follow" "$seed" < "$work/texts.jsonl" > "$work/follow.jsonl"
    thirds follow 160
    step "head"
    fast=(--ttt-stride 4)
    if [[ $device == cpu ]]; then
        fast+=(--micro-batch 4)
        if grep -q avx512_bf16 /proc/cpuinfo; then
            fast+=(--products bf16)
        fi
    fi
    # What it begins with stays the same if another run replaces the head meanwhile.
    [[ -e $work/before.gguf ]] || cp "$head" "$work/before.gguf"
    # from OUT FILE STEPS RATE ARGS
    from() {
        learn "$1" "$3" "$4" --overlap-share 0.9 --init-from "$2" --draft-vocab-size 6000 "${corpora[@]}" "${fast[@]}" "${@:5}"
    }
    from "$work/head" "$work/before.gguf" "$steps" 1.2e-3 --warmup 40
    $foretoken convert --model "$work/head" --type q4_1 --out "$work/after.gguf"
    # score NAME: alpha at temperature 0 of the file NAME.gguf on the held-out rows.
    score() {
        mkdir -p "$work/$1"
        for file in "$work"/head/{features,targets}*; do
            ln -sf "../head/${file##*/}" "$work/$1/"
        done
        from "$work/$1" "$work/$1.gguf" 1 1e-6 >&2
        python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["untrained"]["agreement"])' "$work/$1/report.json"
    }
    before=$(score before)
    after=$(score after)
    step "alpha at temperature 0: $before before, $after after"
    if awk "BEGIN { exit !($after - $before < ${MIN_GAIN:-0.02}) }"; then
        step "$head stays"
    elif ! cmp --silent "$work/before.gguf" "$head"; then
        step "$head is another one than before this run, and stays: compare it with $work/after.gguf"
    else
        mv "$work/after.gguf" "$head"
    fi
    exit 0
fi

step "answers"
ours prompts "$prompts" > "$work/first.jsonl"
halves first
answer first-greedy 0 200
answer first-sampled 1 200

step "answers to prompts with texts of the model"
cat "$work"/first-*-answers.jsonl > "$work/texts.jsonl"
ours follow "$follow" < "$work/texts.jsonl" > "$work/follow.jsonl"
halves follow
answer follow-greedy 0 160
answer follow-sampled 1 160

step "head"
corpora=(--corpus "$work/texts.jsonl" --corpus "$work/follow-greedy-answers.jsonl"
    --corpus "$work/follow-sampled-answers.jsonl")
learn "$work/rough" "$rough_steps" 3e-3 --warmup 40 "${corpora[@]}"
# What the target computed serves both.
mkdir -p "$work/head"
for file in "$work"/rough/{features,targets}*; do
    ln -sf "../rough/${file##*/}" "$work/head/"
done
learn "$work/head" "$steps" 1.2e-3 --warmup 20 --init-from "$work/rough" --overlap-share 0.9 "${corpora[@]}"
$foretoken convert --model "$work/head" --type q4_1 --out "$head"
ls -l "$out"
