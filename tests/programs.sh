#!/bin/sh
# Sees to it that the programs are here which the tests call: a Chromium for the dashboard, curl for the page on HTTP,
# Node.js for the client in JavaScript, systemd-analyze for the units.
# Debian's own are used; nothing is downloaded from elsewhere.
set -u

have() {
  for name; do
    command -v "$name" > /dev/null 2>&1 && return 0
  done
  return 1
}

installed() {
  [ "$(id -u)" = 0 ] && have apt-get || return 1
  echo "Installing $1 for the tests ..."
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -qq -y --no-install-recommends "$1" > /dev/null 2>&1 && return 0
  apt-get update -qq > /dev/null 2>&1
  apt-get install -qq -y --no-install-recommends "$1" > /dev/null
}

if ! have "${BSFG_CHROMIUM:-chromium}" chromium chromium-browser google-chrome && ! installed chromium; then
  echo "There is no Chromium here, so the tests of the dashboard in a browser will fail." >&2
  echo "Install it (on Debian: sudo apt-get install chromium), or name one: BSFG_CHROMIUM=/path/to/it make test" >&2
fi
if ! have curl && ! installed curl; then
  echo "There is no curl here, so the test of the page on HTTP will fail." >&2
  echo "Install it (on Debian: sudo apt-get install curl)." >&2
fi
if ! have node && ! installed nodejs; then
  echo "There is no Node.js here, so the tests of the client in JavaScript will fail." >&2
  echo "Install it (on Debian: sudo apt-get install nodejs)." >&2
fi
if ! have systemd-analyze && ! installed systemd; then
  echo "There is no systemd-analyze here, so the test of the units will fail." >&2
  echo "Install it (on Debian: sudo apt-get install systemd)." >&2
fi
exit 0
