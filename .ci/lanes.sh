#!/usr/bin/env bash
# Sourced by .ci/run.
# lanes NUMBER STEP…: runs command lines in their order, NUMBER at a time. When one ends, its output is shown in one piece, with its
# wall-clock and processor seconds. Runs all of them; fails if one fails.
lanes() {
    local at_once=$1 lock
    shift
    lock=$(mktemp)
    printf '%s\0' "$@" | xargs -0 -P "$at_once" -I STEP bash -c 'one_step "$@"' _ STEP "$lock" || return 1
    rm "$lock"
}

one_step() {
    local said began=$SECONDS failed='' used TIMEFORMAT='%U %S'
    said=$(mktemp)
    used=$({ time bash -c "$1" > "$said" 2>&1; } 2>&1) || failed=" failed"
    used=$(awk 'END { printf "%.0f", $1 + $2 }' <<< "$used")
    (flock 9 && cat "$said" && echo "$1$failed: $((SECONDS - began)) s, $used s of a processor") 9> "$2"
    rm "$said"
    [ -z "$failed" ]
}
export -f one_step
