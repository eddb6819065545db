"""Train tiny random models of many architectures with a colocated vLLM engine on a CPU, and say which follow.

Each runs in a process of its own, because vLLM keeps global state: two optimizer steps with a large learning
rate, so that the weights of every step differ. Then the engine gets the trained weights, and

- its log-probs of the tokens that it samples are compared with the trainer's, and both with those of the
  same weights in float64: the larger of two errors is the one that is not the other's fault,
- its greedy tokens are compared with the trainer's,
- one bit of each tensor is flipped in turn on its way to the engine, and the comparison must name the tensor.

    OMP_NUM_THREADS=1 python benchmarks/vllm_architectures.py [NAME ...] [--dtype bfloat16]
    python benchmarks/vllm_architectures.py --table        # prints the table of docs/vllm.md
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import queue
import tempfile
import traceback
from typing import Any

from common import RESULTS, write_results

SIZE = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ALL_HEADS = {"num_key_value_heads": 4}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {  # kv_lora_rank and qk_rope_head_dim are the only ones of vLLM's kernel for a CPU
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}

#: Changes of SIZE by ``model_type``.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "olmoe": EXPERTS,
    "gemma2": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 32, "tie_word_embeddings": True},
    "glm4": {"head_dim": 32},
    "glm4_moe": {
        **EXPERTS,
        "head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "phi": ALL_HEADS,
    "phi3": {},
    "granite": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere": {"tie_word_embeddings": True},
    "smollm3": {},
    "starcoder2": {},
    "stablelm": ALL_HEADS,
    "gpt2": {
        **ALL_HEADS,
        **NO_DROPOUT,
        "n_embd": 128,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "tie_word_embeddings": True,
    },
    "gpt_neox": ALL_HEADS,
    "opt": {
        **ALL_HEADS,
        "dropout": 0.0,
        "ffn_dim": 96,
        "word_embed_proj_dim": 128,
        "init_std": 0.3,
        "tie_word_embeddings": True,
    },
    "bloom": {**ALL_HEADS, "n_layer": 2, "n_head": 4, "tie_word_embeddings": True},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "tie_word_embeddings": True},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**LATENT, "q_lora_rank": 64, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc"},
    "minicpm3": {**LATENT, "q_lora_rank": 64},
    "gpt_oss": {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 128))])}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def make_trainer(name: str, dtype: str, directory: str) -> Any:
    """Return a trainer of a random model of the architecture ``name``, with an engine."""
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM

    from groupwise import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZE, **ARCHITECTURES[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    args = GRPOConfig(
        directory,
        use_vllm=True,
        vllm_max_model_length=64,
        vllm_engine_kwargs={"kv_cache_memory_bytes": 2**25, "max_num_seqs": 32},
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        max_steps=2,
        logging_steps=1,
        learning_rate=0.02,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{"prompt": " ".join(f"w{3 + (7 * i + j) % 125}" for j in range(3 + i))} for i in range(4)]
    reward = lambda completions, **_: [float(len(set(text.split()))) for text in completions]  # noqa: E731
    return GRPOTrainer(model, reward, args, Dataset.from_list(rows), processing_class=make_tokenizer())


PROMPTS = [[4, 5, 6], [7, 8, 9, 10, 11, 12, 13], [20] * 5, [99, 3, 64, 31]]


def logps_of(model: Any, prompt: list[int], tokens: list[int]) -> Any:
    """Return the model's log-probs of a continuation, from logits in its own dtype."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def compare(run: Any) -> dict[str, Any]:
    """Return the largest differences of log-probs, and the share of prompts with equal greedy tokens."""
    import torch

    from groupwise.records import SamplingOptions

    model = run.accelerator.unwrap_model(run.model).eval()
    exact = copy.deepcopy(model).double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # the others have no float64
    gaps: dict[str, list[float]] = {"engine_trainer": [], "engine_float64": [], "trainer_float64": []}
    for prompt, sample in zip(PROMPTS, run.backend.generate(PROMPTS), strict=True):
        engine = torch.tensor(sample.logps).double()
        own, true = (logps_of(one, prompt, sample.token_ids) for one in (model, exact))
        for name, difference in zip(gaps, (engine - own, engine - true, own - true), strict=True):
            gaps[name].append(float(difference.abs().max()))
    greedy = run.backend.generate(PROMPTS, SamplingOptions(generation_kwargs={"temperature": 0.0}))
    equal = 0
    for prompt, sample in zip(PROMPTS, greedy, strict=True):
        ids = list(prompt)
        for _ in sample.token_ids:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        equal += ids[len(prompt) :] == list(sample.token_ids)
    return {**{name: max(values) for name, values in gaps.items()}, "greedy": equal / len(PROMPTS)}


def flips(run: Any) -> dict[str, Any]:
    """Flip a bit of each tensor on its way to the engine; returns names whose flips were not found."""
    import torch

    from groupwise.errors import BackendError
    from groupwise.generation.vllm.receiver import CheckpointReceiver
    from groupwise.policy.weight_iterator import PolicyWeights

    receive, aim = CheckpointReceiver.receive_weights, ""

    def flipped(engine: Any, update: Any) -> None:
        update.weights = [
            (name, flip(tensor) if name == aim else tensor) for name, tensor in update.weights or []
        ] or None
        receive(engine, update)

    def flip(tensor: Any) -> Any:
        changed = tensor.detach().clone().contiguous()
        bits = changed.view(torch.int32 if changed.element_size() == 4 else torch.int16).view(-1)
        bits[len(bits) // 3] ^= 1
        return changed

    source = PolicyWeights(run.model)
    names = [name for name, _ in source.full()]
    missed = []
    CheckpointReceiver.receive_weights = flipped
    try:
        for aim in names:
            run.backend.invalidate_weights()
            try:
                run.backend.sync_weights(source, step=run.state.global_step)
                missed.append(aim)
            except BackendError as error:
                if aim not in str(error):
                    missed.append(f"{aim}: {error}")
    finally:
        CheckpointReceiver.receive_weights = receive
    run.backend.invalidate_weights()
    run.backend.sync_weights(source, step=run.state.global_step)  # no false alarm
    return {"tensors": len(names), "missed": missed}


def worker(name: str, dtype: str) -> dict[str, Any]:
    from groupwise.policy.weight_iterator import PolicyWeights

    stage = "the engine does not start"
    try:
        with tempfile.TemporaryDirectory() as directory:
            run = make_trainer(name, dtype, directory)
            stage = "training ends"
            run.train()
            lines = [line for line in run.state.log_history if "loss" in line]
            steps = [line.get("sampling/sampling_logp_difference/max") for line in lines]
            stage = "the sync ends"
            run.backend.sync_weights(PolicyWeights(run.model), step=run.state.global_step)
            return {"steps": steps, **compare(run), **flips(run)}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{stage}: {type(error).__name__}: {error}"[:600]}


def in_process(name: str, dtype: str, seconds: float = 300.0) -> dict[str, Any]:
    """Return the result of ``worker`` in a process forked from this one, which imports vLLM once."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm.entrypoints.llm  # noqa: F401

    import groupwise.trainer  # noqa: F401

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=lambda: results.put(worker(name, dtype)))
    process.start()
    try:
        return results.get(timeout=seconds)
    except queue.Empty:
        return {"failed": f"no result within {seconds:g} s"}
    finally:
        process.kill()


def table(path: Any) -> str:
    """Return the table of docs/vllm.md from the results."""
    results = json.loads(path.read_text())["results"]
    lines = [
        "| architecture | dtype | engine and trainer | engine and float64 | trainer and float64 | greedy "
        "| flips found |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, one in results.items():
        name, dtype = key.split(" ")
        if "failed" in one:
            lines.append(f"| {name} | {dtype} | {one['failed'].splitlines()[0][:160]} | | | | |")
            continue
        gaps = " | ".join(
            f"{one[gap]:.0e}" for gap in ("engine_trainer", "engine_float64", "trainer_float64")
        )
        found = one["tensors"] - len(one["missed"])
        lines.append(f"| {name} | {dtype} | {gaps} | {one['greedy']:.0%} | {found} of {one['tensors']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", default=[], help=f"of {', '.join(ARCHITECTURES)}; default: all")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--table", action="store_true", help="print the table of the recorded results")
    options = parser.parse_args()
    path = RESULTS / "vllm_architectures.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    for name in () if options.table else options.names or ARCHITECTURES:
        found = in_process(name, options.dtype)
        results[f"{name} {options.dtype}"] = found
        print(name, found, flush=True)
        write_results("vllm_architectures", {"results": dict(sorted(results.items()))})
    print(table(path))


if __name__ == "__main__":
    main()
