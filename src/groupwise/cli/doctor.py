"""``groupwise doctor``: check settings, data, rewards, sampler and memory of a run without training."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from groupwise.cli.checks import batch_findings, length_findings, row_findings, tokenizer_findings
from groupwise.cli.report import Finding, fail, ok, summary, table, warn
from groupwise.cli.run_file import RunArguments, read_run
from groupwise.cli.sources import check_model, load_datasets, lora_config, resolve_rewards
from groupwise.compat.transformers import attention_implementation
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.redact import redact
from groupwise.config.sampling import chosen_backend
from groupwise.config.settings import card_settings
from groupwise.config.validation import warnings_of
from groupwise.errors import ConfigError
from groupwise.generation.base import check_backend
from groupwise.tokenization.prompts import tokenize_prompt
from groupwise.tokenization.text import end_tokens, text_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset

    from groupwise.trainer import GRPOTrainer

T = TypeVar("T")

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
    report = Report()
    planned = _planned(options.num_processes)
    try:
        settings, config = read_run(rest, "doctor", planned)
    except ConfigError as error:
        report.add([fail("settings", str(error))])
        return report.close()
    report.add(_settings(config))
    report.attempt("reward", lambda: resolve_rewards(settings))
    if settings.iterative is not None:
        report.attempt("iterative", lambda: _check_iterative(settings, config))
    model_config = report.attempt("model", lambda: check_model(settings, config))
    if model_config is not None:
        report.attempt("model", lambda: _check_quantization(settings, config))
        report.attempt("sampler", lambda: report.add(_sampler(config, model_config)))
    datasets = report.attempt("dataset", lambda: load_datasets(settings))
    rows = [] if datasets is None or datasets[0] is None else _sample_rows(datasets[0], report)
    if datasets is not None and datasets[0] is not None:
        report.add(batch_findings(config, len(datasets[0])))
    lengths: list[int] = []
    if model_config is not None and rows:
        found = report.attempt(
            "tokenizer", lambda: _check_prompts(settings, config, model_config, rows, report)
        )
        lengths = found or []
    has_prompts = bool(lengths) or settings.dataset is None  # prompts of an environment: only by sampling
    ready = model_config is not None and has_prompts and not report.failed
    if ready and not options.no_model:
        report.attempt("trial", lambda: _trial(settings, config, rows, lengths, options, report))
    elif not options.no_model:
        report.add([warn("trial", "skipped because of the problems above")])
    return report.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="groupwise doctor",
        description="Check a run without training. Accepts the settings of groupwise train "
        "(--config run.yaml, --field value) and the following.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--num_processes", type=int, default=1, help="number of processes of the run")
    parser.add_argument(
        "--no_model", action="store_true", help="skip the checks that need the model's weights"
    )
    parser.add_argument(
        "--num_prompts", type=int, default=2, help="number of prompts to sample completions for"
    )
    parser.add_argument(
        "--max_new_tokens", type=int, default=64, help="maximum tokens per sampled completion"
    )
    return parser


def _planned(processes: int) -> type[GRPOConfig]:
    """Return a configuration class that resolves batch sizes for this number of processes."""
    return type("GRPOConfig", (GRPOConfig,), {"world_size": property(lambda self: processes)})


class Report:
    """Collects findings and prints each at once, because some checks take minutes."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.findings.append(finding)
            print(redact(table([finding])), flush=True)

    def attempt(self, subject: str, work: Callable[[], T]) -> T | None:
        """Return the result of ``work``; if it raises, add a finding and return None."""
        try:
            return work()
        except Exception as error:
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            self.add([fail(subject, f"{kind}{error}")])
            return None

    @property
    def failed(self) -> bool:
        return any(finding.status == "fail" for finding in self.findings)

    def close(self) -> int:
        print(summary(self.findings))
        return int(self.failed)


def _settings(config: GRPOConfig) -> Iterable[Finding]:
    """Report the settings of the method, others that were changed, and those without effect."""
    shown = ", ".join(f"{name}={value}" for name, value in card_settings(config).items())
    yield ok("settings", f"every constraint holds: {shown}")
    for message in warnings_of(config):
        yield warn("settings", message)


def _sample_rows(dataset: Dataset, report: Report) -> list[dict[str, Any]]:
    """Return rows at equal distances over the training set, without empty prompts."""
    if "prompt" not in (dataset.column_names or []):
        names = ", ".join(map(repr, dataset.column_names))
        report.add([fail("dataset", f"no 'prompt' column; the columns are {names}")])
        return []
    stride = max(len(dataset) // _MAX_ROWS, 1)
    rows = [dataset[index] for index in range(0, len(dataset), stride)][:_MAX_ROWS]
    report.add(row_findings(rows))
    return [row for row in rows if row["prompt"]]


def _check_prompts(
    settings: RunArguments,
    config: GRPOConfig,
    model_config: PreTrainedConfig,
    rows: list[dict[str, Any]],
    report: Report,
) -> list[int]:
    """Check tokenizer and prompts; return the prompt lengths in tokens, after truncation."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(settings.model, trust_remote_code=config.trust_remote_code)
    tokenizer = text_tokenizer(processor)  # images are not counted
    tokenizer.chat_template = tokenizer.chat_template or getattr(processor, "chat_template", None)
    text_config = model_config.get_text_config(decoder=True)
    template_kwargs = cast("dict[str, Any] | None", config.chat_template_kwargs)
    report.add(
        tokenizer_findings(
            tokenizer,
            text_config.vocab_size,
            _end_tokens(settings.model, text_config, tokenizer),
            rows[0]["prompt"],
            template_kwargs,
        )
    )
    if report.failed:
        return []
    progress = tqdm(rows, desc="prompts", leave=False, file=sys.stderr)
    lengths = [len(tokenize_prompt(tokenizer, row["prompt"], template_kwargs)) for row in progress]
    context = getattr(text_config, "max_position_embeddings", None)
    report.add(length_findings(lengths, config, context, f"{len(rows)} prompts"))
    limit = config.max_prompt_length
    return [length if limit is None else min(length, limit) for length in lengths]


def _end_tokens(model: str, text_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a completion: those of the generation config and of the tokenizer."""
    from transformers import GenerationConfig

    try:
        config: object = GenerationConfig.from_pretrained(model)
    except OSError:  # models without generation_config.json
        config = text_config
    return end_tokens(config, tokenizer)


def _check_quantization(settings: RunArguments, config: GRPOConfig) -> None:
    from groupwise.policy.quantization import check_quantization

    check_quantization(settings.model, config, None, lora_config(settings))


def _check_iterative(settings: RunArguments, config: GRPOConfig) -> None:
    from groupwise.cli.train import iterative_settings

    iterative_settings(settings)["iterative"].with_reference_refresh(config)


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
    device = trainer.accelerator.device
    parameters = next(trainer.model.parameters())
    mixed = trainer.accelerator.mixed_precision
    yield ok(
        "device",
        f"{device}, parameters {str(parameters.dtype).removeprefix('torch.')}, mixed precision {mixed}, "
        f"attention {attention_implementation(trainer.model).removeprefix('groupwise_')}",
    )
    reference = "none (beta=0)" if config.beta == 0 else type(trainer.reference).__name__
    yield ok(
        "layout",
        f"sequence_layout {trainer.logprob_computer.layout}, "
        f"logprob_head {trainer.logprob_computer.head.name}, reference "
        f"{reference}",
    )


def _sampler(config: GRPOConfig, model_config: PreTrainedConfig) -> Iterable[Finding]:
    """Report the generation backend; a server must be running and fit the run."""
    chosen = chosen_backend(config)
    check_backend(config)
    if chosen != "server":
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
