#!/usr/bin/env bash
# Run all tiers, fastest first, and stop at the first failure. If no cluster is running, start one for the tests.
# The cluster's programs and images are built in the background, at a low priority, while the first tiers run.
set -euo pipefail
cd "$(dirname "$0")/../.."
started_s=$SECONDS
results=$(mktemp -d)
builder=""

say() { printf '\n==> [%4d s] %s\n' "$((SECONDS - started_s))" "$*"; }
in_cluster() { PYTHONPATH=deploy/dev/cluster .venv/bin/python -m local_cluster "$@"; }
begin_build() {
  set -m  # a process group of its own, so that the whole build can be stopped
  { nice -n 19 make --no-print-directory images || touch "$results/build.failed"; } \
    >"$results/build.log" 2>&1 </dev/null &
  builder=$!
  set +m
}
check_build() { # stop early if the build has failed
  [ ! -e "$results/build.failed" ] || { say "programs and images: the build failed"; cat "$results/build.log"; exit 1; }
}
tier() { # NAME OPTIONS AND FOLDERS…: one pytest run with its own result file
  local name=$1; shift
  check_build
  say "$name tests"
  .venv/bin/pytest -q --junitxml="$results/$name.xml" "$@"
}

was_running=no
finish() {
  local code=$?
  if [ -n "$builder" ]; then kill -- "-$builder" 2>/dev/null && wait "$builder" || true; fi
  [ "$was_running" = yes ] || in_cluster down >/dev/null 2>&1 || true
  .venv/bin/python deploy/dev/summary.py "$results"/*.xml 2>/dev/null || true
  rm -rf "$results"
  exit "$code"
}
trap finish EXIT

begin_build
say "lint; programs and images of the cluster are built in the background"
make --no-print-directory lint
tier unit -n auto --maxprocesses 4 tests/unit tests/shell
tier distributed -n 2 tests/distributed  # several processes each, which wait for one another for much of the time
say "programs and images of the cluster"
tail -n +1 -f --pid="$builder" "$results/build.log"
check_build
say "cluster"
if in_cluster status >/dev/null 2>&1; then was_running=yes; fi
make --no-print-directory cluster-running
eval "$(in_cluster env)"
# Integration tests run their own operators; an operator installed by an earlier demo would act on the same jobs.
helm uninstall heterotrain --namespace heterotrain-system --ignore-not-found --wait
tier packaging tests/packaging  # after the cluster's start, because the chart's tests use its helm
tier integration tests/integration --ignore tests/integration/cluster
tier e2e tests/e2e
if [ "$was_running" = no ]; then
  in_cluster down
  tier cluster tests/integration/cluster
fi
say "done"
