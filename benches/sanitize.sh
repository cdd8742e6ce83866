#!/bin/sh
# Runs a few steps of a tiny recipe, eager, captured and replayed, under each tool of compute-sanitizer.
#
#   benches/sanitize.sh [BITSTEP [RECIPE]]
#
# BITSTEP is the built program (default: target/release/bitstep), RECIPE a recipe (default:
# golden/llama-tiny.toml). COMPUTE_SANITIZER names the tool, GEMM the matrix products (own or auto; default: own,
# since a library's kernels are not this engine's to judge), STEPS the steps (default: 6, of which 3 are
# eager). Prints each tool's summary. The exit code is 0 when all four are clean, 1 when one found
# something, 2 when one could not run or said nothing: that is no clean result either.
set -u
cd "$(dirname "$0")/.." || exit 2
bitstep=${1:-target/release/bitstep}
recipe=${2:-golden/llama-tiny.toml}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
gemm=${GEMM:-own}
steps=${STEPS:-6}
# A code that neither the program nor the sanitizer uses for anything else.
found_code=99
log=$(mktemp)
trap 'rm -f "$log"' EXIT
worst=0

# Keeps the more serious of the outcomes so far.
outcome() {
    [ "$1" -le "$worst" ] || worst=$1
}

# What a tool prints when it has found nothing.
clean_summary() {
    case $1 in
        racecheck) echo "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
        *) echo "ERROR SUMMARY: 0 errors" ;;
    esac
}

for tool in memcheck racecheck initcheck synccheck; do
    options=
    [ "$tool" != racecheck ] || options="--racecheck-report all"
    # shellcheck disable=SC2086 # The options are words of this script.
    "$sanitizer" --tool "$tool" $options --error-exitcode "$found_code" --require-cuda-init yes \
        "$bitstep" train "$recipe" --steps "$steps" --device cuda:0 --gemm "$gemm" --quiet >"$log" 2>&1
    code=$?
    summary=$(grep 'SUMMARY:' "$log" | tail -n 1)
    printf '%-10s %s\n' "$tool" "${summary:-no summary}"
    if [ "$code" -eq 0 ] && printf '%s\n' "$summary" | grep -qF "$(clean_summary "$tool")"; then
        # A run that ended before its first step checks nothing.
        grep -q '^root ' "$log" && continue
        echo "$tool: the program printed no root, so it has not trained" >&2
        outcome 2
    elif [ -n "$summary" ] && { [ "$code" -eq "$found_code" ] || [ "$code" -eq 0 ]; }; then
        outcome 1
    else
        echo "$tool: could not run, exit code $code" >&2
        outcome 2
    fi
    tail -n 40 "$log" >&2
done
exit "$worst"
