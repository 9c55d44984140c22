"""data: the split is disjoint and stable, and every world size reads the same global batches."""

import pytest
import torch

from zeroshard.data.text import Batches, compressed_bits_per_byte, held_out_windows, read_corpus


@pytest.fixture
def folder(tmp_path):
    for i in range(40):
        file = tmp_path / f"part{i % 4}" / f"{i}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"file {i}: " + "some words to read " * (i + 1))
    (tmp_path / "image.bin").write_bytes(b"\x89\0\0binary")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_text("not text for us")
    return tmp_path


def _text(nbytes: int) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_held_out_files_are_never_trained_on(folder):
    corpus = read_corpus(folder, held_out_nbytes=1000)
    assert not set(corpus.train_files) & set(corpus.held_out_files)
    assert len(corpus.train_files) + len(corpus.held_out_files) == 40
    assert corpus.held_out.numel() >= 1000
    for file in corpus.held_out_files:
        content = (folder / file).read_bytes()
        assert content in corpus.held_out.numpy().tobytes()
        assert content[:9] not in corpus.train.numpy().tobytes()


def test_the_split_is_the_same_every_time(folder):
    assert read_corpus(folder, held_out_nbytes=500).digest == read_corpus(folder, held_out_nbytes=500).digest


def test_a_lone_file_is_split_at_its_tail(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(1, 201)))
    corpus = read_corpus(file, held_out_nbytes=50)
    assert torch.cat([corpus.train, corpus.held_out]).tolist() == list(range(1, 201))
    assert corpus.held_out.numel() == 20  # a tenth


@pytest.mark.parametrize("name", ["missing", "nothing"])
def test_a_folder_without_text_is_an_error_that_names_it(tmp_path, name):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=f"data: expected .*{name}"):
        read_corpus(tmp_path / name)


def test_every_machine_has_the_default_corpus():
    corpus = read_corpus()
    assert corpus.train.numel() > 10**6
    assert "site-packages" not in " ".join(corpus.train_files)


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (2, 1), (3, 2), (1, 12), (12, 1)])
def test_all_world_sizes_read_the_same_global_batch(world_size, accumulate):
    batches = Batches(_text(3000), seq=16, batch=12, seed=3)
    for step in (0, 7, 40):
        parts = [
            batches.part(step, rank, world_size, micro, accumulate) for rank in range(world_size) for micro in range(accumulate)
        ]
        inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        expected_inputs, expected_targets = batches.rows(step, 0, 12)
        assert torch.equal(inputs, expected_inputs)
        assert torch.equal(targets, expected_targets)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_an_epoch_reads_each_window_once_and_the_next_one_differs():
    batches = Batches(_text(1000), seq=10, batch=11, seed=1)  # 99 windows, 9 steps an epoch
    epochs = [[batches.offsets(step) for step in range(first, first + 9)] for first in (0, 9)]
    flat = [[offset for step in epoch for offset in step] for epoch in epochs]
    for offsets in flat:
        assert len(set(offsets)) == batches.windows == 99
        assert len({offset % 10 for offset in offsets}) == 1
        assert max(offsets) + 10 < 1000
    assert flat[0] != flat[1]
    assert Batches(_text(1000), seq=10, batch=11, seed=2).offsets(0) != epochs[0][0]


def test_a_batch_that_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match="batch: expected a multiple of ranks x accumulate = 4 x 1, got 6"):
        Batches(_text(100), seq=4, batch=6).part(0, 0, 4)
    with pytest.raises(ValueError, match="at least 2 \\* seq \\+ 1 = 201 bytes"):
        Batches(_text(100), seq=100, batch=1)


@pytest.mark.parametrize(
    ("nbytes", "seq", "stride"), [(100, 10, 10), (101, 10, 5), (97, 10, 1), (7, 10, 5), (11, 10, 5), (12, 10, 5)]
)
def test_each_held_out_byte_but_the_first_is_scored_once(nbytes, seq, stride):
    text = torch.arange(nbytes, dtype=torch.uint8)
    windows, scored = held_out_windows(text, seq, stride)
    assert windows.shape == (len(scored), seq + 1)
    assert sorted(windows[:, 1:][scored].tolist()) == list(range(1, nbytes))
    context = torch.arange(seq).expand_as(scored)[1:][scored[1:]]  # bytes before the scored one in its window, less one
    assert (context >= seq - stride).all()


def test_compressors_are_measured_in_bits_per_byte():
    bits = compressed_bits_per_byte(_text(20000))
    assert all(7.9 < value < 8.2 for value in bits.values())  # random bytes do not compress
    assert max(compressed_bits_per_byte(torch.zeros(20000, dtype=torch.uint8)).values()) < 0.1
