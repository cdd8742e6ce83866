#!/usr/bin/env bash
# Kills a training run at random moments (SIGKILL), resumes it and compares what it ends with to a golden.
#
#   tests/kill.sh [KILLS [SEED]]      BITSTEP=path/to/bitstep
#
# The run saves a checkpoint after every step, so that many kills fall into a save. After each kill a copy of the
# run's folder is resumed to its end: its root has to be the golden's and its metrics those of a run that never
# stopped. The killed run itself is resumed and killed again until it ends. Exit code 0: all of it held.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
program=${BITSTEP:-$root/target/release/bitstep}
kills=${1:-200}
RANDOM=${2:-1}
recipe=$root/golden/llama-tiny.toml
steps=20
expected=$(sed -n "s/^step $((steps - 1)) .* root //p" "$root/golden/llama-tiny.golden")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
new=(train "$recipe" --until "$steps" --quiet --device cpu --set checkpoint.every=1 --set checkpoint.keep_last=2)

fail() {
    echo "failed after $killed kills: $*" >&2
    exit 1
}

# The parts of the metrics that bits decide.
bits() {
    grep -o '"step":[0-9]*\|"loss_bits":"[0-9a-f]*"\|"grad_norm":[^,]*' "$1/metrics.jsonl"
}

# A run has ended: $1 is its folder, $2 what it printed.
check_end() {
    grep -q "^root  *$expected " <<<"$2" || fail "$1 ends with another root: $2"
    bits "$1" | cmp -s - "$place/bits" || fail "$1 has other metrics"
}

killed=0
begun=$(date +%s%N)
out=$("$program" "${new[@]}" --out "$place/whole")
whole_ms=$((($(date +%s%N) - begun) / 1000000))
bits "$place/whole" >"$place/bits"
check_end "$place/whole" "$out"

before_first=0 in_save=0 in_removal=0 between=0 resumed=0 ended=0
run=$place/run
going_on=()
while [ "$killed" -lt "$kills" ]; do
    if [ -d "$run/checkpoints" ] && ls "$run/checkpoints" | grep -q '^step-'; then
        going_on=(train --resume "$run" --until "$steps" --quiet --device cpu)
    else
        rm -rf "$run"
        going_on=("${new[@]}" --out "$run")
    fi
    "$program" "${going_on[@]}" >"$place/out" 2>"$place/err" &
    child=$!
    pause_ms=$((RANDOM % (whole_ms + 1)))
    sleep "$((pause_ms / 1000)).$(printf %03d $((pause_ms % 1000)))"
    kill -KILL "$child" 2>/dev/null || true
    code=0
    wait "$child" 2>/dev/null || code=$?
    if [ "$code" -eq 0 ]; then
        check_end "$run" "$(cat "$place/out")"
        ended=$((ended + 1))
        rm -rf "$run"
        continue
    fi
    [ "$code" -eq 137 ] || fail "exit code $code: $(cat "$place/err")"
    killed=$((killed + 1))
    left=$(ls -A "$run/checkpoints" 2>/dev/null || true)
    if ! grep -q '^step-' <<<"$left"; then
        before_first=$((before_first + 1))
        continue
    fi
    case $left in
    *.writing-*) in_save=$((in_save + 1)) ;;
    *.removing-*) in_removal=$((in_removal + 1)) ;;
    *) between=$((between + 1)) ;;
    esac
    rm -rf "$place/copy"
    cp -a "$run" "$place/copy"
    out=$("$program" train --resume "$place/copy" --until "$steps" --quiet --device cpu 2>"$place/err") ||
        fail "a resume ends with code $?: $(cat "$place/err")"
    check_end "$place/copy" "$out"
    resumed=$((resumed + 1))
done
echo "kills $killed: $before_first before the first checkpoint, $in_save during a save, $in_removal during a removal," \
    "$between between them"
echo "resumes $resumed: all end with the golden's root $expected and the metrics of a run that never stopped;" \
    "$ended killed runs went on to their end"
