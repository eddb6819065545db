"""``groupwise doctor``: check settings, data and sampler of a run, then one optimizer step of it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import transformers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedConfig

from groupwise.agents.loop import AgentLoop
from groupwise.agents.start import add_environment_rows, check_template, make_agent_loop
from groupwise.commands.cli.checks import batch_findings, length_findings, memory_finding, tokenizer_findings
from groupwise.commands.cli.findings import SKIPPED, Finding, Report, fail, ok, warn
from groupwise.commands.cli.launch import CONFIGS
from groupwise.commands.cli.run_file import RunArguments, read_run, read_yaml, sources_of
from groupwise.commands.cli.sources import iterative_arguments, load_datasets, trainer_arguments
from groupwise.compat import unmet
from groupwise.compat.transformers import attention_implementation
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import chosen_backend, json_dict
from groupwise.config.settings import card_settings
from groupwise.config.validation import warnings_of
from groupwise.data.dataset_checks import (
    check_data,
    functions_by_source,
    has_image_columns,
    mix_sources,
    scored_columns,
)
from groupwise.data.loaders import prepare_data
from groupwise.errors import ConfigError
from groupwise.generation.backends import check_backend
from groupwise.policy.introspection import check_adapter, context_length, load_config, text_config
from groupwise.policy.loading import check_loading, load_processing_class, shapes_of_policy
from groupwise.policy.quantization import quantization_of
from groupwise.rewards.runtime.loading import check_columns, check_rewards
from groupwise.tokenization.images import is_processor
from groupwise.tokenization.prompts import (
    is_conversational,
    text_problem,
    tokenize_prompt,
    with_text_content,
    without_added_keys,
)
from groupwise.tokenization.text import ProcessingClass, end_tokens, text_tokenizer

if TYPE_CHECKING:
    from groupwise.trainer import GRPOTrainer

_MAX_ROWS = 1000  # rows whose prompt is tokenized
_SERVER_TIMEOUT = 10.0  # seconds


def run(arguments: Sequence[str]) -> int:
    """Print the report. Returns 1 if a check failed, else 0."""
    options, rest = _parser().parse_known_args(list(arguments))
    name = options.accelerate_config
    options.launch = read_yaml(str(CONFIGS.get(name, name))) if name else {}
    if options.num_processes is None:
        options.num_processes = options.launch.get("num_processes", 1)
    if options.num_processes < 1:
        raise ConfigError(f"--num_processes {options.num_processes}: allowed: 1 or more")
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
        report.add(fail("settings", text) for text in str(error).split("\n  - ")[1:] or [str(error)])
        return
    shown = ", ".join(f"{name}={value}" for name, value in card_settings(config).items())
    missing = unmet("transformers", ("tokenizers", "huggingface-hub", "kernels"))
    if missing:
        text = f"transformers {transformers.__version__} needs {', '.join(missing)}; install these versions"
        report.add([warn("versions", text)])
    report.add([ok("settings", f"every constraint holds: {shown}")])
    report.add(warn("settings", message) for message in warnings_of(config))
    given = {name: report.attempt(name, load) for name, load in trainer_arguments(settings, config).items()}
    given["reward_funcs"], by_source = functions_by_source(given["reward_funcs"], sources_of(settings))
    if settings.iterative is not None:
        report.attempt(
            "iterative", lambda: iterative_arguments(settings)["iterative"].with_reference_refresh(config)
        )
    report.attempt("model", check_adapter, settings.model, given["peft_config"])
    model_config = report.attempt("model", load_config, settings.model, config)
    if model_config is not None:
        report.attempt("model", check_loading, settings.model, config, None, given["peft_config"])
    if not report.failed and not quantization_of(settings.model, config):  # of these docs/lora.md has a table
        try:
            policy = shapes_of_policy(settings.model, config, given["peft_config"])
            memory = memory_finding(policy, config, options.launch)
        except Exception as error:  # a model that is not built without weights, an optimizer of GPUs alone
            memory = warn("memory", f"of each device is not computed: {error}")
        report.add([memory])
    # What the constructor of the trainer checks before it loads the model, by its functions.
    longest: list[int] = []
    datasets: tuple[Any, Any] = None, None
    loop_arguments = given["tools"], given["environment_factory"], given["rollout_func"], config
    agents = report.attempt("tools", make_agent_loop, *loop_arguments)
    if agents is not None:
        if settings.rewards is None or given["reward_funcs"] is not None:  # else reported above
            rewards = given["reward_funcs"], None, config, agents.reward_funcs
            report.attempt("reward", check_rewards, *rewards, multi_turn=agents.is_multi_turn)
        datasets = report.attempt("dataset", _check_datasets, settings, config, agents, report) or datasets
        if given["rollout_func"] is None:
            known = by_source, config.eval_max_samples, *datasets
            scored: Any = report.attempt("reward", list, scored_columns(given["reward_funcs"] or (), *known))
            for pair in () if agents.is_multi_turn else scored or ():
                report.attempt("reward", check_columns, *pair)
    if model_config is not None:
        with_images = has_image_columns(*datasets)
        sampler = _sampler(config, model_config, with_images=with_images, asks=not options.no_server)
        report.attempt("sampler", report.add, sampler)
        if agents is not None and datasets[0] is not None:
            prompts = settings, config, agents, datasets, given["processing_class"], report
            longest = report.attempt("prompts", _check_prompts, *prompts) or []
    if not options.no_model and report.failed:
        report.add([SKIPPED])
    elif not options.no_model:
        report.attempt("trial", _trial, settings, config, longest, report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="groupwise doctor",
        description="Check a run, then train one step of it. Accepts the settings of groupwise train "
        "(--config run.yaml, --field value) and the following.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--num_processes", type=int, help="number of processes of the run (default: of the next, or 1)")
    add("--accelerate_config", help="sharding of the run, as for groupwise train")
    add("--json", action="store_true", help="print one JSON object: failed, findings, first")
    add("--no_model", action="store_true", help="skip the step, which needs the model's weights")
    add("--no_server", action="store_true", help="do not ask the vLLM servers, which need not be up")
    return parser


def _check_datasets(
    settings: RunArguments, config: GRPOConfig, agents: AgentLoop, report: Report
) -> tuple[Any, Any]:
    """Load and check the data for training and evaluation; report on the batches.

    Raises:
        ConfigError: the trainer refuses a dataset.
    """
    given = add_environment_rows(*load_datasets(settings), agents, config)
    train_dataset, eval_dataset, _ = mix_sources(*given, config)
    check_data(train_dataset, eval_dataset, config)
    report.add(batch_findings(config, len(train_dataset)))
    return train_dataset, eval_dataset


def _check_prompts(
    settings: RunArguments,
    config: GRPOConfig,
    agents: AgentLoop,
    datasets: tuple[Any, Any],
    processor: ProcessingClass | None,
    report: Report,
) -> list[int]:
    """Check the chat template and all prompts; report on some of them.

    Returns:
        the numbers of these rows, by descending length of the prompt; none if the environments have the
        prompts, which only sampling shows.

    Raises:
        ConfigError: the trainer refuses a prompt or the tokenizer.
    """
    processor = load_processing_class(processor, settings.model, config)
    check_template(agents, processor, config)
    prepare_data(*datasets, config, settings.model, processor, agents.renders_prompts)
    if settings.dataset is None and not settings.datasets:
        return []
    train_dataset = datasets[0]
    stride = max(len(train_dataset) // _MAX_ROWS, 1)  # at equal distances over the training set
    numbers = range(0, len(train_dataset), stride)[:_MAX_ROWS]
    rows = [train_dataset[i] for i in numbers]
    if len({is_conversational(row["prompt"]) for row in rows}) > 1:
        report.add([warn("prompts", "some prompts are strings, others messages; write all as messages")])
    tokenizer = text_tokenizer(processor)  # images are not counted
    texts = [row["prompt"] for row in rows if not is_conversational(row["prompt"])]
    problems = {text_problem(tokenizer, text, adds_bos=not is_processor(processor)) for text in texts}
    report.add(warn("prompts", problem) for problem in problems - {""})
    tokenizer.chat_template = tokenizer.chat_template or getattr(processor, "chat_template", None)
    kwargs: dict[str, Any] = dict(config.chat_template_kwargs or {})  # type: ignore[arg-type]
    try:
        generation: object = GenerationConfig.from_pretrained(settings.model)
    except OSError:  # models without generation_config.json
        generation = text_config(settings.model, config)
    ends = end_tokens(generation, tokenizer)
    prompts = [without_added_keys(row["prompt"]) for row in rows]
    if not is_processor(processor):
        prompts = [with_text_content(prompt) for prompt in prompts]
    report.add(tokenizer_findings(tokenizer, ends, prompts[0], kwargs))
    progress = tqdm(prompts, desc="prompts", leave=False, file=sys.stderr)
    lengths = [len(tokenize_prompt(tokenizer, prompt, kwargs)) for prompt in progress]
    context = context_length(settings.model, config)
    report.add(length_findings(lengths, config, context and context.tokens, f"{len(rows)} prompts"))
    return [number for _, number in sorted(zip(lengths, numbers, strict=True), reverse=True)]


def _trial(settings: RunArguments, config: GRPOConfig, longest: list[int], report: Report) -> None:
    """Train one optimizer step on the longest prompts in a temporary directory; report on its log."""
    from groupwise.commands.cli.train import make_trainer
    from groupwise.commands.cli.trial import step_findings, trial_config

    with tempfile.TemporaryDirectory() as directory, redirect_stdout(sys.stderr):
        of_one_step = dataclasses.replace(settings, iterative=None)
        trainer = make_trainer(of_one_step, trial_config(config, directory), longest)
        print(f"one step with {trainer.args.generation_batch_size} completions")
        trainer.train()
    report.add(step_findings(trainer))
    report.add(_implementations(trainer, config))


def _implementations(trainer: GRPOTrainer, config: GRPOConfig) -> Iterable[Finding]:
    """Report device, precision, attention, reference model and fast paths of the run."""
    dtype = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
    yield ok(
        "device",
        f"{trainer.accelerator.device}, parameters {dtype}, mixed precision "
        f"{trainer.accelerator.mixed_precision}, attention "
        f"{attention_implementation(trainer.model).removeprefix('groupwise_')}",
    )
    reference = "none (beta=0)" if config.beta == 0 else type(trainer.reference).__name__
    yield ok("reference", reference)
    for path in trainer.fast_paths():
        yield (warn if path.warns else ok)("fast path", str(path))


def _sampler(
    config: GRPOConfig, model_config: PreTrainedConfig, *, with_images: bool, asks: bool
) -> Iterable[Finding]:
    """Report the generation backend; a server must be running and fit the run, unless it is not asked."""
    check_backend(config, with_images=with_images)
    if (chosen := chosen_backend(config)) != "server":
        if chosen == "colocate":
            from groupwise.generation.vllm.serve import check_tensor_parallel

            size, name = config.vllm_tensor_parallel_size, "vllm_tensor_parallel_size"
            splits = not json_dict(config.vllm_engine_kwargs).get("enable_expert_parallel")
            check_tensor_parallel(model_config, size, name, splits_experts=splits)
        is_engine = chosen == "colocate"
        yield ok("sampler", "vLLM in the trainer's processes" if is_engine else "transformers generate")
        return
    if not asks:
        yield ok("sampler", "a vLLM server, which was not asked (--no_server)")
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
