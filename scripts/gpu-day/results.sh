# shellcheck shell=bash disable=SC2154
# The last part of scripts/gpu-day.sh: what else is to be kept, as far as there is room.

# Files that may come back, besides gpu-day.tar.gz and summary.txt.
room=6

# pieces NAME FOLDER FILE...: an archive of the files, in pieces, because what brings files back may limit their size.
pieces() {
    local name=$1.tar.gz pieces
    tar -czf - -C "$2" "${@:3}" | split -b 15M - "$work/$name."
    pieces=("$work/$name".*)
    if [ ${#pieces[@]} -gt "$room" ]; then
        echo "$name stays in $2: it has ${#pieces[@]} pieces, and there is room for $room"
        rm "${pieces[@]}"
        return
    fi
    mv "${pieces[@]}" "$kept/"
    room=$((room - ${#pieces[@]}))
}

part_results() {
    rm -f "$kept"/head-weights.tar.gz.* "$kept"/corpus.tar.gz.*
    if [ -e "$work/best" ]; then
        # --init-from takes this folder.
        pieces head-weights "$work/$(<"$work/best")" config.json model.safetensors
    fi
    if compgen -G "$work/corpus/*-answers.jsonl" >/dev/null; then
        pieces corpus "$work" corpus
    fi
    du -ch "$kept"/*.tar.gz*
}
