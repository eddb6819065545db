"""Compare the layouts `forked` and `padded` on a hybrid model: one forward and backward pass of a group.

A Qwen3.5 of 8 layers (6 with a recurrent state, 2 with attention; hidden size 512, random float32 weights),
gradient checkpointing, 8 completions of 64 tokens after one prompt. Every measurement is a fresh process,
alternating; time is that of the processor, memory what the pass adds to the process's peak.

    python benchmarks/forked.py --prompt_tokens 480 --rounds 3
"""

from __future__ import annotations

import argparse
import resource
import time

from common import measure_in_process, print_result, ratio_of_sums, write_results

LAYOUTS = ("forked", "padded")
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "pad_token_id": 0,
}


def run_worker(layout: str, prompt_tokens: int) -> None:
    """Run the pass in this process; print its processor time and the memory it added."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    from groupwise.policy.heads.capture import LogprobHead
    from groupwise.policy.logprobs import LogprobComputer
    from groupwise.records import TokenBatch

    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    prompt_BL = torch.randint(1, SHAPE["vocab_size"], (1, prompt_tokens)).repeat(8, 1)
    completion_BT = torch.randint(1, SHAPE["vocab_size"], (8, 64))
    batch = TokenBatch(
        prompt_ids_BL=prompt_BL,
        prompt_mask_BL=torch.ones_like(prompt_BL),
        completion_ids_BT=completion_BT,
        completion_mask_BT=torch.ones_like(completion_BT),
        loss_mask_BT=torch.ones_like(completion_BT),
        group_ids_B=torch.zeros(8, dtype=torch.long),
        old_logps_BT=torch.zeros(8, 64),
    )
    computer = LogprobComputer(layout, LogprobHead("chunked"))
    computer.checked = True  # the check is made once per run
    peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    computer(model, batch, with_entropy=False).logps_BT.sum().backward()
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    print_result({"cpu_seconds": [time.process_time() - start], "added_mib": [added / 1024]})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt_tokens", type=int, default=480)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", choices=LAYOUTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker, options.prompt_tokens)
        return
    runs: dict[str, list[dict]] = {layout: [] for layout in LAYOUTS}
    for index in range(options.rounds):
        for layout in LAYOUTS[index % 2 :] + LAYOUTS[: index % 2]:
            runs[layout].append(
                measure_in_process(__file__, layout, f"--prompt_tokens={options.prompt_tokens}")
            )
            print(f"round {index + 1} {layout}: {runs[layout][-1]}", flush=True)
    ratios = {
        name: ratio_of_sums(*([run[key] for run in runs[layout]] for layout in LAYOUTS))
        for name, key in (("processor_time", "cpu_seconds"), ("memory", "added_mib"))
    }
    settings = {"prompt_tokens": options.prompt_tokens, "rounds": options.rounds, **SHAPE}
    write_results(
        f"forked_{options.prompt_tokens}", {"settings": settings, "runs": runs, "forked_over_padded": ratios}
    )
    print(ratios)


if __name__ == "__main__":
    main()
