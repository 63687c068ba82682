#!/bin/sh
# Sees to it that there is a Chromium for the tests of the dashboard. Debian's own is used; nothing is downloaded
# from elsewhere.
set -u

for name in "${BSFG_CHROMIUM:-chromium}" chromium chromium-browser google-chrome; do
  command -v "$name" > /dev/null 2>&1 && exit 0
done

if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null 2>&1; then
  echo "Installing Chromium for the tests of the dashboard ..."
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -qq -y --no-install-recommends chromium > /dev/null 2>&1 && exit 0
  apt-get update -qq > /dev/null 2>&1
  apt-get install -qq -y --no-install-recommends chromium > /dev/null && exit 0
fi

echo "There is no Chromium here, so the tests of the dashboard in a browser will fail." >&2
echo "Install it (on Debian: sudo apt-get install chromium), or name one: BSFG_CHROMIUM=/path/to/it make test" >&2
exit 0
