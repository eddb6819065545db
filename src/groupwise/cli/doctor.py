"""``groupwise doctor``: everything about a run that can be found out without training."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tqdm import tqdm

from groupwise.cli.checks import batch_findings, length_findings, row_findings, tokenizer_findings
from groupwise.cli.report import Finding, fail, ok, summary, table, warn
from groupwise.cli.run_file import RunArguments, read_run
from groupwise.cli.sources import check_model, load_datasets, resolve_rewards
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.redact import redact
from groupwise.errors import ConfigError
from groupwise.generation.build import check_backend, chosen_backend
from groupwise.tokenization.prompts import tokenize_prompt

_COUNTED = 1000  # prompts whose length is looked at
_PATIENCE = 10.0  # seconds for a server to answer


def run(arguments: Sequence[str]) -> int:
    """Print the report; 1 where something would fail, else 0."""
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
    report.add([ok("settings", f"{config.loss_type}, every rule holds")])
    report.attempt("reward", lambda: resolve_rewards(settings))
    model_config = report.attempt(
        "model",
        lambda: check_model(settings, config.trust_remote_code, config.model_init_kwargs),  # type: ignore[arg-type]
    )
    if model_config is not None:
        report.attempt("sampler", lambda: report.add(_sampler(config, model_config)))
    datasets = report.attempt("dataset", lambda: load_datasets(settings))
    rows = [] if datasets is None or datasets[0] is None else _some_rows(datasets[0], report)
    if datasets is not None and datasets[0] is not None:
        report.add(batch_findings(config, len(datasets[0])))
    lengths: list[int] = []
    if model_config is not None and rows:
        found = report.attempt(
            "tokenizer", lambda: _look_at_prompts(settings, config, model_config, rows, report)
        )
        lengths = found or []
    own_data = settings.dataset is None  # an environment's; what it asks is seen when it is sampled
    ready = model_config is not None and (lengths or own_data) and not report.failed
    if ready and not options.no_model:
        report.attempt("trial", lambda: _try_out(settings, config, rows, lengths, options, report))
    elif not options.no_model:
        report.add([warn("trial", "left out: the problems above come first")])
    return report.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="groupwise doctor",
        description="Checks a run without training. Takes the settings of groupwise train "
        "(--config run.yaml, --field value) and the following.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--num_processes", type=int, default=1, help="processes that the run will have")
    parser.add_argument("--no_model", action="store_true", help="leave out what needs the model's weights")
    parser.add_argument("--num_prompts", type=int, default=2, help="prompts to sample completions for")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="most tokens to sample")
    return parser


def _planned(processes: int) -> type[GRPOConfig]:
    """The configuration as it would be in one of that many processes."""
    return type("GRPOConfig", (GRPOConfig,), {"world_size": property(lambda self: processes)})


class Report:
    """Prints findings as they come: some take minutes."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.findings.append(finding)
            print(redact(table([finding])), flush=True)

    def attempt(self, subject: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns; None and a finding where it fails, whatever the reason."""
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


def _some_rows(dataset: Any, report: Report) -> list[dict[str, Any]]:
    """Rows from all over the training set."""
    if "prompt" not in (dataset.column_names or []):
        names = ", ".join(map(repr, dataset.column_names))
        report.add([fail("dataset", f"it has no 'prompt' column; its columns are {names}")])
        return []
    stride = max(len(dataset) // _COUNTED, 1)
    rows = [dataset[index] for index in range(0, len(dataset), stride)][:_COUNTED]
    report.add(row_findings(rows))
    return [row for row in rows if row["prompt"]]


def _look_at_prompts(
    settings: RunArguments,
    config: GRPOConfig,
    model_config: Any,
    rows: list[dict[str, Any]],
    report: Report,
) -> list[int]:
    """Findings about the tokenizer and the prompts; their lengths after the configured cut."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(settings.model, trust_remote_code=config.trust_remote_code)
    tokenizer = getattr(processor, "tokenizer", processor)  # images are not counted
    tokenizer.chat_template = tokenizer.chat_template or getattr(processor, "chat_template", None)
    text_config = model_config.get_text_config(decoder=True)
    report.add(
        tokenizer_findings(
            tokenizer,
            text_config.vocab_size,
            _end_tokens(settings, config, text_config, tokenizer),
            rows[0]["prompt"],
            config.chat_template_kwargs,
        )
    )
    if report.failed:
        return []
    progress = tqdm(rows, desc="prompts", leave=False, file=sys.stderr)
    lengths = [len(tokenize_prompt(tokenizer, r["prompt"], config.chat_template_kwargs)) for r in progress]  # type: ignore[arg-type]
    context = getattr(text_config, "max_position_embeddings", None)
    report.add(length_findings(lengths, config, context, f"{len(rows)} prompts"))
    limit = config.max_prompt_length
    return [length if limit is None else min(length, limit) for length in lengths]


def _end_tokens(settings: RunArguments, config: GRPOConfig, text_config: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: the model's and the tokenizer's."""
    from transformers import GenerationConfig

    try:
        own = GenerationConfig.from_pretrained(settings.model).eos_token_id
    except OSError:  # a model need not come with generation settings
        own = getattr(text_config, "eos_token_id", None)
    ids = {own} if isinstance(own, int) else set(own or [])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return sorted(ids)


def _try_out(
    settings: RunArguments,
    config: GRPOConfig,
    rows: list[dict[str, Any]],
    lengths: list[int],
    options: Any,
    report: Report,
) -> None:
    """Sample, score, and compute the longest row."""
    from groupwise.cli import trial
    from groupwise.cli.train import make_trainer

    with tempfile.TemporaryDirectory() as directory:
        small = trial.trial_config(config, options.max_new_tokens, directory)
        trainer = make_trainer(settings, small)
        print(f"sampling {options.num_prompts} x {small.num_generations} completions", file=sys.stderr)
        asked = rows or [trainer.train_dataset[i] for i in range(options.num_prompts)]  # type: ignore[index]
        rollout, seconds = trial.sample(trainer, asked[: options.num_prompts])
        longest = max(lengths, default=max(len(ids) for ids in rollout.prompt_ids))
        report.add(trial.sample_findings(rollout, seconds, config, small.max_completion_length))
        report.add(trial.reward_findings(trainer, rollout, seconds))
        print(f"one row of {longest} + {config.max_completion_length} tokens", file=sys.stderr)
        peak = trial.train_row(trainer, longest, config.max_completion_length)
        report.add(trial.memory_findings(trainer, config, longest, peak))
        report.add(_choices(trainer, config))


def _choices(trainer: Any, config: GRPOConfig) -> Iterable[Finding]:
    """What the run will compute with."""
    device = trainer.accelerator.device
    parameters = next(trainer.model.parameters())
    mixed = trainer.accelerator.mixed_precision
    yield ok(
        "device",
        f"{device}, parameters {str(parameters.dtype).removeprefix('torch.')}, mixed precision {mixed}, "
        f"attention {trainer.model.config._attn_implementation.removeprefix('groupwise_')}",
    )
    reference = "none (beta=0)" if config.beta == 0 else type(trainer.reference).__name__
    yield ok(
        "layout",
        f"sequence_layout {trainer.logprob_computer.layout}, "
        f"logprob_head {trainer.logprob_computer.head.name}, reference "
        f"{reference}",
    )


def _sampler(config: GRPOConfig, model_config: Any) -> Iterable[Finding]:
    """What samples, and whether it is ready; a server has to be up."""
    chosen = chosen_backend(config)
    check_backend(config)
    if chosen != "server":
        named = {"transformers": "transformers generate", "colocate": "vLLM in the trainer's processes"}
        yield ok("sampler", named[chosen])
        return
    from groupwise.generation.vllm.client import VLLMServers
    from groupwise.generation.vllm.preflight import check_servers
    from groupwise.generation.vllm.server import server_urls

    servers = VLLMServers(server_urls(config), min(config.vllm_server_timeout, _PATIENCE))
    try:
        servers.wait_until_up("looking for it")
        for fact in check_servers(servers, model_config, config, None):
            yield ok(
                "sampler",
                f"vLLM server {fact.url}, {fact.model} in {fact.dtype}, at most "
                f"{fact.max_model_length} tokens, weights by {fact.weight_transfer}",
            )
    finally:
        servers.close()
