"""Fine-tune a language model from its file of weights: each rank reads its own slices, and none ever holds the whole model.

    python examples/fine_tune.py                                           # one process; a small Llama, made first
    torchrun --nproc-per-node 2 examples/fine_tune.py                      # two ranks
    torchrun --nproc-per-node 8 examples/fine_tune.py --weights FOLDER --text FILE --precision bf16 --lr 1e-5

FOLDER is a model as the Hugging Face Hub has it: config.json, model.safetensors (or several such files) and a tokenizer. Without
--weights a small Llama of bytes learns Python's source first and is saved as such a folder; without --text the model learns the
texts of Python's reference. Writes losses.json, curve.png (if matplotlib is installed) and the tuned model, again as such a folder.
"""

import argparse
import inspect
import json
import os
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

import zeroshard as zs


def make_weights(folder):
    """A Llama of 0.3 million parameters that has read argparse.py, as a folder of config, weights and tokenizer."""
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer()  # a token is a byte
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=128, tie_word_embeddings=True,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    tokens = torch.tensor(tokenizer(inspect.getsource(argparse)).input_ids)
    for step in range(200):
        batch = windows(tokens, rows=8, seq=64, seed=step)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read(path, tokenizer):
    """The tokens of a text, by default of Python's reference: those to learn, and the last tenth, which is held out."""
    text = path.read_text() if path else "\n".join(topics[name] for name in sorted(topics))[:400_000]
    tokens = torch.tensor(tokenizer(text).input_ids)
    return tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]


def windows(tokens, rows, seq, seed):
    """Rows of seq tokens that follow each other, from places that the seed determines: (rows, seq)."""
    starts = torch.randint(len(tokens) - seq + 1, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return tokens[starts + torch.arange(seq)]


def draw(losses, held_out, path):
    """The curve of the training loss, and the loss of the held-out text before and after."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 3.2), layout="constrained")
    axis = figure.subplots()
    axis.plot(range(1, len(losses) + 1), losses, lw=1, color="#1b7f79", label="training, mean of the ranks")
    axis.plot([0, len(losses)], held_out, "o", color="#a44a3f", label="held-out text")
    axis.set(xlabel="step", ylabel="loss, nats a token")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main():
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--weights", type=Path, help="folder with config.json, *.safetensors and a tokenizer")
    command.add_argument("--text", type=Path, help="file of text to learn")
    command.add_argument("--out", type=Path, help="folder of the results (default: a temporary one)")
    command.add_argument("--steps", type=int, default=100)
    command.add_argument("--rows", type=int, default=16, help="sequences of a step, over all ranks")
    command.add_argument("--seq", type=int, default=64, help="tokens of a sequence")
    command.add_argument("--lr", type=float, default=4e-3)
    command.add_argument("--precision", default="fp32", help="fp32 or bf16")
    chosen = command.parse_args()

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    given = [str(chosen.out or tempfile.mkdtemp())]  # one folder for all ranks
    if ranks > 1:
        dist.broadcast_object_list(given)
    out = Path(given[0])
    weights = chosen.weights or out / "made"
    if rank == 0:
        (out / "tuned").mkdir(parents=True, exist_ok=True)
        if chosen.weights is None:
            make_weights(weights)
    if ranks > 1:
        dist.barrier()

    # the model: built without values, which the slices then get from the files
    config = AutoConfig.from_pretrained(weights)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.lr)
    model, optimizer = zs.shard(model, optimizer, stage=3, weights=weights, precision=chosen.precision, max_grad_norm=1.0)
    zs.checkpoint_activations(model)

    tokenizer = AutoTokenizer.from_pretrained(weights)
    learned, held_out = read(chosen.text, tokenizer)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def own(tokens, seed):  # this rank's part of a batch that is the same on any number of ranks
        return windows(tokens, chosen.rows, chosen.seq, seed)[rank::ranks].to(device)

    def loss_of(batch):  # without a cache, which blocks that are computed again would fill twice
        return model(input_ids=batch, labels=batch, use_cache=False).loss

    def mean(loss):
        if ranks > 1:
            dist.all_reduce(loss)
        return loss.item() / ranks

    def evaluate():
        model.eval()
        with torch.no_grad():
            found = [mean(loss_of(own(held_out, seed))) for seed in range(8)]
        model.train()
        return sum(found) / len(found)

    before, losses = evaluate(), []
    for step in range(chosen.steps):
        for group in optimizer.param_groups:
            group["lr"] = chosen.lr * min(1.0, (step + 1) / 10, (chosen.steps - step) / chosen.steps * 1.5)
        loss = loss_of(own(learned, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss.detach()))
        if rank == 0 and (step == 0 or (step + 1) % 20 == 0):
            print(f"step {step + 1:3}: loss {losses[-1]:.3f}, gradient norm {optimizer.last_step.grad_norm:.3f}")
    after = evaluate()

    zs.save_safetensors(model, out / "tuned" / "model.safetensors")  # by all ranks, each its slices
    if rank == 0:
        config.save_pretrained(out / "tuned")
        tokenizer.save_pretrained(out / "tuned")
        (out / "losses.json").write_text(json.dumps({"losses": losses, "held_out": [before, after]}) + "\n")
        try:
            draw(losses, [before, after], out / "curve.png")
        except ModuleNotFoundError:
            print("no curve.png without matplotlib")
        print(zs.report(model))
        print(f"held-out text: {before:.3f} nats a token before, {after:.3f} after; the model is in {out / 'tuned'}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
