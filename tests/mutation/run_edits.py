"""Edits of ``hf``, ``commands`` and ``generation``: repeated windows, sweeps, recorded decoding steps."""

from __future__ import annotations

from mutation import edits_of

FREEZE = ("tests/hf/test_base.py", "-k", "collections")
MARKS = ("tests/hf/test_step_state.py",)
MEMORY = ("tests/hf/test_out_of_memory.py",)
ADAPTERS = ("tests/commands/sweeps/test_row_adapters.py",)
SHARES = ("tests/architecture/test_figures.py", "-k", "eight_gpus")
COMMANDS = ("tests/commands/sweeps/test_commands.py",)
CHECK = ("tests/policy/layouts/test_fallbacks.py", "tests/policy/layouts/test_check.py")
CLIENT = ("tests/generation/test_vllm_client.py",)
GRAPHS = ("tests/generation/test_decoding_graph.py",)
PIECES = (*CLIENT, "-k", "piece_is_decoded")  # others would wait for the rest of a response
ENDED = ("tests/agents/test_batches_ahead.py", "-k", "discarded")
AHEAD = ("tests/generation/test_rollout_staleness.py",)

RUNS = [
    *edits_of(
        "agents/multi_turn.py",
        ("each.calls and _may_overlap(each)", "each.calls", AHEAD),
        ("                self.loop.executor.give_up(future, RuntimeError(", "                str((", ENDED),
    ),
    *edits_of(
        "generation/decoding_graph.py",
        ("            counter += 1\n", "            pass\n", GRAPHS),
        ("        self.mask_R11C.index_fill_(-1, self.position_1, True)\n", "", GRAPHS),
        ("            tensor.copy_(value)\n", "            pass\n", GRAPHS),
        ("length <= self.step.capacity", "length < self.step.capacity", GRAPHS),
        ("length <= self.step.capacity", "True", GRAPHS),
        ("difference <= self.tolerance", "True", GRAPHS),
        ("        self._end_graph(self.tokens_RS.shape[1] - 1)\n", "", GRAPHS),
        ("_end_graph(self.tokens_RS.shape[1] - 1)", "_end_graph(self.tokens_RS.shape[1])", GRAPHS),
        ("_end_graph(length - 1)", "_end_graph(length)", GRAPHS),
        ("True if mask is None else mask", "True", GRAPHS),
        ("finished_share = 0.5", "finished_share = 0.0", GRAPHS),
        ("        before = self.last_read\n", "        before = None\n", GRAPHS),
        ("        self._end_graph(length)\n        self.graphs.refuse", "        self.graphs.refuse", GRAPHS),
    ),
    *edits_of(
        "generation/growing_cache.py",
        ("states.to(buffer.dtype)", "states", GRAPHS),
        ("            buffer[:, :, self.get_seq_length() :] = 0\n", "            pass\n", GRAPHS),
    ),
    *edits_of(
        "generation/vllm/client.py",
        ("            del text[self._start : stop + 1]", "            del text[self._start : stop]", CLIENT),
        ("max(self._start, len(text) - self._LONGEST)", "len(text)", CLIENT),
        ("range(0, len(part), PIECE)", "range(0, len(part), len(part) or 1)", PIECES),
        ('b"]}" if has_top else b"}"', 'b"}"', CLIENT),
    ),
    *edits_of(
        "hf/base.py",
        ("is_own = gc.get_freeze_count() == 0", "is_own = True", FREEZE),
        ("        gc.freeze()\n", "", FREEZE),
        ("gc.collect()  #", "pass  #", FREEZE),
        ("            gc.unfreeze()\n", "            pass\n", FREEZE),
    ),
    *edits_of(
        "hf/step_state.py",
        ("return dict(self._marks)", "return self._marks", MARKS),
        ("        self._begun_at = None  # a step that", "        # a step that", MARKS),
        ("restore(marks[name])\n        self.reset()\n", "restore(marks[name])\n", MARKS),
        ("            self.restore(marks)\n", "", MARKS),
        ("self._begun_at == self.global_step()", "self._begun_at is not None", MARKS),
    ),
    *edits_of(
        "hf/out_of_memory.py",
        ("                component.restore(mark)\n", "                pass\n", MEMORY),
        ("            model.zero_grad()\n", "", MEMORY),
        ("self._attempt(model, self._window, num", "self._attempt(model, [inputs], num", MEMORY),
        ("if not is_out_of_memory(error):", "if False:", MEMORY),
        (
            "            self._window = []\n        return loss",
            "            pass\n        return loss",
            MEMORY,
        ),
    ),
    *edits_of(
        "commands/cli/checks.py",
        ("for number, size in stored) / (ranks if stage == 3 else 1)", "for number, size in stored)", SHARES),
        (" + 4 * bool(zero)", "", SHARES),
        ("1 / ranks if fsdp else min(ranks, 2)", "min(ranks, 2)", SHARES),
    ),
    *edits_of(
        "commands/sweeps/adapters.py",
        ("b.append(weight_b * layer.scaling[name])", "b.append(weight_b)", ADAPTERS),
        ("hidden_RSC.where(self.adapters.mask(self.ranks), 0.0)", "hidden_RSC", ADAPTERS),
        ("own if type(parameter) is nn.Parameter else parameter", "parameter", ADAPTERS),
    ),
    *edits_of(
        "commands/sweeps/commands.py",
        ("                path.unlink()\n", "                pass\n", COMMANDS),
        ("left.unlink(missing_ok=True)", "pass", COMMANDS),
        ('raise ConfigError(given["text"])', 'return str(given["text"])', COMMANDS),
    ),
    *edits_of(
        "policy/layouts/check.py",
        ("prompts[-1][len(prompts[-1]) // 4 :]", "prompts[-1]", CHECK),
        ("for row in (2, 1)]", "for row in (1, 1)]", CHECK),
        ("[more + ids for ids in prompts[:2]]", "prompts[:2]", CHECK),
        ("training=not self.random", "training=True", CHECK),
        ("if not rows.moved <= _ALLOWED[rows.dtype][0]", "if False", CHECK),
    ),
    *edits_of("policy/introspection.py", ("if ids_1S.shape[1] > _FEW_TOKENS", "if True", CHECK)),
    *edits_of("policy/attention.py", ("1 < queries < keys", "False", CHECK)),
    *edits_of(
        "policy/layouts/check.py",
        ("(first.layout, *computer.other_layouts)", "(first.layout,)", CHECK),
        ("(first.head, *computer.other_heads)", "(first.head,)", CHECK),
    ),
]
