#!/usr/bin/env bash
# Sourced by .ci/run.
# beside WAITING STEP: runs a step that mostly waits (for Slurm) in parallel with another, and shows its output at the end.
# Fails if either of them fails.
beside() {
    local log waiting failed=0
    log=$(mktemp)
    "$1" > "$log" 2>&1 &
    waiting=$!
    "$2" || failed=$?
    wait "$waiting" || failed=$?
    cat "$log"
    rm "$log"
    return "$failed"
}
