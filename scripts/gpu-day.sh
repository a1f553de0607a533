#!/usr/bin/env bash
# Everything that we want of a GPU, for a day on which one is lent to us, in the order of its worth:
#
#   scripts/gpu-day.sh [--dry] [--out DIR] [--results DIR] [--list] [--again] [--budget SECONDS] [PART...]
#   scripts/gpu-day.sh --pack FILE [--beside]
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
#   --results  where the results go that are to be kept, in at most eight files of at most 15 MiB; by default DIR
#   --list     the parts, with their limits in seconds
#   --budget   seconds for all of this call: a part gets no more than is left, and none starts that could not do much
#   --pack     makes FILE (.tar.xz), a folder with this script, the programs and their files, of less than 60 MB, for a
#              machine of a GPU that has nothing but bash, python3 and a driver: without cargo, toolkit, network or
#              repository. There, after `tar -xf FILE`: foretoken-gpu-day/scripts/gpu-day.sh --budget 540. CUDA's libraries
#              may be those of Python's wheels (nvidia-cublas and so on, which PyTorch brings)
#   --beside   packs the programs alone, for a machine that has this checkout: there, in its root, after `tar -xf FILE`:
#              scripts/gpu-day.sh --budget 540
#
# The results are gpu-day.tar.gz, which tells the script what is done if it is unpacked in DIR on another machine, and
# summary.txt, both written anew after every part; and in pieces, as far as there is room, the weights and the corpus from
# which training can go on elsewhere: head-weights.tar.gz.* and corpus.tar.gz.*
#
# Programs that were built elsewhere can be named: FORETOKEN, the program; FORETOKEN_BENCH_GPU, the bench `gpu`;
# FORETOKEN_TESTS, the tests `cuda` and `cuda_sampling`, separated by spaces. --pack packs these, and builds them if
# FORETOKEN is not set. SMOLLM2 is the model if it is not where scripts/fetch-smollm2.sh puts it, and PROMPTS a file of
# prompts to measure it with. CORPUS_SHARDS (6) is how large the corpus becomes if there is time, TRAIN_SECONDS how long the
# head trains in all calls together (what the first leaves it). Paths are relative to the folder above that of the script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
script=scripts/gpu-day.sh

# Name, seconds at most, seconds without which it does not start, what it does.
parts="\
build      1500  60 the program, the bench and the tests
check        90  10 what this machine is, and whether the program finds its GPU
tests       300  60 the tests of the GPU
steps-bf16  180  30 floors, steps and chains of draft steps of 3B and 1B in bf16
steps-4bit  420  30 the same with quantized weights
streams     420  60 throughput of 1 to 128 streams, plain, with tables, with a draft model, batch-invariant
profile     180  30 steps of 3B and 1B by kernel
sanitizer    90  20 a short command under compute-sanitizer
distill     120  20 speed of training on the demonstration model
grid        600  60 speed-up by acceptance and length of drafts, bf16 and quantized pairs
smollm2     300  40 SmolLM2 with every drafter
corpus      300  40 SmolLM2 answers prompts that we wrote
train      3600 120 a head for SmolLM2 learns from the answers
results      60   0 the results and the head, in few files"

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

# Programs and files that --pack has packed.
use_packed() {
    [ -e PACKED ] || return 0
    [ ! -e bin/embedded.json ] || restore_embedded
    export FORETOKEN=${FORETOKEN:-bin/foretoken} FORETOKEN_UNPACKED=$PWD
    export FORETOKEN_TESTS=${FORETOKEN_TESTS:-$(compgen -G 'bin/cuda*' | tr '\n' ' ')}
    if [ -x bin/gpu ]; then
        export FORETOKEN_BENCH_GPU=${FORETOKEN_BENCH_GPU:-bin/gpu}
    fi
}

# Shows the programs CUDA's libraries of Python's wheels, if there are any. Programs that are linked without a toolkit look
# for them in CUDA_SHIM_PATH, others in LD_LIBRARY_PATH.
find_libraries() {
    local found
    [ -z "${CUDA_SHIM_PATH:-}" ] || return 0
    found=$(python3 - 2>/dev/null <<'PYTHON'
import glob, os, nvidia

files = [file for root in nvidia.__path__ for file in glob.glob(f"{root}/*/lib/lib*.so*")]
print(":".join(sorted({os.path.dirname(file) for file in files})))
PYTHON
    ) || return 0
    [ -n "$found" ] || return 0
    export CUDA_SHIM_PATH=$found LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$found
}

for file in measure train results pack; do
    # shellcheck source=/dev/null
    source "scripts/gpu-day/$file.sh"
done

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
        0) [ "$name" = results ] || return 0 ;;
        *) [ -n "$again" ] || is_named "$name" || [ "$name" = results ] || return 0 ;;
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
        [ "$name" = results ] || room=$((room - reserve))
        if [ "$room" -lt "$least" ]; then
            if [ "$name" != results ]; then
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
    [ "$name" != results ] || rm -f "$out/results.txt"
    echo "== $name: at most $room s"
    started=$(now)
    printf '\n==== %s, at most %s s\n' "$(date -u '+%F %T')" "$room" >>"$out/$name.txt"
    timeout --kill-after=5 "$room" "$script" --inside "$name" "$((started + room))" --out "$out" \
        --results "$kept" ${dry:+--dry} \
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
        0 | "$skip_code") grep -E '^(skipped|verdict)' "$out/$name.txt" | tail -n 2 || true ;;
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

is_chosen() { [ ${#names[@]} = 0 ] || is_named "$1" || [ "$1" = results ]; }

# save: the results so far. What a fresh machine has to make anew is not among them: the build, and what the corpus and
# the training left in `work`.
save() {
    summary >"$out/summary.txt"
    (
        cd "$out"
        find . -maxdepth 1 -type f ! -name 'results.*' ! -name '*.tar.gz*' \
            ! -name build.done ! -name corpus.done ! -name train.done -print0 \
            | tar -czf work/gpu-day.tar.gz --null -T -
    )
    mv "$work/gpu-day.tar.gz" "$kept/"
    [ "$kept" -ef "$out" ] || cp "$out/summary.txt" "$kept/"
}

dry="" again="" budget="" out="" kept="" names=() part="" deadline="" packed="" beside=""
while [ $# -gt 0 ]; do
    case $1 in
        --dry) dry=1 ;;
        --again) again=1 ;;
        --out) out=${2:?--out needs a folder} && shift ;;
        --results) kept=${2:?--results needs a folder} && shift ;;
        --pack) packed=${2:?--pack needs a file} && shift ;;
        --beside) beside=1 ;;
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
use_packed
binary=${FORETOKEN:-$built/release/foretoken}
device=cuda target=configs/llama-3.2-3b draft=configs/llama-3.2-1b
out=${out:-target/gpu-day${dry:+-dry}}
work=$out/work
kept=${kept:-$out}
if [ -n "$packed" ]; then
    pack "$packed"
    exit
fi
if [ -n "$dry" ]; then
    device=cpu target=$work/tiny-target draft=$work/tiny-draft
    # scripts/emulated-gpu.sh sets that.
    [ -z "${FORETOKEN_EMULATED_GPU:-}" ] || device=cuda
    if [ -z "${FORETOKEN:-}" ] && [ -x "$built/debug/foretoken" ]; then
        binary=$built/debug/foretoken
    fi
fi

find_libraries
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

mkdir -p "$work" "$kept"
kind=${dry:+dry}
[ -e "$work/kind" ] || echo "$kind" >"$work/kind"
[ "$(<"$work/kind")" = "$kind" ] || fail "$out has results of a run that was ${kind:+not }dry: choose another --out"
tiny "$work/tiny-target" 512 2
tiny "$work/tiny-draft" 256 1

declare -A result=()
started_all=$(now)
ends=$((started_all + ${budget:-0}))
# For the results.
reserve=25
[ -z "$dry" ] || reserve=3
stopped="" child=""
trap 'stopped=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' INT TERM
while read -r -u 3 name limit least _; do
    [ -z "$stopped" ] || [ "$name" = results ] || continue
    if [ "$name" = results ]; then
        was_stopped=$stopped stopped=""
        run_part results "$limit" "$least"
    elif is_chosen "$name"; then
        run_part "$name" "$limit" "$least"
        save
    fi
done 3<<<"$parts"
summary
cat "$out/results.txt"
echo "$(($(now) - started_all)) s in all"
[ "$failures" = 0 ] && [ -z "$was_stopped" ]
