#!/bin/sh
# Verifies a tiny golden on a GPU, eager, captured and replayed, under each tool of compute-sanitizer.
#
#   benches/sanitize.sh [BITSTEP [GOLDEN]]
#
# BITSTEP is the built program (default: target/release/bitstep), GOLDEN a golden of few steps (default:
# golden/llama-tiny.golden). COMPUTE_SANITIZER names the tool, GEMM the matrix products (own or auto; default:
# own, since a library's kernels are not this engine's to judge), TOOLS those of its tools that run (default:
# all four). Prints each tool's summary. The exit code is 0 when all that ran are clean, 1 when one found
# something, 2 when one could not run, said nothing or computed other bits: that is no clean result either.
set -u
cd "$(dirname "$0")/.." || exit 2
bitstep=${1:-target/release/bitstep}
golden=${2:-golden/llama-tiny.golden}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
gemm=${GEMM:-own}
tools=${TOOLS:-memcheck racecheck initcheck synccheck}
# A code that neither the program nor the sanitizer uses for anything else.
found_code=99
log=$(mktemp) || exit 2
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

for tool in $tools; do
    report=
    [ "$tool" != racecheck ] || report="--racecheck-report all"
    # The report's words are options of their own.
    # shellcheck disable=SC2086
    "$sanitizer" --tool "$tool" $report --error-exitcode "$found_code" \
        "$bitstep" verify "$golden" --device cuda:0 --gemm "$gemm" >"$log" 2>&1
    code=$?
    summary=$(grep 'SUMMARY:' "$log" | tail -n 1)
    printf '%-10s %s\n' "$tool" "${summary:-no summary}"
    clean=no
    printf '%s\n' "$summary" | grep -qF "$(clean_summary "$tool")" && clean=yes
    if [ "$code" -eq 0 ] && [ "$clean" = yes ] && grep -q ': identical' "$log"; then
        continue
    fi
    if [ -n "$summary" ] && [ "$clean" = no ]; then
        echo "$tool: found something, exit code $code" >&2
        outcome 1
    else
        echo "$tool: did not run the golden to its end with equal bits, exit code $code" >&2
        outcome 2
    fi
    tail -n 40 "$log" >&2
done
exit "$worst"
