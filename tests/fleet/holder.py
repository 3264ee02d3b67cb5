"""``python -m tests.fleet.holder URL BODY``: posts BODY to URL/v1/completions and reads to the end."""

import sys
import urllib.request


def main(url: str, body: str) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body.encode(), headers)  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
        while answer.read1(65536):
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
