#!/bin/sh
# Two Ray nodes in two network namespaces of this machine, joined by a virtual cable; then a drill of tests/support in the
# first of them, with a rank on each node: ray_drill.py, or ray_server_drill.py. Needs root.
#   sh tests/support/ray_namespaces.sh PYTHON [KILLS [DRILL]]
set -eu
python=$1 kills=${2:-2} drill=${3:-ray_drill.py}
bin=$(dirname "$python")
folder=$(mktemp -d /tmp/qray.XXXX)
head="" worker=""
# a token of this cluster alone, for the processes that are started here
RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$("$python" -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_MODE RAY_AUTH_TOKEN
end() {
    for pid in $worker $head; do kill "$pid" 2>/dev/null || true; done
    sleep 3
    for space in quire-a quire-b; do
        for pid in $(ip netns pids $space 2>/dev/null); do kill -9 "$pid" 2>/dev/null || true; done
        ip netns del $space 2>/dev/null || true
    done
    rm -rf "$folder"
}
trap end EXIT
trap 'exit 143' INT TERM  # some shells do not run the former then
wait_for() {  # until a node has started
    for _ in $(seq 300); do
        grep -q "Ray runtime started" "$1" && return
        sleep 1
    done
    cat "$1"
    return 1
}
ip netns add quire-a
ip netns add quire-b
ip link add quire-va netns quire-a type veth peer name quire-vb netns quire-b
for pair in a:1 b:2; do
    space=quire-${pair%:*} cable=quire-v${pair%:*}
    ip -n "$space" addr add 10.77.0.${pair#*:}/24 dev "$cable"
    ip -n "$space" link set "$cable" up
    ip -n "$space" link set lo up
done
common="--num-cpus 1 --disable-usage-stats --block"
ip netns exec quire-a "$bin/ray" start --head --port 6379 --node-ip-address 10.77.0.1 --include-dashboard false \
    --temp-dir "$folder/a" $common >"$folder/head.log" 2>&1 &
head=$!
wait_for "$folder/head.log"
ip netns exec quire-b "$bin/ray" start --address 10.77.0.1:6379 --node-ip-address 10.77.0.2 $common \
    >"$folder/worker.log" 2>&1 &
worker=$!
wait_for "$folder/worker.log"
ip netns exec quire-a "$python" "tests/support/$drill" --kills "$kills" --address 10.77.0.1:6379 || {
    cat "$folder/head.log" "$folder/worker.log"
    exit 1
}
