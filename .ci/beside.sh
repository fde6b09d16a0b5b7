#!/usr/bin/env bash
# Sourced by .ci/run.
# beside WAITING STEP: runs a step that waits a lot (for Slurm) beside another; what it prints is shown at the end.
# Fails where one of the two does.
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
