"""The host tier's benchmark does what it says: right bytes are put, and reads copy nothing."""

import json

import pytest
import torch

from benchmarks.bench_host_tier import LAYOUTS, SPLITS, Work, main


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_put_is_whole_and_reads_are_views_of_the_arena(name, tmp_path):
    layout = LAYOUTS[name]
    work = Work(tmp_path, layout, 5, seed=1)
    first = work.view.mapping.data_ptr()
    last = first + work.view.mapping.nbytes
    with work.tier:
        for split in SPLITS[name]:
            for kv in (work.token_major, work.head_major):
                location = work.put(kv, split)
                work.verify()
                found = work.read()
                assert len(found) == layout.num_layers
                for layer, (k, v) in enumerate(found):
                    start = first + location.offset + layout.layer_offset(5, layer)
                    assert k.data_ptr() == start and first <= v.data_ptr() < last
                    assert v.data_ptr() == start + layout.layer_bytes(5) // 2
                    assert torch.equal(torch.stack((k, v)), work.head_major[layer])
        stats = work.tier.stats()
        assert stats.evictions == 2 * len(SPLITS[name]) - 2  # the arena has room for two
        assert stats.num_leases == stats.num_reservations == stats.refused == 0
        assert work.tier.check_integrity() == []


def test_the_plain_copy_copies_the_same_bytes(tmp_path):
    work = Work(tmp_path, LAYOUTS["135M"], 5, seed=1)
    with work.tier:
        for half in (0, 1):
            work.copy_plainly()
            copied = torch.from_numpy(work._plain.reshape(2, -1)[half]).view(torch.bfloat16)
            assert torch.equal(copied.view(work.head_major.shape), work.head_major)


def test_it_prints_shares_of_ceilings(tmp_path, capsys):
    num_threads = torch.get_num_threads()
    main(["--layouts", "135M", "--tokens", "7", "--rounds", "3", "--directory", str(tmp_path)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {(row["what"], row["ranks"]): row for row in found["results"]}
    assert len(rows) == 8
    assert rows["plain copy", 1]["share_of_ceiling"] == 1.0
    assert rows["one xxh3", 1]["share_of_ceiling"] == 1.0
    assert 0.0 < rows["put, token-major", 3]["share_of_ceiling"] < 1.0
    assert "gb_per_s" not in rows["leased read", 1]
    assert list(tmp_path.iterdir()) == [] and torch.get_num_threads() == num_threads
