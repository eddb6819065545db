"""Compare the processor time of a step with its floor: the matrix products that no trainer can avoid.

The floor has every distinct token once: linear layers of the prompts, of every decoding step with all rows,
of one forward and two backward products in training; the output layer at completion tokens; attention's two
products of queries with keys and of weights with values, in training their four backward products, too, a
causal square by half; one step of fused AdamW. Each product counts with its fastest time of `F.linear` and of
packed weights. The work is that of `step_time.py` with completions of full length. Beside it: groupwise's
step by phase, and TRL's as a whole, both over the floor with and without attention.

Other programs change processor time least. `--operators` adds the largest operators of one more step.

    OMP_NUM_THREADS=2 python benchmarks/roofline.py --case short --libraries groupwise trl
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from common import add_precision, measure_in_process, print_result, write_results

CHUNK = 1024  # rows of a product with the output layer


def processor_seconds(compute: Callable[[], Any], repeats: int = 3) -> float:
    """Return the least processor time of a call, after a warm-up."""
    compute()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        compute()
        seconds.append(time.process_time() - start)
    return min(seconds)


def linear_shapes(model: Any) -> Counter[tuple[int, int]]:
    """Count the linear layers by (outputs, inputs), without the output layer."""
    import torch

    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return Counter(tuple(layer.weight.shape) for layer in layers)


def forward_seconds(shape: tuple[int, int], rows: int, dtype: Any) -> float:
    """Return the time of a product of `rows` rows: plain, or with a packed weight if that is faster."""
    import torch

    from groupwise.compat.torch import has_onednn_linear, onednn_linear, onednn_pack

    weight, inputs = torch.randn(shape, dtype=dtype), torch.randn(rows, shape[1], dtype=dtype)
    with torch.no_grad():
        plain = processor_seconds(lambda: torch.nn.functional.linear(inputs, weight))
        if not has_onednn_linear():
            return plain
        packed = onednn_pack(weight, rows)
        return min(plain, processor_seconds(lambda: onednn_linear(inputs, packed)))


def backward_seconds(shape: tuple[int, int], rows: int, dtype: Any) -> float:
    """Return the time of the products with the gradient: for the inputs, and for the weight."""
    import torch

    weight, inputs = torch.randn(shape, dtype=dtype), torch.randn(rows, shape[1], dtype=dtype)
    gradient = torch.randn(rows, shape[0], dtype=dtype)
    linear = torch.nn.functional.linear
    for_inputs = processor_seconds(lambda: linear(gradient, weight.t()))
    return for_inputs + processor_seconds(lambda: linear(gradient.t(), inputs.t()))


def attention_seconds(
    queries: int, keys: int, config: Any, dtype: Any, *, batch: int = 1, backward: bool = False
) -> float:
    """Return the time of attention's products in a layer: 2, or the 4 of the backward pass.

    Args:
        queries: tokens of a sequence of the batch, each with all query heads.
        keys: tokens that each of them attends to.
        batch: sequences, each with keys of its own.
    """
    import torch

    groups, size = batch * config.num_key_value_heads, config.head_dim
    rows = queries * config.num_attention_heads // config.num_key_value_heads  # those of a head of keys
    query, key = torch.randn(groups, rows, size, dtype=dtype), torch.randn(groups, keys, size, dtype=dtype)
    weights = torch.randn(groups, rows, keys, dtype=dtype)
    scores = processor_seconds(lambda: torch.bmm(query, key.mT))
    values = processor_seconds(lambda: torch.bmm(weights, key))
    if not backward:
        return scores + values
    # As scores: the gradient of the weights. As values: that of the queries. Twice: those of keys and values.
    return scores + values + 2 * processor_seconds(lambda: torch.bmm(weights.mT, query))


def measure_floor(options: argparse.Namespace) -> dict[str, float]:
    """Return processor seconds of the floor by phase."""
    import torch
    from step_time import case_settings, make_dataset, make_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, case = make_model("smollm2"), case_settings(options.case)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    messages = [row["prompt"] for row in make_dataset(options.case, 0).select(range(case["prompts"]))]
    lengths = [
        len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        for chat in messages
    ]
    rows, steps = 8 * case["prompts"], case["new_tokens"]
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    shapes, head = linear_shapes(model), tuple(model.get_output_embeddings().weight.shape)

    def layers(seconds: Callable[..., float], tokens: int) -> float:
        return sum(count * seconds(shape, tokens, dtype) for shape, count in shapes.items())

    tokens, completion_tokens = sum(lengths) + rows * steps, rows * steps
    chunks = completion_tokens / CHUNK
    floor = {
        "prefill": layers(forward_seconds, sum(lengths)) + forward_seconds(head, case["prompts"], dtype),
        "decoding": (steps - 1) * (layers(forward_seconds, rows) + forward_seconds(head, rows, dtype)),
        "training, forward": layers(forward_seconds, tokens) + chunks * forward_seconds(head, CHUNK, dtype),
        "training, backward": layers(backward_seconds, tokens)
        + chunks * backward_seconds(head, CHUNK, dtype),
    }
    attention = partial(attention_seconds, config=model.config, dtype=dtype)
    # Decoding: a group's rows to their prompt, and each row to half of a whole completion.
    seconds = (steps - 1) * (
        attention(8, max(lengths), batch=case["prompts"]) + attention(1, steps // 2, batch=rows)
    )
    seconds += sum(attention(length, length) / 2 for length in lengths)  # prefill
    for backward in (False, True):  # prompts to themselves, a group to its prompt, completions to themselves
        seconds += sum(
            attention(length, length, backward=backward) / 2
            + attention(8 * steps, length, backward=backward)
            + attention(steps, steps, batch=8, backward=backward) / 2
            for length in lengths
        )
    floor["attention"] = model.config.num_hidden_layers * seconds
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    floor["optimizer"] = processor_seconds(torch.optim.AdamW(model.parameters(), fused=True).step)
    return floor


def measure_steps(library: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return processor seconds of the steps after the first, groupwise's by phase too, and operators."""
    from step_time import binary_reward, make_dataset, make_model, trainer_settings
    from torch.profiler import ProfilerActivity, profile
    from transformers import AutoTokenizer, TrainerCallback

    if library == "trl":
        from trl import GRPOConfig, GRPOTrainer
    else:
        from groupwise import GRPOConfig, GRPOTrainer
        from groupwise.reporting import timing

        timing.time = SimpleNamespace(perf_counter=time.process_time)  # the phases of its logs
    settings = trainer_settings(options.case, options.steps, "full", options.precision)
    last = settings["max_steps"] = settings["max_steps"] + options.operators
    marks: list[float] = []
    profiled = profile(activities=[ProfilerActivity.CPU])

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if options.operators and state.global_step == last - 1:
                profiled.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            marks.append(time.process_time())
            if options.operators and state.global_step == last:
                profiled.__exit__(None, None, None)

    path = make_model("smollm2")
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=path,
            reward_funcs=binary_reward,
            args=GRPOConfig(directory, **settings),
            train_dataset=make_dataset(options.case, 0),
            processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
            callbacks=[Clock()],
        )
        trainer.train()
    steps = [after - before for before, after in pairwise(marks)][: options.steps]
    logs = [log for log in trainer.state.log_history if "time/train" in log][1 : 1 + options.steps]
    names = [name for name in (logs[0] if logs else {}) if name.startswith("time/") and name.count("/") == 1]
    operators = (
        sorted(profiled.key_averages(), key=lambda o: -o.self_cpu_time_total) if options.operators else []
    )
    return {
        "seconds": steps,
        "phases": {name: statistics.median(log[name] for log in logs) for name in names},
        "operators": {o.key: [o.count, round(o.self_cpu_time_total / 1e6, 3)] for o in operators[:20]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=("short", "long"), default="short")
    parser.add_argument("--steps", type=int, default=2, help="after a warm-up")
    parser.add_argument("--libraries", nargs="+", choices=("groupwise", "trl"), default=["groupwise"])
    parser.add_argument("--operators", action="store_true", help="profile one more step")
    parser.add_argument("--output", default=None, help="name of the results file, or none")
    parser.add_argument("--worker", choices=("floor", "groupwise", "trl"), help=argparse.SUPPRESS)
    add_precision(parser)
    options = parser.parse_args()
    if options.worker:
        floor = options.worker == "floor"
        print_result(measure_floor(options) if floor else measure_steps(options.worker, options))
        return
    arguments = [f"--case={options.case}", f"--steps={options.steps}", f"--precision={options.precision}"]
    arguments += ["--operators"] if options.operators else []
    results: dict[str, Any] = {
        "case": options.case,
        "floor": measure_in_process(__file__, "floor", *arguments),
    }
    total = sum(results["floor"].values())
    without = total - results["floor"]["attention"]
    print(
        f"floor {total:.2f} s, {without:.2f} without attention:",
        {name: round(value, 2) for name, value in results["floor"].items()},
        flush=True,
    )
    for library in options.libraries:
        results[library] = measured = measure_in_process(__file__, library, *arguments)
        for name, floor in (("over_floor", total), ("over_floor_without_attention", without)):
            measured[name] = [round(seconds / floor, 3) for seconds in measured["seconds"]]
            print(f"{library} {measured['seconds']} s, {name} {measured[name]}", flush=True)
        for name, value in {**measured["phases"], **measured["operators"]}.items():
            print(f"  {name:30} {value}")
        output = options.output or f"roofline_{options.case}_{options.precision}"
        if output != "none":
            write_results(output, results)


if __name__ == "__main__":
    main()
