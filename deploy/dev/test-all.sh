#!/usr/bin/env bash
# All tiers, fastest first; stops at the first that fails. Starts the cluster when none runs and takes it down again.
# What the cluster is made of is compiled and packed on what the first tiers leave of the processors.
set -euo pipefail
cd "$(dirname "$0")/../.."
started_s=$SECONDS
results=$(mktemp -d)
builder=""

say() { printf '\n==> [%4d s] %s\n' "$((SECONDS - started_s))" "$*"; }
in_cluster() { PYTHONPATH=deploy/dev/cluster .venv/bin/python -m local_cluster "$@"; }
begin_build() {
  set -m  # a process group of its own, so that all of it can be ended
  { nice -n 19 make --no-print-directory images || touch "$results/build.failed"; } >"$results/build.log" 2>&1 </dev/null &
  builder=$!
  set +m
}
check_build() { # say at once when it has failed
  [ ! -e "$results/build.failed" ] || { say "the cluster's parts could not be made"; cat "$results/build.log"; exit 1; }
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
say "lint; meanwhile the cluster's parts are made"
make --no-print-directory lint
tier unit -n auto --maxprocesses 4 tests/unit tests/shell
tier distributed tests/distributed
say "the cluster's parts"
tail -n +1 -f --pid="$builder" "$results/build.log"
check_build
say "cluster"
if in_cluster status >/dev/null 2>&1; then was_running=yes; fi
make --no-print-directory cluster-running
eval "$(in_cluster env)"
# Integration tests run operators of their own: one that an earlier demo installed would do the same jobs' work.
helm uninstall heterotrain --namespace heterotrain-system --ignore-not-found --wait
tier packaging tests/packaging  # the chart's tests need the helm that comes with the cluster
tier integration tests/integration --ignore tests/integration/cluster
tier e2e tests/e2e
if [ "$was_running" = no ]; then
  in_cluster down
  tier cluster tests/integration/cluster
fi
say "done"
