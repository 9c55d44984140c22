"""DeepSpeed's words for axes that cut the model: PipelineModule and AutoTP, against one process and torch alone."""

import itertools
import time

import pipeline_kit
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import seeding
from torch import nn
from zeroshard.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from zeroshard.deepspeed.runtime.pipe.module import PipelineError
from zeroshard.deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard import seam
from zeroshard.comm.launch import run_processes
from zeroshard.integrations.deepspeed import sections, topology

TOKENS, WIDTH, ROWS, LENGTH, STEPS, MICRO = 23, 12, 2, 5, 3, 4


class Embed(nn.Module):
    def __init__(self, seed):
        super().__init__()
        with seeding(seed):
            self.word, self.scale = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.ones(WIDTH))

    @property
    def weight(self):
        return self.word.weight

    def forward(self, batch):
        tokens, mask = batch
        return self.word(tokens) * self.scale, mask


class Block(nn.Module):
    def __init__(self, seed):
        super().__init__()
        with seeding(seed):
            self.norm, self.map = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, state):
        x, mask = state
        return x + torch.tanh(self.map(self.norm(x))) * mask[0, :, None], mask


def head(embed, state):
    return F.linear(state[0], embed.weight * embed.scale)


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers():
    blocks = [LayerSpec(Block, seed) for seed in range(2, 6)]
    tied = {"tied_weight_attr": "weight"}
    return [TiedLayerSpec("embed", Embed, 1, **tied), *blocks, TiedLayerSpec("embed", Embed, 9, forward_fn=head, **tied)]


def data(step, dp):
    """MICRO micro-batches ((tokens, a mask with another number of rows), labels)."""
    draw = torch.Generator().manual_seed(100 * step + dp)
    for _ in range(MICRO):
        tokens = torch.randint(TOKENS, (ROWS, LENGTH + 1), generator=draw)
        yield (tokens[:, :-1], torch.arange(LENGTH).view(1, LENGTH) < 4), tokens[:, 1:]


def config(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": MICRO, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more,
    }  # fmt: skip


def one_process():
    """(loss of each step, norm of each step, loss of an evaluation), by torch alone."""
    embed, blocks = Embed(1), [Block(seed) for seed in range(2, 6)]
    params = [p for module in (embed, *blocks) for p in module.parameters()]
    optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-3)

    def loss(step):
        found = []
        for inputs, labels in itertools.chain(data(step, 0), data(step, 1)):
            state = embed(inputs)
            for block in blocks:
                state = block(state)
            found.append(loss_of(head(embed, state), labels))
        return sum(found) / len(found)

    losses, norms = [], []
    for step in range(STEPS):
        losses.append(loss(step))
        losses[-1].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return [each.item() for each in losses], norms, loss(STEPS).item()


def _engine(stage, stages=2, method="parameters", frozen=False, **options):
    net = PipelineModule(layers(), num_stages=stages, loss_fn=loss_of, partition_method=method, **options)
    net.tied_modules.requires_grad_(not frozen)
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config(stage))[0]


def _trains(engine, first=0, last=STEPS):
    dp = engine.grid.get_data_parallel_rank()
    told = [(float(engine.train_batch(data(step, dp))), engine.get_global_grad_norm()) for step in range(first, last)]
    return [loss for loss, _ in told], [norm for _, norm in told], float(engine.eval_batch(data(STEPS, dp)))


def _pipelines(rank, ranks, folder):
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    told, cuts = {}, []
    for stage, options in (
        (0, {}),
        (1, {"method": "uniform", "activation_checkpoint_interval": 2}),
        (2, {"method": "type:block"}),
        (3, {}),
    ):
        engine = _engine(stage, **options)
        told[stage] = _trains(engine)
        cuts.append(engine.module.partitions())
        seen = seam.engine_of(engine.module)
        cut = seen.topology
        assert (len(cut.stages), len(cut.places), seen.ranks.world_size, seen.world.world_size) == (2, 2, 2, 4)
        assert engine.global_steps == STEPS and engine.global_samples == STEPS * 2 * MICRO * ROWS
        engine.destroy()

    # a checkpoint of two stages goes on with four, one pipeline over all ranks, which reads what both data-parallel ranks have read
    engine = _engine(1)
    assert (engine.is_first_stage(), engine.is_last_stage()) == (rank < 2, rank >= 2)
    _trains(engine, 0, 1)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    engine.destroy()
    engine = _engine(1, 4)
    engine.set_train_batch_size(2 * MICRO * ROWS)
    _, state = engine.load_checkpoint(folder)
    assert state["epoch"] == 3 and engine.global_steps == 1

    def both(step):
        return itertools.chain(data(step, 0), data(step, 1))

    losses = [float(engine.train_batch(both(step))) for step in range(1, STEPS)]
    told["resumed"] = losses, float(engine.eval_batch(both(STEPS)))
    engine.destroy()
    return told, cuts, _values(rank), _mistakes(rank), [_given_inputs(more) for more in LOW]


class Meets(nn.Linear):
    """Notes its inputs, and computes in the dtype of its weight."""

    def forward(self, x):
        self.met = x
        return super().forward(x.to(self.weight.dtype))


BF16 = {"bf16": {"enabled": True}}
LOW = (BF16, {"fp16": {"enabled": True, "auto_cast": True}}, {**BF16, "zeroshard": {"shard": {"cast_inputs": True}}})


def _given_inputs(more):
    """What the first stage's first layer gets of float32 inputs; "" on the other stage."""
    net = PipelineModule([Meets(1, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=lambda x, y: (x.float() - y).square().mean())
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config(0, **more))[0]
    engine.train_batch(iter([(torch.tensor([[2049.0]]), torch.zeros(1, 4))] * MICRO))
    met = next((f"{layer.met.dtype} {layer.met.item()}" for layer in net.modules() if isinstance(layer, Meets)), "")
    engine.destroy()
    return met


def _values(rank):
    """What eval_batch returns; data of a loader; one micro-batch less than stages is too few for 1F1B."""
    engine = _engine(1)
    score, logits = engine.eval_batch(data(7, 0), return_logits=True, reduce_output=None)
    shown = [None if score is None else len(score), None if logits is None else tuple(logits.shape)]
    shown.append(engine.eval_batch(data(7, 0), bcast_loss=False) is None)
    if engine.is_first_stage() or engine.is_last_stage():
        engine.set_dataloader(list(data(0, engine.grid.get_data_parallel_rank())))
    before = float(engine.train_batch())
    ended = []
    for call in (engine.train_batch, lambda: engine.eval_batch(data(7, 0), num_micro_batches=1)):
        with pytest.raises((StopIteration, ValueError)) as caught:
            call()
        ended.append(type(caught.value).__name__)
    return [*shown, before, ended]


def _mistakes(rank):
    engine, said = _engine(1), []

    def broken():
        yield from itertools.islice(data(0, 0), 2)
        raise OSError("the disk is gone")

    wrong = (
        lambda: engine(torch.zeros(1)), engine.step, lambda: engine.save_16bit_model("x"),
        lambda: engine.train_batch(broken() if rank == 0 else data(0, 0)),
        lambda: PipelineModule(layers()), lambda: PipelineModule(layers(), num_stages=3),
        lambda: PipelineModule(layers()[:1], num_stages=2), lambda: PipelineModule(layers(), num_stages=2, partition_method="type:x"),
        lambda: PipelineModule(layers(), topology=PipeModelDataParallelTopology(2, 2, 1)),
        lambda: PipelineModule([TiedLayerSpec("a", nn.Linear, 2, 2), TiedLayerSpec("a", nn.LayerNorm, 2, tied_weight_attr="x")],
                               num_stages=2),
        lambda: _engine(1, frozen=rank < 2),
    )  # fmt: skip
    for each in wrong:
        with pytest.raises((RuntimeError, PipelineError, zs.ZeroshardError, sections.DeepSpeedConfigError, OSError)) as caught:
            each()
        said.append(str(caught.value))
    dist.barrier()
    return said


@pytest.mark.processes
def test_pipelines_train_as_one_process(tmp_path):
    losses, norms, evaluated = one_process()
    results = run_processes(_pipelines, 4, str(tmp_path))
    for rank, (told, cuts, values, said, met) in enumerate(results):
        assert met == (["torch.float32 2049.0", "torch.float16 2048.0", "torch.bfloat16 2048.0"] if rank < 2 else [""] * 3)
        for stage in (0, 1, 2, 3):
            torch.testing.assert_close(torch.tensor(told[stage][0]), torch.tensor(losses), rtol=0, atol=2e-6)
            torch.testing.assert_close(torch.tensor(told[stage][1]), torch.tensor(norms), rtol=0, atol=1e-5)
            assert abs(told[stage][2] - evaluated) < 2e-6
        assert cuts == [[0, 3, 6]] * 4
        torch.testing.assert_close(torch.tensor(told["resumed"][0]), torch.tensor(losses[1:]), rtol=0, atol=2e-6)
        assert abs(told["resumed"][1] - evaluated) < 2e-6
        last = rank >= 2
        assert values[:3] == ([MICRO, (ROWS, LENGTH, TOKENS), False] if last else [None, None, True])
        assert abs(values[3] - losses[0]) < 2e-6 and values[4] == ["StopIteration", "ValueError"]
        sentences = (
            "Only train_batch", "Only train_batch", "zero_to_fp32", "the disk is gone", "must provide num_stages", "must divide",
            "1 layers for 2 stages", "no valid layers", "expected the axes pipe and data", "no parameter 'x'",
            "freeze all copies or none",
        )  # fmt: skip
        for sentence, text in zip(sentences, said, strict=True):
            assert sentence in text, text


def _tensors(rank, ranks, folder):
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    given = {**config(1), "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": pipeline_kit.ROWS}

    def engine_of(tp, noted=0):
        model, section = pipeline_kit.model(), {"tensor_parallel": {"autotp_size": tp}} if tp else {}
        model = deepspeed.tp_model_init(model, noted, torch.float32) if noted else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
        return deepspeed.initialize(model=model, optimizer=optimizer, config={**given, **section})[0]

    def train(engine, first, last):
        found = []
        for step in range(first, last):
            tokens, targets = pipeline_kit.batch(step, deepspeed.utils.groups.get_data_parallel_rank())
            loss = pipeline_kit.loss(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            found.append((loss.item(), engine.get_global_grad_norm()))
        return found

    engine = engine_of(0, noted=2)
    told = train(engine, 0, 2)
    seen = seam.engine_of(engine.module)
    cut = seen.topology
    assert (len(cut.stages), len(cut.places), seen.ranks.world_size, seen.world.rank) == (1, 2, ranks // 2, rank)
    groups = deepspeed.utils.groups
    place = (
        groups.get_data_parallel_rank(),
        groups.get_tensor_model_parallel_rank(),
        groups.get_tensor_model_parallel_world_size(),
    )
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = engine_of(0)  # no ranks share a layer
    engine.load_checkpoint(folder)
    total = sum(value.double().square().sum().item() for value in zs.full_state_dict(engine.module).values())
    engine.destroy()
    make, said, begun = topology.init_device_mesh, [], 0.0

    def late(*args, **options):
        made = make(*args, **options)
        time.sleep(1.0 if rank == 2 else 0.0)
        return made

    topology.init_device_mesh = late
    for tp, noted in ((3, 0), (2, 4), (-1, 0), (4, 0)):
        begun = time.monotonic()
        with pytest.raises((sections.DeepSpeedConfigError, zs.ConfigError)) as caught:
            engine_of(tp, noted)
        said.append(str(caught.value))
    assert time.monotonic() - begun > 0.9  # no rank leaves while another makes its groups, which needs rank 0's store
    return told, place, total, said


@pytest.mark.processes
def test_layers_cut_over_ranks_train_as_one_process(tmp_path):
    model = pipeline_kit.model()
    optimizer, expected = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3), []
    for step in range(2):
        losses = [pipeline_kit.loss(model(x), y) for x, y in (pipeline_kit.batch(step, dp) for dp in range(2))]
        (sum(losses) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(([loss.item() for loss in losses], norm))
    wanted = sum(value.double().square().sum().item() for value in model.state_dict().values())
    for rank, (told, place, total, said) in enumerate(run_processes(_tensors, 4, str(tmp_path))):
        assert place == (rank // 2, rank % 2, 2) and abs(total - wanted) < 1e-4
        for (loss, norm), (losses, wanted_norm) in zip(told, expected, strict=True):
            assert abs(loss - losses[rank // 2]) < 1e-5 and abs(norm - wanted_norm) < 1e-5
        for text, sentence in zip(
            said, ("a divisor of the 4 ranks", "tp_model_init: 4", "got -1", "2 attention heads"), strict=True
        ):
            assert sentence in text


def test_ranks_of_a_topology():
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert grid.get_axis_names() == ["pipe", "data", "model"] and grid.world_size() == 8
    assert grid.get_rank(pipe=1, data=0, model=1) == 5 and grid.get_coord(5) == (1, 0, 1)
    assert grid.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]] and grid.get_axis_comm_lists("x") == []
    assert grid.filter_match(pipe=0, data=1) == [2, 3] == sorted(grid.get_axis_list("data", 1))[:2]
    assert (ProcessTopology(["x"], [3]).get_dim("x"), PipeDataParallelTopology(2, 4).get_dim("model")) == (3, 0)
    with pytest.raises(ValueError, match="rank 8 not found"):
        grid.get_coord(8)


def test_specs_of_layers():
    assert repr(LayerSpec(nn.Linear, 2, 3, bias=False)) == "Linear(2, 3, bias=False)"
    assert LayerSpec(nn.Linear, 2, 3).build().weight.shape == (3, 2)
    with pytest.raises(RuntimeError, match="only supports torch.nn.Module types"):
        LayerSpec(len)
