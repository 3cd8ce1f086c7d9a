"""A tensor-parallel rank of the emulated engine: a process that answers each line by a number.

Its share of a token is a hash of rank, prompt and position. The standard library alone, so that it
starts at once.
"""

import hashlib
import sys


def share_of(rank: int, line: str) -> int:
    """line: what identifies a token, such as a prompt's digest and the token's index"""
    return int.from_bytes(hashlib.blake2b(f"{rank} {line}".encode(), digest_size=4).digest())


def main() -> None:
    rank = int(sys.argv[1])
    for line in sys.stdin:
        print(share_of(rank, line.strip()), flush=True)


if __name__ == "__main__":
    main()
