"""What the other processes of the sharing tests do. Importable, so that they can be spawned."""

import random
from multiprocessing.connection import Connection
from pathlib import Path

from kv_tier import ArenaView
from tests.kv_tier.arena_cases import (
    LAYOUT,
    holds,
    key_of,
    lease,
    open_tier,
    reserve,
    store,
    write_heads,
)


def be_a_rank(directory: Path, parent: Connection) -> None:
    """Write or check the heads that are asked for, until told to stop."""
    view = ArenaView(directory, LAYOUT)
    while (task := parent.recv()) is not None:
        verb, location, chunk, head_start, num_heads = task
        if verb == "write":
            write_heads(view, location, chunk, head_start, num_heads)
            parent.send(True)
        else:
            parent.send(holds(view, location, chunk, head_start, num_heads))


def hold_and_wait(directory: Path, parent: Connection) -> None:
    """Store chunk 1, lease it, retire and lease chunk 2, reserve chunk 3, then hang."""
    tier = open_tier(directory)
    view = ArenaView(directory, LAYOUT)
    for chunk in (1, 2):
        write_heads(view, store(tier, chunk, 2), chunk, 0, 4)
    leases = [lease(tier, chunk, 2) for chunk in (1, 2)]
    tier.discard(key_of(2))
    reservation = reserve(tier, 3, 2)
    parent.send((leases, reservation))
    parent.recv()


def read_slowly(directory: Path, parent: Connection) -> None:
    """Lease chunk 1, and read it again and again until told to stop; then let it go."""
    tier = open_tier(directory)
    view = ArenaView(directory, LAYOUT)
    found = lease(tier, 1, 2)
    assert found is not None
    parent.send(found.location)
    num_reads = num_wrong = 0
    while not parent.poll():
        num_reads += 1
        num_wrong += not holds(view, found.location, 1, 0, 4)
        if num_reads == 10:
            parent.send("it reads")
    parent.recv()
    tier.release([found])
    parent.send((num_reads, num_wrong))


def hammer(directory: Path, seed: int, parent: Connection) -> None:
    """Use a few chunks in a small arena at random; report every value that was not right.

    Says first that it is on its way, so that it can be killed in the middle.
    """
    choose = random.Random(seed)
    tier = open_tier(directory)
    view = ArenaView(directory, LAYOUT)
    num_read, wrong = 0, []
    for step in range(200):
        if step == 20:
            parent.send("on its way")
        chunk = choose.randrange(7)
        size = 1 + chunk % 3
        found = lease(tier, chunk, size)
        if found is not None:
            num_read += 1
            if not holds(view, found.location, chunk, 0, 4):
                wrong.append((step, chunk))
            if choose.random() < 0.1:
                tier.discard(key_of(chunk))
                if not holds(view, found.location, chunk, 0, 4):
                    wrong.append((step, chunk))
            tier.release([found])
        elif (reservation := reserve(tier, chunk, size)) is not None:
            write_heads(view, reservation.location, chunk, 0, 4)
            if choose.random() < 0.1:
                tier.abort(reservation)
            else:
                tier.commit(reservation)
    tier.close()
    parent.send((num_read, wrong))
