"""``groupwise doctor``: check settings, data, rewards, sampler and memory of a run without training."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedConfig

from groupwise.cli.checks import batch_findings, length_findings, tokenizer_findings
from groupwise.cli.report import Finding, Report, fail, ok, warn
from groupwise.cli.run_file import RunArguments, read_run
from groupwise.cli.sources import (
    check_model,
    iterative_arguments,
    load_datasets,
    lora_config,
    resolve_rewards,
)
from groupwise.compat.transformers import attention_implementation
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import chosen_backend
from groupwise.config.settings import card_settings
from groupwise.config.validation import warnings_of
from groupwise.data.dataset_checks import check_data, prepare_data
from groupwise.errors import ConfigError
from groupwise.generation.base import check_backend
from groupwise.policy.loading import load_processing_class
from groupwise.policy.quantization import check_quantization
from groupwise.tokenization.prompts import is_conversational, tokenize_prompt
from groupwise.tokenization.text import end_tokens, text_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset

    from groupwise.trainer import GRPOTrainer

_MAX_ROWS = 1000  # rows whose prompt is tokenized
_SERVER_TIMEOUT = 10.0  # seconds
_BACKENDS = {
    "transformers": "transformers generate",
    "continuous": "transformers continuous batching",
    "colocate": "vLLM in the trainer's processes",
}


def run(arguments: Sequence[str]) -> int:
    """Print the report. Returns 1 if a check failed, else 0."""
    options, rest = _parser().parse_known_args(list(arguments))
    if options.help:
        print(_parser().format_help())
        return 0
    report = Report(as_json=options.json)
    # With --json, stdout has the object alone: rewards and libraries may print.
    with redirect_stdout(sys.stderr if options.json else sys.stdout):
        _check_run(options, rest, report)
    return report.close()


def _check_run(options: argparse.Namespace, rest: Sequence[str], report: Report) -> None:
    """Add the findings of all checks to ``report``; later checks need the results of earlier ones."""
    # Batch sizes are resolved for the number of processes of the run.
    processes = {"world_size": property(lambda self: options.num_processes)}
    try:
        settings, config = read_run(rest, "doctor", type("GRPOConfig", (GRPOConfig,), processes))
    except ConfigError as error:
        report.add([fail("settings", str(error))])
        return
    shown = ", ".join(f"{name}={value}" for name, value in card_settings(config).items())
    report.add([ok("settings", f"every constraint holds: {shown}")])
    report.add(warn("settings", message) for message in warnings_of(config))
    report.attempt("reward", lambda: resolve_rewards(settings))
    if settings.iterative is not None:
        report.attempt(
            "iterative", lambda: iterative_arguments(settings)["iterative"].with_reference_refresh(config)
        )
    model_config = report.attempt("model", lambda: check_model(settings, config))
    if model_config is not None:
        report.attempt(
            "model", lambda: check_quantization(settings.model, config, None, lora_config(settings))
        )
        report.attempt("sampler", lambda: report.add(_sampler(config, model_config)))
    datasets = report.attempt("dataset", lambda: load_datasets(settings)) or (None, None)
    train_dataset = datasets[0]
    rows: list[dict[str, Any]] = []
    lengths: list[int] | None = None
    if train_dataset is not None and report.succeeds("dataset", lambda: check_data(*datasets, config)):
        report.add(batch_findings(config, len(train_dataset)))
        if model_config is not None:
            stride = max(len(train_dataset) // _MAX_ROWS, 1)  # at equal distances over the training set
            rows = [train_dataset[i] for i in range(0, len(train_dataset), stride)][:_MAX_ROWS]
            lengths = report.attempt(
                "prompts", lambda: _check_prompts(settings, config, model_config, datasets, rows, report)
            )
    has_prompts = bool(lengths) or settings.dataset is None  # prompts of an environment: only by sampling
    if not options.no_model:
        if model_config is not None and has_prompts and not report.failed:
            report.attempt("trial", lambda: _trial(settings, config, rows, lengths or [], options, report))
        else:
            report.add([warn("trial", "skipped because of the problems above")])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="groupwise doctor",
        description="Check a run without training. Accepts the settings of groupwise train "
        "(--config run.yaml, --field value) and the following.",
        add_help=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-h", "--help", action="store_true")
    add("--num_processes", type=int, default=1, help="number of processes of the run")
    add("--json", action="store_true", help="print one JSON object: failed, findings, first")
    add("--no_model", action="store_true", help="skip the checks that need the model's weights")
    add("--num_prompts", type=int, default=2, help="number of prompts to sample completions for")
    add("--max_new_tokens", type=int, default=64, help="maximum tokens per sampled completion")
    return parser


def _check_prompts(
    settings: RunArguments,
    config: GRPOConfig,
    model_config: PreTrainedConfig,
    datasets: tuple[Dataset | None, Dataset | None],
    rows: list[dict[str, Any]],
    report: Report,
) -> list[int]:
    """Run the trainer's checks of prompts and report on ``rows``; return their lengths after truncation.

    Raises:
        ConfigError: the trainer refuses a prompt or the tokenizer.
    """
    processor = load_processing_class(None, settings.model, config)
    custom = settings.tools or settings.environment or settings.rollout_func  # render prompts otherwise
    prepare_data(*datasets, config, settings.model, processor, None if custom else lambda prompt: prompt)
    if len({is_conversational(row["prompt"]) for row in rows}) > 1:
        report.add([warn("prompts", "some prompts are strings, others are chat messages")])
    tokenizer = text_tokenizer(processor)  # images are not counted
    tokenizer.chat_template = tokenizer.chat_template or getattr(processor, "chat_template", None)
    kwargs: dict[str, Any] = dict(config.chat_template_kwargs or {})  # type: ignore[arg-type]
    text_config = model_config.get_text_config(decoder=True)
    try:
        generation: object = GenerationConfig.from_pretrained(settings.model)
    except OSError:  # models without generation_config.json
        generation = text_config
    ends = end_tokens(generation, tokenizer)
    report.add(tokenizer_findings(tokenizer, ends, rows[0]["prompt"], kwargs))
    progress = tqdm(rows, desc="prompts", leave=False, file=sys.stderr)
    lengths = [len(tokenize_prompt(tokenizer, row["prompt"], kwargs)) for row in progress]
    context = getattr(text_config, "max_position_embeddings", None)
    report.add(length_findings(lengths, config, context, f"{len(rows)} prompts"))
    return [min(length, config.max_prompt_length or length) for length in lengths]


def _trial(
    settings: RunArguments,
    config: GRPOConfig,
    rows: list[dict[str, Any]],
    lengths: list[int],
    options: argparse.Namespace,
    report: Report,
) -> None:
    """Sample completions, compute their rewards, and train on the longest row."""
    from groupwise.cli import trial
    from groupwise.cli.train import make_trainer

    with tempfile.TemporaryDirectory() as directory:
        small = trial.trial_config(config, options.max_new_tokens, directory)
        trainer = make_trainer(settings, small)
        print(f"sampling {options.num_prompts} x {small.num_generations} completions", file=sys.stderr)
        prompts = rows or [trainer.train_dataset[i] for i in range(options.num_prompts)]  # type: ignore[index]
        rollout, seconds = trial.sample(trainer, prompts[: options.num_prompts])
        longest = max(lengths, default=max(len(ids) for ids in rollout.prompt_ids))
        report.add(trial.sample_findings(rollout, seconds, config, small.max_completion_length))
        report.add(trial.reward_findings(trainer, rollout, seconds))
        print(f"one row of {longest} + {config.max_completion_length} tokens", file=sys.stderr)
        peak = trial.train_row(trainer, longest, config.max_completion_length)
        report.add(trial.memory_findings(trainer, config, longest, peak))
        report.add(_implementations(trainer, config))


def _implementations(trainer: GRPOTrainer, config: GRPOConfig) -> Iterable[Finding]:
    """Report device, precision, attention, layout, log-prob head and reference model of the run."""
    dtype = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
    yield ok(
        "device",
        f"{trainer.accelerator.device}, parameters {dtype}, mixed precision "
        f"{trainer.accelerator.mixed_precision}, attention "
        f"{attention_implementation(trainer.model).removeprefix('groupwise_')}",
    )
    reference = "none (beta=0)" if config.beta == 0 else type(trainer.reference).__name__
    computer = trainer.logprob_computer
    yield ok(
        "layout",
        f"sequence_layout {computer.layout}, logprob_head {computer.head.name}, reference {reference}",
    )


def _sampler(config: GRPOConfig, model_config: PreTrainedConfig) -> Iterable[Finding]:
    """Report the generation backend; a server must be running and fit the run."""
    check_backend(config)
    if (chosen := chosen_backend(config)) != "server":
        yield ok("sampler", _BACKENDS[chosen])
        return
    from groupwise.generation.vllm.client import VLLMServers
    from groupwise.generation.vllm.preflight import check_servers
    from groupwise.generation.vllm.server import server_urls

    servers = VLLMServers(server_urls(config), min(config.vllm_server_timeout, _SERVER_TIMEOUT))
    try:
        servers.wait_until_up("checking it")
        for fact in check_servers(servers, model_config, config, None):
            yield ok(
                "sampler",
                f"vLLM server {fact.url}, {fact.model} in {fact.dtype}, at most "
                f"{fact.max_model_length} tokens, weights by {fact.weight_transfer}",
            )
    finally:
        servers.close()
