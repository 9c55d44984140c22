"""What others save of a sharded model, on every rank: files that load back equal, or our error with the remedy."""

import copy
import pickle
import threading
from collections import OrderedDict

import pytest
import torch

import zeroshard as zs
from zeroshard.errors import ShardedAccessError
from zeroshard.integrations.deepspeed.utilities import clone_tensors_for_torch_save
from zeroshard.testing import run_threads

# ./test installs these (requirements/test.txt); absent where the suite runs in an environment of other tools, as on a GPU machine
transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft")
files = pytest.importorskip("safetensors.torch", reason="needs safetensors")


one_at_a_time = threading.Lock()  # Transformers patches itself while it builds and loads


def llama(tied=False):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 16}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1
    )
    with one_at_a_time:
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(WEIGHTS.get(tied, model.state_dict()))
    return model


WEIGHTS = {}
torch.manual_seed(0)
for _tied in (True, False):
    WEIGHTS[_tied] = {name: value.clone() for name, value in llama(_tied).state_dict().items()}


def adapted():
    model = peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0, modules_to_save=["lm_head"])
    )
    model.load_state_dict(
        {name: value + ("lora_B" in name) for name, value in model.state_dict().items() if "lora_A" not in name}, strict=False
    )
    for number, param in enumerate(param for name, param in model.named_parameters() if "lora_A" in name):
        param.data = torch.linspace(-1, 1, param.numel()).view(param.shape) + number
    return model


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def read_back(folder, tied):
    with one_at_a_time:
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
    same(model.state_dict(), WEIGHTS[tied])


def pretrained(model, path, tied, rank):
    model.save_pretrained(path)
    read_back(path, tied)


def pretrained_in_parts(model, path, tied, rank):
    model.save_pretrained(path, max_shard_size="6KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    read_back(path, tied)


def safetensors_file(model, path, tied, rank):
    files.save_file(model.state_dict(), path)
    same(files.load_file(path), WEIGHTS[tied])


def safetensors_model(model, path, tied, rank):
    files.save_model(model, str(path))
    fresh = llama(tied)
    fresh.lm_head.weight.data.zero_()
    files.load_model(fresh, str(path))
    same(fresh.state_dict(), WEIGHTS[tied])


def torch_file(model, path, tied, rank):
    torch.save(model.state_dict(), path)
    same(torch.load(path), WEIGHTS[tied])


WAYS = (pretrained, pretrained_in_parts, safetensors_file, safetensors_model, torch_file)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_is_saved_right_or_the_remedy_is_told(stage, tied, tmp_path):
    def run(rank):
        model = llama(tied)
        model, _ = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
        for way in WAYS if not tied else (way for way in WAYS if way is not safetensors_file):  # which refuses ties itself
            path = tmp_path / f"{way.__name__}{rank}"
            if stage < 3:
                way(model, path, tied, rank)
                continue
            with pytest.raises(ShardedAccessError, match="zs.full_state_dict"):
                way(model, path, tied, rank)
        whole = zs.full_state_dict(model)  # the remedy, on all ranks
        model.save_pretrained(tmp_path / f"whole{rank}", state_dict=dict(whole), max_shard_size="6KB")
        read_back(tmp_path / f"whole{rank}", tied)
        torch.save(whole, tmp_path / f"whole{rank}.pt")
        same(torch.load(tmp_path / f"whole{rank}.pt"), WEIGHTS[tied])

    run_threads(2, run)


def test_the_weights_lie_on_the_main_process_alone(tmp_path):
    """Accelerate's way: other ranks get no state dict and write nothing, and still call save_pretrained."""

    def run(rank):
        model = llama()
        model, _ = zs.shard(model, None, stage=3)
        whole = zs.full_state_dict(model)
        model.save_pretrained(tmp_path, is_main_process=rank == 0, state_dict=whole if rank == 0 else None)
        assert "save_pretrained" not in vars(zs.close(model))

    run_threads(2, run)
    read_back(tmp_path, False)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_sharded_model_that_is_pickled_or_copied_says_what_to_do(stage, tmp_path):
    def run(rank):
        model, _ = zs.shard(llama(), None, stage=stage)
        for action in (pickle.dumps, copy.deepcopy, lambda model: torch.save(model, tmp_path / "model.pt")):
            with pytest.raises(ShardedAccessError, match=r"zs.full_state_dict\(model\)"):
                action(model)
        if stage == 3:
            with pytest.raises(ShardedAccessError, match=r"zs.full_state_dict\(model\)"):
                pickle.dumps(model.model.layers[0])
        same(pickle.loads(pickle.dumps(zs.close(model))).state_dict(), WEIGHTS[False])

    run_threads(2, run)


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_are_saved_merged_and_switched_off(stage, tmp_path):
    plain, ids = adapted(), torch.arange(8)[None]
    adapter = {name: value.clone() for name, value in peft.get_peft_model_state_dict(plain).items()}
    merged = plain.merge_and_unload().state_dict()
    kept = "adapter_model.safetensors"

    def run(rank):
        model = adapted()
        model, _ = zs.shard(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), stage=stage)
        if stage == 3:
            with pytest.raises(ShardedAccessError, match="zs.full_state_dict"):
                model.save_pretrained(tmp_path / f"refused{rank}")
            with pytest.raises(ShardedAccessError, match="zs.gathered"):
                model.merge_adapter()
        with zs.gathered([p for p in model.parameters() if p.requires_grad]):
            model.save_pretrained(tmp_path / f"gathered{rank}")
        model.save_pretrained(tmp_path / f"whole{rank}", state_dict=zs.full_state_dict(model))
        for name in ("gathered", "whole"):
            same(files.load_file(tmp_path / f"{name}{rank}" / kept), adapter)
        same(peft.get_peft_model_state_dict(model, state_dict=zs.full_state_dict(model)), adapter)
        with torch.no_grad():
            with model.disable_adapter():
                off = model(input_ids=ids).logits
            assert not torch.equal(off, model(input_ids=ids).logits)
        again = peft.PeftModel.from_pretrained(llama(), tmp_path / f"whole{rank}")
        same(peft.get_peft_model_state_dict(again), adapter)
        same(zs.close(model).merge_and_unload().state_dict(), merged)

    run_threads(2, run)


def test_what_is_tied_stays_so_in_a_clone():
    """`accelerator.get_state_dict` below stage 3: files have each tensor once, as those of one process."""
    state = llama(tied=True).state_dict()
    clone = clone_tensors_for_torch_save(state)
    same(clone, state)
    assert (
        clone["lm_head.weight"].data_ptr() == clone["model.embed_tokens.weight"].data_ptr() != state["lm_head.weight"].data_ptr()
    )
    assert len({value.data_ptr() for value in clone.values()}) == len(clone) - 1


def test_a_clone_for_torch_save_shares_no_container_with_what_it_was_made_of():
    """Also not those without tensors: a program writes into the clone, or goes on while a thread saves it."""
    state = OrderedDict(weight=torch.ones(2), groups=[{"lr": 0.1}], sizes=[1, 2])
    clone = clone_tensors_for_torch_save(state)
    clone["groups"][0]["lr"] = 0.2
    clone["sizes"].append(3)
    assert type(clone) is OrderedDict and (state["groups"], state["sizes"]) == ([{"lr": 0.1}], [1, 2])
    assert clone_tensors_for_torch_save(state["groups"]) is not state["groups"]


def test_a_model_that_is_born_sharded_tells_who_reads_its_memory_what_to_do():
    def run(rank):
        with zs.init(stage=3):
            born = torch.nn.Linear(4, 4)
        with pytest.raises(ShardedAccessError, match=r"full_tensor\(\).*before TrainingArguments"):
            born.weight.detach().numpy()

    run_threads(2, run)
