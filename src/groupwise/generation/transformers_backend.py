"""Generation with the policy's own ``generate``."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from groupwise.compat.accelerate import is_out_of_memory
from groupwise.compat.deepspeed import gathered
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import sampler_settings
from groupwise.core.padding import length_mask, pad_sequences
from groupwise.cpu import cpu_generation
from groupwise.cpu.linear import stock_linears
from groupwise.cpu.multinomial import RowStreams
from groupwise.distributed import requires_lockstep_forwards
from groupwise.errors import BackendError, ConfigError, GroupwiseError, shortened
from groupwise.generation.backends import BackendEntry
from groupwise.generation.base import RUN_SETTINGS, GenerationBackend
from groupwise.generation.decoding import DecodingRows, RowSampler, decode_groups, group_prompts
from groupwise.generation.settings import (
    autocast_of_training,
    can_record,
    check_cache,
    check_config,
    decoding_path,
    generation_settings,
    keep_autocast_weights,
    make_recorder,
    warn_about_model_settings,
    warn_about_run_settings,
    without_model_settings,
)
from groupwise.generation.truncation import sample_and_record
from groupwise.policy.introspection import (
    CausalLM,
    evaluation_mode,
    experts_of,
    has_prompt_learning,
    unwrapped,
    without_adapter,
)
from groupwise.policy.logprob_mismatch import LogpRecorder, PlainForwardCheck, WrongLogpsError
from groupwise.random_state import DrawnFrom
from groupwise.records import Completion, SamplingOptions
from groupwise.records.fast_paths import FastPath
from groupwise.records.images import ImageInputs, join_images
from groupwise.tokenization.text import ProcessingClass, end_tokens, text_tokenizer

if TYPE_CHECKING:
    from groupwise.generation.decoding_graph import StepGraphs

logger = logging.getLogger(__name__)


class TransformersBackend(GenerationBackend):
    """Samples with ``model.generate``, always from the current weights.

    ``decode_groups`` replaces the decoding loop inside ``generate`` where it applies: it processes each
    prompt once for its whole group, and removes finished rows from the batch. With ``stock_decoding`` loop,
    cache and linear layers are those of transformers and PyTorch, bit for bit.

    The log-probs that tokens are sampled with are compared with the model's plain forward of one row. Where
    they differ, rows are sampled again, in the loop of ``generate``, then without padding; if nothing agrees,
    the run ends.

    Args:
        model: returns the unwrapped policy; called at every generation because training may wrap it again.
        generation_config: what is the same for all requests; see :func:`generation_settings`.
        config: has the sampler settings that a request leaves out; None: ``generation_config`` has them.
        pad_to_multiple_of: pad prompts to a multiple of this length; None: to the longest.
        gather_weights: the model is partitioned by ZeRO-3, and each call gathers it once. Otherwise every
            forward of a partitioned model gathers its layers one after the other.
    """

    supports_images = True
    #: Why decoding steps are no CUDA graphs; "": they are, where they can be recorded.
    eager_reason = ""

    def __init__(
        self,
        model: Callable[[], PreTrainedModel],
        generation_config: GenerationConfig,
        config: GRPOConfig | None = None,
        *,
        pad_to_multiple_of: int | None = None,
        gather_weights: bool = False,
    ) -> None:
        self.model, self.generation_config, self.config = model, generation_config, config
        self.pad_to_multiple_of = pad_to_multiple_of
        self.gather_weights = gather_weights
        self.stock_decoding = generation_config.cache_implementation is not None
        self.by_length = False  # only rows of equal length are in a batch
        self.found = ""  # why the run has left its first way of decoding
        self.compares = config is not None and config.logprob_mismatch_check != "off"
        self.plain_check: PlainForwardCheck | None = None
        self.end_tokens = frozenset(end_tokens(generation_config))
        self.records_experts = config is not None and config.router_replay == "R3"
        if self.records_experts:
            self.eager_reason = "router_replay='R3' records experts in Python, which a graph does not run"
        self.graphs: StepGraphs | None = None  # on a CUDA device

    @property
    def requires_all_ranks(self) -> bool:
        return requires_lockstep_forwards(self.model())

    def _in_lockstep(self, model: CausalLM) -> bool:
        """Return True if ranks run forwards together, until the last row of all ranks has ended."""
        return requires_lockstep_forwards(model) and not self.gather_weights

    def fast_paths(self, policy: Any) -> list[FastPath]:
        """See :meth:`GenerationBackend.fast_paths`."""
        path = decoding_path(policy, self.config_of(RUN_SETTINGS))
        if self._in_lockstep(policy):
            path = FastPath("decoding", "transformers", "parameters are sharded, so ranks decode in step")
        elif self.found:
            path = FastPath("decoding", self._way(policy), self.found, True)
        elif self.stock_decoding and not path.reason:
            path = FastPath("decoding", "transformers", "cache_implementation of groupwise.trl_hooks")
        graphs = None if path.reason else self._step_graphs(policy.device)
        return [path] if graphs is None else [path, graphs.path()]

    def _step_graphs(self, device: torch.device) -> StepGraphs | None:
        """Return the use of graphs by the run; None on a device without graphs."""
        if device.type == "cuda" and self.graphs is None:
            from groupwise.generation.decoding_graph import StepGraphs

            self.graphs = StepGraphs(reason=self.eager_reason)
        return self.graphs

    def reports_sampling_mask(self, generation_kwargs: Mapping[str, Any]) -> bool:
        """Return True unless the model has a decoding loop of its own, or beams are sampled."""
        return can_record(self.model(), self.generation_config)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = RUN_SETTINGS
    ) -> list[Completion]:
        if has_prompt_learning(self.model()):
            from groupwise.compat.peft import virtual_tokens_once

            with virtual_tokens_once(unwrapped(self.model())):
                return self._generate_by_length(prompts, sampling)
        state = None if self.generator is None else self.generator.get_state()
        while True:
            try:
                sample = self._generate_by_length if self.by_length else self._generate
                return sample(prompts, sampling)
            except Exception as error:
                if not self._may_be_of_its_way(error):
                    raise
                self._leave_way(error)
            if state is not None and self.generator is not None:  # as if the other way had never been taken
                self.generator.set_state(state)

    def _may_be_of_its_way(self, error: Exception) -> bool:
        """Return True for wrong log-probs, and errors of a way that has given no compared rows yet."""
        if isinstance(error, WrongLogpsError):
            return True
        known = isinstance(error, BackendError | torch.OutOfMemoryError) or is_out_of_memory(error)
        return self.plain_check is not None and not (known or self.plain_check.seen)

    def padded_length(self, prompts: Sequence[Sequence[int]]) -> int:
        """Return the length that prompts are padded to in one batch."""
        multiple = self.pad_to_multiple_of or 1
        return -(-max(map(len, prompts)) // multiple) * multiple

    def _are_padded(self, prompts: Sequence[Sequence[int]]) -> bool:
        return not self.by_length and min(map(len, prompts)) < self.padded_length(prompts)

    def _way(self, model: CausalLM) -> str:
        """Return the name of the present way of decoding."""
        loop = "transformers" if self.stock_decoding else "own loop"
        return f"{loop}, rows of equal length" if self.by_length else loop

    def _leave_way(self, error: Exception) -> None:
        """Take the next way of decoding, after the present one failed, or differed from a plain forward.

        Raises:
            BackendError: there is no other way.
        """
        model = self.model()
        wrong = isinstance(error, WrongLogpsError)
        reason = str(error) if wrong else f"it fails with {shortened(error)}"
        own = not decoding_path(model, self.config_of(RUN_SETTINGS)).reason
        # In the order of trial: by length or not, in the loop of transformers or the own one.
        ways = [(by_length, stock) for by_length in (False, True) for stock in sorted({not own, True})]
        later = [way for way in ways if way > (self.by_length, self.stock_decoding)]
        name = type(without_adapter(model)).__name__
        if not later or self._in_lockstep(model):
            if not wrong:  # transformers' own loop, on rows without padding
                raise BackendError(
                    f"{name} gives no log-probs of sampled tokens: {self._way(model)}: {reason}; sample with "
                    "vLLM, or with another version of transformers"
                ) from error
            raise BackendError(
                f"{name} samples tokens with other log-probs than those of its plain forward of the row: "
                f"{reason}. The policy gradient would be wrong; keep prompts and completions together below "
                "the length at which the model's computation changes, sample with vLLM, or, with "
                "logprob_mismatch_check='off', continue at your own risk"
            )
        if self.plain_check is not None:
            self.plain_check.forget()
        before = self._way(model)
        (self.by_length, self.stock_decoding), self.found = later[0], reason
        logger.warning("decoding (%s) of %s: %s; using %s", before, name, reason, self._way(model))

    def _generate_by_length(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions
    ) -> list[Completion]:
        """Sample prompts of each length apart, for adapters of virtual tokens.

        Padding would come between the virtual tokens and the prompt, and change the prompt's positions.
        """
        if self._in_lockstep(self.model()):
            raise BackendError(
                "an adapter of virtual tokens samples prompts of each length apart, and with sharded "
                "parameters (FSDP, ZeRO-3) ranks would wait for each other forever; do not shard, or use LoRA"
            )
        completions: dict[int, Completion] = {}
        for length in dict.fromkeys(map(len, prompts)):
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            per_row = {name: getattr(sampling, name) for name in ("max_tokens", "images", "seeds")}
            own: dict[str, Any] = {
                name: [values[row] for row in rows] for name, values in per_row.items() if values is not None
            }
            part = [prompts[row] for row in rows]
            of_length = self._generate(part, replace(sampling, **own), padded=False)
            completions.update(zip(rows, of_length, strict=True))
        return [completions[row] for row in range(len(prompts))]

    @torch.no_grad()
    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, *, padded: bool = True
    ) -> list[Completion]:
        """Sample one completion per prompt in one call of ``model.generate``.

        It decodes in groupwise's loop where that applies, else in its own loop; a recorder of the sampling
        mask is part of either.
        """
        model: CausalLM = self.model()
        config, images = self.config_of(sampling), sampling.images or ()
        lockstep = self._in_lockstep(model)
        if lockstep and not all(row.arrays for row in images):
            raise BackendError(
                "a prompt has no image, and the model's parameters are sharded: ranks with images would wait "
                "forever for this one to run the vision tower; keep only rows with images, or do not shard "
                "(ZeRO-2, DDP)"
            )
        with (
            self._as_in_training(model),
            stock_linears(model) if self.stock_decoding else cpu_generation(model),
            nullcontext() if lockstep else keep_autocast_weights(model.device),
        ):
            recorder = make_recorder(model, config)  # None: nothing is truncated
            logps = self._logp_recorder(model, prompts, config)  # None: nothing is compared
            rows = prompts  # of the prefill: B
            loop: dict[str, Any] = {"synced_gpus": False} if self.gather_weights else {}
            routing: Any = None  # SampledRouting
            generator = self.generator_of(sampling, model.device)
            draws: Any = nullcontext() if generator is None else DrawnFrom(generator)
            if not (lockstep or self.stock_decoding or decoding_path(model, config).reason):
                first, copies = group_prompts(prompts, images)  # P rows, of which the loop makes B
                rows, images = [prompts[row] for row in first], [images[row] for row in first if images]
                if self.records_experts:
                    from groupwise.policy.experts import SampledRouting

                    routing = SampledRouting(experts_of(model) or (0, 0))
                draws = nullcontext()  # the sampler has the generator
                graphs = self._step_graphs(model.device)
                sampler, make_rows = (RowSampler, DecodingRows) if graphs is None else graphs.loop()
                records: Any = {"recorder": recorder, "generator": generator, "logps": logps}
                arrays = {name for row in images for name in row.arrays}
                own: Any = {"copies": copies, "image_arrays": arrays, "make_rows": make_rows}
                own["make_sampler"] = partial(sampler, **records, routing=routing)
                loop = {"custom_generate": partial(decode_groups, **own)}
            elif self.records_experts:
                raise _needs_own_loop(BackendError, self.fast_paths(model)[0].reason)
            elif recorder is not None or logps is not None:
                stock_loop = partial(sample_and_record, recorder=recorder, logps=logps, synced_gpus=lockstep)
                loop = {"custom_generate": stock_loop}
            multiple = self.pad_to_multiple_of if padded else None
            inputs = self.model_inputs(rows, images, multiple, model.device)
            prompt_length = inputs["input_ids"].shape[1]  # L, padding included
            with draws, nullcontext() if routing is None else routing:
                sequences = model.generate(**inputs, generation_config=config, **loop)  # (B, L + longest)
        sampled = sequences[:, prompt_length:].tolist()
        completions = self.completions(sampled, sampling.max_tokens, config, recorder)
        if routing is not None:
            lengths = [len(each.token_ids) for each in completions]
            routed = routing.completions([len(row) for row in rows], lengths)
            completions = [
                replace(each, routed_experts=of_row) for each, of_row in zip(completions, routed, strict=True)
            ]
        if logps is not None:
            assert self.plain_check is not None  # it made the recorder due
            self.plain_check.check_rows(
                model,
                [(prompt, each.token_ids) for prompt, each in zip(prompts, completions, strict=True)],
                sampling.images,
                logps.of_completion,
                padded=self._are_padded(prompts),
                lockstep=lockstep,
                forward_context=self._as_in_training(model),
            )
        return completions

    @contextmanager
    def _as_in_training(self, model: CausalLM) -> Iterator[None]:
        """Context manager of forward passes: weights and precision of training, settings of the run alone."""
        with (
            evaluation_mode(model),  # gradient checkpointing would disable the key-value cache, too
            gathered(model) if self.gather_weights else nullcontext(),
            without_model_settings(model),
            autocast_of_training(model),
        ):
            yield

    def _logp_recorder(
        self, model: CausalLM, prompts: Sequence[Sequence[int]], config: GenerationConfig
    ) -> LogpRecorder | None:
        """Return a recorder if these rows may have to be compared with the model's plain forward."""
        if not self.compares or has_prompt_learning(model) or not can_record(model, config):
            return None
        if self.plain_check is None:
            self.plain_check = PlainForwardCheck(model)
        padded, limit = self._are_padded(prompts), config.max_new_tokens
        due = self.plain_check.may_be_due(map(len, prompts), limit, padded)
        return LogpRecorder() if due else None

    def generator_of(
        self, sampling: SamplingOptions, device: torch.device
    ) -> torch.Generator | RowStreams | None:
        """Return the random numbers of a request: those of its rows, unless samples share a generator."""
        if self.generator is None or sampling.seeds is None:
            return self.generator
        return RowStreams(sampling.seeds, device)

    def model_inputs(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[ImageInputs],
        multiple: int | None,
        device: torch.device,
    ) -> dict[str, Any]:
        """Return ids and mask of the prompts, padded on the left: (B or P, L), and tensors of the images."""
        pad = self.generation_config.pad_token_id
        input_ids = pad_sequences(prompts, pad, left=True, multiple_of=multiple, device=device)
        length = input_ids.shape[1]
        mask = length_mask([len(prompt) for prompt in prompts], length, left=True, device=device)
        starts = [length - len(prompt) for prompt in prompts]
        return {
            "input_ids": input_ids,
            "attention_mask": mask,
            **join_images(images, starts, length, device),
        }

    def config_of(self, sampling: SamplingOptions) -> GenerationConfig:
        """Return the settings of a request. The batch runs until the row with the highest limit has ended."""
        config = copy.deepcopy(self.generation_config)
        if sampling.max_tokens is not None:
            config.max_new_tokens = max(sampling.max_tokens)
        of_run = {} if self.config is None else vars(sampler_settings(self.config))
        given = {**of_run, **sampling.generation_kwargs}
        if given.get("temperature") == 0:
            given |= {"do_sample": False, "temperature": 1.0}
        if given.get("min_p") == 0:
            given["min_p"] = None  # 0 removes no token, but generate would sort the vocabulary to find out
        config.update(**given)
        return config

    def completions(
        self,
        sequences: Sequence[list[int]],
        max_tokens: Sequence[int] | None,
        config: GenerationConfig,
        recorder: Any,
    ) -> list[Completion]:
        """Return the completions of rows from the tokens after their prompts, padded on the right."""
        size = len(sequences)
        masks = [None] * size if recorder is None else recorder.completions(size)
        limits = max_tokens or [config.max_new_tokens] * size
        completions = []
        for sequence, limit, mask in zip(sequences, limits, masks, strict=True):
            tokens = sequence[:limit]
            end = next((index + 1 for index, token in enumerate(tokens) if token in self.end_tokens), None)
            kept = None if mask is None else mask.first(len(tokens[:end]))
            completions.append(Completion(tokens[:end], truncated=end is None, sampling_mask=kept))
        return completions


def _needs_own_loop(error: type[GroupwiseError], reason: str) -> GroupwiseError:
    return error(
        "router_replay='R3' records experts in groupwise's decoding loop, which is not used: "
        f"{reason}; use 'R2' or 'disabled'"
    )


def make_backend(
    policy: Callable[[], PreTrainedModel],
    config: GRPOConfig,
    processing_class: ProcessingClass,
    suppress_tokens: Sequence[int] = (),
    kind: type[TransformersBackend] = TransformersBackend,
) -> TransformersBackend:
    """Construct the backend; see :class:`groupwise.generation.backends.BackendFactory`."""
    check_cache(config, policy())
    settings = generation_settings(config, policy(), text_tokenizer(processing_class), suppress_tokens)
    backend = kind(
        policy,
        GenerationConfig(**settings),
        config,
        pad_to_multiple_of=cast("int | None", config.pad_to_multiple_of),  # "auto" is resolved
        gather_weights=is_deepspeed_zero3_enabled() and config.ds3_gather_for_generation,
    )
    path = decoding_path(policy(), backend.config_of(RUN_SETTINGS))
    if backend.records_experts and path.reason:
        raise _needs_own_loop(ConfigError, path.reason)
    warn_about_model_settings(policy(), backend.config_of(RUN_SETTINGS))
    warn_about_run_settings(config)
    return backend


ENTRY = BackendEntry(make_backend, check_config, supports_images=True)
