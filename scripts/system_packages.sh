#!/bin/sh
# Installs the named Debian packages that are missing, when root; names them, and goes on, when not.
missing=""
for package in "$@"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "install ok installed" || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
if ! command -v apt-get >/dev/null; then
  echo "some tests use the programs of Debian's packages$missing; those tests skip without them"
elif [ "$(id -u)" = 0 ]; then
  echo "installing$missing"
  apt-get update -q >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >/dev/null
else
  echo "some tests skip without these packages: sudo apt-get install$missing"
fi
