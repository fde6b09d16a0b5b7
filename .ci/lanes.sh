#!/usr/bin/env bash
# Sourced by .ci/run.
# lanes NUMBER STEP…: runs command lines, so many at a time, in their order; each one's output is shown in one piece when it has
# ended, with its seconds. All are run; fails if any has failed.
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
