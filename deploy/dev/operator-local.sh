#!/usr/bin/env bash
# Runs the operator from the sources in place of the installed one, until Ctrl-C: operator-local.sh PYTHON [OPTION …]
# The options are those of `heterotrain-operator run`. The installed Deployment has no replicas meanwhile, and gets them
# back at any kind of end. Both operators use one Lease, so they never act at the same time.
set -eu
python=$1 deployment=deployment/heterotrain-operator
shift
variables=$("$python" -m local_cluster env)
eval "$variables"
own() { kubectl --namespace heterotrain-system "$@"; }

if ! replicas=$(own get "$deployment" --output 'jsonpath={.spec.replicas}'); then
  "$python" -m lab.install
  replicas=1
fi
[ "$replicas" -gt 0 ] || replicas=1 # a killed run may have left none behind

restore() {
  trap '' INT TERM HUP # a further Ctrl-C would leave the cluster without an operator
  kill "$proxy" 2>/dev/null || true
  echo "==> scale the installed operator up to $replicas"
  own scale "$deployment" "--replicas=$replicas"
}
# Prometheus, through the API server.
exec {answers}< <(exec kubectl proxy --port=0)
proxy=$!
trap restore EXIT
read -r line <&"$answers" || { echo "kubectl proxy does not start" >&2; exit 1; }
own scale "$deployment" --replicas=0
pods=app.kubernetes.io/name=heterotrain-operator,pod-template-hash
own wait pod --selector "$pods" --for=delete --timeout=60s || true # there may be none; and the Lease separates both

# In a session of its own: of Ctrl-C it gets one SIGTERM, by which it releases the Lease. A second Ctrl-C kills it.
setsid "$python" -m heterotrain_operator run --namespace heterotrain-system --lease-name heterotrain-operator \
  --identity "local-$(id -un)" --listen 127.0.0.1 --health-port 18080 --metrics-port 19090 --log-format text \
  --prometheus-url "http://127.0.0.1:${line##*:}/api/v1/namespaces/monitoring/services/prometheus:http/proxy" "$@" &
operator=$! stop=TERM
trap 'kill -"$stop" "$operator" 2>/dev/null || true; stop=KILL' INT TERM HUP
echo "==> operator from the sources; its metrics: http://127.0.0.1:19090/metrics"
code=0
while kill -0 "$operator" 2>/dev/null; do
  code=0
  wait "$operator" || code=$? # a signal ends the wait, too
done
[ "$stop" = TERM ] || code=0
exit "$code"
