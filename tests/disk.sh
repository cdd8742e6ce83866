#!/usr/bin/env bash
# Lets the disk of a training run become full, or read-only, and compares what the resumed run ends with to a golden.
#
#   tests/disk.sh [OFFSETS]      BITSTEP=path/to/bitstep
#
# The disk is a small tmpfs of a mount namespace of its own. Its size is chosen so that the run's second checkpoint
# fits up to one of OFFSETS places in it. The run has to end with code 4, naming the file and the last checkpoint;
# with more room it is resumed and has to end with the golden's root. Exit code 0: all of it held; 77: this machine
# gives no namespace, and nothing was checked.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [ "${1:-}" != inside ]; then
    if ! unshare --user --map-root-user --mount sh -c 'mount -t tmpfs none /mnt' 2>/dev/null; then
        echo "skipped: no mount namespace on this machine"
        exit 77
    fi
    exec unshare --user --map-root-user --mount "$0" inside "${1:-50}"
fi
program=${BITSTEP:-$root/target/release/bitstep}
offsets=$2
recipe=$root/golden/llama-tiny.toml
steps=20
expected=$(sed -n "s/^step $((steps - 1)) .* root //p" "$root/golden/llama-tiny.golden")
disk=$(mktemp -d)
page=4096
errors=$(mktemp)
trap 'umount "$disk" 2>/dev/null || true; rmdir "$disk"; rm -f "$errors"' EXIT

fail() {
    echo "failed: $*" >&2
    exit 1
}

# Runs the program into $out, $err and $code.
train() {
    code=0
    out=$("$program" train "$@" --quiet 2>"$errors") || code=$?
    err=$(cat "$errors")
}

check_end() {
    [ "$code" -eq 0 ] || fail "$1: code $code: $err"
    grep -q "^root  *$expected " <<<"$out" || fail "$1: another root: $out"
}

new=("$recipe" --out "$disk/run" --device cpu --set checkpoint.every=1)

# What a run and its first two checkpoints take.
mount -t tmpfs -o size=256m none "$disk"
train "${new[@]}" --until 1
[ "$code" -eq 0 ] || fail "code $code: $err"
whole=$(du -s --block-size=1 "$disk/run" | cut -f1)
one=$(du -s --block-size=1 "$disk/run/checkpoints/step-1" | cut -f1)
umount "$disk"

full=0
for ((offset = 0; offset < offsets; offset++)); do
    room=$(((whole + one * offset / offsets) / page * page))
    mount -t tmpfs -o size=$room none "$disk"
    train "${new[@]}" --until "$steps"
    [ "$code" -eq 4 ] || fail "offset $offset: code $code, expected 4: $err"
    grep -q "^error: cannot write $disk/run/.*No space left on device" <<<"$err" || fail "offset $offset: $err"
    last=$(sed -n 's/^the last checkpoint is //p' <<<"$err")
    [ "$last" = "$disk/run/checkpoints/step-1" ] || fail "offset $offset: the last checkpoint: $err"
    mount -o remount,size=256m "$disk"
    train --resume "$disk/run" --device cpu --until "$steps"
    check_end "full at offset $offset"
    umount "$disk"
    full=$((full + 1))
done
echo "disk full at $full offsets of a save of $one bytes: code 4, the checkpoint before named; every resume ends with the golden's root"

mount -t tmpfs -o size=256m none "$disk"
train "${new[@]}" --until 4
[ "$code" -eq 0 ] || fail "code $code: $err"
mount -o remount,ro "$disk"
before=$(find "$disk" -type f -exec sha256sum {} + | sort)
train --resume "$disk/run" --device cpu --until "$steps"
[ "$code" -eq 4 ] || fail "read-only: code $code, expected 4: $err"
grep -q "^error: cannot write .*Read-only file system" <<<"$err" || fail "read-only: $err"
[ "$before" = "$(find "$disk" -type f -exec sha256sum {} + | sort)" ] || fail "read-only: files have changed"
train "$recipe" --device cpu --until 1 --out "$disk/other"
[ "$code" -eq 4 ] || fail "read-only, new run: code $code, expected 4: $err"
mount -o remount,rw "$disk"
train --resume "$disk/run" --device cpu --until "$steps"
check_end "read-only"
umount "$disk"
echo "read-only disk: code 4, nothing changed; the resume ends with the golden's root"
