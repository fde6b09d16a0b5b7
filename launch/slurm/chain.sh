#!/usr/bin/env bash
# Submits a run as a chain of jobs:
#   launch/slurm/chain.sh [-n JOBS] [options of sbatch] launch/slurm/frontier.sbatch --out RUN [flags of launch/train.py]
# All of them wait in the queue from now on, under one name, and start one after the other however the one before ended
# (-d singleton): nothing has to stay logged in, no job has to submit another, and a lost node takes nothing along. None
# is requeued, which Slurm delays by minutes: the next one starts instead.
# Each reads RUN/status.json before it starts: after "preempted" or a loss it goes on from the last checkpoint; after
# "finished", or an error that would come again (usage, data, memory, a loss that is no number), the rest is cancelled.
# So it is after SEQPAR_TRIES (3) jobs in a row without a new checkpoint.
set -euo pipefail
usage="usage: chain.sh [-n JOBS, 10] [options of sbatch] JOBSCRIPT --out RUN [flags of launch/train.py]"

count=10
if [ "${1:-}" = -n ]; then
    count=${2:-}
    shift 2 || { echo "$usage" >&2; exit 2; }
fi
wrong() {
    echo "error: $1 (launch/slurm has frontier.sbatch and generic.sbatch)" >&2
    echo "$usage" >&2
    exit 2
}
options=() before=''
while [ $# -gt 0 ] && [ ! -f "$1" ]; do
    case $before,$1 in  # neither an option nor the value of one, so the job script
        ,[!-]* | *.sbatch) wrong "there is no job script $1" ;;
    esac
    before=''
    case $1 in *=*) ;; -*) before=$1 ;; esac
    options+=("$1")
    shift
done
[ $# -gt 0 ] || [ ${#options[@]} = 0 ] || wrong "none of these is a job script that is there: ${options[*]}"
out='' before=''
for word in "$@"; do
    case $word in --out=*) out=${word#--out=} ;; esac
    [ "$before" != --out ] || out=$word
    before=$word
done
if ! [ "$count" -gt 0 ] 2> /dev/null; then
    echo "error: -n $count: a number of jobs is needed" >&2
    echo "$usage" >&2
    exit 2
fi
if [ -z "$out" ]; then
    [ $# = 0 ] || echo "error: --out RUN is needed, the folder of the run that all jobs go on with" >&2
    echo "$usage" >&2
    exit 2
fi

mkdir -p "$out"
if [ -s "$out/jobs.txt" ]; then
    if ! head -n 1 "$out/jobs.txt" | grep -q '^[^ ]* job [^ ]* restart '; then
        echo "error: $out/jobs.txt is there, and no chain wrote it: name another folder by --out" >&2
        exit 3
    fi
    mv -f "$out/jobs.txt" "$out/.jobs.txt"  # what an earlier chain met does not count
fi
path=$(cd "$out" && pwd -P)
name=seqpar-$(basename "$path")-$(printf %s "$path" | cksum | cut -c1-5)  # one chain at a time works on a run
home=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
for ((n = 0; n < count; n++)); do
    job=$(SEQPAR_CHAIN=$name SEQPAR_HOME=$home \
        sbatch --parsable "${options[@]}" -J "$name" -d singleton --no-requeue -o "$out/jobs.out" "$@") || break
    echo "job ${job%%;*}"
done
if [ "$n" = 0 ]; then
    [ ! -e "$out/.jobs.txt" ] || mv "$out/.jobs.txt" "$out/jobs.txt"
    exit 1
fi
rm -f "$out/.jobs.txt"
echo "$n of $count jobs wait as $name; their log is $out/jobs.out; stop them with: scancel --name $name"
[ "$n" = "$count" ]
