#!/usr/bin/env bash
# Called by the job scripts: link.sh srun … python launch/train.py [flags]. Runs that line and ends with the run's own
# verdict, which a launcher may turn into a signal's code. As a link of a chain (chain.sh) it goes on with the run, or
# ends at once where the run is over. RUN/jobs.txt tells which jobs worked on it, and from which checkpoint.
set -uo pipefail

out='' before='' act=''
for word in "$@"; do
    case $word in */train.py | seqpar.cli.train) act=train ;; --out=*) out=${word#--out=} ;; esac
    [ "$before" != --out ] || out=$word
    before=$word
done
[ "$act" = train ] || exec "$@"  # the other acts have no run folder that a next job could go on with
if [ -z "$out" ]; then
    out=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID  # a requeued job finds its run again
    set -- "$@" --out "$out"
fi
jobs=$out/jobs.txt
export SEQPAR_VERDICT=$out/verdict-$SLURM_JOB_ID.txt  # the code of an error that status.json does not have

told() {  # prints an entry of status.json, if that was written after the last line of jobs.txt
    [ ! "$out/status.json" -nt "$jobs" ] || sed -n "s/^ *\"$1\": \"\{0,1\}\([^\",]*\).*/\1/p" "$out/status.json"
}

final() { case $1 in 0 | 2 | 3 | 4 | 5 | 130) ;; *) false ;; esac; }  # 1, 6, 75 and signals may go better next time

is_held() { tail -n 1 "$jobs" | grep -q '^held'; }  # whether the job before this one found another training there

over() {  # prints why the chain ends before this job; nothing where it goes on
    [ -s "$jobs" ] || return  # the first job tries, whatever an earlier chain met
    grep '^over' "$jobs" && return
    case $(told state) in finished | failed)
        { is_held && [ "$(told state)" = failed ]; } || ! final "$(told code)" ||  # the other training's failure
            echo "over: $(told state) with code $(told code), as status.json says" ;;
    esac
    same=$(tail -n "${SEQPAR_TRIES:-3}" "$jobs" | grep -c "^$checkpoint ")
    [ "$same" -lt "${SEQPAR_TRIES:-3}" ] || echo "over: $same jobs in a row brought it no further than $checkpoint"
}

wait_longer() {  # the chain's next job starts later: after 10 minutes, and twice as long each time, up to a day
    echo "held: another training has the run folder" >> "$jobs"
    times=$(awk '/^held/ { n++; held = 1; next } { if (!held) n = 0; held = 0 } END { print n }' "$jobs")
    minutes=$((times < 8 ? ${SEQPAR_RETRY_MINUTES:-10} << (times - 1) : 1440))
    echo "another training has $out: the next job of chain $SEQPAR_CHAIN starts in $minutes minutes or later"
    for next in $(squeue -h -u "$(id -un)" -n "$SEQPAR_CHAIN" -t PENDING -o %i); do
        scontrol update "JobId=$next" "StartTime=now+${minutes}minutes"
    done
}

checkpoint=$(cat "$out"/{,fold[0-4]/}checkpoints/latest 2> /dev/null | tr -d '\n')  # --fold all5: of each fold
checkpoint=${checkpoint:-nothing}
if [ -n "${SEQPAR_CHAIN:-}" ]; then
    reason=$(over)
    if [ -n "$reason" ]; then
        echo "job $SLURM_JOB_ID of chain $SEQPAR_CHAIN has nothing to do: $reason"
        exit 0
    fi
    if [ -e "$out/config.json" ] || [ -e "$out/fold0/config.json" ]; then set -- "$@" --resume; fi
fi
mkdir -p "$out" && rm -f "$SEQPAR_VERDICT" &&
    echo "$checkpoint job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST, $(date)" >> "$jobs"

"$@"
code=$?
if [ -s "$SEQPAR_VERDICT" ]; then
    code=$(cat "$SEQPAR_VERDICT")
    rm -f "$SEQPAR_VERDICT"
else
    case $(told state) in finished) code=0 ;; preempted) code=75 ;; failed) code=$(told code) ;; esac
fi
if [ -n "${SEQPAR_CHAIN:-}" ] && final "$code"; then
    echo "over: ended with code $code" >> "$jobs"
    scancel --quiet --user "$(id -un)" --name "$SEQPAR_CHAIN" --state PENDING
elif [ -n "${SEQPAR_CHAIN:-}" ] && [ "$code" = 6 ]; then
    wait_longer
fi
exit "$code"
