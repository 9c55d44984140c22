"""The installed torch has every private name that the library uses, and each still means what utils/torch_compat.py says."""

import ast
import datetime
import weakref
from pathlib import Path

import private_names
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.utils import torch_compat

PATH = Path(torch_compat.__file__)
USES = {use.name: use for use in reversed(private_names.private_uses(PATH))}  # of each the first
LATER = {f"{module}.{name}": f"torch_compat.{here}" for here, (module, name) in torch_compat._LATER.items()}


def needed_by(name: str) -> str:
    """The function of torch_compat that uses a name, and what it is for; the line of a constant."""
    if name in LATER:
        return LATER[name]
    use = USES[name]
    for node in ast.parse(PATH.read_text()).body:
        if use.where and getattr(node, "name", None) == use.where:
            return f"{use.where}: {ast.get_docstring(node).splitlines()[0]}"
    return PATH.read_text().splitlines()[use.line - 1].strip()


def test_torch_has_it(subtests):
    for name in sorted({*USES, *LATER}):
        with subtests.test(name=name):
            try:
                private_names.found(name)
            except (AttributeError, ImportError):
                pytest.fail(f"torch {torch.__version__} lacks {name} (utils/torch_compat.py needs it: {needed_by(name)})")


def test_what_is_missing_is_named_with_what_needs_it(monkeypatch):
    monkeypatch.delattr(torch._C, "_swap_tensor_impl")
    with pytest.raises((AttributeError, ImportError)):
        private_names.found("torch._C._swap_tensor_impl")
    assert needed_by("torch._C._swap_tensor_impl").startswith("exchange: Exchange the contents of two tensor objects")
    assert needed_by("torch._disable_dynamo").startswith("disable_dynamo = torch._disable_dynamo")


def test_tensors():
    tensor = torch.zeros(4)
    before = torch_compat.version(tensor)
    tensor.add_(1)
    assert torch_compat.version(tensor) == before + 1
    view = tensor[:2]
    assert torch_compat.base(view) is tensor and torch_compat.base(tensor) is None
    assert torch_compat.storage_id(view.untyped_storage()) == torch_compat.storage_id(tensor.untyped_storage())
    assert torch_compat.storage_id(torch.zeros(4).untyped_storage()) != torch_compat.storage_id(tensor.untyped_storage())
    assert not torch_compat.faking()
    with torch_compat.FakeTensorMode():
        assert torch_compat.faking()
        assert isinstance(torch.empty(1), torch_compat.FakeTensor)
        with torch_compat.unset_fake_temporarily():
            assert not torch_compat.faking()
    storage = torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)
    rebuilt = torch_compat.rebuilder()(storage, 1, (2,), (1,), False, {})
    assert rebuilt.tolist() == [1.0, 1.0]
    assert torch.Tensor in torch_compat.FOREACH_TYPES
    torch_compat.assert_async(torch.tensor(True), "")


def test_implementations_change_places_and_a_graph_is_seen():
    one, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(2))
    assert torch_compat.swap(one, other)
    assert one.tolist() == [1.0, 1.0] and other.tolist() == [0.0]
    graph = one * 2
    assert not torch_compat.swap(one, other)
    torch_compat.exchange(one, other)
    assert one.tolist() == [0.0] and other.tolist() == [1.0, 1.0]
    graph.sum().backward()
    assert other.grad.tolist() == [2.0, 2.0]  # the graph goes on with what it knows
    assert not torch_compat.has_hooks(one) and torch_compat.post_accumulate_hooks(one) == {}
    hook = one.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_compat.has_hooks(one) and list(torch_compat.post_accumulate_hooks(one)) == [hook.id]
    torch_compat.carry_hooks(one, other)
    assert list(torch_compat.post_accumulate_hooks(other)) == [hook.id]


def test_a_wrapper_without_functions_of_its_own():
    class Wrapper(torch.Tensor):
        __torch_function__ = torch_compat.disabled_torch_function

        @classmethod
        def __torch_dispatch__(cls, *_):
            raise NotImplementedError

    made = torch_compat.make_wrapper_subclass(Wrapper, (3, 2), dtype=torch.float64)
    assert isinstance(made, Wrapper) and made.shape == (3, 2) and made.dtype == torch.float64
    with torch_compat.DisableTorchFunctionSubclass():
        assert torch.overrides.has_torch_function((made,)) is False


def test_modules():
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert torch_compat.own_parameters(module[0]) is module[0]._parameters and list(torch_compat.own_modules(module)) == ["0"]
    assert list(torch_compat.own_buffers(module[0])) == ["running_mean", "running_var", "num_batches_tracked"]
    assert isinstance(module[0], torch_compat.NormBase)
    assert torch_compat.early_modules(nn.Module.__new__(nn.Module)) == {}
    assert torch_compat.original(module) is module and torch_compat.compiled_call(module) is None
    torch_compat.set_compiled_call(module, lambda value: "compiled")
    assert module(None) == "compiled"
    module.register_forward_hook(lambda *_: None)
    module.register_state_dict_pre_hook(lambda *_: None)
    assert [len(table) for table in torch_compat.forward_hooks(module)] == [1, 0]
    assert [len(table) for table in torch_compat.state_dict_hooks(module)] == [0, 0, 1]
    assert all(callable(getattr(torch.optim.SGD, name)) for name in torch_compat.STEP_METHODS)


def test_autograd():
    param, seen = nn.Parameter(torch.ones(2)), []
    first = torch_compat.next_node()
    product = param * 2
    assert torch_compat.number_of(product.grad_fn) == first == torch_compat.next_node() - 1
    assert torch_compat.graph_task() == -1

    def hook(grad: torch.Tensor) -> None:
        seen.append((torch_compat.graph_task() != -1, torch_compat.nodes_to_run([param])))
        torch_compat.at_end_of_backward(lambda: seen.append("over"))

    product.register_hook(hook)
    product.sum().backward()
    assert seen == [(True, 1), "over"]
    assert not torch_compat.in_derivative()
    torch.func.grad(lambda x: seen.append(torch_compat.in_derivative()) or x.sum())(torch.ones(1))
    assert seen[-1] is True
    pack, unpack = (lambda tensor: tensor), (lambda tensor: tensor)
    assert torch_compat.top_saved_tensors_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert torch_compat.top_saved_tensors_hooks() == (pack, unpack)


def test_steps_of_one_call():
    for step, _states in ((torch_compat.fused_adam_, 3), (torch_compat.fused_adamw_, 3)):
        param, grad, count = torch.ones(4), torch.ones(4), torch.tensor(1.0)
        step(
            [param], [grad], [torch.zeros(4)], [torch.zeros(4)], [], [count], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        assert torch.allclose(param, torch.full((4,), 0.9), atol=1e-5)


def test_files(tmp_path):
    path = str(tmp_path / "a.pt")
    writer = torch_compat.file_writer(path)
    writer.write_record("data.pkl", b"four", 4)
    writer.write_end_of_file()
    assert torch_compat.file_reader(path).get_record("data.pkl") == b"four"
    torch.save(torch.arange(3), path)
    with torch_compat.FakeTensorMode():
        skipped = torch.load(path)
    offset = torch_compat.checkpoint_offset(skipped.untyped_storage())
    assert Path(path).read_bytes()[offset : offset + 24] == torch.arange(3).numpy().tobytes()


def test_groups():
    torch_compat.clear_sharding_caches()
    torch.distributed.init_process_group("fake", store=torch_compat.FakeStore(), rank=0, world_size=2)
    try:
        group, gone = torch.distributed.group.WORLD, []
        torch_compat.set_timeout(datetime.timedelta(seconds=5), group)
        weakref.finalize(torch_compat.dies_with(group), gone.append, "the group")
        assert not gone
    finally:
        torch.distributed.destroy_process_group()
    assert gone == ["the group"] and group is not None


def operators_of_two_steps(mode):
    """The operators of two steps of a GPT, with all that is known of the tensors that they return and which memory these share."""
    seen, kept = [], {}

    class Log(torch_compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for each in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(each, torch.Tensor):
                    storage = each.untyped_storage()
                    memory = kept.setdefault(torch_compat.storage_id(storage), (len(kept), storage))[0]
                    facts = (
                        each.shape,
                        each.stride(),
                        each.storage_offset(),
                        each.dtype,
                        each.device,
                        each.requires_grad,
                        storage.nbytes(),
                    )
                    seen.append((str(func), memory, *facts))
            return result

    with mode(), Log():
        model = GPT(GPTConfig(vocab_size=64, seq_len=16, dim=32, layers=2, heads=2, bias=True))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            tokens = torch.zeros(2, 16, dtype=torch.long)
            checkpoint(model, tokens, tokens, use_reentrant=False).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


def test_fake_tensors_of_a_dry_run_are_torchs():
    assert torch_compat.PlanMode is torch_compat.QuickFakeMode  # else dry runs are slow: a release has changed what it replaces
    found, wanted = (operators_of_two_steps(mode) for mode in (torch_compat.PlanMode, torch_compat.FakeTensorMode))
    assert len(found) > 500 and found == wanted
