# shellcheck shell=bash disable=SC2154
# Parts of scripts/gpu-day.sh: a corpus, and a head that learns from it.

# How fast a head learns, on the demonstration model, which is always there: its corpus, the target's pass and steps.
part_distill() {
    need_binary
    local prompts=2000 shape=(--draft-vocab-size 2048 --steps 60)
    [ -z "$dry" ] || prompts=6 shape=(--draft-vocab-size 256 --seq-len 32 --batch-size 1 --steps 2)
    answering=$demo
    python3 scripts/head_prompts.py prompts "$prompts" 7 >"$work/speed.jsonl"
    once corpus answer "$work/speed.jsonl" 0 100
    rm -rf "$work/speed"
    once eagle3 "$binary" distill --method eagle3 --model "$answering" --device "$device" --holdout 0.02 \
        --corpus "$work/speed-answers.jsonl" --out "$work/speed" "${shape[@]}"
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
