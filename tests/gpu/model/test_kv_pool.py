"""The KV pool's layout and its memory."""

import psutil
import torch
from corun.gpu.model.kv_pool import KvLayout, KvPool, LayerKvShape

CPU = torch.device("cpu")
LAYERS = (LayerKvShape(2, 8, 8), LayerKvShape(3, 6, 4))


def make_pool(num_blocks: int = 10, *, block_size: int = 4) -> KvPool:
    return KvPool(KvLayout(LAYERS, block_size, torch.bfloat16), num_blocks, CPU)


def test_views_have_the_shapes_of_the_layers() -> None:
    pool = make_pool()
    key, value = pool.layer(1)
    assert key.shape == (10, 3, 4, 6)
    assert value.shape == (10, 3, 4, 4)
    assert key.stride()[2:] == (6, 1)
    assert value.stride()[2:] == (4, 1)


def test_layers_and_blocks_do_not_overlap() -> None:
    pool = make_pool()
    for number, view in enumerate(view for i in range(2) for view in pool.layer(i)):
        for block in range(10):
            view[block] = number * 10 + block
    for number, view in enumerate(view for i in range(2) for view in pool.layer(i)):
        for block in range(10):
            assert (view[block] == number * 10 + block).all()


def test_every_matrix_starts_on_a_cache_line() -> None:
    offsets, block_bytes = KvLayout(LAYERS, 5, torch.float32).offsets_bytes()
    assert all(offset % 64 == 0 for pair in offsets for offset in pair)
    assert block_bytes % 64 == 0


def test_released_blocks_read_as_zero_and_can_be_written_again() -> None:
    layout = KvLayout((LayerKvShape(4, 64, 64),), 16, torch.float32)
    pool = KvPool(layout, 8, CPU)
    key, _ = pool.layer(0)
    key.fill_(1.0)
    pool.release([3])
    assert (key[3] == 0).all()
    assert (key[[2, 4]] == 1).all()
    key[3] = 2.0
    assert (key[3] == 2).all()


def test_release_spares_neighbours_that_share_a_memory_page() -> None:
    pool = make_pool(100)
    key, _ = pool.layer(0)
    key.fill_(1.0)
    pool.release([50])
    kept = [block for block in range(100) if block != 50]
    assert (key[kept] == 1).all()


def test_untouched_blocks_take_no_memory() -> None:
    layout = KvLayout((LayerKvShape(8, 128, 128),), 16, torch.float32)
    process = psutil.Process()
    before = process.memory_info().rss
    pool = KvPool(layout, 2**13, CPU)
    assert pool.block_bytes * pool.num_blocks == 2**30
    assert process.memory_info().rss - before < 2**26
    pool.close()
