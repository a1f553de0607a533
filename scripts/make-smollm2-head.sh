#!/usr/bin/env bash
# Trains the EAGLE-3 head for SmolLM2-135M-Instruct, models/heads, from scratch: the model answers prompts
# that we wrote, and a head learns to continue its answers.
#
#   scripts/make-smollm2-head.sh [WORK]
#
# WORK (default: target/smollm2-head) contains all intermediate files, 4 GB. Each step resumes where it was
# interrupted; delete its file to repeat it. It takes about three hours on 2 cores. PROMPTS, FOLLOW,
# ROUGH_STEPS and STEPS change the amount of work. Needs cargo and python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=${1:-target/smollm2-head}
prompts=${PROMPTS:-3130}
follow=${FOLLOW:-740}
rough_steps=${ROUGH_STEPS:-1100}
steps=${STEPS:-700}
out=models/heads
mkdir -p "$work" "$out"

step() { printf '== %s\n' "$*" >&2; }
ours() { python3 scripts/head_prompts.py "$@"; }
# Training allocates again at once what it frees, so memory is not returned to the system.
export MIMALLOC_PURGE_DELAY=-1

step "foretoken"
cargo build --release
foretoken=${CARGO_TARGET_DIR:-target}/release/foretoken
./scripts/fetch-smollm2.sh
model=models/SmolLM2-135M-Instruct.Q4_1.gguf

# answer NAME TEMPERATURE MAX_TOKENS: the model's answers to NAME.jsonl.
answer() {
    $foretoken generate --model "$model" --prompts "$work/$1.jsonl" --out "$work/$1-answers.jsonl" \
        --temperature "$2" --max-tokens "$3"
}
# halves NAME: every other prompt is answered greedily, the others are sampled.
halves() {
    awk 'NR % 2 == 0' "$work/$1.jsonl" > "$work/$1-greedy.jsonl"
    awk 'NR % 2 == 1' "$work/$1.jsonl" > "$work/$1-sampled.jsonl"
}

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
# The target's layers, but with a head of K and V for each of Q: through these the head sees its token.
shape=configs/smollm2-eagle3.json
# learn OUT STEPS RATE ARGS
learn() {
    $foretoken distill --method eagle3 --model "$model" --draft-config "$shape" \
        --corpus "$work/texts.jsonl" --corpus "$work/follow-greedy-answers.jsonl" \
        --corpus "$work/follow-sampled-answers.jsonl" --ttt-steps 3 --holdout 0.02 --batch-size 8 \
        --eval-every 50 --checkpoint-every 50 --resume --out "$1" --steps "$2" --learning-rate "$3" "${@:4}"
}
learn "$work/rough" "$rough_steps" 3e-3 --warmup 40
# What the target computed serves both.
mkdir -p "$work/head"
for file in "$work"/rough/{features,targets}*; do
    ln -sf "../rough/${file##*/}" "$work/head/"
done
learn "$work/head" "$steps" 1.2e-3 --warmup 20 --init-from "$work/rough" --overlap-share 0.9
$foretoken convert --model "$work/head" --type q4_1 --out "$out/smollm2-135m-eagle3.Q4_1.gguf"
ls -l "$out"
