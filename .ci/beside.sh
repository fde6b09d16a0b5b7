#!/usr/bin/env bash
# Sourced by .ci/run.
# beside "STEPS" "STEPS": runs two rows of steps in parallel, each step after the one before it, and shows the first row's output
# at the end. Fails if a step of either fails; the rest of its row is left out.
beside() {
    local log waiting failed=0
    log=$(mktemp)
    # shellcheck disable=SC2086 # a row's steps are its words
    in_turn $1 > "$log" 2>&1 &
    waiting=$!
    # shellcheck disable=SC2086
    in_turn $2 || failed=$?
    wait "$waiting" || failed=$?
    cat "$log"
    rm "$log"
    return "$failed"
}

in_turn() {
    local step began
    for step in "$@"; do
        began=$SECONDS
        "$step" || { echo "$step failed after $((SECONDS - began)) s" && return 1; }
        echo "$step: $((SECONDS - began)) s"
    done
}
