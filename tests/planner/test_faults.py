"""Faults of the user's own code in a dry run: dtypes that real kernels refuse, and one sentence that names the place for all else."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard as zs
from zeroshard.cli import main
from zeroshard.errors import ConfigError
from zeroshard.planner.faults import check_dtypes
from zeroshard.planner.models import GPT, GPTConfig

FP32, BF16, FP16, INT = torch.float32, torch.bfloat16, torch.float16, torch.int64


def ones(dtype, *shape):
    return torch.ones(*shape, dtype=dtype)


def put(x, y, *shape, mask=False):
    where = ones(torch.bool, 5) if mask else torch.tensor([1, 2])
    ones(x, 5)[where] = ones(y, *shape)


OPERATORS = {  # name -> operands of two dtypes
    "mm": lambda x, y: torch.mm(ones(x, 3, 4), ones(y, 4, 5)),
    "matmul": lambda x, y: ones(x, 2, 3, 4) @ ones(y, 4, 5),
    "bmm": lambda x, y: torch.bmm(ones(x, 2, 3, 4), ones(y, 2, 4, 5)),
    "baddbmm": lambda x, y: torch.baddbmm(ones(x, 2, 3, 5), ones(x, 2, 3, 4), ones(y, 2, 4, 5)),
    "addbmm": lambda x, y: torch.addbmm(ones(x, 3, 5), ones(x, 2, 3, 4), ones(y, 2, 4, 5)),
    "mv": lambda x, y: torch.mv(ones(x, 3, 4), ones(y, 4)),
    "dot": lambda x, y: torch.dot(ones(x, 4), ones(y, 4)),
    "einsum": lambda x, y: torch.einsum("ij,jk->ik", ones(x, 3, 4), ones(y, 4, 5)),
    "outer": lambda x, y: torch.outer(ones(x, 4), ones(y, 4)),
    "linear": lambda x, y: F.linear(ones(x, 2, 3, 4), ones(y, 5, 4), ones(y, 5)),
    "linear without bias": lambda x, y: F.linear(ones(x, 3, 4), ones(y, 5, 4)),
    "bias": lambda x, y: F.linear(ones(x, 3, 4), ones(x, 5, 4), ones(y, 5)),
    "conv1d": lambda x, y: F.conv1d(ones(x, 1, 3, 8), ones(y, 4, 3, 3)),
    "conv2d bias": lambda x, y: F.conv2d(ones(x, 1, 3, 8, 8), ones(x, 4, 3, 3, 3), ones(y, 4)),
    "conv_transpose2d": lambda x, y: F.conv_transpose2d(ones(x, 1, 3, 8, 8), ones(y, 3, 4, 3, 3)),
    "layer_norm": lambda x, y: F.layer_norm(ones(x, 3, 4), (4,), ones(y, 4), ones(y, 4)),
    "group_norm": lambda x, y: F.group_norm(ones(x, 3, 4, 5), 2, ones(y, 4), ones(y, 4)),
    "batch_norm": lambda x, y: F.batch_norm(ones(x, 3, 4), ones(y, 4), ones(y, 4), ones(y, 4), ones(y, 4), training=True),
    "batch_norm in eval": lambda x, y: F.batch_norm(ones(x, 3, 4), ones(y, 4), ones(y, 4), ones(y, 4), ones(y, 4)),
    "rms_norm": lambda x, y: F.rms_norm(ones(x, 3, 4), (4,), ones(y, 4)),
    "attention": lambda x, y: F.scaled_dot_product_attention(ones(x, 1, 2, 3, 4), ones(y, 1, 2, 3, 4), ones(y, 1, 2, 3, 4)),
    "attention mask": lambda x, y: F.scaled_dot_product_attention(*[ones(x, 1, 2, 3, 4)] * 3, attn_mask=ones(y, 3, 3)),
    "index_put": lambda x, y: put(x, y, 2),
    "index_put one number": lambda x, y: put(x, y),
    "index_put mask": lambda x, y: put(x, y, 5, mask=True),
    "index_put mask, one number": lambda x, y: put(x, y, 1, mask=True),
    "index_add": lambda x, y: ones(x, 5).index_add(0, torch.arange(2), ones(y, 2)),
    "index_copy": lambda x, y: ones(x, 5).index_copy(0, torch.arange(2), ones(y, 2)),
    "scatter": lambda x, y: ones(x, 5).scatter(0, torch.arange(2), ones(y, 2)),
    "masked_scatter": lambda x, y: ones(x, 5).masked_scatter(ones(torch.bool, 5), ones(y, 5)),
    "where": lambda x, y: torch.where(ones(torch.bool, 5), ones(x, 5), ones(y, 5)),
    "cat": lambda x, y: torch.cat([ones(x, 5), ones(y, 5)]),
    "lerp": lambda x, y: torch.lerp(ones(x, 5), ones(y, 5), 0.5),
    "addcmul": lambda x, y: torch.addcmul(ones(x, 5), ones(y, 5), ones(y, 5)),
    "add": lambda x, y: ones(x, 5) + ones(y, 5),
    "add in place": lambda x, y: ones(x, 5).add_(ones(y, 5)),
    "copy": lambda x, y: ones(x, 5).copy_(ones(y, 5)),
    "mse_loss": lambda x, y: F.mse_loss(ones(x, 5), ones(y, 5)),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(ones(x, 5), ones(y, 5)),
    "cross_entropy of weights": lambda x, y: F.cross_entropy(ones(x, 3, 5), ones(INT, 3), ones(y, 5)),
    "prelu": lambda x, y: F.prelu(ones(x, 3, 5), ones(y, 1)),
    "grid_sample": lambda x, y: F.grid_sample(ones(x, 1, 2, 3, 3), ones(y, 1, 2, 2, 2), align_corners=False),
    "embedding_bag": lambda x, y: F.embedding_bag(ones(INT, 2, 3), ones(x, 5, 4), per_sample_weights=ones(y, 2, 3), mode="sum"),
    "lstm": lambda x, y: nn.LSTM(4, 5, dtype=y)(ones(x, 2, 3, 4)),
    "attention module": lambda x, y: nn.MultiheadAttention(4, 2, dtype=y)(*[ones(x, 2, 3, 4)] * 3),
    "autocast": lambda x, y: torch.autocast("cpu", BF16)(F.linear)(ones(x, 3, 4), ones(y, 5, 4)),
}  # fmt: skip


class Checked(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        check_dtypes(func, args)
        return func(*args, **(kwargs or {}))


def refused(run, x, y):
    try:
        run(x, y)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return True
    return False


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_tensors_refuse_the_dtypes_that_real_kernels_refuse_and_no_others(name):
    for x, y in ((FP32, FP32), (BF16, BF16), (FP32, BF16), (BF16, FP32), (FP32, FP16), (FP16, FP32)):
        real = refused(OPERATORS[name], x, y)
        with FakeTensorMode(allow_non_fake_inputs=True), Checked():
            assert refused(OPERATORS[name], x, y) == real, (x, y)


class Net(nn.Module):
    """Tokens -> logits; somewhere on the way it does what it should not."""

    def __init__(self, fault=None, optimize=None):
        super().__init__()
        self.embedding, self.fault = nn.Embedding(64, 16), fault
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.head = nn.Linear(16, 64)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden if self.fault is None else self.fault(hidden))


def upcast(hidden):
    return hidden.float()


def planned(make, **options):
    return zs.plan(make, ranks=2, batch=(1, 8), stage=3, **options)


def step(make, **options):
    """A real one, of one rank."""
    model = make()
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3, **options)
    try:
        model(torch.zeros(1, 8, dtype=torch.long)).float().sum().backward()
        optimizer.step()
    finally:
        zs.close(model)


def test_a_model_that_feeds_fp32_into_bf16_weights_fails_in_the_plan_as_in_the_run():
    planned(lambda: Net(upcast), precision="fp32")
    for run in (planned, step):
        with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype, but got [Ff]loat.* and [Bb][Ff]loat16"):
            run(lambda: Net(upcast), precision="bf16")
    with pytest.raises(ConfigError, match=r"forward fails in or after unit '.*', in Net \(.*test_faults.py:\d+\): RuntimeError"):
        planned(lambda: Net(upcast), precision="bf16")


def test_what_converts_by_itself_is_planned():
    def mixed(hidden):
        with torch.autocast("cpu", BF16):
            hidden = F.linear(hidden.float(), torch.ones(16, 16))
        hidden = (hidden + torch.ones(16)).masked_fill(torch.zeros(16, dtype=torch.bool), 0.0)
        return F.layer_norm(hidden.bfloat16(), (16,), torch.ones(16), torch.zeros(16))

    planned(lambda: Net(mixed), precision="bf16")
    planned(Net, precision="bf16", dtypes={"Embedding": "fp32"})


def broken(hidden):
    raise KeyError("nothing")


def in_backward(hidden):
    hidden.register_hook(lambda grad: 1 / 0)
    return hidden


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Net(broken), ["forward fails", "in broken (", "test_faults.py:", "KeyError: 'nothing'"]),
        (lambda: Net(in_backward), ["backward fails", "test_faults.py:", "ZeroDivisionError"]),
        (
            lambda: Net(lambda hidden: hidden * hidden.sum().item()),
            ["forward reads values of tensors", "test_faults.py:", "without asserts"],
        ),
        (
            lambda: nn.Sequential(nn.Embedding(64, 16), nn.Linear(15, 64)),
            ["forward fails in or after unit '(root)': ", "reduction dim"],
        ),
        (lambda: nn.Sequential(nn.Embedding(64, 16), nn.Flatten()), ["expected logits (rows, seq, tokens)", "(1, 128)"]),
        (lambda: Net(1 / 0), ["can not be built", "test_faults.py:", "division by zero"]),
    ],
)
def test_faults_of_the_model_name_the_place(make, words):
    with pytest.raises(ConfigError) as caught:
        planned(make)
    for word in words:
        assert word in str(caught.value), caught.value


def test_nothing_is_hidden_by_activation_checkpoints():
    with pytest.raises(ConfigError, match="forward fails.*reduction dim"):
        planned(
            lambda: nn.Sequential(nn.Embedding(64, 16), *[nn.Sequential(nn.Linear(16, 15)) for _ in range(3)]), checkpointing=True
        )


class Reads(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(param.data.norm().item())


def test_optimizers_that_read_numbers_are_named_with_the_remedy():
    for make, name in ((lambda parameters: Reads(parameters, lr=0.1), "Reads"),
                       (lambda parameters: zs.whole_matrix(torch.optim.Adafactor)(parameters), "Adafactor")):  # fmt: skip
        with pytest.raises(
            ConfigError,
            match=rf"{name}.step reads values of tensors .*another optimizer whose states have the same sizes.*optimizer=None",
        ):
            planned(Net, optimizer=make)
    with pytest.raises(ConfigError, match="optimizer: the function that makes it fails.*TypeError"):
        planned(Net, optimizer=lambda parameters: torch.optim.SGD(parameters, lrr=1))
    with pytest.raises(ConfigError, match="returns a torch.optim.Optimizer, got list"):
        planned(Net, optimizer=list)


def test_a_batch_over_tp_is_one_tensor():
    with pytest.raises(ConfigError, match="batch: with axes pp or tp expected one tensor .*got dict"):
        zs.plan(lambda: GPT(GPTConfig(vocab_size=64, seq_len=16, dim=16, layers=2, heads=2)), axes={"tp": 2}, batch=dict)


def test_unknown_options_are_named_with_the_nearest():
    with pytest.raises(ConfigError, match="checkpointing: .*got 'ofload'. Did you mean 'offload'?"):
        planned(Net, checkpointing={"ofload": "cpu"})
    for nonsense in ("cpu", 3, None):
        with pytest.raises(ConfigError, match="checkpointing: expected True, False or options"):
            planned(Net, checkpointing=nonsense)
    with pytest.raises(ConfigError, match="parallel: .*got 'shedule'. Did you mean 'schedule'?"):
        zs.plan(Net, axes={"pp": 2}, batch=(1, 8), parallel={"shedule": "1f1b"})


def test_the_command_ends_with_2_and_one_line(tmp_path, monkeypatch, capfd):
    (tmp_path / "faulty_model.py").write_text(
        "from torch import nn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embedding = nn.Embedding(64, 16)\n"
        "    def forward(self, tokens):\n"
        "        return self.embedding(tokens) @ self.embedding.weight\n"
    )
    (tmp_path / "script_to_plan.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for command in (["plan"], ["plan", "--auto"], ["simulate"]):
        # -q: on a busy machine there are lines of progress, too
        assert main([*command, "faulty_model:Model", "--ranks", "2", "--seq", "8", "-q"]) == 2
        printed = capfd.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1, printed.err
        assert "forward fails in or after unit" in printed.err and "in Model (faulty_model.py:7): RuntimeError" in printed.err
    assert main(["plan", "script_to_plan:model"]) == 2
    assert "cannot import 'script_to_plan' of 'script_to_plan:model': in <module> (script_to_plan.py:2)" in capfd.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 7}')
    assert main(["plan", "config.json"]) == 2
    assert "The hidden size (64) is not a multiple of the number of attention heads (7)" in capfd.readouterr().err
