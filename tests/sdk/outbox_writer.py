"""A producer process that is killed: it sends numbered facts through an outbox and tells which were accepted."""

from __future__ import annotations

import sys

from bsfg import Endpoint, Producer
from bsfg.testing.facts import messages

BURST = 20


def main() -> None:
    """Send facts from a number on, for ever; after each burst print how many are accepted."""
    outbox, first, address, *files = sys.argv[1:]
    endpoint = Endpoint(address)
    if files:
        ca, certificate, key, server_name = files
        endpoint = Endpoint(address, ca, certificate, key, server_name)
    with Producer(endpoint, stream="operational", outbox=outbox, linger_ms=0.5) as producer:
        number = int(first)
        while True:
            futures = [producer.send(each) for each in messages(BURST, first=number)]
            for future in futures:
                future.wait_accepted()
            number += BURST
            print(number, flush=True)


if __name__ == "__main__":
    main()
