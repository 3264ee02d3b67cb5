#!/bin/sh
# A service manager of its own: nothing that it mounts, stops or cleans is seen outside. Arguments: a folder that
# both sides see, and the program that runs beside the manager. To be run by: unshare -m -C -p -f.
set -e
folder=$1
shift
mount --bind "$folder" /mnt
mount -t tmpfs tmpfs /tmp # first of all: a manager may clean what it finds there
mount -t tmpfs tmpfs /run
mount -t proc proc /proc
mount -t cgroup2 none /sys/fs/cgroup
export XDG_RUNTIME_DIR=/run/own SYSTEMD_UNIT_PATH=/run/units HOME=/run/home
unset NOTIFY_SOCKET LISTEN_FDS LISTEN_PID DBUS_SESSION_BUS_ADDRESS
mkdir -p /run/systemd/system /run/own /run/units /run/home
chmod 700 /run/own
printf '[Unit]\nDescription=nothing else\nDefaultDependencies=no\n' >/run/units/default.target
systemd=/usr/lib/systemd/systemd
test -x $systemd || systemd=/lib/systemd/systemd
$systemd --user --unit=default.target --log-target=null &
manager=$!
status=0
"$@" || status=$?
kill $manager
exit $status
