#!/usr/bin/env bash
# Sourced by steps that need a program from outside the environment.

# need WHAT LACKING PACKAGE...: returns if the command LACKING prints nothing. Otherwise it installs the Debian packages. If
# LACKING still prints why WHAT cannot run, the step ends: as skipped, or as failed if CI=true.
need() {
    local what=$1 lacking=$2 why log
    shift 2
    why=$("$lacking")
    if [ -n "$why" ] && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        log=$(mktemp)
        {
            apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
        } > "$log" 2>&1 || tail -n 5 "$log" >&2
        rm "$log"
        why=$("$lacking")
    fi
    [ -n "$why" ] || return 0
    if [ "${CI:-}" = true ]; then
        echo "$what cannot run: $why" >&2
        exit 1
    fi
    echo "$what skipped: $why"
    exit 0
}
