"""The framing of W&B's logs: records of any length, torn at any byte, damaged in the middle."""

from __future__ import annotations

import random
import struct
import zlib

import pytest

from lightning_fuse.reports.wandb_log import log_records

HEADER = b":W&B\xe1\xbe\x00"  # as wandb 0.31 writes it
BLOCK = 32768


def written(records: list[bytes]) -> tuple[bytes, list[int]]:
    """A log by the format's description, and where each record ends: an independent writer."""
    data, ends = bytearray(HEADER), []
    for record in records:
        rest, first = record, True
        while True:
            room = BLOCK - len(data) % BLOCK
            if room < 7:
                data += bytes(room)
                room = BLOCK
            part, rest = rest[: room - 7], rest[room - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not rest]
            data += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            first = False
            if not rest:
                break
        ends.append(len(data))
    return bytes(data), ends


def some_records() -> list[bytes]:
    """Short ones, one that ends 3 bytes before a block does, one over several blocks, an empty one."""
    chance = random.Random(0)
    sizes = [10, 0, 500, BLOCK - 3 - 7 - (7 + 7 + 10 + 7 + 0 + 7 + 500), 40, 3 * BLOCK, 1, 200]
    return [chance.randbytes(size) for size in sizes]


def test_records_of_any_length_come_back() -> None:
    records = some_records()
    data, ends = written(records)
    assert ends[3] % BLOCK == BLOCK - 3  # the next record begins a block
    assert list(log_records(data)) == records


def test_a_torn_log_gives_what_was_whole() -> None:
    records = some_records()
    data, ends = written(records)
    places = {*range(7, ends[2] + 40), *range(ends[3] - 9, ends[4] + 9), *range(ends[5] - 40, len(data)), 2 * BLOCK + 3}
    for place in sorted(places):
        assert list(log_records(data[:place])) == records[: sum(end <= place for end in ends)]


def test_space_that_was_never_written_is_a_torn_end() -> None:
    data, _ = written(some_records()[:3])
    assert len(list(log_records(data + bytes(1000)))) == 3


@pytest.mark.parametrize("place", [20, 40, 600, BLOCK + 100])
def test_damage_before_the_end_is_said(place: int) -> None:
    data = bytearray(written(some_records())[0])
    data[place] ^= 0x10
    with pytest.raises(ValueError, match=r"damaged at byte \d+ of"):
        list(log_records(bytes(data), "run-a.wandb"))


@pytest.mark.parametrize("data", [b"", b":W&B", b"PK\x03\x04 and more", b":W&B\xe1\xbe\x01 a later version"])
def test_another_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a W&B log of version 0"):
        list(log_records(data))
