#!/usr/bin/env bash
# Sourced by .ci/run.
# lanes NUMBER STEP…: runs command lines in their order, NUMBER at a time. When one ends, its output is shown in one piece, with its
# seconds. Runs all of them; fails if one fails.
lanes() {
    local at_once=$1 lock
    shift
    lock=$(mktemp)
    printf '%s\0' "$@" | xargs -0 -P "$at_once" -I STEP bash -c 'one_step "$@"' _ STEP "$lock" || return 1
    rm "$lock"
}

one_step() {
    local said began=$SECONDS failed=
    said=$(mktemp)
    bash -c "$1" > "$said" 2>&1 || failed=" failed"
    (flock 9 && cat "$said" && echo "$1$failed: $((SECONDS - began)) s") 9> "$2"
    rm "$said"
    [ -z "$failed" ]
}
export -f one_step
