#!/usr/bin/env bash
# All tiers, fastest first; stops at the first that fails. Starts the cluster when none runs and takes it down again.
set -euo pipefail
cd "$(dirname "$0")/.."
started_s=$SECONDS
results=$(mktemp -d)

say() { printf '\n==> [%4d s] %s\n' "$((SECONDS - started_s))" "$*"; }
tier() { # NAME FOLDERS…: one pytest run with its own result file
  local name=$1; shift
  say "$name tests"
  .venv/bin/pytest -q --junitxml="$results/$name.xml" "$@"
}
in_cluster() { PYTHONPATH=deploy/local .venv/bin/python -m local_cluster "$@"; }

was_running=no
finish() {
  local code=$?
  [ "$was_running" = yes ] || in_cluster down >/dev/null 2>&1 || true
  .venv/bin/python deploy/summary.py "$results"/*.xml 2>/dev/null || true
  rm -rf "$results"
  exit "$code"
}
trap finish EXIT

say "lint"
make --no-print-directory lint
tier unit tests/unit tests/shell
tier distributed tests/distributed
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
