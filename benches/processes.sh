#!/bin/sh
# Verifies goldens in many fresh processes, several beside each other; all must have the bits of the goldens.
#
#   benches/processes.sh BITSTEP [PROCESSES [GOLDEN ...]]
#
# BITSTEP is the built program, PROCESSES how many are started (default: 20), each of which verifies all the goldens
# (default: all of golden/). DEVICE names the device (default: cuda:0), GEMM the matrix products (own or auto; default:
# auto), BESIDE how many processes run at once (default: 5).
# Prints each golden with how many processes said that it is identical. The exit code is 0 when all did, 1 when one
# did not or said something else, 2 when the arguments are wrong.
set -u
program=${1:-}
count=${2-20}
[ -n "$program" ] || { echo "expected the path of the built program" >&2; exit 2; }
case $count in '' | *[!0-9]* | 0*) echo "processes: expected an integer from 1 on, found $count" >&2; exit 2 ;; esac
case ${BESIDE:-5} in '' | *[!0-9]* | 0*) echo "BESIDE: expected an integer from 1 on, found $BESIDE" >&2; exit 2 ;; esac
[ $# -ge 2 ] && shift 2 || shift 1
[ $# -gt 0 ] || set -- "$(dirname "$0")"/../golden/*.golden
for golden in "$@"; do
    [ -f "$golden" ] || { echo "$golden: no such golden" >&2; exit 2; }
done
logs=$(mktemp -d) || exit 2
trap 'rm -rf "$logs"' EXIT
started=0
while [ "$started" -lt "$count" ]; do
    batch=0
    while [ "$batch" -lt "${BESIDE:-5}" ] && [ "$started" -lt "$count" ]; do
        started=$((started + 1)) batch=$((batch + 1))
        (
            "$program" verify "$@" --device "${DEVICE:-cuda:0}" --gemm "${GEMM:-auto}" >"$logs/$started.out" 2>&1
            echo $? >"$logs/$started.code"
        ) &
    done
    wait
done
worst=0
for golden in "$@"; do
    same=$(grep -lF "$golden: identical (" "$logs"/*.out | wc -l)
    roots=$(grep -hF "$golden: identical (" "$logs"/*.out | sed 's/^.* steps, root \([0-9a-f]*\).*$/\1/' | sort -u | tr '\n' ' ')
    echo "$golden: identical in $same of $count processes, root ${roots:-none}"
    [ "$same" -eq "$count" ] || worst=1
done
for code in "$logs"/*.code; do
    [ "$(cat "$code")" = 0 ] && continue
    worst=1
    echo "process $(basename "$code" .code): exit code $(cat "$code")" >&2
    tail -n 5 "${code%.code}.out" >&2
done
[ "$(ls "$logs"/*.code | wc -l)" -eq "$count" ] || worst=1
exit "$worst"
