#!/usr/bin/env bash
# Puts on this machine what the tests start: valkey-server 8, RabbitMQ 3.10 or later, the libraries that Mooncake loads,
# Node, 18 or later, Go, kubectl, systemd-analyze, Chromium, Prometheus, and a C compiler.
# They are only installed: every test starts its own, on a free port of the loopback interface, and ends it.
set -euo pipefail

missing=()
command -v valkey-server >/dev/null || missing+=(valkey-server)
ls /usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server >/dev/null 2>&1 || missing+=(rabbitmq-server)
command -v node >/dev/null || missing+=(nodejs)
command -v go >/dev/null || missing+=(golang-go)
command -v kubectl >/dev/null || missing+=(kubernetes-client)
command -v systemd-analyze >/dev/null || missing+=(systemd)
command -v chromium >/dev/null || missing+=(chromium)
command -v promtool >/dev/null || missing+=(prometheus)
command -v cc >/dev/null || missing+=(gcc libc6-dev)
ldconfig -p | grep -q 'libibverbs\.so\.1' || missing+=(libibverbs1)
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "the tests need ${missing[*]}, and this machine has no apt-get: install them by hand" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "the tests need ${missing[*]}: run  sudo $0  once, or install them by hand" >&2
    exit 1
fi

release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
backports=()
if [ "$release" = bookworm ]; then  # its own release has no valkey-server
    backports=(-t bookworm-backports)
    if ! grep -rqs bookworm-backports /etc/apt/sources.list /etc/apt/sources.list.d; then
        # The machine's own mirror and key, with another suite.
        source=$(grep -ls 'Suites:.*\bbookworm\b' /etc/apt/sources.list.d/*.sources | head -1 || true)
        if [ -n "$source" ]; then
            {
                echo "Types: deb"
                grep -m1 '^URIs:' "$source"
                echo "Suites: bookworm-backports"
                echo "Components: main"
                grep -m1 '^Signed-By:' "$source" || true
            } >/etc/apt/sources.list.d/bookworm-backports.sources
        else
            sed -n 's/^\(deb .*\) bookworm main.*/\1 bookworm-backports main/p' /etc/apt/sources.list | head -1 \
                >/etc/apt/sources.list.d/bookworm-backports.list
        fi
    fi
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# A machine of its own for tests needs no server that is always on.
RUNLEVEL=1 apt-get install -y -q --no-install-recommends "${backports[@]}" "${missing[@]}"
