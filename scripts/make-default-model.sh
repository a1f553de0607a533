#!/usr/bin/env bash
# Trains the default pair, models/default, from scratch: SmolLM2-135M-Instruct writes the corpus, a
# target learns the texts, and a draft learns the target's distributions on the target's own texts.
#
#   scripts/make-default-model.sh [WORK]
#
# WORK (default: target/default-model) contains all intermediate files. Each step resumes where it was
# interrupted; delete its file to repeat it. It takes about four hours on 2 cores.
# TEXTS, SHALLOW_STEPS, TARGET_STEPS and DRAFT_STEPS change the amount of work. Needs cargo, and python3
# with pip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=${1:-target/default-model}
texts=${TEXTS:-12800}
shallow_steps=${SHALLOW_STEPS:-1300}
target_steps=${TARGET_STEPS:-2600}
draft_steps=${DRAFT_STEPS:-2400}
out=models/default
mkdir -p "$work" "$out"

step() { printf '== %s\n' "$*" >&2; }
ours() { python3 scripts/default_model.py "$@"; }
# Training allocates again at once what it frees, so memory is not returned to the system.
export MIMALLOC_PURGE_DELAY=-1

step "foretoken"
# Without the embedded pair, which may not exist yet.
cargo build --release --no-default-features
foretoken=${CARGO_TARGET_DIR:-target}/release/foretoken
./scripts/fetch-smollm2.sh

step "corpus"
ours prompts train "$texts" > "$work/prompts.jsonl"
ours steer < "$work/prompts.jsonl" > "$work/steered.jsonl"
$foretoken generate --model models/SmolLM2-135M-Instruct.Q4_1.gguf --prompts "$work/steered.jsonl" \
    --out "$work/smollm2.jsonl" --temperature 0.6 --top-p 0.95 --max-tokens 110
ours clean < "$work/smollm2.jsonl" > "$work/corpus.jsonl"

# shape FILE HIDDEN LAYERS HEADS KV_HEADS MLP IDS: writes a config.json. IDS is the size of the draft's
# vocabulary, or null.
shape() {
    cat > "$1" <<JSON
{
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 4096,
  "draft_vocab_size": $7,
  "hidden_size": $2,
  "num_hidden_layers": $3,
  "num_attention_heads": $4,
  "num_key_value_heads": $5,
  "head_dim": 64,
  "intermediate_size": $6,
  "max_position_embeddings": 1024,
  "rope_theta": 10000.0,
  "rms_norm_eps": 1e-05,
  "tie_word_embeddings": true,
  "hidden_act": "silu"
}
JSON
}

# learn ARGS: trains on the texts of the corpus.
learn() {
    $foretoken distill --objective ce --model "$work/tokenizer" --corpus "$work/corpus.jsonl" --retokenize \
        --micro-batch 2 --eval-every 50 --checkpoint-every 50 --resume "$@"
}

step "target"
[ -f "$work/tokenizer/tokenizer.json" ] ||
    $foretoken tokenizer --corpus "$work/corpus.jsonl" --vocab-size 4096 --out "$work/tokenizer"
# In the first half, four layers learn faster than seven.
shape "$work/shallow.json" 512 4 8 4 1024 null
learn --draft-config "$work/shallow.json" --out "$work/shallow" --holdout 0.01 --batch-size 8 \
    --steps "$shallow_steps" --learning-rate 2e-3
shape "$work/target.json" 512 7 8 4 1024 null
learn --draft-config "$work/target.json" --out "$work/target" --init-from "$work/shallow" --holdout 0.004 \
    --batch-size 4 --steps "$target_steps" --learning-rate 1e-3
# On CPUs without VNNI, Q8_0 makes a row of verification more expensive and a plain step no faster.
target=$out/foretoken-demo.Q5_1.gguf
$foretoken convert --model "$work/target" --type q5_1 --out "$target"

step "draft"
# The kinds of texts that it will draft: sampled and greedy ones.
answer() {
    $foretoken generate --model "$target" --prompts "$1" --out "$2" --max-tokens 200 --temperature "$3"
}
head -n 6000 "$work/prompts.jsonl" > "$work/fewer.jsonl"
answer "$work/fewer.jsonl" "$work/sampled.jsonl" 0.8
sort -u -t: -k4 "$work/fewer.jsonl" > "$work/different.jsonl"
head -n 2000 "$work/different.jsonl" > "$work/fewest.jsonl"
answer "$work/fewest.jsonl" "$work/greedy.jsonl" 0
shape "$work/draft.json" 256 1 4 2 512 2048
$foretoken distill --model "$target" --draft-config "$work/draft.json" \
    --corpus "$work/sampled.jsonl" --corpus "$work/greedy.jsonl" --top-k 64 --holdout 0.01 --batch-size 8 \
    --micro-batch 2 --steps "$draft_steps" --learning-rate 4e-3 --eval-every 100 --checkpoint-every 100 \
    --resume --out "$work/draft"
$foretoken convert --model "$work/draft" --type q8_0 --out "$out/foretoken-demo-draft.Q8_0.gguf"
ls -l "$out"
