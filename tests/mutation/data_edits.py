"""Edits of ``groupwise.data``: which rows a step trains on, where, and how often."""

from __future__ import annotations

from mutation import Mutation, edits_of

REBALANCING = ("tests/data/test_rebalancing_plan.py",)
SAMPLING = ("tests/data/test_dynamic_sampling.py",)
TRAINING = "tests/data/test_rebalancing.py"
PROMPTS = (
    "tests/data/test_prompt_source.py",
    "-k",
    "not subclass and not failed_step and not plain_loader",
)
RANKS = ("tests/test_distributed.py",)
STREAMS = ("tests/data/test_streaming.py", "-k", "different_order or checked_with")
SERIALIZATION = ("tests/records/test_serialization.py",)
BY_VALUE = ("tests/reporting/test_metrics_by_value.py", "-k", "every_group or at_most")
BY_SOURCE = ("tests/mixins/test_rewards_by_source.py", "-k", "called_with_its_rows")
CURRICULUM = ("tests/data/test_curriculum.py", "-m", "not slow")
EXCHANGE = ("tests/distributed/test_rebalancing_memory.py", "-k", "2")


def _rebalancing(*edits: tuple[str, str]) -> list[Mutation]:
    return edits_of("data/rebalancing.py", *[(old, new, REBALANCING) for old, new in edits])


def _sampling(*edits: tuple[str, str]) -> list[Mutation]:
    return edits_of("data/dynamic_sampling.py", *[(old, new, SAMPLING) for old, new in edits])


def _prompts(*edits: tuple[str, str]) -> list[Mutation]:
    return edits_of("data/prompt_source.py", *[(old, new, PROMPTS) for old, new in edits])


def _curriculum(*edits: tuple[str, str]) -> list[Mutation]:
    return edits_of("data/sources.py", *[(old, new, CURRICULUM) for old, new in edits])


def _streaming(*edits: tuple[str, str], tests: tuple[str, ...]) -> list[Mutation]:
    return edits_of("data/sources.py", *[(old, new, tests) for old, new in edits])


DATA = [
    *_curriculum(
        ("self.step - self.rates.step_N <", "self.step <"),
        ("(low_N | high_N) & is_recent_N", "low_N & is_recent_N"),
        ("draws_N < self._weights_N / self._weights_N.max()", "draws_N < self._weights_N"),
        ("        self._reading = epoch, place + 1\n", "        self._reading = epoch, place\n"),
        ("deepcopy(state_dict())", "state_dict()"),
        ("torch.where(rate_P.isnan(), self.rate_N[index_P], rate_P)", "rate_P"),
        ("if first == 0 <= place and not read:", "if False:"),
    ),
    *edits_of(
        "reporting/metrics.py",
        ("if (first + row) % size == 0", "if row % size == 0", BY_VALUE),
        ("range(rewards.num_valid)", "range(len(rollouts) - 1)", BY_VALUE),
    ),
    *edits_of(
        "rewards/runtime/calling.py",
        ("rollouts.select(rows)", "rollouts", BY_SOURCE),
        (" if row in scored_F[i]", "", BY_SOURCE),
    ),
    *edits_of(
        "reporting/metrics.py",
        ("{*known})][:most]", "{*known})]", BY_VALUE),
        ('self.values = snapshot.get("values", [])', "pass", BY_VALUE),
    ),
    *edits_of(
        "data/dataset_checks.py",
        ('"all_exhausted"', '"first_exhausted"', ("tests/data/test_mixtures.py", "-k", "begins_again")),
        ("{**dict.fromkeys(columns), **row}", "row", ("tests/data/test_mixtures.py", "-k", "streams")),
    ),
    *edits_of(
        "distributed.py",
        ("num_rows // self.world_size", "num_rows", PROMPTS),
        ("(rank + 1) * num_rows)", "(rank + 2) * num_rows)", RANKS),
        ("sorted({row // self.num_generations for row", "sorted({row for row", RANKS),
    ),
    *_prompts(
        ("        self._num_taken += num_prompts\n", ""),
        ("self.last[0], self.last[1] + 1", "self.last[0], self.last[1]"),
        ("range(first, first + num_batches)", "range(num_batches)"),
        ("            self._kept.popleft()\n        self", "            pass\n        self"),
        ("self._kept_from, self._num_taken = (self.epoch, self.index), 0", "self._num_taken = 0"),
        ('"epoch": self.epoch', '"epoch": 0'),
        ('"index": self.index', '"index": 0'),
        ("if (epoch, index) != self._kept_from:", "if False:"),
        ("self.seek(epoch)\n            for", "self.seek(0)\n            for"),
        ("if found != epoch:", "if False:"),
        ("self.epoch, self.index = self._kept_from = epoch, index\n", "self._kept_from = epoch, index\n"),
        ("epoch, index\n        self._num_taken = 0\n", "epoch, index\n"),
        ("        self._kept.clear()\n", ""),
        ("self._prompts, self._reading = None, (epoch, 0)", "self._reading = (epoch, 0)"),
        ("self._reading = epoch, index + len(read)", "self._reading = epoch, index"),
        ("self._prompts, self._reading = None, (epoch + 1, 0)", "self._prompts = None"),
        ("epoch, self._last_length = self._reading", "epoch = self._reading[0]; self._last_length = 1"),
        ("rows[row // size]", "rows[numbers[0]]"),
        ("self._sampler.set_epoch(epoch)", "self._sampler.set_epoch(0)"),
        ("range(self._next_epoch, epoch)", "range(0)"),
        ("self._sampler is None or epoch < self._next_epoch", "self._sampler is None"),
        ("number in own and (epoch", "(epoch"),
        (" and (epoch, place + number) >= self._resumed_at", ""),
        ("            place += len(batch)\n", ""),
        ("if len(batch) < size and not self.config.dynamic_sampling:", "if len(batch) < size:"),
        ("self._read_in_epoch(missing) if same_epoch else self._read(missing)", "self._read(missing)"),
    ),
    *_streaming(
        ("self._loader = self._loader or self.make_loader()", "self._loader = self.make_loader()"),
        ("islice(self._loader, 0, None, self.repeats)", "iter(self._loader)"),
        ("            self._loader.set_epoch(epoch)\n", "            pass\n"),
        ("return super().take(1)", "return super().take(num_prompts)"),
        ("super().upcoming(num_batches, 1, first)", "super().upcoming(num_batches, num_prompts, first)"),
        tests=PROMPTS,
    ),
    *_streaming(
        ("            self.dataset.set_epoch(epoch)\n", "            pass\n"),
        ("_shuffled(dataset, data_seed(config)) if config.shuffle_dataset else dataset", "dataset"),
        ("min(num_workers, 1)", "num_workers"),
        ("        hide_dataloader_worker()\n", ""),
        ("        check(row, index)\n", "        check(row, 0)\n"),
        tests=STREAMS,
    ),
    *edits_of(
        "data/sampler.py",
        ("rest[: len(rest) // self.repeats]", "rest", PROMPTS),
        ("if rest and not self.drop_last:", "if rest:", PROMPTS),
        ("            deque(islice(indices, size * (self.repeats - 1)), maxlen=0)\n", "", PROMPTS),
        ("len(set(group)) > 1 or len(group) < size", "len(group) < size", PROMPTS),
        ("torch.randperm(self.num_prompts", "torch.randperm(self.num_prompts - 1", PROMPTS),
    ),
    *edits_of(
        "trl_hooks/state.py",
        ("missing % uses == 0:", "True:", PROMPTS),
        ("missing % uses == 0:", "False:", PROMPTS),
        ("num_micro_batches - self.num_left  #", "num_micro_batches  #", PROMPTS),
    ),
    *edits_of(
        "data/loaders.py",
        ("self.source.seek(self.epoch)", "self.source.seek(0)", PROMPTS),
        ("if number % self.config.micro_batches_per_generation == 0:", "if True:", PROMPTS),
    ),
    *_rebalancing(
        ("(advantages_BX != 0) & counts_BT", "(advantages_BX != 0)"),
        (
            "if budget.skip_zero_advantage else counts_BT",
            "if budget.skip_zero_advantage else counts_BT + True",
        ),
        ("sum(self.rows_per_rank[:rank])", "sum(self.rows_per_rank[: rank + 1])"),
        ("start + self.rows_per_rank[rank]", "start + self.rows_per_rank[0]"),
        ("one == other for one, other", "one != other for one, other"),
        ("[False, *repeats]", "[*repeats, False]"),
        ("batch.completion_mask_BT.sum(-1))  #", "batch.loss_mask_BT.sum(-1))  #"),
        ("if budget.fixed:  # the loss", "if False:  # the loss"),
        ("_window_stats(own.shape, count, whole", "_window_stats(own.shape, 0, whole"),
        ("batch.with_fields(rows.fields)", "batch"),
        ("enumerate(kept if", "enumerate([row for part in mine for row in part] if"),
        (
            "_without_weight(MicroBatch.regroup(window, [[shortest]])[0])",
            "MicroBatch.regroup(window, [[shortest]])[0]",
        ),
        ("if not has_gradient]", "if has_gradient]"),
        ("in window])[skipped].sum()", "in window]).sum()"),
        ("return tokens.kept_B", "return tokens.kept_B | True"),
        (
            "_window_stats(rows.shape, sum(rows.has_gradient)",
            "_window_stats(rows.shape, sum(own.has_gradient)",
        ),
        (
            "[None] * (len(window) - len(batches)) + batches, stats",
            "batches + [None] * (len(window) - len(batches)), stats",
        ),
        ("rows=total / world_size", "rows=total"),
        ("(total - num_computed) / world_size", "num_computed / world_size"),
        (
            "(sum(shape.prompts) + sum(shape.completions)) / world_size",
            "sum(shape.prompts) + sum(shape.completions)",
        ),
        ("padded, padded - tokens", "padded, padded"),
        ("return tokens, 0", "return tokens, tokens"),
        ("layout_tokens(shape, part, layout) for", 'layout_tokens(shape, part, "shared_prefix") for'),
        ("float(self.computed_tokens)", "float(self.tokens)"),
        ("if budget.world_size > 1:\n        for", "if budget.world_size > 2:\n        for"),
        ("range(start, start + micro_batch_size)", "range(start, len(tokens))"),
        ("max(-(-len(rows) // (budget", "max((len(rows) // (budget"),
        ("(-shape.group_tokens([row]), row)", "(-shape.completions[row], row)"),
        ("(-shape.group_tokens([row]), row)", "row"),
        ("(row for row in group if row in computed)", "group"),
        ("row]) > capacity:", "row]) >= capacity:"),
        ("// (capacity * budget.world_size))", "// capacity)"),
        ("        count += 1\n", "        count += 2\n"),
        ("in parts) > capacity:", "in parts) >= capacity:"),
        ("if budget.world_size > 1:  # a rank", "if False:  # a rank"),
        ("parts.sort(key=lambda part: -sum(", "parts.sort(key=lambda part: sum("),
        ("half = len(largest) // 2", "half = 1"),
        ("(len(piece) > 1, shape.group_tokens(piece))", "shape.group_tokens(piece)"),
        ("budget.micro_batch_size * (max(", "(max("),
        ("(max(shape.prompts) +", "(min(shape.prompts) +"),
        (" + budget.max_completion_length)", " + max(shape.completions))"),
        ("shortest = min(range(count)", "shortest = max(range(count)"),
        ('"loss_mask_BT", "token_weights_BT"', '"token_weights_BT"'),
        ('"entropy_mask_BT", "entropy_weights_BT"', '"entropy_mask_BT"'),
    ),
    *edits_of(
        "cpu/__init__.py",
        ("sizes[-1] + cost > _CACHE_TOKENS", "sizes[-1] + cost >= _CACHE_TOKENS", REBALANCING),
        ("        sizes[-1] += cost\n", "", REBALANCING),
        ("key=lambda part: -sizes[part]", "key=lambda part: sizes[part]", REBALANCING),
        ("shape.groups(shared=shared)", "shape.groups(shared=not shared)", REBALANCING),
    ),
    *edits_of(
        "data/exchange.py",
        (
            "part if len(part) and receiver != rank else None",
            "part if len(part) else None",
            REBALANCING,
        ),
        ("row - held[rank].start for row", "row for row", REBALANCING),
        ("if any(row not in held[receiver]", "if any(True", REBALANCING),
        ("    pieces[rank] = parts[rank]", "    pieces[rank] = parts[rank - 1]", REBALANCING),
        ("buffer, joined, received, sent)", "buffer, joined, sent, received)", EXCHANGE),
        (
            "all_to_all_single(received_sizes, sent_sizes)",
            "all_to_all_single(received_sizes, sent_sizes.flip(0))",
            EXCHANGE,
        ),
    ),
    *edits_of(
        "records/tensors.py",
        ("full_like(ids_BT, axis.fill", "full_like(ids_BT, 0.0", REBALANCING),
        ("return self.prompts[rows[0]] + sum(", "return sum(", REBALANCING),
        ("if repeats and shared:", "if repeats:", REBALANCING),
    ),
    *edits_of(
        "records/serialization.py",
        ("on_host.clone() if is_part else on_host", "on_host", SERIALIZATION),
        ('f.metadata.get("saved", True)', "True", SERIALIZATION),
        ("if id(value) not in known:\n            saved", "if True:\n            saved", SERIALIZATION),
        ("tuple(value) if issubclass(kind, tuple) else value", "value", SERIALIZATION),
    ),
    *edits_of(
        "data/budget.py",
        ("has_reference and not config.kl_in_reward", "False", (TRAINING, "-k", "something_else")),
        ('vars(owner).get("zero_grad_at_zero_advantage", False)', "True", (TRAINING, "-k", "subclass")),
        ("if config.has_entropy_bonus else", "if False else", (TRAINING, "-k", "something_else")),
        ("skip_masked=_declares_zero_grad(trainer),", "", (TRAINING, "-k", "subclass")),
        (
            "in (trainer, *type(trainer).__mro__)",
            "in type(trainer).__mro__",
            (TRAINING, "-k", "subclass"),
        ),
        (
            "if not OBJECTIVES[config.loss_type].zero_grad_at_zero_advantage",
            "if False",
            (TRAINING, "-k", "zero_grad or subclass"),
        ),
    ),
    *_sampling(
        ("return not self.num_unfilled or", "return self.num_unfilled == 0 and"),
        ("len(self._rounds) == self", "len(self._rounds) > self"),
        ("[: self.num_prompts], *", ", *"),
        ("return max(self.num_prompts", "return abs(self.num_prompts"),
        ("Mean(float(self.num_unfilled), self.num_prompts)", "Mean(float(self.num_unfilled))"),
        ("float(num_sampled - self.num_prompts)", "float(num_sampled)"),
        (
            "self._with_variance if varies else self._without_variance",
            "self._without_variance if varies else self._with_variance",
        ),
        ("(len(self._rounds) - 1, group)", "(0, group)"),
        ("self._without_variance[: self.num_unfilled]", "self._without_variance"),
        ("if row in position]", "]"),
        ("key=positions.__getitem__", "key=lambda i: i"),
        ("range(rewards.local.start, rewards.local.stop)", "range(len(rewards.rewards_NF))"),
        ('if n != "environments"', ""),
        ("config.world_size // math.gcd(config.world_size, config.num_generations)", "1"),
        ("max(share_with_variance, 1 / most)", "max(share_with_variance, 1)"),
        ("max(len(completion.token_ids)", "min(len(completion.token_ids)"),
        ("rows_of_rank(self.config.process_index", "rows_of_rank(0"),
    ),
    *edits_of(
        "records/rollout.py",
        ("for row in part.images or ()] or None", "for row in part.images or () if False] or None", SAMPLING),
        ("part.get(name, [fill] * length)", "part[name]", SAMPLING),
        ("range(len(self.rewards_NF))[self.local]", "range(len(self.rewards_NF))", SAMPLING),
        ("columns={name: values[local] for", "columns={name: values for", SAMPLING),
        ("step_rewards=_select(self.step_rewards, rows)", "step_rewards=self.step_rewards", SAMPLING),
    ),
]
