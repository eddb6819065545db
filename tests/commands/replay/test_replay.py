"""Recorded runs repeated bit by bit, records that were changed, and bundles.

Files: ``commands/replay/replay.py``, ``commands/replay/bundle.py``.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import math
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from support import agent_runs, tiny_vlm
from support.fakes.fake_backend import EchoBackend
from support.runs import policy, prompts, tokenizer, trainer
from support.workers.launch import run_ranks
from transformers import TrainerCallback

from groupwise import ConfigError, GRPOTrainer
from groupwise.commands.replay.bundle import LIMIT, is_replayed, open_recording, write_bundle
from groupwise.commands.replay.replay import _adapter_config, replay, replay_config
from groupwise.records.serialization import host_copy, load
from groupwise.reporting.rollout_files import FOLDER, Recording, file_name

WORKER = Path(__file__).parents[2].joinpath("support", "workers", "replay_worker.py")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Saves the tiny policy and its tokenizer, by the changes of its configuration."""

    def saved(**changes: Any) -> str:
        directory = tmp_path_factory.mktemp("tiny")
        policy(**changes).save_pretrained(directory)
        tokenizer().save_pretrained(directory)
        return str(directory)

    return saved


def recorded(directory: Path, model: str, make: Any = trainer, **settings: Any) -> GRPOTrainer:
    """A run of three steps with saved rollouts and a checkpoint at the end."""
    given = {"max_steps": 3, "save_rollouts": True, "save_strategy": "steps", "save_steps": 3, **settings}
    run = make(directory, model=model, **given)
    run.train()
    return run


CASES: dict[str, dict[str, Any]] = {
    "on-policy": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "several generations in a step": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "reuse": {"num_iterations": 2, "steps_per_generation": 2},
    "reference": {"beta": 0.1},
    "kl in reward": {"beta": 0.1, "kl_in_reward": True},
    "adapter": {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"])},
    "padded, entropy quantile": {"sequence_layout": "padded", "top_entropy_quantile": 0.5},
    "dynamic sampling": {"dynamic_sampling": True},
    "truncated sampling": {"top_k": 5},
    "masked completions": {"mask_truncated_completions": True, "max_completion_length": 40},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_repeated_bit_by_bit_from_the_initial_model(tmp_path, tiny, case):
    recorded(tmp_path, tiny(), **CASES[case])
    found = replay(tmp_path, 3)
    assert [str(step) for step in found.steps if step.first] == []
    assert [step.step for step in found.steps] == [1, 2, 3]
    assert all(step.budget == 0 and not any(step.deviations.values()) for step in found.steps)
    assert found.steps[-1].compared["log-prob"] > 0 and found.steps[-1].compared["gradient norm"] > 0
    assert found.weights == "equal, bit for bit"


@pytest.mark.slow
def test_a_step_with_dropout_has_the_same_masks(tmp_path, tiny):
    model = tiny(attention_dropout=0.3)
    recorded(
        tmp_path,
        model,
        num_iterations=2,
        eval_dataset=[{"prompt": "w1"}],
        eval_strategy="steps",
        eval_steps=1,
    )
    found = replay(tmp_path, 3)
    assert found.equals_record and found.weights == "equal, bit for bit"


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_a_replay_begins_at_a_checkpoint_inside_of_a_generation(tmp_path, tiny, adapter):
    more = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])} if adapter else {}
    recorded(tmp_path, tiny(), num_iterations=2, max_steps=4, save_steps=1, **more)
    found = replay(tmp_path, 4)
    assert Path(found.start).name == "checkpoint-3"
    assert [step.step for step in found.steps] == [4] and found.equals_record
    assert found.steps[0].compared["old log-prob"] > 0 and found.weights == "equal, bit for bit"


@pytest.mark.slow
def test_rollouts_with_tools_are_replayed_without_the_tools(tmp_path):
    model = agent_runs.policy(len(agent_runs.tokenizer()))
    model.save_pretrained(tmp_path / "model")
    settings = {"tools": [agent_runs.measure], "max_steps": 2, "save_steps": 2}
    settings["reward_funcs"] = agent_runs.turn_reward
    recorded(tmp_path / "run", model, agent_runs.trainer, **settings)
    found = replay(
        tmp_path / "run", 2, model=str(tmp_path / "model"), processing_class=agent_runs.tokenizer()
    )
    assert found.equals_record and found.weights == "equal, bit for bit"
    window = Recording(tmp_path / "run" / FOLDER).step(2).window
    masks = [batch.loss_mask_BT.sum() for batch in window]
    tokens = [batch.completion_mask_BT.sum() for batch in window]
    assert any(batch.advantages_BX.std(1).any() for batch in window)  # of each turn
    assert 0 < sum(masks) < sum(tokens)  # results of tools have no loss


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_rollouts_of_several_rows_are_replayed_with_their_contexts(tmp_path, tiny, layout):
    calls = itertools.count(1)

    def rollout(texts, run):
        ids, draw = run.processing_class(texts)["input_ids"], random.Random(next(calls))
        rows = [(i, [ids[i], [9, 8, 4 + i]][k]) for i in range(len(ids)) for k in range(1 + i % 2)]
        said = [[draw.randrange(4, 32) for _ in range(draw.randint(1, 5))] for _ in rows]
        numbers, contexts = zip(*rows, strict=True)
        return {"prompt_ids": contexts, "completion_ids": said, "rollout_ids": numbers}

    recorded(tmp_path, tiny(), rollout_func=rollout, num_iterations=2, sequence_layout=layout)
    found = replay(tmp_path, 3)
    assert found.equals_record and found.weights == "equal, bit for bit"
    assert any(batch.contexts for batch in Recording(tmp_path / FOLDER).step(3).window)


@pytest.mark.slow
def test_images_are_read_by_their_digest(tmp_path):
    run = tiny_vlm.trainer(tmp_path, save_rollouts=True)
    run.train()
    model, processor = tiny_vlm.build("gemma3")
    found = replay(tmp_path, 2, model=model, processing_class=processor)
    assert found.equals_record and found.steps[-1].compared["log-prob"] > 0
    ours, theirs = found.trainer.model.state_dict(), run.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(ConfigError, match="step 2 has images, which a bundle lacks"):
        write_bundle(Recording(tmp_path / FOLDER), 2, tmp_path / "bug.zip")


class StaleBackend(EchoBackend):
    """A separate sampler with log-probs, whose second token comes from the weights of the step before."""

    def generate(self, prompts: Any, sampling: Any = None) -> list[Any]:
        found = [self._complete(prompt, self.max_tokens, False) for prompt in prompts]
        step = self.version or 0
        return [
            replace(
                c, logps=[-3.0 - 0.1 * i for i in range(4)], versions=[step, max(step - 1, 0), step, step]
            )
            for c in found
        ]


@pytest.mark.slow
def test_stale_rollouts_are_replayed_with_their_versions_and_log_probs(tmp_path, tiny):
    recorded(tmp_path, tiny(), backend=StaleBackend(), logprob_mismatch_check="off")
    found = replay(tmp_path, 3)
    assert found.equals_record and found.weights == "equal, bit for bit"
    assert found.steps[-1].compared["sampler log-prob"] > 0
    completions = Recording(tmp_path / FOLDER).generation(3, 0).rollouts.completions
    assert {tuple(c.versions) for c in completions} == {(2, 1, 2, 2)}


class _LowersBeta(TrainerCallback):
    def __init__(self) -> None:
        self.run: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.beta = 0.5 / (1 + state.global_step)


@pytest.mark.slow
def test_settings_that_a_callback_changed_act_again(tmp_path, tiny):
    lowers = _LowersBeta()
    run = trainer(
        tmp_path,
        model=tiny(),
        beta=0.5,
        callbacks=[lowers],
        max_steps=3,
        save_rollouts=True,
        save_strategy="steps",
        save_steps=3,
    )
    lowers.run = run
    run.train()
    found = replay(tmp_path, 3)
    assert found.equals_record and found.weights == "equal, bit for bit"
    assert Recording(tmp_path / FOLDER).step(3).settings["beta"] == pytest.approx(0.5 / 3)


class _SetsLearningRate(TrainerCallback):
    """Learning rates that no schedule gives."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = 1e-3 * (1 + state.global_step)


@pytest.mark.slow
def test_learning_rates_that_a_callback_set_are_those_of_the_replay(tmp_path, tiny):
    recorded(tmp_path, tiny(), callbacks=[_SetsLearningRate()], max_steps=3, save_steps=3)
    found = replay(tmp_path, 3)
    assert found.equals_record and found.weights == "equal, bit for bit"
    assert set(Recording(tmp_path / FOLDER).step(3).learning_rates) == {3e-3}


class _TruncatesLater(TrainerCallback):
    """From the second step on; the backend does not report the tokens that truncation keeps."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.top_p = 0.9 if state.global_step else 1.0


class Placeholders(GRPOTrainer):
    """A subclass whose log-probs of the third step may be placeholders."""

    def may_have_placeholder_logps(self) -> bool:
        return self.state.global_step == 2


@pytest.mark.slow
def test_each_step_has_the_recorded_facts_about_its_sampler(tmp_path, tiny):
    more = {"callbacks": [_TruncatesLater()], "kind": Placeholders, "logprob_mismatch_check": "off"}
    recorded(tmp_path, tiny(), backend=StaleBackend(), **more)
    steps = [Recording(tmp_path / FOLDER).step(step) for step in (1, 2, 3)]
    assert [step.truncation_unknown for step in steps] == [False, True, True]
    assert [step.corrects_for_sampler for step in steps] == [True, True, False]
    found = replay(tmp_path, 3)
    assert found.equals_record and found.weights == "equal, bit for bit"


class HalfAdvantages(GRPOTrainer):
    """A subclass with advantages of its own."""

    def compute_advantages(self, rewards: Any) -> torch.Tensor:
        return 0.5 * super().compute_advantages(rewards)


@pytest.mark.slow
def test_a_subclass_is_replayed_by_its_class_and_otherwise_leaves_the_record_at_an_advantage(tmp_path, tiny):
    recorded(tmp_path, tiny(), kind=HalfAdvantages)
    assert replay(tmp_path, 2, trainer_class=HalfAdvantages).equals_record
    found = replay(tmp_path, 2)
    assert found.steps[0].first.quantity == "advantage"
    assert found.steps[0].first.replayed == pytest.approx(2 * found.steps[0].first.recorded)


@pytest.mark.slow
def test_a_replay_on_two_processes_and_the_error_of_another_number(tmp_path, tiny):
    model = tiny()
    done = run_ranks(WORKER, tmp_path, model)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = [json.loads((tmp_path / f"found_{rank}.json").read_text()) for rank in range(2)]
    assert [rank["equal"] for rank in found] == [True, True] and found[0]["weights"] == "equal, bit for bit"
    with pytest.raises(
        ConfigError, match=r"trained by 2 processes, and the replay has 1: .*--num_processes 2"
    ):
        replay(tmp_path / "run", 2)


def test_a_step_of_another_number_of_processes_than_the_last_ones_is_refused(tmp_path, tiny):
    recorded(tmp_path, tiny())
    for rank in (1, 2):  # the run was resumed on one process after step 1
        (tmp_path / FOLDER / file_name("step", 1, rank)).write_bytes(b"")
    with pytest.raises(ConfigError, match="recorded by 3 processes, before the run resumed with 1"):
        replay(tmp_path, 1)


# Records that were changed.


def change(run: Path, kind: str, step: int, edit: Callable[[Any], Any], part: int | None = None) -> None:
    """Rewrite a file of a recording."""
    path = run / FOLDER / file_name(kind, step, 0, part)
    values = edit(load(io.BytesIO(gzip.decompress(path.read_bytes()))))
    content = io.BytesIO()
    torch.save(host_copy(values), content)
    path.write_bytes(gzip.compress(content.getvalue()))


@pytest.mark.slow
def test_a_changed_token_of_the_generation_is_named(tmp_path, tiny):
    recorded(tmp_path, tiny())
    changed = {}

    def edit(values: Any) -> Any:
        completions = list(values["rollouts"].completions)
        changed["was"] = completions[2].token_ids[1]
        completions[2] = replace(completions[2], token_ids=list(completions[2].token_ids))
        completions[2].token_ids[1] = 5 if changed["was"] != 5 else 6
        return {**values, "rollouts": replace(values["rollouts"], completions=completions)}

    change(tmp_path, "generation", 2, edit, part=0)
    first, second = replay(tmp_path, 2).steps
    assert first.first is None
    found = second.first
    assert (found.quantity, found.recorded) == ("token", changed["was"]) and found.replayed in (5, 6)
    assert found.place == "row 2 (prompt 1), token 1"
    assert str(second).startswith(
        "step 2 diverges from the record at the token of row 2 (prompt 1), token 1: recorded"
    )


@pytest.mark.slow
def test_a_changed_log_prob_and_gradient_norm_are_named(tmp_path, tiny):
    recorded(tmp_path, tiny())

    def edit_logps(values: Any) -> Any:
        values["computed"][0]["logps_BT"][1, 0] += 1e-6
        return values

    change(tmp_path, "step", 1, edit_logps)
    row = Recording(tmp_path / FOLDER).step(1).computed[0].rows[1]
    found = replay(tmp_path, 1).steps[0]
    assert found.first.quantity == "log-prob" and found.first.place == f"row {row} (prompt 0), token 0"
    assert replay(tmp_path, 1, tolerance=1e-3).steps[0].first is None

    def edit_norm(values: Any) -> Any:
        values["gradient_norms"]["model.norm.weight"] *= 1.01
        return values

    change(tmp_path, "step", 3, edit_norm)
    found = replay(tmp_path, 3).steps[-1]
    assert (found.first.quantity, found.first.place) == ("gradient norm", "model.norm.weight")
    change(tmp_path, "step", 3, lambda values: {**values, "gradient_norms": {"model.norm.weight": 1.0}})
    assert str(replay(tmp_path, 3).steps[-1].first).startswith("number of gradient norms: recorded 1, ")


@pytest.mark.slow
def test_a_changed_reward_is_seen_at_the_first_advantage_of_its_group(tmp_path, tiny):
    recorded(tmp_path, tiny())

    def edit(values: Any) -> Any:
        values["rewards"].rewards_NF[3, 0] += 7
        return values

    change(tmp_path, "generation", 1, edit, part=0)
    found = replay(tmp_path, 1).steps[0]
    assert (found.first.quantity, found.first.place) == ("advantage", "row 0 (prompt 0)")


@pytest.mark.slow
def test_recordings_that_cannot_be_replayed_say_why(tmp_path, tiny):
    with pytest.raises(ConfigError, match=r"was not trained with save_rollouts=True"):
        replay(tmp_path, 1)
    model = tiny()
    recorded(tmp_path / "run", model)
    for step in (0, 5):
        with pytest.raises(ConfigError, match=rf"step {step} is not recorded; recorded steps: \[1, 2, 3\]"):
            replay(tmp_path / "run", step)
    header = tmp_path / "run" / FOLDER / "run.json"
    values = json.loads(header.read_text())
    header.write_text(json.dumps({**values, "model": ""}))
    with pytest.raises(ConfigError, match=r"no name; give --model with the initial model"):
        replay(tmp_path / "run", 1)
    assert replay(tmp_path / "run", 1, model=model).equals_record
    for change_of, message in (
        ({"sharded": True}, "FSDP or DeepSpeed, whose steps cannot be replayed"),
        (
            {"trainer": ["mine.Trainer", "groupwise.trl_hooks.trainer.GRPOTrainer"]},
            "trained with groupwise.trl_hooks",
        ),
    ):
        header.write_text(json.dumps({**values, **change_of}))
        with pytest.raises(ConfigError, match=message):
            replay(tmp_path / "run", 1)
    header.write_text(json.dumps({name: value for name, value in values.items() if name != "world_size"}))
    with pytest.raises(ConfigError, match=r"is damaged: .*run.json\['world_size'\] is None, not int"):
        replay(tmp_path / "run", 1)
    header.write_text(json.dumps({**values, "format": 2}))
    with pytest.raises(ConfigError, match=r"format 2, and this version of groupwise reads format 1"):
        replay(tmp_path / "run", 1)


@pytest.mark.slow
def test_other_versions_have_a_budget(tmp_path, tiny):
    recorded(tmp_path, tiny())
    header = tmp_path / FOLDER / "run.json"
    values = json.loads(header.read_text())
    values["versions"]["torch"] = "1.0"
    header.write_text(json.dumps(values))
    (found,) = replay(tmp_path, 1).steps
    assert found.budget == 1e-3 and found.first is None


# Bundles.

SECRETS = {
    "HF_TOKEN": "hf_planted0000000000000000environment",
    "WANDB_API_KEY": "planted-key-of-wandb",
}
IN_CONFIG = "hf_planted000000000000000000hubtoken"


@pytest.mark.slow
def test_a_bundle_is_small_has_no_secret_and_is_replayed_elsewhere(tmp_path, tiny, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    model = tiny()
    kwargs = {"token": IN_CONFIG, "note": "confidential instructions"}
    hidden = {"hub_token": IN_CONFIG, "chat_template_kwargs": kwargs, "run_name": "private-name"}
    data = prompts(8).map(lambda row: {"prompt": "w1 w2 w3"})
    recorded(tmp_path / "run", model, save_steps=1, num_iterations=2, train_dataset=data, **hidden)
    bundle = tmp_path / "elsewhere" / "bug.zip"
    bundle.parent.mkdir()
    size = write_bundle(Recording(tmp_path / "run" / FOLDER), 2, bundle)
    assert size == bundle.stat().st_size < LIMIT == 10**6
    with zipfile.ZipFile(bundle) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    assert contents.keys() == {"run.json", "step-000002.rank0.pt"}
    assert Recording(tmp_path / "run" / FOLDER).generation(1, 0).rollouts.prompts == ["w1 w2 w3"] * 4
    secrets = [*SECRETS.values(), IN_CONFIG, "private-name", str(tmp_path), "w1 w2 w3", kwargs["note"]]
    text = b"".join(contents.values())
    assert [secret for secret in secrets if secret.encode() in text] == []
    assert json.loads(contents["run.json"])["settings"]["learning_rate"] == 1e-2
    weights = str(shutil.copytree(tmp_path / "run" / "checkpoint-1", tmp_path / "elsewhere" / "weights"))
    shutil.rmtree(tmp_path / "run")
    found = replay(bundle, model=weights)
    assert [step.step for step in found.steps] == [2] and found.equals_record
    assert found.steps[0].compared["log-prob"] > 0 and found.steps[0].budget == 0
    with pytest.raises(ConfigError, match=r"step 2 and not the weights before it; .*checkpoint-1"):
        replay(bundle)


@pytest.mark.slow
def test_a_bundle_has_no_path_of_the_machine_and_no_text(tmp_path, tiny):
    model = str(shutil.copytree(tiny(), tmp_path / "private-home" / "weights"))
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    recorded(tmp_path / "run", model, peft_config=adapter)
    shutil.rmtree(tmp_path / "private-home")  # a path stays one
    header = tmp_path / "run" / FOLDER / "run.json"
    values = json.loads(header.read_text())
    assert "private-home" in values["model"] and "private-home" in str(values["adapter"])
    values["settings"]["generation_kwargs"] = {"stop_strings": ["confidential"], "typical_p": 0.9}
    header.write_text(json.dumps({**values, "reward_funcs": [str(tmp_path / "private-home" / "judge")]}))
    write_bundle(Recording(tmp_path / "run" / FOLDER), 1, tmp_path / "bug.zip")
    with zipfile.ZipFile(tmp_path / "bug.zip") as archive:
        text = b"".join(archive.read(name) for name in archive.namelist()).decode(errors="replace")
        found = json.loads(archive.read("run.json"))
    assert "private-home" not in text and "confidential" not in text
    assert (found["model"], found["reward_funcs"]) == ("weights", ["judge"])
    assert found["settings"]["generation_kwargs"] == {"typical_p": 0.9}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step-000002.rank0.pt.gz", "generation-000002.0.rank0.pt.gz"])
@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: gzip.compress(b"hello")]
)
def test_a_damaged_file_is_named(tmp_path, tiny, name, damage):
    recorded(tmp_path, tiny())
    path = tmp_path / FOLDER / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=rf"{name}' is damaged"):
        replay(tmp_path, 2)


@pytest.mark.slow
def test_weights_that_differ_leave_the_record_where_bits_must_be_the_same(tmp_path, tiny):
    recorded(tmp_path, tiny(), save_steps=1)
    assert replay(tmp_path, 2).equals_record
    path = tmp_path / "checkpoint-2" / "model.safetensors"
    weights = load_file(path)
    first = next(iter(weights))
    save_file({**weights, first: weights[first] + 1}, path, metadata={"format": "pt"})
    found = replay(tmp_path, 2)
    assert first in found.weights and not found.equals_record


@pytest.mark.slow
def test_weights_of_another_step_leave_a_bundle_at_the_first_log_prob(tmp_path, tiny):
    model = tiny()
    recorded(tmp_path, model)
    write_bundle(Recording(tmp_path / FOLDER), 3, tmp_path / "bug.zip")
    found = replay(tmp_path / "bug.zip", model=model).steps[0].first
    assert found.quantity == "log-prob" and found.place.endswith("token 0")


def test_a_window_that_is_too_large_is_refused(tmp_path, tiny, monkeypatch):
    recorded(tmp_path, tiny())
    monkeypatch.setattr("groupwise.commands.replay.bundle.LIMIT", 2000)
    with pytest.raises(ConfigError, match=r"step 1 takes 0.0 MB, and a bundle has at most 0 MB"):
        write_bundle(Recording(tmp_path / FOLDER), 1, tmp_path / "bug.zip")


def test_files_of_others_are_not_unpacked(tmp_path):
    strange = tmp_path / "strange.zip"
    with zipfile.ZipFile(strange, "w") as archive:
        archive.writestr("../outside.py", "harm")
    with pytest.raises(ConfigError, match=r"is no bundle: it contains '../outside.py'"):
        replay(strange)
    (tmp_path / "text.zip").write_text("no archive")
    with pytest.raises(ConfigError, match=r"neither the folder of a run nor a bundle"):
        replay(tmp_path / "text.zip")


@pytest.fixture(scope="module")
def sound(tmp_path_factory, tiny) -> Path:
    """Bundle of a run with an adapter."""
    directory = tmp_path_factory.mktemp("sound")
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    recorded(directory, tiny(), max_steps=1, save_strategy="no", peft_config=config)
    write_bundle(Recording(directory / FOLDER), 1, directory / "bug.zip")
    return directory / "bug.zip"


def changed_bundle(sound: Path, file: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    """Copy a bundle with one of its files changed."""
    with zipfile.ZipFile(sound) as source, zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as target:
        for entry in source.namelist():
            content = source.read(entry)
            target.writestr(entry, change(content) if entry == name else content)
    return file


STEP = "step-000001.rank0.pt"


def with_values(**values: Any) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        result = io.BytesIO()
        torch.save({**load(io.BytesIO(content)), **values}, result)
        return result.getvalue()

    return change


DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "truncated": (STEP, lambda content: content[:-200], "is damaged"),
    "no archive": (STEP, lambda content: b"text", "is damaged"),
    "another value": (STEP, with_values(window=[3]), "parts of types int"),
    "another field": (STEP, with_values(more=1), "unexpected keyword argument 'more'"),
    "a list": ("run.json", lambda content: b"[]", "run.json is [], not dict"),
    "types": (
        "run.json",
        lambda content: content.replace(b'"world_size": 1', b'"world_size": "1"'),
        "world_size",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_bundle_is_named(case, sound, tmp_path):
    name, change, message = DAMAGED[case]
    bundle = changed_bundle(sound, tmp_path / "bug.zip", name, change)
    with pytest.raises(ConfigError) as error, open_recording(bundle) as recording:
        assert recording.header
        recording.step(1)
    assert message in str(error.value) and "bug.zip" in str(error.value)
    with open_recording(sound) as recording:
        assert recording.step(1).step == 1


def test_every_cut_of_a_bundle_is_an_error_that_names_it(sound, tmp_path):
    content = sound.read_bytes()
    for at in range(40, len(content) - 40, len(content) // 12):
        (tmp_path / "cut.zip").write_bytes(content[:at] + bytes(30) + content[at + 30 :])
        try:
            with open_recording(tmp_path / "cut.zip") as recording:
                assert recording.header
                recording.step(1)
        except ConfigError as error:
            assert "cut.zip" in str(error)


@pytest.mark.parametrize(
    "given", [{"megatron_core": "harm.module", "megatron_config": {"a": 1}}, {"tokenizer_kwargs": {"x": 1}}]
)
def test_fields_of_an_adapter_that_may_load_code_are_refused(given, sound, tiny, tmp_path):
    def change(content: bytes) -> bytes:
        header = json.loads(content)
        return json.dumps({**header, "adapter": {**header["adapter"], **given}}).encode()

    bundle = changed_bundle(sound, tmp_path / "bug.zip", "run.json", change)
    with pytest.raises(ConfigError, match=rf"adapter sets .*{next(iter(given))}.*, which may load code"):
        replay(bundle, model=tiny())
    assert replay(sound, model=tiny()).steps


def test_numbers_of_an_adapter_are_taken_under_any_name():
    given = {"peft_type": "BOFT", "boft_n_butterfly_factor": 2, "target_modules": ["q_proj"]}
    config = _adapter_config({**given, "auto_mapping": {}, "inference_mode": True})
    assert (config.boft_n_butterfly_factor, config.inference_mode) == (2, False)


def test_settings_of_a_bundle_load_no_code(tmp_path):
    strange = {"trust_remote_code": True, "model_init_kwargs": {"code_revision": "x"}, "deepspeed": "x.json"}
    strange |= {"output_dir": "/elsewhere", "push_to_hub": True, "beta": 0.25, "use_cpu": True, "bf16": False}
    config = replay_config(
        {"settings": strange, "max_steps": 2}, str(tmp_path / "here"), trust_remote_code=False
    )
    assert config.beta == 0.25 and config.output_dir == str(tmp_path / "here")
    assert (config.trust_remote_code, config.model_init_kwargs, config.deepspeed) == (False, None, None)
    assert config.push_to_hub is False and not math.isnan(config.learning_rate)
    assert is_replayed("epsilon") and is_replayed("vllm_importance_sampling_mode")
    assert not is_replayed("dataset_weights") and not is_replayed("metrics_by")  # a replay has no sources
    assert not is_replayed("vllm_server_host") and not is_replayed("run_name") and not is_replayed("unknown")
